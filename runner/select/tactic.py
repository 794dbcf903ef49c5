"""Tactic: as many tokens as reach a share of all attention (Zhu et al. 2025, arXiv 2502.12216).

Decides: at decode, the fewest positions whose attention weights sum to `P`, as far as that can be
told without scoring all keys. The keys of each KV head are clustered (K-means, 4.2); a step ranks
the clusters by q . centroid (4.3), computes the weights of the first 2 % of the positions in that
order, fits y = a / x + b to the others through the means of two windows (4.4), and keeps the least
number of positions whose weights sum to P of the total (Alg. 1). Attending to weight p errs by at
most 2 (1 - p) max |v| (Eq. 6).

`rows="group"` attends to the union over the heads of a KV head (4.5), `rows="head"` to each one's.
Departures: the first `sink` and last `local` positions stay out of the clusters and always take
part, as do the tokens since the last clustering; their weight counts towards P, so that only the
rest is asked of the clusters: on real attention that keeps half the tokens for more weight.
`outside="apart"` asks P of the clusters alone. P = 1 keeps everything.
State: the clusters, made from the keys at the first decode step, then every `period` tokens, and
anew after positions in them were truncated.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels import ops
from tamis.jit_kernels.ops import AUDIT
from tamis.jit_kernels.types import KVView, Selection
from tamis.select.base import DECODE, Bound, Recording, SelectorShape, SelectorState, new_selection

CLUSTER, STEP = "cluster", "step"
ROUNDING = 1e-3  # of the longest value: float16 keys and values, float32 sums
PANEL = 32  # clusters whose centroids lie together


@dataclass(frozen=True, slots=True)
class Tactic:
    """P: share of attention. c: tokens a cluster. first: share of tokens weighed exactly."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    P: float = 0.9
    c: int = 32
    n_iter: int = 10
    first: float = 0.02
    period: int = 2048
    sink: int = 4
    local: int = 256
    outside: str = "counted"
    rows: str = "group"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.P <= 1 or not 0 <= self.first <= 1:
            raise ValueError(f"{self}: expected 0 < P <= 1 and 0 <= first <= 1")
        if min(self.c, self.n_iter, self.period, self.local) < 1 or self.sink < 0:
            raise ValueError(f"{self}: expected c, n_iter, period and local >= 1, sink >= 0")
        if self.outside not in ("counted", "apart"):
            raise ValueError(f"outside is {self.outside!r}, expected 'counted' or 'apart'")
        if self.rows not in ("group", "head"):
            raise ValueError(f"rows is {self.rows!r}, expected 'group' or 'head'")

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


