"""Quest: whole pages by an upper bound of their scores (Tang et al. 2024, arXiv 2406.10774).

Decides: at decode, the pages whose keys could have the largest q . k. Of each page the
element-wise maximum M and minimum m of the keys are kept (the paper's 3.3, stage 1); whatever the
keys are, q . k <= sum_i max(q_i M_i, q_i m_i), and the pages with the largest bounds take part.
Reads 2 vectors a page instead of `page` keys to decide.

Departures: the first `sink` and last `recent` positions always take part (whole pages, counted in
the budget): all methods here share them. `rows="group"` chooses once for the query heads that share
a KV head, by the largest of their bounds; the paper has one set a head.
State: the bounds, made from the keys at the first decode step after they are missing.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    ParameterError,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
    new_selection,
)


@dataclass(frozen=True, slots=True)
class Quest:
    """budget: tokens that a row keeps. page: tokens of a page.

    dense: first layers that are dense.
    """

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    budget: int = 1024
    page: int = 16
    dense: int = common("dense_layers", 2)  # as in the paper: these layers are hardly sparse
    sink: int = 4
    recent: int = 16
    rows: str = "head"

    def __post_init__(self) -> None:
        check(
            self,
            "page >= 1",
            "dense >= 0",
            "sink >= 0",
            "recent >= 1",
            "rows in ('group', 'head')",
        )
        if self.n_top < 0:
            needed = self.page * (self.n_sink + self.n_recent)
            raise ParameterError(
                {"budget": self.budget}, f"at least {needed}, which sinks and window take"
            )

    @property
    def n_sink(self) -> int:
        """The number of pages that hold a sink."""
        return -(-self.sink // self.page)

    @property
    def n_recent(self) -> int:
        """The number of pages that hold the last `recent` positions, wherever a page ends."""
        return 1 + -(-(self.recent - 1) // self.page)

    @property
    def n_top(self) -> int:
        """The number of pages that are selected by their bounds."""
        return self.budget // self.page - self.n_sink - self.n_recent

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def chosen(p: Quest, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The positions that query heads of one KV head keep, bool [n_kv]: section 3.3.

    q f64 [heads, head_dim], the heads of one row; k f64 [n_kv, head_dim].
    """
    starts = np.arange(0, len(k), p.page)
    largest, smallest = np.maximum.reduceat(k, starts), np.minimum.reduceat(k, starts)
    parts = np.maximum(q[:, None] * largest, q[:, None] * smallest)  # [heads, n_page, head_dim]
    bounds = parts.sum(axis=2).max(axis=0)
    n_page = len(starts)
    kept = np.zeros(n_page, bool)
    low, high = min(p.n_sink, n_page), max(p.n_sink, n_page - p.n_recent)
    kept[:low] = kept[high:] = True
    kept[low + np.argsort(-bounds[low:high], kind="stable")[: p.n_top]] = True
    return np.repeat(kept, p.page)[: len(k)]


class _State(SelectorState):
    def __init__(self, params: Quest, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        self._n_row = shape.n_head_kv if params.rows == "group" else shape.n_head
        self._n_page = -(-shape.n_ctx // params.page)
        sizes = (shape.n_layer, shape.n_head_kv, self._n_page, 2, shape.head_dim)
        self._bounds = np.zeros(sizes, np.float16)
        self._filled = np.zeros((shape.n_layer, 1), np.int64)  # positions included in the bounds
        self.counters = (self._filled,)
        self._parts = np.zeros((shape.n_head, 2, shape.head_dim), np.float32)  # of q, by sign
        self._scores = np.zeros((shape.n_head, self._n_page), np.float32)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer] or layer < p.dense:
            return super().select_decode(rec, layer, q, kv)
        self._record_bounds(rec, layer, q, kv)
        self._record_scores(rec, layer)
        sel = new_selection(shape, rec, n_row=self._n_row, block=p.page)
        rec.program.add(
            ops.SELECT_TOP_K,
            step=rec.step,
            scores=self._scores,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=self._n_row,
            capacity=shape.n_head // self._n_row * self._n_page,
            block=p.page,
            n_sink=p.n_sink,
            n_recent=p.n_recent,
            n_top=p.n_top,
        )
        return sel

    def truncate(self, n_tokens: int) -> None:
        np.minimum(self._filled, n_tokens, out=self._filled)

    def _record_bounds(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        rec.program.add(
            ops.QUEST_BOUNDS,
            (self.shape.head_dim, kv.types[0]),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            bounds=self._bounds[layer],
            filled=self._filled[layer],
            parts=self._parts,
            page=self._params.page,
        )

    def _record_scores(self, rec: Recording, layer: int) -> None:
        rec.program.add(
            ops.QUEST_SCORE,
            (self.shape.head_dim, self.shape.group, self.shape.n_head // self._n_row),
            cost=self._score_cost,
            step=rec.step,
            parts=self._parts,
            bounds=self._bounds[layer],
            filled=self._filled[layer],
            scores=self._scores,
            page=self._params.page,
        )

    def _score_cost(self, n_tok: int, pos: int) -> tuple[int, int]:
        """The cost of two vectors per page, read once for all heads.

        An element is multiplied by both.
        """
        n = (pos // self._params.page + 1) * self.shape.head_dim
        return 4 * n * self.shape.n_head_kv, 4 * n * self.shape.n_head


METHOD = Quest
