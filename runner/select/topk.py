"""Exact top-k: the oracle that every approximate method is measured against.

Decides: at decode, the first `sink` positions, the last `recent` ones, and the `k` positions
between them with the largest q . k. Reads every key to do so: it bounds quality, not cost. Layers
that have a sliding window of their own stay as they are.

Rows: `rows="group"` makes one set for the query heads that share a KV head, by the maximum of their
scores; `rows="head"` makes one set a query head. A KV head's keys are read once for all of them.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    BestScores,
    Recording,
    SelectorShape,
    SelectorState,
    check_numbers,
    common,
)


@dataclass(frozen=True, slots=True)
class TopK:
    """k: tokens kept between sinks and window. sink, recent: always kept. rows: group or head."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    k: int = common("budget", 512, beside=True)
    sink: int = 4
    recent: int = 64
    rows: str = "group"

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.k < 0 or self.sink < 0 or self.recent < 1:
            raise ValueError(f"{self}: expected k >= 0, sink >= 0 and recent >= 1")
        if self.rows not in ("group", "head"):
            raise ValueError(f"rows is {self.rows!r}, expected 'group' or 'head'")

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


class _State(SelectorState):
    """Nothing is remembered: scratch of one layer, used by all in turn."""

    def __init__(self, params: TopK, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params, p = params, params
        self._group = shape.group if p.rows == "group" else 1
        n_row = shape.n_head // self._group
        self._best = BestScores(shape, n_row, n_sink=p.sink, n_local=p.recent, n_top=p.k)

    def decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().decode(rec, layer, q, kv)
        p, shape = self._params, self.shape
        rec.program.add(
            ops.SCORE_KEYS,
            (shape.head_dim, shape.group, self._group, kv.types[0]),
            cost=self._score_cost,
            step=rec.step,
            q=q,
            counts=None,
            k_pages=kv.k,
            k_table=kv.k_table,
            scores=self._best.scores,
            maxima=self._best.maxima,
            n_head_kv=shape.n_head_kv,
            capacity=self._best.scores.shape[1],
            n_sink=p.sink,
            n_local=p.recent,
            drop=0,
        )
        return self._best.choose(rec)

    def _score_cost(self, n_tok: int, pos: int) -> tuple[int, int]:
        """Each key once for all heads that share it."""
        n = max(0, pos + 1 - self._params.sink - self._params.recent) * self.shape.head_dim
        return 2 * n * self.shape.n_head_kv, 2 * n * self.shape.n_head


METHOD = TopK
