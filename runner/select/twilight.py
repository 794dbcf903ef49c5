"""Twilight: of what any method chose, the fewest positions that reach top-p (arXiv 2502.02770).

Lin et al. 2025, hierarchical top-p pruning. Decides: at decode, how many of the positions that
`inner` selected take part. The method inside chooses generously; the weights of its positions are
computed, softmax over them alone, and each query head keeps the fewest whose weights sum to `p`:
those that weigh at least a threshold, the largest one with which they do, found by halving the
range of weights (the paper's Alg. 1). What the budget of `inner` wastes on a head of few heavy keys
is so not read again, and its values are not read at all.

Heads of a row share what any of them keeps, as the paper's groups of query heads do: the keys of a
KV head are read once for them.
Departures: weights are computed with the keys themselves, not with a copy in 4 bits: reading them
costs four times as much, and nothing is missed. The threshold is a multiple of 2^-24 of the largest
weight. Layers in which `inner` reads everything are left alone, as the paper's first two are,
except where it is `dense`: `twilight(dense)` prunes the whole context, the paper's best case.
State: the inner method's, and one layer's weights.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
    WrapperState,
    check,
    packed,
)


@dataclass(frozen=True, slots=True)
class Twilight:
    """inner: the method that selects. p: the share of its attention that each head keeps."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    inner: Selector
    p: float = 0.95

    def __post_init__(self) -> None:
        check(self, "0 < p <= 1")

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape, self.inner.open(shape))


def threshold(weights: np.ndarray, p: float, rounds: int = ops.ROUNDS) -> float:
    """The least weight that a head keeps: Alg. 1. weights f64 [n], whose largest is 1."""
    low, high = 0.0, 1.0
    for _ in range(rounds if p < 1 else 0):
        middle = (low + high) / 2
        enough = weights[weights >= middle].sum() >= p * weights.sum()
        low, high = (middle, high) if enough else (low, middle)
    return low


def kept(logits: np.ndarray, p: float) -> np.ndarray:
    """Which of a row's positions any of its heads keeps, bool [n]; logits f64 [heads, n]."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    kept_by_any: np.ndarray = np.any([w >= threshold(w, p) for w in weights], axis=0)
    return kept_by_any


class _State(WrapperState):
    """The inner state, and the ops that prune what it selects."""

    def __init__(self, params: Twilight, shape: SelectorShape, inner: SelectorState) -> None:
        super().__init__(shape, inner)
        self._params = params
        self.lse, self.meter = inner.lse, inner.meter
        self.evicting = False  # what a step prunes may be kept by the next one
        # Scratch of one layer, shared by all with equally many rows and equal blocks.
        self._scratch: dict[tuple[int, int], dict[str, Any]] = {}

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        chosen = super().select_decode(rec, layer, q, kv)
        whole = self._inner.chooses and self.reads_all(rec, layer, chosen)
        if self.shape.window[layer] or whole:
            return chosen
        scratch = self._rows(chosen.n_row, chosen.block)
        self._record_weights(rec, q, kv, chosen, scratch)
        rec.program.add(
            ops.TWILIGHT_PRUNE,
            (self.shape.n_head // chosen.n_row,),
            step=rec.step,
            indptr=chosen.indptr,
            indices=chosen.indices,
            log_weight=chosen.log_weight,
            block=chosen.block,
            share=self._params.p,
            scale=self.shape.scale,
            **{name: scratch[name] for name in ("logits", "sets", "weights", "counts")},
        )
        sel = packed(rec, scratch["sets"], scratch["counts"])
        if chosen.log_weight is None:
            return sel
        # They are packed like the positions: both are words of 32 bits.
        weights = packed(rec, scratch["weights"].view(np.int32), scratch["counts"])
        return sel._replace(log_weight=weights.indices.view(np.float32))

    def _record_weights(
        self,
        rec: Recording,
        q: np.ndarray,
        kv: KVView,
        chosen: Selection,
        scratch: dict[str, Any],
    ) -> None:
        shape = self.shape
        rec.program.add(
            ops.TWILIGHT_WEIGH,
            (shape.head_dim, shape.n_head // chosen.n_row, kv.types[0]),
            cost=_cost_of(chosen, kv.k[0, 0, 0].nbytes, shape.n_head * shape.head_dim),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            indptr=chosen.indptr,
            indices=chosen.indices,
            rows=scratch["rows"],
            logits=scratch["logits"],
            n_row=chosen.n_row,
            heads_per_kv=shape.group,
            n_head_kv=shape.n_head_kv,
            block=chosen.block,
            window=0,
            stride=1,
        )

    def _rows(self, n_row: int, block: int) -> dict[str, Any]:
        """Buffers of n_row rows of blocks."""
        if (n_row, block) not in self._scratch:
            n = -(-self.shape.n_ctx // block) * block  # positions that a row may list
            n_tile, group = -(-n // ops.TILE), self.shape.n_head // n_row
            self._scratch[n_row, block] = {
                "rows": np.zeros((n_row, n_tile, ops.TILE + ops.LIST_PAD), np.int32),
                "logits": np.zeros((n_row, n_tile, group, ops.TILE), np.float32),
                "sets": np.zeros((n_row, self.shape.n_ctx), np.int32),
                "weights": np.zeros((n_row, self.shape.n_ctx), np.float32),
                "counts": np.zeros(n_row, np.int32),
            }
        return self._scratch[n_row, block]


def _cost_of(sel: Selection, key_bytes: int, n_element: int) -> Cost:
    """The cost of a Selection's keys, read once for the heads of a row.

    n_element: of the queries of all heads.
    """

    def cost(_n_tok: int, pos: int) -> tuple[int, int]:
        n_block = np.diff(sel.indptr[: sel.n_row + 1])
        n_key = int(np.minimum(n_block * sel.block, pos + 1).sum())
        return key_bytes * n_key, 2 * n_element * n_key // sel.n_row

    return cost


METHOD = Twilight
