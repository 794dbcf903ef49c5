"""HiP: a tree search for the best keys (Lee et al. 2024, arXiv 2406.09827).

Decides: at decode, about `k` positions, found by O(log T) rounds over one representative a chunk.
The keys between sinks and window are cut into k / b_k chunks of whole blocks; each round splits
every chunk in two branches, scores a branch by its centre block, and keeps the best k / b_k (3.1,
Eq. 4), until a branch is one block. A block's score is the best q . k over every b_sk-th of its
keys (3.2). A mask serves r_m steps; sinks and the local window move on without it. Prefill is
dense, so b_q and b_sq, which cut queries, have no part here.

Options: `span` takes that many positions round each chosen block as well (App. A.3's patch; off,
as in the paper). `rows="group"` searches once for the query heads that share a KV head, by the best
of their scores; the paper searches for each head.
State: the masks; after anything but the next decode step they are estimated anew.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels import ops
from tamis.jit_kernels.types import KVView, Selection
from tamis.select.base import DECODE, Recording, SelectorShape, SelectorState, new_selection

REFRESH, REUSE = "refresh", "reuse"


@dataclass(frozen=True, slots=True)
class HiP:
    """k: tokens the tree chooses. l_d: first layers that read all. The rest as in the paper."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    k: int = 1024
    b_k: int = 2
    b_sk: int = 1
    r_m: int = 1
    l_d: int = 3
    sink: int = 16
    local: int = 256
    span: int = 0
    rows: str = "head"

    def __post_init__(self) -> None:
        if not 1 <= self.b_sk <= self.b_k <= self.k:
            raise ValueError(f"{self}: expected 1 <= b_sk <= b_k <= k")
        if self.r_m < 1 or self.l_d < 0 or self.sink < 0 or self.local < 1 or self.span < 0:
            raise ValueError(f"{self}: expected r_m, local >= 1 and l_d, sink, span >= 0")
        if self.rows not in ("group", "head"):
            raise ValueError(f"rows is {self.rows!r}, expected 'group' or 'head'")

    @property
    def n_chunk(self) -> int:
        """Chunks that a round keeps: blocks of the mask."""
        return self.k // self.b_k

    @property
    def n_sink(self) -> int:
        """Blocks that hold a sink."""
        return -(-self.sink // self.b_k)

    @property
    def n_near(self) -> int:
        """Blocks on either side of a chosen one that `span` takes in."""
        return -(-max(0, self.span - self.b_k) // (2 * self.b_k))

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


class _State(SelectorState):
    def __init__(self, params: HiP, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        self._n_row = shape.n_head_kv if params.rows == "group" else shape.n_head
        n_chunk = params.n_chunk
        self._masks = np.zeros((shape.n_layer, self._n_row, 1 + n_chunk), np.int32)
        self._tree = np.zeros((self._n_row, 8, n_chunk), np.int32)
        self._phase = REFRESH
        self._made = self._last = 0  # steps: of the masks, and before the next; 0 = no masks

    def decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer] or layer < p.l_d:
            return super().decode(rec, layer, q, kv)
        if self._phase == REFRESH:
            self._record_estimate(rec, layer, q, kv)
        sel = new_selection(shape, rec, n_row=self._n_row, block=p.b_k)
        rec.program.add(
            ops.HIP_SELECT,
            step=rec.step,
            mask=self._masks[layer],
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=self._n_row,
            n_chunk=p.n_chunk,
            block=p.b_k,
            n_sink=p.n_sink,
            n_local=p.local,
            n_near=p.n_near,
        )
        return sel

    def phase(self, step: int) -> str:
        # Step 0 makes no masks that count: a Program is recorded under its name before any runs.
        follows = self._made > 0 and step == self._last + 1
        self._phase = REUSE if follows and step < self._made + self._params.r_m else REFRESH
        if self._phase == REFRESH:
            self._made = step
        self._last = step
        return self._phase

    def truncate(self, n_tokens: int) -> None:
        self._made = 0

    def _record_estimate(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        p, shape = self._params, self.shape
        rec.program.add(
            ops.HIP_ESTIMATE,
            (shape.head_dim, shape.n_head // self._n_row),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            mask=self._masks[layer],
            tree=self._tree,
            n_row=self._n_row,
            heads_per_kv=shape.group,
            n_head_kv=shape.n_head_kv,
            n_chunk=p.n_chunk,
            block=p.b_k,
            stride=p.b_sk,
            n_sink=p.n_sink,
            n_local=p.local,
        )


METHOD = HiP
