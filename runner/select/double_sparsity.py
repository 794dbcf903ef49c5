"""Double Sparsity: keys are scored by a few channels (Yang et al. 2024, arXiv 2408.07092).

Decides: at decode, the first `sink` positions, the last `recent`, and those between with the
largest partial products of query and key over the label channels (the paper's Alg. 1). These are
the channels in which |q_c k_c| is largest, by KV head (its section 3.1). Their elements of all keys
lie apart, so that choosing reads `label` of the keys' bytes.

Departures. Calibration is on the prompt's own keys and its last `s` queries, not offline. Labels
stay float16 where the paper has 4 bits: they are read once for all heads of a KV head.
`rows="group"` makes one set for the query heads that share a KV head, by the largest of their
scores; "head" one set a query head. Sinks and the last ones are kept whole, as in all methods here.
After a prompt or truncate() the channels are found anew; /load runs the last tokens once more for
their queries. Layers that have a sliding window of their own stay as they are.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    DECODE,
    SPAN,
    START,
    BestScores,
    ParameterError,
    Recording,
    SelectorShape,
    SelectorState,
    StartingState,
    check,
    common,
)


@dataclass(frozen=True, slots=True)
class DoubleSparsity:
    """budget: tokens that a row keeps. label: the share of channels by which keys are scored."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    budget: int = 1024
    label: float = 0.25
    s: int = common("queries", 32)  # queries before the first step, by which channels are found
    sink: int = 4
    recent: int = 64
    rows: str = "group"

    def __post_init__(self) -> None:
        check(
            self,
            "0 < label <= 1",
            "s >= 1",
            "recent >= 1",
            "sink >= 0",
            "rows in ('group', 'head')",
        )
        if self.n_top < 0:
            needed = self.sink + self.recent
            raise ParameterError(
                {"budget": self.budget}, f"at least {needed}, which sinks and window take"
            )

    @property
    def n_top(self) -> int:
        """The number of positions that are selected by their scores."""
        return self.budget - self.sink - self.recent

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def channels(q: np.ndarray, k: np.ndarray, n_label: int) -> np.ndarray:
    """The label channels of a KV head, ascending: those of the largest |q_c k_c| (section 3.1).

    q f64 [n, head_dim]: the last queries of its heads; k f64 [n_kv, head_dim].
    """
    products = np.abs(q).sum(axis=0) * np.abs(k).sum(axis=0)
    return np.sort(np.argsort(-products, kind="stable")[:n_label])


def scored(q: np.ndarray, k: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Scores of the keys by their label channels, f64 [n_kv]: Alg. 1; of several heads the largest.

    q f64 [heads, head_dim], the heads of one row.
    """
    partial: np.ndarray = q[:, labels] @ k[:, labels].T
    return partial.max(axis=0)


class _State(StartingState):
    """The label channels of every KV head, and the keys' elements in them."""

    def __init__(self, params: DoubleSparsity, shape: SelectorShape) -> None:
        super().__init__(shape, params.s)
        self._params, p = params, params
        self._group = shape.group if p.rows == "group" else 1
        self._n_label = max(1, int(p.label * shape.head_dim))
        n_ctx = -(-shape.n_ctx // SPAN) * SPAN
        per_kv = shape.n_layer, shape.n_head_kv, self._n_label
        self._channels = np.zeros(per_kv, np.int32)
        self._labels = zeros((*per_kv, n_ctx), np.float16)
        # Scratch of one layer, shared by all.
        self._work = np.zeros((shape.n_head_kv, shape.head_dim), np.float32)
        self._parts = np.zeros((shape.n_head, self._n_label), np.float32)
        n_row = shape.n_head // self._group
        self._best = BestScores(shape, n_row, n_sink=p.sink, n_local=p.recent, n_top=p.n_top)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        if self._phase == START:
            self._record_channels(rec, layer, q, kv)
        self._record_scores(rec, layer, q, kv)
        return self._best.choose(rec)

    def _record_channels(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        shape = self.shape
        rec.program.add(
            ops.LABEL_CHANNELS,
            (shape.head_dim, shape.group),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            channels=self._channels[layer],
            work=self._work,
            n_head_kv=shape.n_head_kv,
            n_label=self._n_label,
            **self._queries.of(layer),
        )

    def _record_scores(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        p, shape, capacity = self._params, self.shape, self._best.scores.shape[1]
        rec.program.add(
            ops.LABEL_KEYS,
            (shape.head_dim,),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            channels=self._channels[layer],
            labels=self._labels[layer],
            parts=self._parts,
            n_head=shape.n_head,
            n_head_kv=shape.n_head_kv,
            n_label=self._n_label,
            capacity=capacity,
            fresh=int(self._phase == START),
        )
        rec.program.add(
            ops.LABEL_SCORE,
            (self._n_label, shape.group, self._group),
            cost=self._score_cost,
            step=rec.step,
            parts=self._parts,
            labels=self._labels[layer],
            scores=self._best.scores,
            maxima=self._best.maxima,
            n_head_kv=shape.n_head_kv,
            capacity=capacity,
            n_sink=p.sink,
            n_local=p.recent,
        )

    def _score_cost(self, _n_tok: int, pos: int) -> tuple[int, int]:
        """The cost of every key's labels, read once for all heads that share it."""
        n = (pos + 1) * self._n_label
        return 2 * n * self.shape.n_head_kv, 2 * n * self.shape.n_head


METHOD = DoubleSparsity
