"""CPE: positions to keep are selected before attention (Pre-hoc Sparsity; Gao et al., 2025).

CIS, clustered index sharing (section IV-A), at decode: steps are divided into blocks of `s`. A head
retrieves - scores every position it sees and keeps the `k` best - when no query of this block that
retrieved has a cosine above `tau` with its own (Eq. 12). Otherwise it reads the set of the most
recent such query, dilated (Eq. 13), and scores no keys. `s=0` turns CIS off. PSAW, progressive
window (Eq. 15), at prefill and decode: deep layers see only the sinks and a last part of the past,
down to `phi ** alpha` of it in the last layer. `phi=1` turns PSAW off. ETF, early token freezing
(Eq. 16), at prefill: deep layers do not update a first part of the prompt after its sinks, all but
`psi ** gamma` of it in the last layer: no attention, no feed-forward, the hidden state is carried
over. Its K and V are the layer's own projections of that state, or with `kv="reuse"` those of the
layer before (appendix G; far worse: docs/methods/cpe.md). `psi=1` turns ETF off.

Decides: the first `sink`, the last `local`, and of what PSAW leaves between them, CIS's sets.
Layers with a sliding window of their own attend as usual, but freeze like all others.

Departures. Layers count from 1, so that the last one reaches phi ** alpha (as in the appendix). In
prefill, and with s=0, the window is widened to whole blocks of 16 positions and to its oldest
query's. The last `local` positions are kept whatever PSAW says. A block also ends where decoding
does: after a prompt, truncate() or load, the next step retrieves. ETF counts a later prompt's
positions from the beginning of the sequence.

`rows="head"` selects for each query head, as the paper does. `rows="union"`, the default, does so
too, and attends to the union of the sets of the heads that share a KV head: each key is read once,
and every head sees more. `rows="group"` makes one decision and one set for these heads: all their
cosines must pass, scores are their maximum. A KV head's keys are scored in one pass, for those of
its heads that retrieve. As one such head is enough for a pass, `join` above `tau` lets others
retrieve with it: those that no query of this block resembles above `join`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    DECODE,
    PREFILL,
    SPAN,
    Bound,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
    new_selection,
    packed,
    united,
)
from tamis.select.key_codes import KeyScores

BLOCK = 16  # positions of a block of PSAW's Selection
ROWS = ("head", "union", "group")


@dataclass(frozen=True, slots=True)
class CPE:
    """The defaults of section V-A, where s is 8 or 16, and V-C's budget: 16 + 432 + 64 tokens."""

    roles: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)
    promise: ClassVar[tuple[str, ...]] = ("bracket",)

    s: int = common("period", 16)  # block size in steps; 0: no CIS
    tau: float = 0.8  # the cosine above which a head shares a set
    # the cosine below which a head retrieves together with others; up to tau: only by itself
    join: float = 0.8
    r: int = 1  # dilation radius
    k: int = common("budget", 432, beside=True)  # floor(k / 3) of them are dilated
    sink: int = 16
    local: int = common("recent", 64)
    phi: float = 0.7  # the part of the past that the last layer sees, for alpha = 1; 1: no PSAW
    alpha: float = 1.0
    psi: float = 0.5  # the part of the prompt that the last layer updates, for gamma = 1; 1: no ETF
    gamma: float = 1.0
    kv: str = "project"  # of frozen tokens
    rows: str = "union"

    def __post_init__(self) -> None:
        check(
            self,
            "s >= 0",
            "r >= 0",
            "sink >= 0",
            "k >= 1",
            "local >= 1",
            "0 < phi <= 1",
            "0 < psi <= 1",
            "alpha >= 0",
            "gamma >= 0",
            "-1 <= tau <= 1",
            "-1 <= join <= 1",
            "kv in ('project', 'reuse')",
            f"rows in {ROWS}",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)

    def dropped(self, layer: int, n_layer: int) -> float:
        """The part of the past that layer `layer` (from 0) does not see: 1 - phi^(...), Eq. 15."""
        return 1.0 - self.phi ** (self.alpha * depth(layer, n_layer))

    def frozen(self, layer: int, n_layer: int) -> float:
        """The part of the prompt that layer `layer` (from 0) does not update, Eq. 16."""
        return 1.0 - self.psi ** (self.gamma * depth(layer, n_layer))


