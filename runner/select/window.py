"""Attention sinks and a sliding window (StreamingLLM: Xiao et al. 2023, arXiv 2309.17453).

Decides: the first `sink` and the last `recent` positions take part, in prefill and decode.
Departure: both ends are widened to whole blocks of `block` tokens; positions keep their true rotary
angles (the paper renumbers them inside the window).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    PREFILL,
    Recording,
    SelectorShape,
    SelectorState,
    check,
)


@dataclass(frozen=True, slots=True)
class Window:
    """sink: first tokens kept (paper: 4). recent: last tokens kept. block: granularity."""

    roles: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)

    sink: int = 4
    recent: int = 1024
    block: int = 16

    def __post_init__(self) -> None:
        check(
            self,
            "sink >= 0",
            "recent >= 1",
            "block >= 1",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


class _State(SelectorState):
    def __init__(self, params: Window, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, window = self._params, self.shape.window[layer]
        if window and window <= p.recent:  # the model itself reads less
            return super().select_prefill(rec, layer, q, kv)
        return self.windowed(rec, p.sink, p.recent, p.block)

    select_decode = select_prefill


METHOD = Window
