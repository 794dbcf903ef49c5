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

from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    BestScores,
    Bound,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
)
from tamis.select.key_codes import KeyScores


@dataclass(frozen=True, slots=True)
class TopK:
    """k: tokens kept between sinks and window. sink, recent: always kept. rows: group or head."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    promise: ClassVar[tuple[str, ...]] = ("bracket",)

    k: int = common("budget", 512, beside=True)
    sink: int = 4
    recent: int = 64
    rows: str = "group"

    def __post_init__(self) -> None:
        check(
            self,
            "k >= 0",
            "sink >= 0",
            "recent >= 1",
            "rows in ('group', 'head')",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def chosen(p: TopK, scores: np.ndarray) -> np.ndarray:
    """The positions of each row, bool [n_row, n_kv]: sinks, recent ones, and the best between.

    scores f64 [n_row, n_kv]: q . k, of rows of several heads the largest.
    """
    n_row, n_kv = scores.shape
    low, high = min(p.sink, n_kv), max(p.sink, n_kv - p.recent)
    kept = np.zeros((n_row, n_kv), bool)
    kept[:, :low] = kept[:, high:] = True
    best = low + np.argsort(-scores[:, low:high], axis=1, kind="stable")[:, : p.k]
    np.put_along_axis(kept, best, values=True, axis=1)
    return kept


class _State(SelectorState):
    """The keys' copy in fewer bits, and scratch of one layer, shared by all."""

    def __init__(self, params: TopK, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params, p = params, params
        self._group = shape.group if p.rows == "group" else 1
        n_row = shape.n_head // self._group
        self._best = best = BestScores(shape, n_row, n_sink=p.sink, n_local=p.recent, n_top=p.k)
        self._scores = KeyScores(shape, best.scores, best.maxima, group=self._group, n_top=p.k)
        self.counters, self.n_bytes = self._scores.counters, self._scores.n_bytes

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        p = self._params
        middle = {"n_sink": p.sink, "n_local": p.recent, "drop": 0}
        self._scores.record(rec, layer, q, kv, cost=self._score_cost, middle=middle)
        return self._best.choose(rec, self._scores.candidates)

    def truncate(self, n_tokens: int) -> None:
        self._scores.truncate(n_tokens)

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        self._scores.bracket(rec, layer, q, sel)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        return self._scores.bounds(layer, report)

    def _score_cost(self, n_tok: int, pos: int) -> tuple[int, int]:
        """The cost of each key, read once for all heads that share it."""
        n = max(0, pos + 1 - self._params.sink - self._params.recent) * self.shape.head_dim
        return 2 * n * self.shape.n_head_kv, 2 * n * self.shape.n_head


METHOD = TopK
