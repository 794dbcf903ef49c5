"""H2O: the heavy hitters and the most recent tokens (Zhang et al. 2023, arXiv 2306.14048).

Decides: at decode, the last `recent` of the budget, the first `sink` positions, and those between
with the largest accumulated attention weights (the paper's Alg. 1). When a position leaves the last
ones it joins the heavy hitters, and the one with the smallest sum is evicted; none comes back. Each
step adds its weights, which are over the kept positions only, to their sums.

Reads nothing to choose; learning a step's weights reads the kept keys once more. Starting costs as
much as scoring all keys `s` times, once after each prompt.

Departures. The paper sums over all queries of the prompt; here over the last `s`, whatever method
read the prompt: a flash kernel has no weights to sum, and older queries could not be had again
after /load, which runs the last tokens once more for theirs. What is evicted stays in the cache and
is only left out; after a prompt or truncate() the sums start anew. `rows="group"` sums over the
query heads that share a KV head, "head" keeps one set a query head. The sinks are kept whole, as in
all methods here. Layers that have a sliding window of their own stay as they are.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    DECODE,
    START,
    ParameterError,
    Recording,
    SelectorShape,
    SelectorState,
    StartingState,
    check,
    common,
    with_ends,
)


@dataclass(frozen=True, slots=True)
class H2O:
    """budget: tokens that a row keeps. recent: the share of the last ones (in the paper a half)."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    budget: int = 1024
    recent: float = 0.5
    sink: int = 4
    s: int = common("queries", 128)  # queries before the first step, from which the sums start
    rows: str = "group"

    def __post_init__(self) -> None:
        check(
            self,
            "0 <= recent <= 1",
            "sink >= 0",
            "s >= 1",
            "rows in ('group', 'head')",
        )
        if self.n_top < 0:
            needed = self.sink + self.n_local
            raise ParameterError(
                {"budget": self.budget}, f"at least {needed}, which sinks and window take"
            )

    @property
    def n_local(self) -> int:
        """The number of last positions that are always kept."""
        return max(1, int(self.recent * self.budget))

    @property
    def n_top(self) -> int:
        """The number of heavy hitters."""
        return self.budget - self.sink - self.n_local

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def chosen(p: H2O, sums: np.ndarray, weights: list[np.ndarray]) -> list[np.ndarray]:
    """The positions that a row keeps at each step: Alg. 1.

    sums f64 [n]: sums of the attention weights of the queries before the first step, whose position
    is n - len(weights). weights: of each step, f64 [heads, n] over all positions; the weights of
    positions that are not kept are redistributed to the others.
    """
    sums, heavy, steps = sums.copy(), np.zeros(0, np.int64), []
    begin = p.sink
    for i, step_weights in enumerate(weights):
        n_kv = len(sums) - len(weights) + i + 1
        end = max(p.sink, n_kv - p.n_local)  # the first of the last positions
        # positions that have left the last ones may be heavy hitters
        heavy = np.union1d(heavy, np.arange(begin, end))
        heavy = np.sort(heavy[np.argsort(-sums[heavy], kind="stable")[: p.n_top]])
        begin = end
        kept = np.concatenate([np.arange(min(p.sink, n_kv)), heavy, np.arange(end, n_kv)])
        shares = step_weights[:, kept]
        sums[kept] += (shares / shares.sum(axis=1, keepdims=True)).sum(axis=0)
        steps.append(kept)
    return steps


class _State(StartingState):
    """Sums and heavy hitters of every row."""

    evicting = True

    def __init__(self, params: H2O, shape: SelectorShape) -> None:
        super().__init__(shape, params.s)
        self._params = params
        self._group = shape.group if params.rows == "group" else 1
        n_row, n_ctx = shape.n_head // self._group, shape.n_ctx
        self._sums = zeros((shape.n_layer, n_row, n_ctx), np.float32)
        self._kept = np.zeros((shape.n_layer, n_row, 1 + params.n_top), np.int32)
        self._begin = np.zeros(1, np.int64)
        # Scratch of one layer, shared by all.
        most = -(-min(n_ctx, params.budget) // 16) * 16
        self._lines = np.zeros((n_row, most), np.int32)
        self._kept_scores = zeros((shape.n_head, most), np.float32)
        self._scores = zeros((shape.n_head, n_ctx), np.float32)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        if self._phase == START:
            self._queries.record_sums(rec, layer, q, kv, self._sums[layer], self._scores)
        rec.program.add(
            ops.H2O_KEEP,
            step=rec.step,
            sums=self._sums[layer],
            kept=self._kept[layer],
            begin=self._begin,
            n_row=self._sums.shape[1],
            capacity=self._sums.shape[2],
            n_keep=p.n_top,
            n_sink=p.sink,
            n_local=p.n_local,
            fresh=int(self._phase == START),
        )
        most = min(shape.n_ctx, p.budget)
        return with_ends(rec, self._kept[layer], self._begin, n_sink=p.sink, capacity=most)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        shape = self.shape
        if shape.window[layer]:
            return
        super().observe(rec, layer, q, kv, sel)
        if rec.n_tok > 1:
            return
        rec.program.add(
            ops.COLUMN_ADD,
            (shape.head_dim, self._group),
            cost=self._add_cost,
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            indptr=sel.indptr,
            indices=sel.indices,
            sums=self._sums[layer],
            lines=self._lines,
            scores=self._kept_scores,
            n_row=len(self._lines),
            heads_per_kv=shape.group,
            n_head_kv=shape.n_head_kv,
            capacity=self._sums.shape[2],
            most=self._lines.shape[1],
            scale=shape.scale,
        )

    def _add_cost(self, _n_tok: int, pos: int) -> tuple[int, int]:
        """The cost of the kept keys of every row."""
        n = min(pos + 1, self._params.budget) * self.shape.head_dim
        return 2 * len(self._lines) * n, 2 * self.shape.n_head * n


METHOD = H2O
