"""What an encoder's family says of itself: how pictures are cut, rows are placed and projected."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tamis.vision.params import VisionParams

# A part of what stands for a picture: text whose special tokens are parsed, or a tile's pixels,
# uint8 [height, width, 3].
Piece = str | np.ndarray


class Later:
    """Rows that are computed when they are first read; `make` is called once, by one thread."""

    def __init__(self, n: int, n_byte: int, make: Callable[[], np.ndarray]) -> None:
        """Stand for `n` rows, which will take about `n_byte` bytes."""
        self._n, self.nbytes = n, n_byte
        self._make, self._values = make, np.empty(0, np.float32)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, rows: slice) -> np.ndarray:
        """The rows of a slice, f32 [n, n_embd]."""
        with self._lock:
            if not self._values.size:
                self._values = self._make()
                assert len(self._values) == self._n
                self._make = lambda: self._values  # so that the pixels are freed
        found: np.ndarray = self._values[rows]
        return found


class Rows(NamedTuple):
    """What stands for a tile in a sequence."""

    values: np.ndarray | Later  # f32 [n, n_embd], and for each deep layer n_embd more
    key: bytes  # digest of the pixels and of the encoder
    grid: tuple[int, int]  # columns and rows, for models with positions in a grid; else (0, 0)
    causal: bool  # whether they see only earlier ones


class Plan(NamedTuple):
    """The rows of a tile's patches, before they enter the first layer."""

    order: np.ndarray  # int [n]: the patch of each row, in raster order; -1: none
    added: np.ndarray | None = None  # f32 [n, n_embd]: positions and biases
    angles: tuple[np.ndarray, np.ndarray] | None = None  # cos and sin, f32 [n, n_half]
    runs: Sequence[int] = ()  # lengths of the windows of neighbouring rows; (): no windows
    result: np.ndarray | None = None  # int: the order of the projected rows
    grid: tuple[int, int] = (0, 0)  # columns and rows of the projected rows


@dataclass(frozen=True, slots=True)
class Family:
    """One projector type. The functions get the encoder's parameters, p."""

    cut: Callable[[np.ndarray, VisionParams], list[Piece]]  # of pixels uint8 [height, width, 3]
    plan: Callable[[VisionParams, Any, int, int], Plan]  # of weights, columns and rows of patches
    project: Callable[[Any], np.ndarray]  # records the projector, of a Vision: f32 [n, n_out]
    tensors: Callable[[VisionParams], Mapping[str, Sequence[int]]]  # shapes of the projector's
    params: Callable[[VisionParams], VisionParams] = lambda p: p  # with the family's defaults
    norm: Callable[[VisionParams], str] = lambda p: "layer"
    n_half: Callable[[VisionParams], int] = lambda p: 0  # rotated pairs of a head
    neox: bool = True
    pooled: int = 1  # rows before the merger for each one after it; 1: merge * merge
    # Layers whose attention stays in the plan's windows.
    windowed: Callable[[VisionParams, int], bool] = lambda p, il: False
    most_window: Callable[[VisionParams], int] = lambda p: 0  # rows of a window
    begin: str = ""  # text before and after a picture
    end: str = ""
    causal: bool = True  # whether a picture's rows see only earlier ones in the text model
    in_grid: bool = False  # whether the text model's positions are those of a grid
    # after_layer(vision, il) records what the rows after a layer are read for, too.
    after_layer: Callable[[Any, int], None] | None = None
    # finish(rows, plan, encoder): what is done to the projected rows on the host.
    finish: Callable[[np.ndarray, Plan, Any], np.ndarray] | None = None
    # Rows that stand for a tile of so many columns and rows of patches.
    n_row: Callable[[VisionParams, int, int], int] = lambda p, nx, ny: nx * ny // p.merge**2