class _State(SelectorState):
    def __init__(self, params: Tactic, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        self._n_row = shape.n_head_kv if params.rows == "group" else shape.n_head
        self._n_panel = -(-(shape.n_ctx // params.c) // PANEL)
        self._phase = CLUSTER
        self._at = 0  # step of the last clustering, 0 = none
        self._extent = np.zeros(2, np.int64)  # all layers are clustered at the same steps
        n_kv, n_slot = shape.n_head_kv, PANEL * self._n_panel
        per_head = (shape.n_layer, n_kv)
        self._centroids = np.zeros((*per_head, self._n_panel, shape.head_dim, PANEL), np.float32)
        self._starts = np.zeros((*per_head, n_slot + 1), np.int32)
        self._order = np.zeros((*per_head, shape.n_ctx), np.int32)
        # Scratch, which the layers share.
        self._norms = np.zeros((n_kv, n_slot), np.float32)
        self._moving = np.zeros(n_kv, np.int64)
        self._labels = np.zeros((n_kv, shape.n_ctx), np.int32)
        self._best = np.zeros((n_kv, shape.n_ctx), np.float32)
        self._sums = np.zeros((n_kv, shape.head_dim), np.float32)
        self._rank = np.zeros((shape.n_head, n_slot), np.int32)
        self._keep = np.zeros(shape.n_head, np.int32)
        n_work = ops.tactic_work(shape.n_ctx, self._n_panel)
        self._work = np.zeros((shape.n_head, n_work), np.float32)
        self._marks = np.zeros((self._n_row, shape.n_ctx), np.uint8)
        self._count = np.zeros(self._n_row, np.int32)

    def decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().decode(rec, layer, q, kv)
        if self._phase == CLUSTER:
            self._record_clusters(rec, layer, kv)
        self._record_budget(rec, layer, q, kv)
        return self._record_selection(rec, layer)

    def phase(self, step: int) -> str:
        due = self._at == 0 or step >= self._at + self._params.period
        self._phase = CLUSTER if due else STEP
        if due:
            self._at = step
        return self._phase

    def truncate(self, n_tokens: int) -> None:
        if n_tokens < self._at:
            self._at = 0
            self._extent[:] = 0

    def bounds(self, report: np.ndarray) -> list[Bound]:
        mass, max_v = report[:, AUDIT.mass], report[:, AUDIT.max_v]
        name, allowed = "2 (1 - p) max|v| (Eq. 6)", 2 * (1 - mass) * max_v
        return [Bound(name, report[:, AUDIT.error], allowed, rounding=ROUNDING * max_v)]

    def _record_clusters(self, rec: Recording, layer: int, kv: KVView) -> None:
        p, shape, add = self._params, self.shape, rec.program.add
        of_all = {
            "k_pages": kv.k,
            "k_table": kv.k_table,
            "extent": self._extent,
            "centroids": self._centroids[layer],
            "norms": self._norms,
            "moving": self._moving,
            "n_head_kv": shape.n_head_kv,
            "n_panel": self._n_panel,
            "n_sink": p.sink,
        }
        add(
            ops.TACTIC_SEED,
            (shape.head_dim,),
            step=rec.step,
            per_cluster=p.c,
            n_local=p.local,
            seed=p.seed * shape.n_layer + layer,
            **of_all,
        )
        of_all |= {"labels": self._labels, "capacity": shape.n_ctx}
        for _ in range(p.n_iter):
            add(ops.TACTIC_ASSIGN, (shape.head_dim,), best=self._best, **of_all)
            add(
                ops.TACTIC_MEAN,
                (shape.head_dim,),
                starts=self._starts[layer],
                order=self._order[layer],
                sums=self._sums,
                **of_all,
            )

    def _record_budget(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        p, shape = self._params, self.shape
        rec.program.add(
            ops.TACTIC_BUDGET,
            (shape.head_dim,),
            cost=self._budget_cost,
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            extent=self._extent,
            centroids=self._centroids[layer],
            starts=self._starts[layer],
            order=self._order[layer],
            rank=self._rank,
            keep=self._keep,
            work=self._work,
            n_head=shape.n_head,
            heads_per_kv=shape.group,
            n_head_kv=shape.n_head_kv,
            n_panel=self._n_panel,
            capacity=shape.n_ctx,
            n_sink=p.sink,
            counted=int(p.outside == "counted"),
            share_f=p.P,
            first_share_f=p.first,
            scale_f=shape.head_dim**-0.5,
        )

    def _budget_cost(self, n_tok: int, pos: int) -> tuple[int, int]:
        """A head reads all centroids, the keys that are weighed first and in two windows of 1 %.

        Where they count, the keys outside of the clusters as well.
        """
        p, shape = self._params, self.shape
        end, n_cluster = (int(x) for x in self._extent)
        n_in = max(0, end - p.sink)
        n_key = (p.first + 0.02) * n_in + (pos + 1 - n_in) * (p.outside == "counted")
        n = int((n_cluster + n_key) * shape.head_dim)
        n_bytes = int((4 * n_cluster + 2 * n_key) * shape.head_dim)
        return shape.n_head * n_bytes, 2 * shape.n_head * n

    def _record_selection(self, rec: Recording, layer: int) -> Selection:
        shape = self.shape
        rec.program.add(
            ops.TACTIC_MARK,
            (shape.n_head // self._n_row,),
            extent=self._extent,
            starts=self._starts[layer],
            order=self._order[layer],
            rank=self._rank,
            keep=self._keep,
            marks=self._marks,
            count=self._count,
            n_row=self._n_row,
            heads_per_kv=shape.group,
            n_panel=self._n_panel,
            capacity=shape.n_ctx,
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
