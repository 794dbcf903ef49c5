"""SnapKV: what the prompt's last queries look at (Li et al. 2024, arXiv 2404.14469).

Decides: once after each prompt, the positions with the largest attention weights of the last
`window` queries, summed over these and pooled over `kernel` neighbours, so that clusters stay whole
(the paper's Listing 1). With them take part the first `sink` positions, the window itself and every
token that came after the prompt. Choosing costs as much as scoring all keys `window` times, once;
a step reads no key to choose.

Budgets. `ada` hands out this share of a layer's budget to the rows by how many of their weights are
among the layer's best (Ada-KV: Feng et al. 2024, arXiv 2407.11550, Alg. 1; its floor of 0.2 is
ada=0.8). `beta` gives early layers more: the last one gets 1 / beta of the mean budget, the first
2 - 1 / beta of it, those between lie on a line (PyramidKV: Cai et al. 2024, arXiv 2406.02069, Eq. 6
to 8; its beta is 20, and 1 gives all layers the same).

Departures. What is not chosen stays in the cache and is only left out. A new prompt, or truncate(),
chooses anew among everything; /load runs the last tokens once more for their queries.
`rows="group"` sums over the query heads that share a KV head, "head" keeps one set a query head.
The sinks are kept whole, as in all methods here. Layers that have a sliding window of their own
stay as they are, and the pyramid is one of the others.
"""

import math
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
class SnapKV:
    """budget: tokens that a row keeps of a prompt. window: the last ones, whose queries select."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    budget: int = 1024
    window: int = common("recent", 32)
    kernel: int = 7  # neighbours that are pooled
    pool: str = "max"
    ada: float = 0.0
    beta: float = 1.0
    sink: int = 4
    rows: str = "group"

    def __post_init__(self) -> None:
        check(
            self,
            "window >= 1",
            "sink >= 0",
            "kernel >= 1",
            "kernel % 2 == 1",
            "0 <= ada <= 1",
            "beta >= 1",
            "pool in ('max', 'mean')",
            "rows in ('group', 'head')",
        )
        if self.budget < self.sink + self.window:
            needed = self.sink + self.window
            raise ParameterError(
                {"budget": self.budget}, f"at least {needed}, which sinks and window take"
            )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def pyramid(mean: int, beta: float, n_layer: int) -> list[int]:
    """PyramidKV's Eq. 6 to 8: budgets of n_layer layers, decreasing from the first to the last."""
    last = mean / beta
    drop = 2 * (mean - last) / max(1, n_layer - 1)
    first = last + drop * (n_layer - 1) if n_layer > 1 else mean
    return [round(first - drop * i) for i in range(n_layer)]


def chosen(p: SnapKV, votes: np.ndarray, n_top: int) -> list[np.ndarray]:
    """The positions that each row keeps between sinks and window: Listing 1, Ada-KV's Alg. 1.

    votes f64 [n_row, n]: sums of the last queries' attention weights at these positions. n_top:
    positions that a row keeps on average. Of equal ones the first are taken.
    """
    n_row, n = votes.shape
    reach = p.kernel // 2
    near = [votes[:, max(0, j - reach) : j + reach + 1] for j in range(n)]
    pooled = np.stack([x.sum(axis=1) if p.pool == "mean" else x.max(axis=1) for x in near], axis=1)
    best = np.argsort(-pooled.ravel(), kind="stable")[: n_top * n_row]
    shares = np.bincount(best // n, minlength=n_row)  # each row's number among the layer's best
    budgets = [int(n_top + p.ada * (share - n_top) + 1e-6) for share in shares]
    if n_top >= n:
        budgets = [n] * n_row
    order = np.argsort(-pooled, axis=1, kind="stable")
    return [np.sort(row[:budget]) for row, budget in zip(order, budgets, strict=True)]


class _State(StartingState):
    """The positions of the prompt that every row keeps."""

    evicting = True

    def __init__(self, params: SnapKV, shape: SelectorShape) -> None:
        super().__init__(shape, params.window)
        self._params = p = params
        self._group = shape.group if p.rows == "group" else 1
        n_row, n_ctx = shape.n_head // self._group, shape.n_ctx
        full = [layer for layer, window in enumerate(shape.window) if not window]
        budgets = pyramid(p.budget - p.sink - p.window, p.beta, len(full))
        self._n_top = dict(zip(full, budgets, strict=True))
        # A row may get everything that `ada` distributes.
        n_keep = {i: math.ceil(n * (1 + p.ada * (n_row - 1))) for i, n in self._n_top.items()}
        self._kept = {i: np.zeros((n_row, 1 + n), np.int32) for i, n in n_keep.items()}
        self._begin = np.zeros(1, np.int64)
        # Scratch of one layer, shared by all.
        self._sums, self._pooled = zeros((2, n_row, n_ctx), np.float32)
        self._scores = zeros((shape.n_head, n_ctx), np.float32)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        if self._phase == START:
            self._record_votes(rec, layer, q, kv)
        kept, n_sink = self._kept[layer], self._params.sink
        return with_ends(rec, kept, self._begin, n_sink=n_sink, capacity=self.shape.n_ctx)

    def _record_votes(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        p, (n_row, capacity) = self._params, self._sums.shape
        self._queries.record_sums(rec, layer, q, kv, self._sums, self._scores)
        rec.program.add(
            ops.SNAPKV_KEEP,
            step=rec.step,
            sums=self._sums,
            pooled=self._pooled,
            kept=self._kept[layer],
            begin=self._begin,
            n_row=n_row,
            capacity=capacity,
            n_keep=self._kept[layer].shape[1] - 1,
            n_sink=p.sink,
            n_local=p.window + 1,  # and the query's own position
            n_top=self._n_top[layer],
            pool=p.kernel,
            average=int(p.pool == "mean"),
            ada=p.ada,
        )


METHOD = SnapKV
