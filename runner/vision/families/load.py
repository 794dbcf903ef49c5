"""An mmproj file on a backend: pictures become rows that stand in a text model's sequence."""

import functools
import hashlib
import importlib
import pkgutil
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

import tamis.vision.families
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.jit_kernels.backends.base import Backend
from tamis.model.weights import MissingTensor
from tamis.vision.decoding import decode
from tamis.vision.family import Family, Later, Piece, Rows
from tamis.vision.params import read_params
from tamis.vision.resizing import normalized
from tamis.vision.tower import Tower, tower_model
from tamis.vision.weights import VisionLoader

KEPT = 32  # pictures whose rows are kept
ROUND = 256  # rows that a tower's room is rounded up to


Embedded = list["str | Rows"]  # text, whose special tokens are parsed, and rows


def known() -> list[str]:
    """The names of the files of families."""
    names = (m.name for m in pkgutil.iter_modules(tamis.vision.families.__path__))
    return sorted(name for name in names if name != "load")


def family_of(file: GGUFFile, projector: str) -> Family:
    """The family of a projector type. Raises GGUFError naming the known ones."""
    name = projector.replace(".", "_")
    if name not in known():
        what = f"{projector!r} is not supported; supported: {', '.join(known())}"
        raise file.error(what, key="clip.projector_type")
    found: Family = importlib.import_module(f"tamis.vision.families.{name}").FAMILY
    return found


def is_supported(path: Path) -> bool:
    """Whether a file is an mmproj file of a known family; it is opened once for each state."""
    try:
        found = path.stat()
    except OSError:
        return False
    return _is_supported(path.absolute(), found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=256)
def _is_supported(path: Path, _changed: int, _n_byte: int) -> bool:
    try:
        with GGUFFile(path) as file:
            family_of(file, read_params(file).projector)
    except (GGUFError, OSError):
        return False
    return True


class Cutter:
    """What an mmproj file says of how pictures are cut; no weights are read."""

    def __init__(self, path: str | Path) -> None:
        """Open an mmproj file. Raises FileNotFoundError, GGUFError."""
        self.file = GGUFFile(path)
        params = read_params(self.file)
        family = family_of(self.file, params.projector)
        try:
            params = family.params(params)
        except ValueError as error:
            raise self.file.error(str(error)) from None
        self.params, self.family = params, family
        self._identity = self.file.identity()

    def cut(self, pixels: np.ndarray) -> list[Piece]:
        """Text and tiles that stand for pixels uint8 [height, width, 3]. Raises PictureError."""
        begin, end = ([text] if text else [] for text in (self.family.begin, self.family.end))
        return [*begin, *self.family.cut(pixels, self.params), *end]

    def grid(self, tile: np.ndarray) -> tuple[int, int]:
        """Columns and rows of a tile's patches. Raises ValueError for a tile of another size."""
        p, (ny, nx) = self.params, tile.shape[:2]
        each = p.patch_size * p.merge
        if tile.ndim != 3 or tile.shape[2] != 3 or not nx * ny or nx % each or ny % each:
            raise ValueError(f"a tile of shape {tile.shape}, expected multiples of {each}")
        return nx // p.patch_size, ny // p.patch_size

    def n_row(self, tile: np.ndarray) -> int:
        """The rows that stand for a tile. Raises ValueError as `grid` does."""
        return self.family.n_row(self.params, *self.grid(tile))

    def key(self, tile: np.ndarray) -> bytes:
        """The digest of a tile and this file."""
        data = self._identity + repr(tile.shape).encode() + tile.tobytes()
        return hashlib.sha256(data).digest()


class Encoder(Cutter):
    """An encoder of pictures and its projector."""

    def __init__(self, path: str | Path, backend: Backend) -> None:
        """Open an mmproj file. Raises FileNotFoundError, GGUFError."""
        super().__init__(path)
        params, family = self.params, self.family
        self.weights = VisionLoader(self.file, params).load(family.tensors(params))
        self._model, self._backend = tower_model(params, self.weights, family), backend
        self._tower: Tower | None = None
        self._running = threading.Lock()
        self._last: OrderedDict[bytes, Embedded] = OrderedDict()  # by the digest of a file

    @property
    def n_embd(self) -> int:
        """The width of the text model's rows."""
        return self.params.n_out

    def embed(self, data: bytes) -> Embedded:
        """Text and rows that stand for a picture's file. Raises PictureError, ImportError.

        What was embedded last is kept: a conversation asks for its pictures at each turn.
        """
        digest = hashlib.sha256(data).digest()
        if digest not in self._last:
            self._last[digest] = self.embed_pixels(decode(data))
            if len(self._last) > KEPT:
                self._last.popitem(last=False)
        self._last.move_to_end(digest)
        return self._last[digest]

    def embed_pixels(self, pixels: np.ndarray) -> Embedded:
        """Text and rows that stand for pixels uint8 [height, width, 3]. Raises PictureError."""
        found: Embedded = []
        for piece in self.cut(pixels):
            if isinstance(piece, str):
                found.append(piece)
            else:
                rows = self.rows_of(piece)
                found.append(rows._replace(values=rows.values[:]))
        return found

    @property
    def least_ubatch(self) -> int:
        """Rows that a chunk must have room for: of a tile of the encoder's own size, else 1."""
        if self.family.causal:
            return 1
        n = self.params.image_size // self.params.patch_size
        return self.family.n_row(self.params, n, n)

    def rows_of(self, tile: np.ndarray) -> Rows:
        """The rows of a tile uint8 [height, width, 3], which are computed when they are read.

        Raises ValueError for a tile that `cut` cannot have made.
        """
        nx, ny = self.grid(tile)
        n, merge = self.n_row(tile), self.params.merge
        later = Later(n, 4 * n * self.n_embd, lambda: self._values(tile, nx, ny))
        grid = (nx // merge, ny // merge) if self.family.in_grid else (0, 0)
        return Rows(later, self.key(tile), grid, self.family.causal)

    def _values(self, tile: np.ndarray, nx: int, ny: int) -> np.ndarray:
        """The rows of a tile, f32 [n, n_embd]."""
        self.file.check_unchanged()
        with self._running:
            plan = self.family.plan(self.params, self.weights, nx, ny)
            values = self._room(len(plan.order)).run(self._patches(tile), plan)
        if plan.result is not None:
            values = values[plan.result]
        if self.family.finish is not None:
            values = self.family.finish(values, plan, self)
        return np.ascontiguousarray(values)

    def _patches(self, tile: np.ndarray) -> np.ndarray:
        """Patches in raster order, f32 [n, 3 * size * size]: channel, row, column."""
        p, size = self.params, self.params.patch_size
        ny, nx = tile.shape[0] // size, tile.shape[1] // size
        x = normalized(tile, p.mean, p.std).reshape(ny, size, nx, size, 3)
        return x.transpose(0, 2, 4, 1, 3).reshape(ny * nx, -1)

    def _room(self, n: int) -> Tower:
        """The recorded encoder, with room for n rows."""
        if self._tower is None or self._tower.most < n:
            most = -(-n // ROUND) * ROUND
            parts = self._backend, most
            try:
                self._tower = Tower(self._model, self.weights, self.family, self.params, parts)
            except MissingTensor as error:
                raise self.file.error("the tensor is missing", key=str(error)) from None
        return self._tower
