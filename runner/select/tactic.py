"""Tactic: as many tokens as reach a share of all attention (Zhu et al. 2025, arXiv 2502.12216).

Decides: at decode, the fewest positions whose attention weights sum to `P`, as far as that can be
told without scoring all keys. The keys of each KV head are clustered (K-means, 4.2); a step ranks
the clusters by q . centroid (4.3), computes the weights of the first 2 % of the positions in that
order, at least 20, fits y = a / x + b to the others through the means of two windows, at 10 % and
at 60 % of the positions (4.4), and keeps the least number of positions whose weights sum to P of
the total (Alg. 1). Attending to weight p errs by at most 2 (1 - p) max |v| (Eq. 6).

`rows="group"` attends to the union over the heads of a KV head (4.5), `rows="head"` to each one's.
`rows="joint"` makes one set for them: clusters in the order of the sum over the heads of what a
member is estimated to hold of a head's weight, as many as `reach` of the heads need for P, by
samples. The union holds more than P of nearly every head; this half as many positions.
Departures: the first `sink` and last `local` positions stay out of the clusters and always take
part, as do the tokens since the last clustering; their weight counts towards P, so that only the
rest is asked of the clusters: on real attention that keeps half the tokens for more weight.
`outside="apart"` asks P of the clusters alone. P = 1 keeps everything.
Keys are clustered `segment` at a time, each segment into its share of the T / c clusters: the work
grows with T, not with its square, and whole segments stay as they are when new tokens are
clustered. `segment=0` clusters everything at once, as the paper does.
A window is 1 % of the positions, at least 32 and at most 128, so that what is read for it stays
the same in long contexts: the paper's have a fixed size, which it does not give.
`sample` tokens replace the curve where it is not 0: whole clusters are kept in order of their
centroids until they reach P, those after the first 2 % weighing size * exp(q . centroid / sqrt(d)),
times one factor: how much of that `sample` of their tokens, drawn in proportion to it, really
weigh, times 1 + `margin`. The curve misses P more often, and in both directions.
State: the clusters. A segment that a prompt fills is clustered after the chunk that fills it, what
is left at the first decode step; those of the last segment and of what came after are made anew
every `period` tokens, and after positions in them were truncated.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    Bound,
    ParameterError,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
    new_selection,
    packed,
)
from tamis.select.clusters import CLUSTER, MAX_ITER, ClusteredState

ROUNDING = 1e-3  # of the longest value: float16 K and V, float32 sums


@dataclass(frozen=True, slots=True)
class Tactic:
    """P: share of attention. c: tokens per cluster. first: share of tokens weighted exactly."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    P: float = 0.9
    c: int = 32
    n_iter: int = 10  # most rounds of K-means
    first: float = 0.02
    period: int = 2048  # tokens after which the last segment is clustered anew
    sink: int = 4
    local: int = common("recent", 256)
    segment: int = 8192  # positions that are clustered together; 0: all of them
    sample: int = 0  # weighted positions of a step's estimate; 0: the curve of 4.4
    margin: float = 0.5  # added to that estimate
    outside: str = "counted"  # whether P counts what is not in the clusters, or "apart"
    rows: str = "group"
    reach: float = 0.7  # the share of heads that must reach P, where rows is "joint"
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "0 < P <= 1",
            "0 <= first <= 1",
            "c >= 1",
            f"1 <= n_iter <= {MAX_ITER}",
            "period >= 1",
            "local >= 1",
            "sink >= 0",
            "segment >= 0",
            "segment % c == 0",
            f"0 <= sample <= {ops.TACTIC_SAMPLES}",
            "margin >= 0",
            "outside in ('counted', 'apart')",
            "rows in ('group', 'head', 'joint')",
            "0 < reach <= 1",
        )
        if self.rows == "joint" and self.sample == 0:
            raise ParameterError({"sample": 0}, "at least 1 where rows is joint")

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def budget_by_fit(weights: np.ndarray, n_first: int, outside: float, share: float) -> int:
    """The number of positions that reach `share` of all weight: Alg. 1, with the curve of 4.4.

    weights f64 [n]: of the clustered positions in the order of their clusters; the first n_first
    are known. outside: the weight of the positions that are not clustered.
    """
    n = len(weights)
    half, x_1, x_2 = min(max(16, n // 200), 64), n // 10, n * 6 // 10
    mu_1 = weights[max(0, x_1 - half) : x_1 + half].mean()
    mu_2 = weights[max(0, x_2 - half) : x_2 + half].mean()
    x_1, x_2 = max(1, x_1), max(2, x_2)
    a = (mu_1 - mu_2) / (1 / x_1 - 1 / x_2)
    b = mu_2 - a / x_2
    curve = np.maximum(a / np.arange(1, n + 1) + b, 0)
    w = np.concatenate([weights[:n_first], curve[n_first:]])
    need = share * (outside + w.sum()) - outside
    if need <= 0:
        return 0
    return min(n, int(np.searchsorted(w.cumsum(), need)) + 1)


class Order(NamedTuple):
    """Clusters in the order in which they are kept, and the weights of their positions."""

    weights: np.ndarray  # f64 [n], or [n_head, n]: of the positions, cluster by cluster
    sizes: np.ndarray  # int [n_cluster]
    logits: np.ndarray  # f64 [n_cluster], or [n_head, n_cluster]: of the centroids


def _drawn(tail: np.ndarray, n_sample: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sampled clusters, and positions within them, at even distances of the sums of `tail`."""
    points = (np.arange(n_sample) + 0.5) / n_sample * tail.sum()
    of = np.searchsorted(tail.cumsum(), points, side="right")
    within = (points - (tail.cumsum() - tail)[of]) / tail[of] * sizes[of]
    return of, within.astype(int)


def budget_by_samples(
    clusters: Order, n_first: int, outside: float, share: float, sampling: tuple[int, float]
) -> int:
    """The budget in whole clusters: the first are known, others are estimated by samples.

    Otherwise it is like budget_by_fit. sampling: the number of samples, and the margin added to
    their estimate (`sample`, `margin`).
    """
    (n_sample, margin), (weights, sizes, logits) = sampling, clusters
    ends = sizes.cumsum()
    last = min(int(np.searchsorted(ends, max(20, n_first))), len(ends) - 1)
    each = np.add.reduceat(np.append(weights, 0), np.append(0, ends[:-1])) * (sizes > 0)
    tail = sizes[last + 1 :] * np.exp(logits[last + 1 :])
    if tail.sum() > 0:
        of, within = _drawn(tail, n_sample, sizes[last + 1 :])
        ratios = weights[ends[last + of] + within] / np.exp(logits[last + 1 + of])
        each[last + 1 :] = tail * ratios.mean() * (1 + margin)
    need = share * (outside + each.sum()) - outside
    if need <= 0:
        return 0
    exact = weights[: ends[last]].cumsum()
    if exact[-1] >= need:
        k = int(np.searchsorted(exact, need)) + 1
        return int(ends[np.searchsorted(ends, k)])
    return int(ends[min(np.searchsorted(each.cumsum(), need), len(ends) - 1)])


def densities(logits: np.ndarray, sizes: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """The estimated share of a head's weight held by a member of each cluster, summed over heads.

    logits f64 [n_head, n_cluster] of the centroids; outside f64 [n_head].
    """
    inside = np.exp(logits)
    shares: np.ndarray = inside / (inside @ sizes + outside)[:, None]
    return shares.sum(axis=0)


def budgets_joint(
    clusters: Order,
    dense: np.ndarray,
    n_first: int,
    outside: np.ndarray,
    share: float,
    sampling: tuple[int, float],
) -> list[int]:
    """The number of positions that each head needs of a common order: `rows="joint"`.

    It is like budget_by_samples, each head with the ratio of its own samples; dense: see densities.
    """
    (n_sample, margin), (weights, sizes, logits) = sampling, clusters
    ends = sizes.cumsum()
    first = min(int(np.searchsorted(ends, max(20, n_first))), len(ends) - 1) + 1
    tail, factors = (dense * sizes)[first:], np.zeros(len(weights))
    exact, rest = weights[:, : ends[first - 1]], np.zeros(len(weights))
    guesses = np.exp(logits[:, first:]) * sizes[first:]
    if tail.sum() > 0:
        of, within = _drawn(tail, n_sample, sizes[first:])
        drawn = weights[:, ends[first - 1 + of] + within]
        rest = (drawn / dense[first:][of]).mean(axis=1) * tail.sum() * (1 + margin)
        factors = rest / guesses.sum(axis=1)
    needs = share * (outside + exact.sum(axis=1) + rest) - outside
    at = [*range(int(ends[first - 1]) + 1), *(int(end) for end in ends[first:])]
    counts = []
    for w, more, factor, need in zip(exact, guesses, factors, needs, strict=True):
        reached = np.concatenate([[0], w.cumsum(), w.sum() + (factor * more).cumsum()])
        counts.append(at[min(int(np.searchsorted(reached, need)), len(at) - 1)])
    return counts


class _State(ClusteredState):
    def __init__(self, params: Tactic, shape: SelectorShape) -> None:
        super().__init__(params, shape)
        self._params = params
        self._n_row = shape.n_head if params.rows == "head" else shape.n_head_kv
        n_slot, n_kv = self._n_slot, shape.n_head_kv
        self._rank = np.zeros((shape.n_head, n_slot), np.int32)
        self._keep = np.zeros(shape.n_head, np.int32)
        if params.rows == "joint":
            work = n_kv, ops.tactic_joint_work(shape.group, shape.n_ctx, n_slot)
            self._sizes, self._density = np.zeros((2, n_kv, n_slot), np.float32)
        else:
            work = shape.n_head, ops.tactic_work(shape.n_ctx, n_slot)
        self._weighed = np.zeros((work[0], self._most_weighed()), np.int32)
        self._n_weighed = np.zeros(work[0], np.int32)
        self._work = np.zeros(work, np.float32)
        self._marks = np.zeros((self._n_row, shape.n_ctx // 64), np.int64)
        self._count = np.zeros(self._n_row, np.int32)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        if self._phase == CLUSTER:
            self.prepare(rec, layer, kv)
        self._record_budget(rec, layer, q, kv)
        return self._record_selection(rec, layer)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        mass, max_v = report[:, AUDIT.mass], report[:, AUDIT.max_v]
        name, allowed = "2 (1 - p) max|v| (Eq. 6)", 2 * (1 - mass) * max_v
        return [Bound(name, report[:, AUDIT.error], allowed, rounding=ROUNDING * max_v)]

    def _most_weighed(self) -> int:
        """The most positions that a head weights: first ones, windows or samples, unclustered ones.

        With samples, the first ones are whole clusters, of one segment at most.
        """
        p, n_ctx = self._params, self.shape.n_ctx
        most = max(20, int(p.first * n_ctx) + 1) + 4 * ops.tactic_half_window(n_ctx)
        most += p.sample + (self._segment if p.sample else 0)
        most += p.sink + p.local + p.c + p.period
        return min(most, ops.tactic_list(n_ctx))

    def _record_budget(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        p, shape, heads = self._params, self.shape, (self.shape.head_dim, self.shape.group)
        self.record_scores(rec, layer, q)
        common: dict[str, Any] = {
            "step": rec.step,
            "extent": self._extent,
            "rank": self._rank,
            "work": self._work,
            "n_slot": self._n_slot,
            "capacity": shape.n_ctx,
            "n_sink": p.sink,
            "n_sample": p.sample,
            "share": p.P,
            "first_share": p.first,
            "scale": shape.scale,
        }
        keys: dict[str, Any] = {
            "q": q,
            "k_pages": kv.k,
            "k_table": kv.k_table,
            "n_head_kv": shape.n_head_kv,
        }
        weighed = self._record_order(rec, layer, common, keys)
        given: dict[str, Any] = {
            "indptr": weighed.indptr,
            "indices": weighed.indices,
            "places": weighed.indices,
            "n_row": weighed.n_row,
            "keep": self._keep,
            "margin": p.margin,
            **keys,
        }
        if p.rows == "joint":
            given |= {"scores": self._scores, "sizes": self._sizes}
            given["n_reach"] = math.ceil(p.reach * shape.group - 1e-9)
            rec.program.add(ops.TACTIC_JOINT, heads, cost=self._budget_cost, **given, **common)
            return
        del common["rank"]
        given |= {"counted": int(p.outside == "counted"), "heads_per_kv": shape.group}
        rec.program.add(ops.TACTIC_BUDGET, heads[:1], cost=self._budget_cost, **given, **common)

    def _record_order(
        self, rec: Recording, layer: int, common: dict[str, Any], keys: dict[str, Any]
    ) -> Selection:
        """Record the clusters' order, and the weights by which their number is chosen."""
        p, shape = self._params, self.shape
        given: dict[str, Any] = {
            "scores": self._scores,
            "starts": self._starts[layer],
            "order": self._order[layer],
            "sets": self._weighed,
            "counts": self._n_weighed,
            "set_capacity": self._weighed.shape[1],
            "counted": int(p.outside == "counted"),
        }
        if p.rows == "joint":
            given |= {"sizes": self._sizes, "density": self._density, **keys}
            heads = (shape.head_dim, shape.group)
            rec.program.add(ops.TACTIC_JOINT_RANK, heads, **given, **common)
        else:
            given |= {"n_head": shape.n_head, "heads_per_kv": shape.group}
            rec.program.add(ops.TACTIC_RANK, **given, **common)
        return packed(rec, self._weighed, self._n_weighed)

    def _budget_cost(self, _n_tok: int, pos: int) -> tuple[int, int]:
        """The cost of the keys that a head weights: first ones and two windows, or the samples.

        The unclustered keys are included if they count towards P. Heads with one order read keys
        once.
        """
        p, shape = self._params, self.shape
        n_in = max(0, int(self._extent[1]) - p.sink)
        if n_in == 0:
            return 0, 0
        n_key = min(n_in, max(20, int(p.first * n_in)))
        n_key += p.sample or 2 * min(n_in, 2 * ops.tactic_half_window(n_in))
        n_key += (pos + 1 - n_in) * (p.outside == "counted")
        n = n_key * shape.head_dim
        n_set = shape.n_head_kv if p.rows == "joint" else shape.n_head
        return 2 * n_set * n, 2 * shape.n_head * n

    def _record_selection(self, rec: Recording, layer: int) -> Selection:
        shape = self.shape
        joint = self._params.rows == "joint"
        rec.program.add(
            ops.TACTIC_MARK,
            (1 if joint else shape.n_head // self._n_row,),
            extent=self._extent,
            labels=self._labels_of(layer),
            starts=self._starts[layer],
            order=self._order[layer],
            rank=self._rank,
            keep=self._keep,
            ends=self._work,  # its rows begin with the ends
            n_end=self._work.shape[1],
            marks=self._marks,
            count=self._count,
            n_row=self._n_row,
            heads_per_kv=1 if joint else shape.group,
            n_slot=self._n_slot,
            capacity=shape.n_ctx,
            n_sink=self._params.sink,
        )
        sel = new_selection(shape, rec, n_row=self._n_row, block=1)
        rec.program.add(
            ops.TACTIC_SELECT,
            step=rec.step,
            extent=self._extent,
            marks=self._marks,
            count=self._count,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=self._n_row,
            capacity=shape.n_ctx,
            n_sink=self._params.sink,
        )
        return sel


METHOD = Tactic
