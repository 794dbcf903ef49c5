"""HShare: sets shared over layers, heads and queries (Wu et al. 2025, ICLR, openreview Tb5PY5vwp6).

Decides: at decode, the first `sink` positions, the last `recent`, and a set of positions between.
Every `period`-th step, part of the heads of part of the layers retrieve: they score all keys and
keep the best. The others take the set of a head of their layer, or of an earlier layer, that is
like theirs; in the steps between, all take the last one's sets. Who shares with whom is found at
the first step after a prompt, at which all retrieve: greedily, the most alike pair first (the
paper's Alg. 1), two sets being as alike as they have positions in common. HShare(l-h-q) of the
paper is layers=l, heads=h, period=1/q; l * h * q of the head-steps retrieve.

Departures. The positions that leave the last `recent` between two retrievals are kept, at most
period - 1. In a group that shares KV heads a set may come from a head of another one: sets are
positions. `rows="head"` is the paper; "group" makes one set for the query heads that share a KV
head, by the largest of their scores, and those are the heads that share. After a prompt or
truncate() sharing is found anew, from the keys alone. Layers that have a sliding window of their
own stay as they are.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    DECODE,
    SPAN,
    ParameterError,
    Recording,
    SelectorShape,
    SelectorState,
    Steps,
    check,
    with_ends,
)
from tamis.select.key_codes import KeyScores

START, RETRIEVE, SHARE = "start", "retrieve", "share"


@dataclass(frozen=True, slots=True)
class HShare:
    """budget: tokens that a row keeps.

    layers, heads: shares that retrieve in every period-th step.
    """

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    budget: int = 1024
    layers: float = 0.75
    heads: float = 0.75
    period: int = 2
    sink: int = 16
    recent: int = 64
    rows: str = "head"

    def __post_init__(self) -> None:
        check(
            self,
            "0 < layers <= 1",
            "0 < heads <= 1",
            "period >= 1",
            "recent >= 1",
            "sink >= 0",
            "rows in ('group', 'head')",
        )
        if self.n_top < 0:
            needed = self.sink + self.recent + self.period - 1
            raise ParameterError(
                {"budget": self.budget}, f"at least {needed}, which sinks and window take"
            )

    @property
    def n_top(self) -> int:
        """The number of positions that are retrieved."""
        return self.budget - self.sink - self.recent - (self.period - 1)

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def n_own(share: float, n: int) -> int:
    """The number of n items that retrieve for themselves: the share of them, rounded up."""
    return math.ceil(share * n - 1e-9)


def sharing(alike: np.ndarray, n_own: int) -> list[int]:
    """For each of n items, the one whose set it takes, if n_own retrieve: Alg. 1, most alike first.

    alike [n, n]: the number of positions that two sets have in common. Of equal pairs the first is
    taken.
    """
    chosen = list(range(len(alike)))
    while len(set(chosen)) > n_own:
        owners = sorted(set(chosen))
        pairs = [(-alike[i][j], i, j) for i in owners for j in owners if i < j]
        _, first, second = min(pairs)
        chosen = [first if c == second else c for c in chosen]
    return chosen


class _State(SelectorState):
    """The sets of all rows, and for each row the one whose set it takes."""

    sharing = True

    def __init__(self, params: HShare, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params, p = params, params
        self._group = shape.group if p.rows == "group" else 1
        self._steps, self._phase = Steps(), START
        n_row, n_ctx = shape.n_head // self._group, -(-shape.n_ctx // SPAN) * SPAN
        full = [layer for layer, window in enumerate(shape.window) if not window]
        self._layers = np.array(full, np.int32)
        self._kept = np.zeros((shape.n_layer, n_row, 1 + p.n_top), np.int32)
        self._owners = np.zeros((shape.n_layer, n_row), np.int32)
        self._begin = np.zeros(1, np.int64)
        # Scratch of one step, shared by all layers.
        n = max(len(full), n_row)
        self._alike, self._chosen = np.zeros((n, n), np.float32), np.zeros(n, np.int32)
        self._asking = zeros((shape.n_head, shape.head_dim), np.float32)
        self._n_asking = np.zeros(shape.n_head_kv, np.int32)
        self._scores = zeros((shape.n_head, n_ctx), np.float32)
        self._maxima = zeros((shape.n_head, n_ctx // 16), np.float32)
        self._score = KeyScores(shape, self._scores, self._maxima, group=self._group, n_top=p.n_top)
        self.counters, self.n_bytes = self._score.counters, self._score.n_bytes
        self._order = zeros((n_row, n_ctx), np.int32)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        if self._phase != SHARE:
            self._record_retrieval(rec, layer, q, kv)
        p, n_row = self._params, self._kept.shape[1]
        sel = with_ends(
            rec,
            self._kept.reshape(-1, 1 + p.n_top),
            self._begin,
            n_sink=p.sink,
            capacity=min(self.shape.n_ctx, p.budget),
            owners=self._owners[layer],
        )
        if self._phase == START and layer == self._layers[-1]:
            rec.program.add(
                ops.HSHARE_MAP,
                kept=self._kept,
                layers=self._layers,
                owners=self._owners,
                alike=self._alike,
                chosen=self._chosen,
                n_layer=len(self._layers),
                n_row=n_row,
                n_keep=p.n_top,
                n_layer_own=n_own(p.layers, len(self._layers)),
                n_row_own=n_own(p.heads, n_row),
            )
        return sel

    def truncate(self, n_tokens: int) -> None:
        self._steps.truncate(n_tokens)
        self._score.truncate(n_tokens)

    def phase(self, step: int) -> str:
        fresh = self._steps.fresh(step)
        due = self._steps.since(step) % self._params.period == 0
        self._phase = START if fresh else RETRIEVE if due else SHARE
        return self._phase

    def _record_retrieval(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        p, shape, add = self._params, self.shape, rec.program.add
        n_row, capacity = self._kept.shape[1], self._scores.shape[1]
        add(
            ops.HSHARE_GATE,
            (shape.head_dim, shape.group, self._group),
            step=rec.step,
            q=q,
            owners=self._owners[layer],
            asking=self._asking,
            n_asking=self._n_asking,
            n_head_kv=shape.n_head_kv,
            first=n_row * layer,
            fresh=int(self._phase == START),
        )
        self._score.record(
            rec,
            layer,
            self._asking,
            kv,
            cost=self._score_cost(layer),
            middle={"n_sink": p.sink, "n_local": p.recent, "drop": 0},
            counts=self._n_asking,
        )
        add(
            ops.HSHARE_KEEP,
            step=rec.step,
            owners=self._owners[layer],
            scores=self._scores,
            maxima=self._maxima,
            order=self._order,
            kept=self._kept[layer],
            begin=self._begin,
            n_row=n_row,
            rows_per_kv=n_row // shape.n_head_kv,
            group=self._group,
            capacity=capacity,
            n_keep=p.n_top,
            n_sink=p.sink,
            n_local=p.recent,
            first=n_row * layer,
        )

    def _score_cost(self, layer: int) -> Cost:
        """The cost of the KV heads with a row that retrieves."""
        p, shape, n_row = self._params, self.shape, self._kept.shape[1]

        def cost(_n_tok: int, pos: int) -> tuple[int, int]:
            retrieves = self._owners[layer] == np.arange(n_row * layer, n_row * (layer + 1))
            n = max(0, pos + 1 - p.sink - p.recent) * shape.head_dim
            n_kv = int(retrieves.reshape(shape.n_head_kv, -1).any(axis=1).sum())
            return 2 * n * n_kv, 2 * n * int(retrieves.sum()) * self._group

        return cost


METHOD = HShare
