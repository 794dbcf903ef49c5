"""The hyperparameters of a vision encoder: the keys clip.* of an mmproj file."""

from dataclasses import dataclass, field

import numpy as np

from tamis.formats.gguf import GGUFFile
from tamis.formats.strings import Strings

PREFIX = "clip.vision."
MOST = {"n_embd": 1 << 16, "n_ff": 1 << 18, "n_layer": 512, "n_head": 1 << 10}


@dataclass(frozen=True, slots=True)
class VisionParams:
    """The shape of an encoder and what its preprocessing needs. Sizes in pixels or patches."""

    projector: str
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    head_dim: int
    n_out: int  # width of the text model's rows
    eps: float
    image_size: int
    patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    activation: str  # "gelu", "silu" or "gelu_quick"
    merge: int = 1  # patches a side that become one row
    min_pixels: int = 0  # of a resized picture; 0: the family's
    max_pixels: int = 0
    # The other numbers of clip.* and clip.vision.*, by the name without the prefix.
    numbers: dict[str, float] = field(default_factory=dict, compare=False)

    def number(self, name: str, default: int, low: int = 0, high: int = 1 << 24) -> int:
        """A whole number of the file. Raises ValueError out of range."""
        value = int(self.numbers.get(name, default))
        if not low <= value <= high:
            raise ValueError(f"{PREFIX}{name} is {value}, expected {low} to {high}")
        return value


def is_mmproj(file: GGUFFile) -> bool:
    """Whether a file holds an encoder, rather than a language model."""
    return file.get("general.architecture", str, "") == "clip"


def read_params(file: GGUFFile) -> VisionParams:
    """Read and check the hyperparameters. Raises GGUFError naming the key."""
    if not is_mmproj(file):
        raise file.error("expected clip: this is no mmproj file", key="general.architecture")
    if not file.get("clip.has_vision_encoder", bool, False):
        what = "is not set: the file has no encoder of pictures"
        raise file.error(what, key="clip.has_vision_encoder")
    read = _Reader(file)
    n_embd = read.size("embedding_length", MOST["n_embd"])
    n_head = read.size("attention.head_count", MOST["n_head"])
    head_dim = read.size("attention.head_dim", 1 << 10, n_embd // n_head)
    if head_dim * n_head != n_embd and "attention.head_dim" not in read.numbers:
        raise file.error(
            f"{n_head} heads do not divide {n_embd} elements", key=f"{PREFIX}attention.head_count"
        )
    if read.size("attention.head_count_kv", n_head, n_head) != n_head:
        raise file.error(
            "is another number than that of the query heads, which is not supported",
            key=f"{PREFIX}attention.head_count_kv",
        )
    projector = file.get("clip.projector_type", str, "") or file.get(
        f"{PREFIX}projector_type", str, ""
    )
    patch_size = read.size("patch_size", 1 << 10)
    image_size = read.size("image_size", 1 << 14)
    return VisionParams(
        projector=projector,
        n_embd=n_embd,
        n_ff=read.size("feed_forward_length", MOST["n_ff"], 0),
        n_layer=read.size("block_count", MOST["n_layer"]),
        n_head=n_head,
        head_dim=head_dim,
        n_out=read.size("projection_dim", MOST["n_embd"]),
        eps=read.real("attention.layer_norm_epsilon"),
        image_size=image_size,
        patch_size=patch_size,
        mean=read.three("image_mean"),
        std=read.three("image_std"),
        activation=read.activation(),
        numbers=read.numbers,
    )


class _Reader:
    """Numbers of clip.vision.*."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.numbers = {
            key.removeprefix(PREFIX).removeprefix("clip."): float(value)
            for key, value in file.metadata.items()
            if key.startswith("clip.") and isinstance(value, int | float | np.integer | np.floating)
        }

    def size(self, name: str, high: int, default: int | None = None) -> int:
        value = self.numbers.get(name, default)
        if value is None:
            raise self._file.error("the key is missing", key=PREFIX + name)
        low = 0 if default == 0 else 1
        if not low <= value <= high or value != int(value):
            raise self._file.error(f"is {value}, expected {low} to {high}", key=PREFIX + name)
        return int(value)

    def real(self, name: str) -> float:
        value = self.numbers.get(name)
        if value is None or not 0 < value < 1:
            raise self._file.error(f"is {value}, expected 0 to 1", key=PREFIX + name)
        return value

    def three(self, name: str) -> tuple[float, float, float]:
        found = self._file.metadata.get(PREFIX + name)
        if found is None or isinstance(found, str | Strings) or np.size(found) < 3:
            raise self._file.error("expected three numbers", key=PREFIX + name)
        a, b, c = (float(x) for x in np.asarray(found).reshape(-1)[:3])
        if not np.isfinite((a, b, c)).all() or (name == "image_std" and min(a, b, c) <= 0):
            raise self._file.error(f"is {a}, {b}, {c}, expected finite numbers", key=PREFIX + name)
        return a, b, c

    def activation(self) -> str:
        gelu, silu = (self._file.get(f"clip.use_{x}", bool, False) for x in ("gelu", "silu"))
        if gelu and silu:
            raise self._file.error("is set, and clip.use_silu is, too", key="clip.use_gelu")
        return "gelu" if gelu else "silu" if silu else "gelu_quick"
