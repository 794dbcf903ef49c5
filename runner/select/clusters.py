"""Clusters of a sequence's keys, which several methods share: those of `tactic`, section 4.2.

The keys of each KV head are clustered by K-means, `segment` positions at a time. A segment that a
prompt fills is clustered after the chunk that fills it, what is left at the first decode step;
those of the last segment and of what came after are made anew every `period` tokens, and after
positions in them were truncated. Methods that also estimate what they do not read keep the mean of
each cluster's values, and split the clusters into zones.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import Attended, Recording, SelectorShape, SelectorState, new_selection

CLUSTER, STEP = "cluster", "step"
MAX_ITER = 1000  # rounds of K-means: each is recorded
LANES = 16  # clusters that are scored together


class Clustering(Protocol):
    """The parameters of a method that has clusters."""

    @property
    def c(self) -> int:
        """Tokens a cluster."""
        ...

    @property
    def n_iter(self) -> int:
        """The most rounds of K-means."""
        ...

    @property
    def period(self) -> int:
        """Tokens after which the last segment is clustered anew."""
        ...

    @property
    def sink(self) -> int:
        """First positions, which stay out of the clusters."""
        ...

    @property
    def local(self) -> int:
        """Last positions, which stay out of the clusters."""
        ...

    @property
    def segment(self) -> int:
        """Positions that are clustered together; 0: all of them."""
        ...

    @property
    def seed(self) -> int:
        """Of the first centroids."""
        ...


class ClusteredState(SelectorState):
    """The clusters of all layers, and when they are made."""

    def __init__(self, params: Clustering, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._clustering = params
        # If everything is clustered at once, the one segment has room for the whole context.
        whole = -(-shape.n_ctx // params.c) * params.c
        self._segment = min(params.segment or whole, whole)
        self._n_segment = -(-shape.n_ctx // self._segment)
        self._n_slot = n_slot = -(-(shape.n_ctx // params.c) // LANES) * LANES
        self.prepares = True
        self._phase = CLUSTER
        self._at = 0  # the step of the last clustering, 0 = none
        # All layers are clustered at the same steps: see ops.TACTIC_SEED.
        self._extent = np.full(3, params.sink, np.int64)
        self._extent[2] = 0
        self.counters = self.planned = (self._extent,)
        n_kv, per_head = shape.n_head_kv, (shape.n_layer, shape.n_head_kv)
        self._means = np.zeros((*per_head, n_slot, shape.head_dim), np.float16)
        self._starts = np.zeros((*per_head, n_slot + 1), np.int32)
        self._order = np.zeros((*per_head, shape.n_ctx), np.int32)
        self.n_bytes = self._means.nbytes + self._starts.nbytes + self._order.nbytes
        # Scratch that layers share.
        self._centroids = np.zeros((n_kv, n_slot, shape.head_dim), np.float32)
        self._norms = np.zeros((n_kv, n_slot), np.float32)
        self._moving = np.zeros((n_kv, self._n_segment), np.int64)
        # A GPU marks positions by their clusters and so stores the labels of all layers.
        self._labels = np.zeros((shape.n_layer if shape.on_gpu else 1, n_kv, shape.n_ctx), np.int32)
        self.n_bytes += self._labels.nbytes
        self._cursor = np.zeros((n_kv, n_slot), np.int32)
        self._panels = np.zeros((ops.TACTIC_WORKERS, (shape.head_dim + 3) * 32), np.float32)
        self._scores = np.zeros((shape.n_head, n_slot), np.float32)

    def phase(self, step: int) -> str:
        """CLUSTER or STEP."""
        due = self._at == 0 or step >= self._at + self._clustering.period
        self._phase = CLUSTER if due else STEP
        if due:
            self._at = step
            self._extent[:] = self._planned(step)
        return self._phase

    def prepare_due(self, end: int) -> bool:
        """Plan whole segments before the last `local` positions, as at a step at `end` - 1."""
        p, done = self._clustering, self._whole(int(self._extent[1]))
        upto = self._whole(end - p.local)
        if upto <= done:
            return False
        self._extent[:] = done, upto, (upto - p.sink) // p.c
        return True

    def _planned(self, pos: int) -> tuple[int, int, int]:
        """The extent of a clustering at position pos: complete segments are not changed."""
        p, segment = self._clustering, self._segment
        n = max(0, pos + 1 - p.local - p.sink)
        n_whole, n_rest = n // segment, n % segment
        n -= n_rest if n_rest < p.c else 0
        begin = min(self._whole(int(self._extent[1])), p.sink + n_whole * segment)
        return begin, p.sink + n, n_whole * (segment // p.c) + n_rest // p.c

    def _whole(self, end: int) -> int:
        """The end of the last whole segment before `end`."""
        sink = self._clustering.sink
        return sink + max(0, end - sink) // self._segment * self._segment

    def truncate(self, n_tokens: int) -> None:
        """Cluster anew what lost positions."""
        if n_tokens < max(self._at, int(self._extent[1])):
            self._at = 0
            self._extent[1] = self._whole(min(n_tokens, int(self._extent[1])))

    def prepare(self, rec: Recording, layer: int, kv: KVView) -> None:
        """Record the clustering of the planned extent."""
        if self.shape.window[layer]:
            return
        p, shape, add = self._clustering, self.shape, rec.program.add
        of_all: dict[str, Any] = {
            "k_pages": kv.k,
            "k_table": kv.k_table,
            "extent": self._extent,
            "centroids": self._centroids,
            "norms": self._norms,
            "moving": self._moving,
            "n_head_kv": shape.n_head_kv,
            "n_slot": self._n_slot,
            "n_segment": self._n_segment,
            "segment": self._segment,
            "per_cluster": p.c,
            "n_sink": p.sink,
        }
        means = self._means[layer]
        seed = p.seed * shape.n_layer + layer
        add(ops.TACTIC_SEED, (shape.head_dim,), means=means, seed=seed, **of_all)
        of_all |= {"labels": self._labels_of(layer), "capacity": shape.n_ctx}
        for _ in range(p.n_iter):
            add(ops.TACTIC_ASSIGN, (shape.head_dim,), panels=self._panels, **of_all)
            add(
                ops.TACTIC_MEAN,
                (shape.head_dim,),
                means=means,
                starts=self._starts[layer],
                order=self._order[layer],
                cursor=self._cursor,
                **of_all,
            )

    def _labels_of(self, layer: int) -> np.ndarray:
        """The clusters of a layer's positions; on the CPU they are scratch that layers share."""
        return self._labels[layer % len(self._labels)]

    def record_scores(self, rec: Recording, layer: int, q: np.ndarray) -> None:
        """Record q . centroid of all clusters."""
        shape, heads = self.shape, (self.shape.head_dim, self.shape.group)
        rec.program.add(
            ops.TACTIC_SCORE,
            heads,
            cost=self._score_cost,
            q=q,
            extent=self._extent,
            means=self._means[layer],
            scores=self._scores,
            n_head_kv=shape.n_head_kv,
            n_slot=self._n_slot,
        )

    def _score_cost(self, _n_tok: int, _pos: int) -> tuple[int, int]:
        """The cost of the centroids: each is read once, for all heads of its KV head."""
        shape, n = self.shape, int(self._extent[2]) * self.shape.head_dim
        return 2 * shape.n_head_kv * n, 2 * shape.n_head * n