def depth(layer: int, n_layer: int) -> float:
    """The relative depth of a layer: 0 up to layer 3 N / 4, rising to 1 in the last one."""
    start = 3 * n_layer // 4
    return max(0, layer + 1 - start) / (n_layer - start)


def middle(p: CPE, pos: int, drop: float) -> np.ndarray:
    """The positions between the sinks, or P_l(t) of Eq. 15, and the last ones of a query at pos.

    drop: the part of the past that PSAW hides in this layer, see CPE.dropped.
    """
    high = max(p.sink, pos + 1 - p.local)
    return np.arange(min(high, max(p.sink, math.floor(drop * pos))), high)


def cosines(q: np.ndarray, references: np.ndarray) -> np.ndarray:
    """sim(t, j) of Eq. 12 with each reference query, f64 [n]: of a row of several heads the least.

    q f64 [heads, head_dim], references f64 [n, heads, head_dim].
    """
    norms = np.linalg.norm(q, axis=-1) * np.linalg.norm(references, axis=-1)
    least: np.ndarray = ((references * q).sum(axis=-1) / norms).min(axis=-1)
    return least


def shared(p: CPE, similar: list[np.ndarray]) -> list[int]:
    """For each row of a KV head the reference whose set it shares, or -1: it retrieves.

    similar: of each row the cosines with its references, the most recent one last.
    """
    above = [np.flatnonzero(cosine > p.tau) for cosine in similar]
    recent = [int(each[-1]) if len(each) else -1 for each in above]
    if -1 in recent:  # the keys are scored anyway: rows that no reference resembles closely join
        near = [max(cosine, default=-1.0) > p.join for cosine in similar]
        recent = [j if close else -1 for j, close in zip(recent, near, strict=True)]
    return recent


