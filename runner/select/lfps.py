"""LFPS: what past steps attended to predicts where this one looks (Yao and Wang, 2025).

Decides, at decode and for each row of query heads: the first `sink` positions, the last `local`,
and of the middle between them the best `budget` of those that two score tables propose. The
vertical table scores positions, the slash table distances to the query. What a step may read is
known before its query (2, 3), so that a tier below memory brings no other keys. A step
1. bypasses the row where the sinks take more than `epsilon` of its attention (Eq. 5-6): the middle
   is represented by its mean value, and the tables stay as they are;
2. takes the entries above a * mean / kurtosis of their table as candidates (Eq. 7-8);
3. adds the neighbours -1 .. 2 whose score is above a mean (Eq. 9);
4. reads the keys of the candidates only, and keeps the best;
5. lets the tables decay by `r` and learn from what was kept (Eq. 10).
The tables start from the attention of the last `s` queries before decoding (Eq. 4),
whatever method read the prompt. Layers that have a sliding window of their own stay as they are.

Rows: `rows="head"` has tables and a set for each query head, as in the paper. `rows="group"`, the
default, has them for the query heads that share a KV head: scores are the mean of their weights, a
row is bypassed where all its heads would be, and each candidate's key is read once for all.

Cost beside the candidates' keys: tables are indexed by position and by distance, so nothing is
shifted; decay is one factor for a table; sums of the entries' powers give mean and kurtosis;
bitmaps of the entries above the threshold and above the mean are combined 64 positions at a time.
What is left that grows with the context is these bitmaps, four bits a row and position, and one of
`renew` parts of the tables a step. The tables take 8 bytes a row and
position. Starting the tables costs as much as scoring all keys `s` times, once after each prompt.

Departures. A bit is compared with threshold and mean when its entry changes and every `renew`
steps: between, an entry that nothing was learned about stays a candidate (`renew=1` is the paper).
The local window is kept whole and is in no table, nor are the sinks (footnote 1); weights are
normalised over what remains (Eq. 10 needs it, by the paper's Eq. 15). The slash table is read at
the distance to the current query. `bypass="mix"` (the paper's third finding) joins the sinks, the
local window and the mean value by their weights; "mean" is the algorithm box's mean value alone;
"none" never bypasses. Mean key and value are those of the start of decoding. After a prompt or
truncate() the tables start anew; load runs the last tokens again for their queries.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    DECODE,
    Attended,
    LastQueries,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
    packed,
)

PAD = 64  # padding entries of a table: words of bits are read across its end
ROWS = ("head", "group")
BYPASSES = ("none", "mix", "mean")


@dataclass(frozen=True, slots=True)
class LFPS:
    """The paper's section 5: a 0.2 (0.1 to 0.4 trade keys for quality), r 0.95, budget 2 %."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    a: float = 0.2  # a smaller one proposes more candidates
    r: float = 0.95  # decay of the tables
    s: int = common("queries", 32)  # queries from which the tables start
    budget: float = 0.02  # the kept part of the context, in addition to sinks and local
    epsilon: float = 0.85
    sink: int = 4
    local: int = common("recent", 64)
    bypass: str = "mix"
    rows: str = "group"
    renew: int = 8  # steps within which each bit is compared anew

    def __post_init__(self) -> None:
        check(
            self,
            "a >= 0",
            "0 < r < 1",
            "0 < budget <= 1",
            "s >= 1",
            "local >= 1",
            "sink >= 0",
            "renew >= 1",
            f"rows in {ROWS}",
            f"bypass in {BYPASSES}",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def threshold(x: np.ndarray, a: float) -> float:
    """tau(x) of Eq. 8; infinite if all entries are equal."""
    squares = (x - x.mean()) ** 2
    if squares.sum() == 0:
        return math.inf
    kurtosis = (squares**2).sum() / squares.sum() ** 2
    return float(a * x.mean() / kurtosis)


def attention(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The mean of the attention weights of q [heads, head_dim] over keys [n, head_dim]: f64 [n]."""
    logits = q @ k.T / math.sqrt(k.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    mean: np.ndarray = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    return mean


@dataclass
class Tables:
    """Algorithm 1 of one row in NumPy, with passes over all positions: the kernels' oracle.

    A row is one query head, or those of a KV head. The slash table is indexed by the distance to
    the query, so that Eq. 10's shift needs nothing. Entries outside the middle are 0.
    """

    p: LFPS
    ver: np.ndarray  # f64 [n_ctx]: Phi_ver, by position
    sla: np.ndarray  # f64 [n_ctx]: Phi_sla, by distance
    mean_key: np.ndarray  # f64 [head_dim], of the middle when decoding began
    mean_value: np.ndarray  # f64 [head_dim]
    spread: np.ndarray  # f64 [heads]: hat sigma^2, the variance of the logits by |q|^2

    @classmethod
    def started(
        cls, p: LFPS, q: np.ndarray, k: np.ndarray, v: np.ndarray, n_ctx: int, n_query: int
    ) -> Self | None:
        """The tables before the step at the last position (Eq. 4); None if there is no middle.

        q f64 [n, heads, head_dim], k and v f64 [n, head_dim], of all positions; n_query: the number
        of queries before the last one that are known.
        """
        pos, low = len(k) - 1, p.sink
        rows = [i for i in range(pos - n_query, pos) if i + 1 - p.local > low] or [pos]
        if rows[-1] + 1 - p.local <= low:
            return None
        ver, sla = np.zeros((2, n_ctx))
        for i in rows:
            middle = np.arange(low, i + 1 - p.local)
            weights = attention(q[i], k[middle]) / (2 * len(rows) * (1 - p.r))
            ver[middle] += weights
            sla[i - middle] += weights
        last = rows[-1]
        logits = q[last] @ k[low : last + 1 - p.local].T / math.sqrt(k.shape[1])
        spread = logits.var(axis=1) / (q[last] ** 2).sum(axis=1)
        of_all = slice(low, pos + 1 - p.local)
        return cls(p, ver, sla, k[of_all].mean(axis=0), v[of_all].mean(axis=0), spread)

    def step(self, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, int | None]:
        """The kept positions, and how many candidates were scored: None for a bypassed row.

        q f64 [heads, head_dim], of the last position of k f64 [n, head_dim].
        """
        p, n = self.p, len(k)
        middle = np.arange(p.sink, n - p.local)
        ends = np.r_[: p.sink, n - p.local : n]
        if p.bypass != "none" and (self.sparsity(q, k) > p.epsilon).all():  # lines 3 to 6
            return ends, None
        above_threshold, above_mean = self.compared(middle, n - 1 - middle)
        first = middle[above_threshold]  # line 8, Eq. 7
        near = np.unique(first[:, None] + [-1, 0, 1, 2])  # line 9, Eq. 9
        candidates = np.intersect1d(near, middle[above_mean])
        if len(candidates) == 0:
            self.learn(candidates, np.zeros(0), n)
            return ends, 0
        weights = attention(q, k[candidates])
        limit = max(1, int(float(np.float32(p.budget)) * n))
        best = np.argsort(-weights, kind="stable")[:limit]  # line 10
        kept, weights = candidates[best], weights[best] / weights[best].sum()
        self.learn(kept, weights - 1 / (2 * len(kept)), n)  # line 11
        return np.union1d(ends, kept), len(candidates)

    def compared(self, middle: np.ndarray, distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where an entry of either table is above its threshold (line 7), and above its mean."""
        ver, sla, a = self.ver[middle], self.sla[distances], self.p.a
        above_threshold = (ver > threshold(ver, a)) | (sla > threshold(sla, a))
        return above_threshold, (ver > ver.mean()) | (sla > sla.mean())

    def learn(self, kept: np.ndarray, gain: np.ndarray, n: int) -> None:
        """Update both tables: Eq. 10."""
        self.ver *= self.p.r
        self.sla *= self.p.r
        self.ver[kept] += gain
        self.sla[n - 1 - kept] += gain

    def global_weight(self, q: np.ndarray, n: int) -> np.ndarray:
        """w_global of Eq. 5, f64 [heads]: what n log-normal weights sum to."""
        mean = q @ self.mean_key / math.sqrt(q.shape[1])
        weight: np.ndarray = n * np.exp(mean + (q**2).sum(axis=1) * self.spread / 2)
        return weight

    def sparsity(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """rho_h of Eq. 6, f64 [heads]."""
        weights, n_sink = np.exp(q @ k.T / math.sqrt(k.shape[1])), self.p.sink
        sinks, local = weights[:, :n_sink].sum(axis=1), weights[:, n_sink:][:, -6:].sum(axis=1)
        rho: np.ndarray = sinks / (sinks + self.global_weight(q, len(k)) + local)
        return rho

    def bypassed(self, q: np.ndarray, n: int, out: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """The output of a bypassed row, f64 [heads, head_dim].

        out and lse: attention to the sinks and the last positions, and its log-sum-exp.
        """
        share = np.ones(len(q))
        if self.p.bypass == "mix":
            weight = self.global_weight(q, n)
            share = weight / (weight + np.exp(lse))
        mixed: np.ndarray = out + share[:, None] * (self.mean_value - out)
        return mixed


class _State(SelectorState):
    """Tables of every row; see contract/ops/select/lfps.py for their layout."""

    def __init__(self, params: LFPS, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        self._group = shape.group if params.rows == "group" else 1
        p, n_layer, n_head = params, shape.n_layer, shape.n_head
        n_row, n_ctx = n_head // self._group, -(-shape.n_ctx // PAD) * PAD + PAD
        most = max(1, int(float(np.float32(p.budget)) * n_ctx))
        self._set_capacity = min(n_ctx, p.sink + p.local + most)
        self._queries = LastQueries(shape, p.s)
        self._ver = zeros((n_layer, n_row, n_ctx), np.float32)
        self._sla = zeros((n_layer, n_row, n_ctx), np.float32)
        self._bits = np.zeros((n_layer, n_row, 2, 2, n_ctx // 64 + 1), np.int64)
        self._stats = np.zeros((n_layer, n_row, ops.LFPS_STATS_SIZE), np.float64)
        self._spread = np.zeros((n_layer, n_head), np.float64)
        self._meta = np.zeros((n_layer, n_row, len(ops.LFPS_META)), np.int64)
        self.counters = (*self._queries.counters, self._meta)
        self._means = np.zeros((n_layer, shape.n_head_kv, 2, shape.head_dim), np.float32)
        # Scratch of one layer, shared by all.
        self._scores = zeros((n_head, n_ctx), np.float32)
        self._proposed = zeros((n_row, n_ctx), np.int32)
        self._n_proposed = np.zeros(n_row, np.int32)
        self._order = zeros((n_row, 2, n_ctx), np.int32)
        self._sets = np.zeros((n_row, self._set_capacity), np.int32)
        self._counts = np.zeros(n_row, np.int32)
        if p.bypass != "none":
            self.lse = np.zeros((1, n_head), np.float32)
        self._kept_lse = self.lse
        self.truncate(0)

    @property
    def scanned_share(self) -> float:
        """Keys read for selection, as a share of all keys, so far."""
        return float(self._meta[..., 4].sum() / max(1, self._meta[..., 5].sum()))

    @property
    def bypass_ratio(self) -> float:
        """The share of bypassed rows in all rows and steps so far."""
        return float(self._meta[..., 2].sum() / max(1, self._meta[..., 3].sum()))

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        self._start(rec, layer, q, kv)
        self._choose(rec, layer, q, kv, self._propose(rec, layer))
        return packed(rec, self._sets, self._counts)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        self._kept_lse = rows.lse  # the buffer may belong to a method around this one
        return []

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        p = self._params
        if self.shape.window[layer] or rec.n_tok > 1 or p.bypass == "none":
            return
        rec.program.add(
            ops.LFPS_BYPASS,
            self._heads,
            step=rec.step,
            q=q,
            spread=self._spread[layer],
            meta=self._meta[layer],
            means=self._means[layer],
            lse=self._kept_lse,
            out=out,
            n_head_kv=self.shape.n_head_kv,
            bypass=BYPASSES.index(p.bypass),
            scale=self.shape.scale,
        )

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        if not self.shape.window[layer]:
            self._queries.record(rec, layer, q)

    def truncate(self, n_tokens: int) -> None:
        """Drop the tables and the queries from n_tokens on: the next step starts anew."""
        self._meta[:, :, 0] = -1
        self._queries.truncate(n_tokens)

    @property
    def n_recall(self) -> int:
        """The number of tokens that a loaded context computes again for their queries."""
        return self._queries.n_recall

    @property
    def _heads(self) -> tuple[int, int, int]:
        return self.shape.head_dim, self.shape.group, self._group

    def _tables(self, layer: int) -> dict[str, Any]:
        return {
            "ver": self._ver[layer],
            "sla": self._sla[layer],
            "bits": self._bits[layer],
            "stats": self._stats[layer],
            "spread": self._spread[layer],
            "meta": self._meta[layer],
            "means": self._means[layer],
            "scores": self._scores,
            "n_head_kv": self.shape.n_head_kv,
            "capacity": self._scores.shape[1],
            "n_sink": self._params.sink,
            "n_local": self._params.local,
            "a": self._params.a,
            "decay": self._params.r,
            "scale": self.shape.scale,
        }

    def _start(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        rec.program.add(
            ops.LFPS_START,
            self._heads,
            step=rec.step,
            q=q,
            k_pages=kv.k,
            v_pages=kv.v,
            k_table=kv.k_table,
            v_table=kv.v_table,
            **self._queries.of(layer),
            **self._tables(layer),
        )

    def _propose(self, rec: Recording, layer: int) -> Selection:
        p, tables = self._params, self._tables(layer)
        names = ("ver", "sla", "bits", "stats", "capacity", "n_sink", "n_local", "a")
        rec.program.add(
            ops.LFPS_PROPOSE,
            step=rec.step,
            sets=self._proposed,
            counts=self._n_proposed,
            n_row=len(self._proposed),
            period=p.renew,
            **{name: tables[name] for name in names},
        )
        return packed(rec, self._proposed, self._n_proposed)

    def _choose(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, proposed: Selection
    ) -> None:
        p = self._params
        rec.program.add(
            ops.LFPS_SETS,
            self._heads,
            cost=self._sets_cost(layer),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            indptr=proposed.indptr,
            indices=proposed.indices,
            places=proposed.indices,
            n_row=proposed.n_row,
            order=self._order,
            sets=self._sets,
            counts=self._counts,
            set_capacity=self._set_capacity,
            bypass=BYPASSES.index(p.bypass),
            budget=p.budget,
            epsilon=p.epsilon,
            **self._tables(layer),
        )

    def _sets_cost(self, layer: int) -> Cost:
        """The cost of the tables, and of the keys scanned per step since the last call (mean)."""
        meta, seen, at = self._meta[layer], np.zeros(2, np.int64), ops.LFPS_META

        def cost(n_tok: int, pos: int) -> tuple[int, int]:
            now = np.array([meta[:, at.n_scanned // 8].sum(), meta[0, at.n_step // 8]])
            n_key, n_step = now - seen
            seen[:] = now
            n = int(n_key / max(1, n_step)) * self.shape.head_dim
            # The bits, and a part of the entries, of two tables.
            n_table = 2 * len(meta) * ((pos + 1) // 4 + 4 * (pos + 1) // self._params.renew)
            return 2 * n + n_table, 2 * n * self._group

        return cost


METHOD = LFPS