class Zones(NamedTuple):
    """How clusters are split: see ops.CLUSTER_ZONES."""

    by_share: bool
    exact: float
    both: float


def zones(logits: np.ndarray, sizes: np.ndarray, p: Zones) -> tuple[np.ndarray, np.ndarray]:
    """The clusters that are read and those that are estimated, bool [n_cluster].

    logits f64 [heads, n_cluster]: scaled ones of the centroids; sizes int [n_cluster].
    """
    counted = sizes if p.by_share else np.minimum(sizes, 1)
    parts = np.exp(logits - logits.max(axis=1, keepdims=True)) * counted
    shares = (parts / parts.sum(axis=1, keepdims=True)).mean(axis=0)
    order = np.argsort(-shares, kind="stable")
    reached = shares[order].cumsum() if p.by_share else np.arange(1.0, len(order) + 1)
    within = []
    for part in (p.exact, p.both):
        n = int(np.searchsorted(reached, part * reached[-1] - 1e-9)) + 1 if part else 0
        bar = shares[order[n - 1]] if n else np.inf
        within.append((shares >= bar) & (shares > 0))
    return within[0], within[1] & ~within[0]


def estimated(logits: np.ndarray, sizes: np.ndarray, values: np.ndarray) -> tuple[Any, Any]:
    """The output f64 [heads, head_dim] of the estimated clusters, and its log-sum-exp [heads].

    logits f64 [heads, n]; values f64 [n, head_dim]: the means of their values.
    """
    weights = np.exp(logits) * sizes
    total = weights.sum(axis=1, keepdims=True)
    return weights @ values / total, np.log(total[:, 0])