def dilated(p: CPE, best: np.ndarray) -> np.ndarray:
    """The set of Eq. 13: the floor(k / 3) best positions and their neighbours, and the others.

    best: S* in descending order of attention weight.
    """
    neighbours = best[: p.k // 3, None] + np.arange(-p.r, p.r + 1)
    return np.union1d(best, neighbours)


def chosen(p: CPE, q: np.ndarray, k: np.ndarray, drop: float = 0.0) -> list[list[np.ndarray]]:
    """The positions that the rows of a KV head keep at each decode step: CIS, section IV-A.

    q f64 [n_step, n_row, heads, head_dim]; k f64 [n, head_dim], of which the last n_step keys are
    those of the steps; drop: see `middle`.
    """
    steps, begin, pos = [], 0, len(k) - len(q)
    for i, queries in enumerate(q):
        between = middle(p, pos + i, drop)
        high = max(p.sink, pos + i + 1 - p.local)
        ends = np.r_[: min(p.sink, pos + i + 1), high : pos + i + 1]
        if len(between) <= p.k:  # everything is kept, and the block ends
            steps.append([np.union1d(ends, between)] * len(queries))
            begin = i + 1
            continue
        if (i - begin) % p.s == 0:  # a block begins: its queries are compared with each other only
            references: list[list[np.ndarray]] = [[] for _ in queries]
            sets: list[list[np.ndarray]] = [[] for _ in queries]
        similar = [
            cosines(row, np.array(past)) if past else np.zeros(0)
            for row, past in zip(queries, references, strict=True)
        ]
        kept = []
        for r, j in enumerate(shared(p, similar)):
            if j >= 0:
                salient = np.intersect1d(sets[r][j], between)
            else:
                scores = (k[between] @ queries[r].T).max(axis=1)
                salient = between[np.argsort(-scores, kind="stable")[: p.k]]
                references[r].append(queries[r])
                sets[r].append(dilated(p, salient))
            kept.append(np.union1d(ends, salient))
        steps.append(kept)
    return steps


def g(delta: float, n: int) -> float:
    """The bound of Eq. 4 on the information, in nats, lost by dropping mass delta of n tokens."""
    if not 0.0 < delta < 1.0:
        return 2 * delta * math.log(n)
    entropy = -delta * math.log(delta) - (1 - delta) * math.log(1 - delta)
    return 2 * (entropy + delta * math.log(n))


def beta_th(tau: float, k_max: float, scale: float) -> float:
    """The bound of Eq. 14 on the retained mass lost by sharing above the cosine tau.

    The loss is relative to the best set, for queries of unit length; k_max is the longest key,
    scale that of attention (the paper's is 1 / sqrt(head_dim)). A bound above 1 means nothing,
    which is usual.
    """
    return 2 * (2 * k_max * scale) * math.sqrt(2 - 2 * tau)


def _fixed(part: float) -> int:
    """A part in units of 2^-32, rounded up: an integral product stays integral."""
    return math.ceil(part * 2**32)


class _State(SelectorState):
    """The state of CIS: queries and sets that retrieved in the current block, for each row."""

    def __init__(self, params: CPE, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        self.freezing = params.kv if params.psi < 1 else ""
        self._group = group = shape.group if params.rows == "group" else 1
        self._n_row = n_row = shape.n_head // group
        p, n_ctx = params, -(-shape.n_ctx // SPAN) * SPAN
        self._n_best = p.k // 3
        self._set_capacity = min(n_ctx, p.sink + p.local + p.k + 2 * p.r * self._n_best)
        self._meta = np.zeros((shape.n_layer, n_row, len(ops.CIS_META)), np.int64)
        self._refs = np.zeros((shape.n_layer, n_row, p.s, group * shape.head_dim), np.float32)
        self._ref_counts = np.zeros((shape.n_layer, n_row, p.s), np.int32)
        self._ref_sets = np.zeros((*self._ref_counts.shape, self._set_capacity), np.int32)
        self._chosen = np.zeros((shape.n_layer, n_row), np.int32)
        # Scratch of one layer, shared by all.
        self._asking = zeros((shape.n_head, shape.head_dim), np.float32)
        self._n_asking = np.zeros(shape.n_head_kv, np.int32)
        self._scores = zeros((shape.n_head, n_ctx), np.float32)
        self._maxima = zeros((shape.n_head, n_ctx // 16), np.float32)
        self._score = KeyScores(shape, self._scores, self._maxima, group=group, n_top=p.k)
        self.counters, self.n_bytes = (self._meta, *self._score.counters), self._score.n_bytes
        self._order = zeros((n_row, n_ctx), np.int32)
        self._sets = np.zeros((n_row, self._set_capacity), np.int32)
        self._counts = np.zeros(n_row, np.int32)
        self.truncate(0)

    @property
    def retrievals(self) -> np.ndarray:
        """The number of retrievals of each row of each layer so far, int64 [n_layer, n_row]."""
        return self._meta[:, :, 3].copy()

    @property
    def retrieval_ratio(self) -> float:
        """The paper's mean rho: retrievals per row and step, over the layers that CIS serves."""
        steps = self._meta[:, :, 4].sum()
        return float(self._meta[:, :, 3].sum() / steps) if steps else 0.0

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer] or self._drop(layer) == 0:
            return super().select_prefill(rec, layer, q, kv)
        return self._psaw(rec, layer)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer] or self._params.s == 0:
            return self.select_prefill(rec, layer, q, kv)
        return self._cis(rec, layer, q, kv)

    def frozen(self, layer: int, n_prompt: int) -> range:
        drop = _fixed(self._params.frozen(layer, self.shape.n_layer))
        return range(self._params.sink, max(self._params.sink, drop * n_prompt >> 32))

    def truncate(self, n_tokens: int) -> None:
        """End all blocks: the queries that selected their sets may be dropped."""
        self._meta[:, :, 0] = -1
        self._score.truncate(n_tokens)

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        if self._params.s > 0:  # PSAW alone codes no keys
            self._score.bracket(rec, layer, q, sel)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        mass, seen = report[:, AUDIT.mass], report[:, AUDIT.n_seen]
        lost = np.maximum(0.0, 1 - mass)
        allowed = np.array([g(delta, n) for delta, n in zip(lost, seen, strict=True)]) / 2
        entropy = np.abs(report[:, AUDIT.entropy] - report[:, AUDIT.kept_entropy])
        bounds = [Bound("entropy lost, g(delta) / 2 (Eq. 24)", entropy, allowed, rounding=1e-6)]
        if self._params.s > 0:
            tau, scale = self._params.tau, self.shape.scale
            beta = np.array([beta_th(tau, k_max, scale) for k_max in report[:, AUDIT.max_k]])
            gap = report[:, AUDIT.best_mass] - mass
            # Eq. 14 holds for queries of unit length, and the model's are not.
            bounds.append(
                Bound("mass below the best, beta (Eq. 14)", gap, beta, holds_always=False)
            )
            bounds += self._score.bounds(layer, report)
        return bounds

    def _drop(self, layer: int) -> int:
        """The factor of Eq. 15, in fixed point."""
        return _fixed(self._params.dropped(layer, self.shape.n_layer))

    def _psaw(self, rec: Recording, layer: int) -> Selection:
        n_row = self.shape.n_head_kv
        sel = new_selection(self.shape, rec, n_row=n_row, block=BLOCK)
        rec.program.add(
            ops.SELECT_PSAW,
            step=rec.step,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=n_row,
            q_block=rec.q_block,
            block=BLOCK,
            n_sink=self._params.sink,
            n_local=self._params.local,
            drop=self._drop(layer),
        )
        return sel

    def _cis(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p = self._params
        middle: dict[str, Any] = {"n_sink": p.sink, "n_local": p.local, "drop": self._drop(layer)}
        heads = (self.shape.head_dim, self.shape.group, self._group)
        rec.program.add(
            ops.CIS_GATE,
            heads,
            step=rec.step,
            q=q,
            refs=self._refs[layer],
            meta=self._meta[layer],
            chosen=self._chosen[layer],
            asking=self._asking,
            n_asking=self._n_asking,
            n_head_kv=self.shape.n_head_kv,
            n_block=p.s,
            n_top=p.k,
            tau=p.tau,
            join=p.join,
            **middle,
        )
        self._score.record(
            rec,
            layer,
            self._asking,
            kv,
            cost=self._score_cost(layer),
            middle=middle,
            counts=self._n_asking,
        )
        self._add_sets(rec, layer, middle)
        if p.rows == "union":
            return united(rec, self.shape, self._sets, self._counts)
        return packed(rec, self._sets, self._counts)

    def _score_cost(self, layer: int) -> Cost:
        """The cost of the keys between sinks and window, read once per KV head that retrieves."""
        p, head_dim = self._params, self.shape.head_dim

        def cost(n_tok: int, pos: int) -> tuple[int, int]:
            start = max(p.sink, math.floor(p.dropped(layer, self.shape.n_layer) * pos))
            n = max(0, pos + 1 - p.local - start) * head_dim
            asking = (self._chosen[layer] == -1).reshape(self.shape.n_head_kv, -1)
            n_kv, n_row = int(asking.any(axis=1).sum()), int(asking.sum())
            return 2 * n * n_kv, 2 * n * n_row * self._group

        return cost

    def _add_sets(self, rec: Recording, layer: int, middle: dict[str, Any]) -> None:
        p = self._params
        rec.program.add(
            ops.CIS_SETS,
            step=rec.step,
            chosen=self._chosen[layer],
            meta=self._meta[layer],
            scores=self._scores,
            maxima=self._maxima,
            order=self._order,
            **self._score.candidates,
            ref_sets=self._ref_sets[layer],
            ref_counts=self._ref_counts[layer],
            sets=self._sets,
            counts=self._counts,
            n_row=self._n_row,
            rows_per_kv=self._n_row // self.shape.n_head_kv,
            group=self._group,
            n_block=p.s,
            capacity=self._scores.shape[1],
            set_capacity=self._set_capacity,
            n_top=p.k,
            n_best=self._n_best,
            radius=p.r,
            **middle,
        )


METHOD = CPE
