"""Importance matrices from a text: sums of squares of what each weight is multiplied with.

As llama.cpp's `llama-imatrix` counts them: by chunks of a text, experts each for themselves.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from tamis.engine.engine import Engine
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile
from tamis.formats.gguf_writer import NewTensor, array, number, string, write
from tamis.make.importance import COUNTS, SUMS
from tamis.make.watching import watched
from tamis.platform.private_files import write_whole

KIND = "imatrix"
DATASETS, CHUNKS, CHUNK = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


class Sums(NamedTuple):
    """Of a tensor: sums of squares f32 [n_matrix, n_in], and numbers of rows f32 [n_matrix]."""

    squares: np.ndarray
    rows: np.ndarray


class Calibration:
    """What is known of a model's tensors after some chunks of n_ctx tokens."""

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx, self.n_chunk = n_ctx, 0
        self.datasets: list[str] = []
        self._sums: dict[str, Sums] = {}
        self._n_matrix: dict[str, int] = {}

    @property
    def sums(self) -> Mapping[str, Sums]:
        """The sums by tensors' names."""
        return self._sums

    @classmethod
    def load(cls, path: Path, n_ctx: int) -> Self:
        """Go on from a GGUF file. Raises GGUFError, ValueError for other chunks, OSError."""
        found = cls(n_ctx)
        with GGUFFile(path) as file:
            if file.metadata.get("general.type") != KIND:
                raise ValueError(f"{path} is no importance matrix in GGUF: one is needed to go on")
            before = file.get(CHUNK, int)
            if before != n_ctx:
                raise ValueError(f"{path} is of chunks of {before} tokens: add --ctx {before}")
            found.n_chunk = file.get(CHUNKS, int)
            found.datasets = list(file.metadata[DATASETS])
            for name in [n.removesuffix(SUMS) for n in file.tensors if n.endswith(SUMS)]:
                shape = file.tensors[name + SUMS].shape[::-1]
                squares = file.data(name + SUMS).view(np.float32).reshape(shape[-2:])
                rows = file.data(name + COUNTS).view(np.float32)
                found._sums[name] = Sums(squares.copy(), rows.copy())
        return found

    def add(self, name: str, rows: np.ndarray, experts: np.ndarray | None) -> None:
        """Count rows that a matrix, or of its matrices those of `experts`, is multiplied with.

        Raises ValueError for rows that are not finite.
        """
        sums = self._sums.get(name)
        if sums is None:
            n = 1 if experts is None else self._n_matrix[name]
            sums = Sums(np.zeros((n, rows.shape[-1]), np.float32), np.zeros(n, np.float32))
            self._sums[name] = sums
        with np.errstate(over="ignore", invalid="ignore"):
            if experts is None:
                sums.squares[0] += np.square(rows).sum(0)
                sums.rows[0] += len(rows)
            else:
                _add_experts(sums, rows, experts)
        if not np.isfinite(sums.squares).all():
            raise ValueError(f"{name} is multiplied with values that are not finite")

    def run(self, engine: Engine, chunks: np.ndarray) -> Iterator[int]:
        """Run chunks, int64 [n, n_ctx]; yields the number of all that were after each.

        Raises ValueError, MemoryError, CompileError.
        """
        tensors = engine.loaded.file.tensors
        self._n_matrix = {n: int(np.prod(t.shape[2:], dtype=np.int64)) for n, t in tensors.items()}
        with watched(engine, self.add, self._n_matrix.__contains__, self.n_ctx) as session:
            for chunk in chunks:
                session.truncate(0)
                session.prefill(chunk.tolist())
                self.n_chunk += 1
                yield self.n_chunk

    def write(self, path: Path) -> None:
        """Write llama.cpp's GGUF file, in place of one that is there. Raises OSError."""
        keys = {
            "general.type": string(KIND),
            DATASETS: array("str", self.datasets),
            CHUNKS: number("u32", self.n_chunk),
            CHUNK: number("u32", self.n_ctx),
        }
        tensors, data = [], []
        for name in sorted(self._sums):
            squares, rows = self._sums[name]
            for end, values, width in ((SUMS, squares, squares.shape[1]), (COUNTS, rows, 1)):
                tensors.append(NewTensor(name + end, (width, len(squares)), GGMLType.F32))
                data.append([values.tobytes()])
        with write_whole(path, shared=True) as out:
            write(out, keys, tensors, data)


def _add_experts(sums: Sums, rows: np.ndarray, experts: np.ndarray) -> None:
    """rows: f32 [n, n_in], or [n, n_used, n_in]; experts: int32 [n, n_used]."""
    for expert in np.unique(experts):
        at, slot = np.nonzero(experts == expert)
        chosen = rows[at] if rows.ndim == 2 else rows[at, slot]
        sums.squares[expert] += np.square(chosen).sum(0)
        sums.rows[expert] += len(at)