class ZonedState(ClusteredState):
    """Reads the clusters of the first zone, and estimates those of the second."""

    estimates = True

    def __init__(self, params: Clustering, shape: SelectorShape, split: Zones) -> None:
        super().__init__(params, shape)
        self._split = split
        n_kv, n_slot = shape.n_head_kv, self._n_slot
        self._values = np.zeros((shape.n_layer, n_kv, n_slot, shape.head_dim), np.float16)
        self.n_bytes += self._values.nbytes
        # Scratch that layers share.
        self._tops = np.zeros((shape.n_head, 2), np.float32)
        self._shares = np.zeros((n_kv, n_slot), np.float32)
        self._bars = np.zeros((n_kv, 2), np.int32)
        self._marks = np.zeros((n_kv, shape.n_ctx // 64), np.int64)
        self._count = np.zeros(n_kv, np.int32)
        self._out = np.zeros((1, shape.n_head, shape.head_dim), np.float32)
        self._out_lse = np.zeros((1, shape.n_head), np.float32)
        self.lse = np.zeros((1, shape.n_head), np.float32)
        self._kept_lse: np.ndarray | None = None  # of the layer being recorded

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """Record the zones; returns what is read."""
        shape = self.shape
        if shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        if self._phase == CLUSTER:
            self.prepare(rec, layer, kv)
        self.record_scores(rec, layer, q)
        rec.program.add(
            ops.CLUSTER_ZONES,
            (shape.group,),
            extent=self._extent,
            scores=self._scores,
            starts=self._starts[layer],
            order=self._order[layer],
            tops=self._tops,
            shares=self._shares,
            bars=self._bars,
            marks=self._marks,
            count=self._count,
            by_share=int(self._split.by_share),
            exact=self._split.exact,
            both=self._split.both,
            scale=shape.scale,
        )
        sel = new_selection(shape, rec, n_row=shape.n_head_kv, block=1)
        rec.program.add(
            ops.TACTIC_SELECT,
            step=rec.step,
            extent=self._extent,
            marks=self._marks,
            count=self._count,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=shape.n_head_kv,
            capacity=shape.n_ctx,
            n_sink=self._clustering.sink,
        )
        return sel

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        """Record nothing; what is read has this log-sum-exp."""
        self._kept_lse = rows.lse
        return []

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        """Record the estimate of the second zone, which joins the softmax of what is read."""
        shape = self.shape
        if rec.n_tok > 1 or shape.window[layer] or self._split.both <= self._split.exact:
            return
        rec.program.add(
            ops.CLUSTER_ESTIMATE,
            (shape.head_dim, shape.group),
            cost=self._score_cost,  # the values of as many clusters, at most
            extent=self._extent,
            scores=self._scores,
            starts=self._starts[layer],
            shares=self._shares,
            bars=self._bars,
            values=self._values[layer],
            out=self._out,
            lse=self._out_lse,
            scale=shape.scale,
        )
        assert self._kept_lse is not None
        rec.program.add(
            ops.TAIL_MERGE,
            kept=out,
            kept_lse=self._kept_lse,
            sampled=self._out,
            sampled_lse=self._out_lse,
            out=out,
            lse=self._kept_lse,
        )

    def prepare(self, rec: Recording, layer: int, kv: KVView) -> None:
        """Record the clustering of the planned extent, and the means of its values."""
        super().prepare(rec, layer, kv)
        if self.shape.window[layer]:
            return
        rec.program.add(
            ops.CLUSTER_VALUES,
            (self.shape.head_dim, *kv.types),
            k_pages=kv.k,
            v_pages=kv.v,
            k_table=kv.k_table,
            v_table=kv.v_table,
            extent=self._extent,
            starts=self._starts[layer],
            order=self._order[layer],
            values=self._values[layer],
            per_cluster=self._clustering.c,
            n_sink=self._clustering.sink,
        )
