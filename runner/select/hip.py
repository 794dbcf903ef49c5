"""HiP: a tree search for the best keys (Lee et al. 2024, arXiv 2406.09827).

Decides: about `k` positions for a step or for b_q queries of a prompt, found by O(log T) rounds
over one representative a chunk. Each round splits every chunk in branches, scores them by their
representatives and keeps the best k / b_k (3.1, Eq. 4), until a branch is one block of b_k keys.
A decode mask serves r_m steps; sinks and the local window move on without it. The first l_d layers
read all.

`rep="centre", rows="head"` is the paper's method: k / b_k equal chunks, two branches each, a
branch's centre block stands for it, by the best q . k over every b_sk-th of its keys (3.2) and, in
a prompt, over every b_sq-th of b_q queries; each query head has its own tree. The paper's has all
keys; here the first `sink` and the last `local` positions, in whole blocks, always take part,
beside the k, as in all methods here, and the tree has those between.
The defaults depart further, because with grouped heads the paper's sets, one a head, read more
bytes than they save:
- `rep="mean"`: the mean of a chunk's keys stands for it, in a byte an element and two floats. Means
  are kept: of blocks, of four blocks, of 16 and so on; a chunk has four branches, and the search
  starts at the first level of at most 4 k / b_k chunks (on a GPU, where rounds wait for each other,
  of 16,384 if these are more, which finds more weight). They take (d + 8) 4 / (3 b_k) bytes a key.
- `rows="group"`: one set for the query heads that share a KV head, by the sum of their weights, 2^x
  (in straight lines) of q . k - log sum exp, the sum over sinks and window: without it the head
  with the longest queries chooses for all.
Prompts are cut in blocks of b_q queries from each chunk's first token on, so n_ubatch should be a
multiple of b_q. Option `span` takes that many positions round each chosen block as well (App.
A.3's patch; off, as in the paper).
State: the masks, estimated anew after anything but the next decode step; the means.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    DECODE,
    PREFILL,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
)

REFRESH, REUSE = "refresh", "reuse"
AT_ONCE = 1 << 14  # means that a GPU scores at once: at 128K positions they are of units of 8 keys


@dataclass(frozen=True, slots=True)
class HiP:
    """k: tokens that the tree selects. l_d: first layers that are dense.

    sink, local: our additions.
    """

    roles: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)

    k: int = common("budget", 1024, beside=True)
    b_k: int = 2
    b_sk: int = 1
    b_q: int = 64
    b_sq: int = 8  # 3.2 advises b_q / b_sq of 16 or 32; here a row's heads are multiplied together
    r_m: int = common("period", 1)
    l_d: int = common("dense_layers", 3)
    sink: int = 16
    local: int = common("recent", 256)
    span: int = 0
    rows: str = "group"
    rep: str = "mean"

    def __post_init__(self) -> None:
        check(
            self,
            "1 <= b_sk <= b_k <= k",
            "r_m >= 1",
            "local >= 1",
            "l_d >= 0",
            "sink >= 0",
            "span >= 0",
            "16 <= b_q <= 4096",
            "b_q % 16 == 0",
            "1 <= b_sq <= b_q",
            "rep in ('centre', 'mean')",
            "rows in ('group', 'head')",
        )

    @property
    def n_chunk(self) -> int:
        """The number of chunks that a round keeps, which is the number of blocks of the mask."""
        return self.k // self.b_k

    @property
    def n_sink(self) -> int:
        """The number of blocks that hold a sink."""
        return -(-self.sink // self.b_k)

    @property
    def n_near(self) -> int:
        """The number of blocks on either side of a selected one that `span` adds."""
        return -(-max(0, self.span - self.b_k) // (2 * self.b_k))

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def search(score: Callable[[int], float], low: int, high: int, n_chunk: int) -> list[int]:
    """The blocks of a mask among low .. high - 1: Alg. 1, with the paper's inclusive ends.

    score: returns the score of a block, which represents the chunk around it.
    """
    n = high - low
    if n <= n_chunk:
        return list(range(low, high))
    ends = [low + _nearest(j * n / n_chunk) for j in range(n_chunk + 1)]
    chunks = [(first, end - 1) for first, end in pairwise(ends)]
    while any(first < last for first, last in chunks):
        branches = []
        for first, last in chunks:
            middle = _nearest((first + last) / 2)
            halves = [(first, middle - 1), (middle, last)]
            branches += halves if middle > first else [(first, last)]
        scores = np.array([score((first + last) // 2) for first, last in branches])
        best = np.argsort(-scores, kind="stable")[:n_chunk]
        chunks = [branches[i] for i in sorted(best)]
    return [first for first, _ in chunks]


def _nearest(x: float) -> int:
    return int(np.floor(x + 0.5))


class _State(SelectorState):
    def __init__(self, params: HiP, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        self._n_row = shape.n_head_kv if params.rows == "group" else shape.n_head
        self._masks = np.zeros((shape.n_layer, self._n_row, 1 + params.n_chunk), np.int32)
        self._room, self._top = ops.hip_room(-(-shape.n_ctx // params.b_k), params.n_chunk)
        self._trees: dict[int, np.ndarray] = {}  # by the number of masks, made when first recorded
        self._means: dict[int, dict[str, Any]] = {}  # by layer, made when first recorded
        # blocks whose means are computed
        self._filled = np.zeros((shape.n_layer, shape.n_head_kv), np.int64)
        self.counters = (self._filled,)
        self._sums = np.zeros((shape.n_head_kv, shape.head_dim), np.float32)
        self._phase = REFRESH
        self._made = self._last = 0  # the step of the masks, and the last step; 0: no masks

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer] or layer < p.l_d:
            return super().select_prefill(rec, layer, q, kv)
        n_mask = -(-rec.n_tok // p.b_q)
        mask = np.zeros((n_mask * self._n_row, 1 + p.n_chunk), np.int32)
        self._record_masks(rec, layer, q, kv, mask=mask, mask_block=p.b_q)
        return self._record_selection(rec, mask, mask_block=p.b_q)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer] or layer < p.l_d:
            return super().select_decode(rec, layer, q, kv)
        mask = self._masks[layer]
        if self._phase == REFRESH:
            self._record_masks(rec, layer, q, kv, mask=mask, mask_block=1)
        return self._record_selection(rec, mask, mask_block=1)

    def phase(self, step: int) -> str:
        # Masks of step 0 do not count: a Program is recorded under its name before any runs.
        follows = self._made > 0 and step == self._last + 1
        self._phase = REUSE if follows and step < self._made + self._params.r_m else REFRESH
        if self._phase == REFRESH:
            self._made = step
        self._last = step
        return self._phase

    def truncate(self, n_tokens: int) -> None:
        self._made = 0
        np.minimum(self._filled, n_tokens // self._params.b_k, out=self._filled)

    def _record_selection(self, rec: Recording, mask: np.ndarray, *, mask_block: int) -> Selection:
        p, shape = self._params, self.shape
        n_rows = -(-rec.n_tok // rec.q_block) * self._n_row
        n_last = (p.local + mask_block) // p.b_k + 3
        most = p.n_sink + p.n_chunk * (1 + 2 * p.n_near) + n_last
        sel = Selection(
            indptr=np.zeros(n_rows + 1, np.int32),
            indices=np.zeros(n_rows * min(most, -(-shape.n_ctx // p.b_k)), np.int32),
            block=p.b_k,
            q_block=rec.q_block,
            n_row=self._n_row,
        )
        rec.program.add(
            ops.HIP_SELECT,
            step=rec.step,
            mask=mask,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=self._n_row,
            n_chunk=p.n_chunk,
            block=p.b_k,
            n_sink=p.n_sink,
            n_local=p.local,
            n_near=p.n_near,
            mask_block=mask_block,
            q_block=rec.q_block,
        )
        return sel

    def _record_masks(
        self,
        rec: Recording,
        layer: int,
        q: np.ndarray,
        kv: KVView,
        *,
        mask: np.ndarray,
        mask_block: int,
    ) -> None:
        p, shape = self._params, self.shape
        given: dict[str, Any] = {
            "step": rec.step,
            "q": q,
            "k_pages": kv.k,
            "k_table": kv.k_table,
            "mask": mask,
            "n_row": self._n_row,
            "heads_per_kv": shape.group,
            "n_chunk": p.n_chunk,
            "block": p.b_k,
            "n_sink": p.n_sink,
            "n_local": p.local,
            "mask_block": mask_block,
            "q_stride": min(p.b_sq, mask_block),
        }
        n_sample = -(-mask_block // given["q_stride"])
        if p.rep == "mean":
            self._record_search(rec, layer, kv.types[0], n_sample, given)
        else:
            self._record_estimate(rec, n_sample, given)

    def _record_search(
        self, rec: Recording, layer: int, type_k: str, n_sample: int, given: dict[str, Any]
    ) -> None:
        p, shape = self._params, self.shape
        group, n_near = shape.n_head // self._n_row, p.b_k * (p.n_sink + 1) + p.local
        n_flat = self._n_flat(given["mask_block"])
        work = ops.hip_work(shape.head_dim, group, n_sample, n_flat, n_near)
        means = self._means_of(layer)
        rec.program.add(
            ops.HIP_MEANS,
            (shape.head_dim, type_k),
            filled=self._filled[layer],
            sums=self._sums,
            **{name: given[name] for name in ("step", "k_pages", "k_table", "block")},
            **means,
        )
        rec.program.add(
            ops.HIP_SEARCH,
            (shape.head_dim, group, type_k),
            cost=self._search_cost(n_sample, given["mask_block"]),
            work=np.zeros((len(given["mask"]), work), np.float32),
            n_flat=n_flat,
            n_near=n_near,
            scale=shape.scale,
            **given,
            **means,
        )

    def _n_flat(self, mask_block: int) -> int:
        """Means that a search scores at once; the blocks of a GPU divide those of a decode step."""
        least = ops.SIBLINGS * self._params.n_chunk
        return max(least, AT_ONCE) if self.shape.on_gpu and mask_block == 1 else least

    def _means_of(self, layer: int) -> dict[str, Any]:
        """The arrays of a layer's means, and their sizes."""
        shape = self.shape
        if layer not in self._means:
            n_mean = sum(self._room >> 2 * level for level in range(self._top + 1))
            size = (shape.n_head_kv, n_mean, shape.head_dim)
            self._means[layer] = {
                "means": zeros(size, np.uint8),
                "extents": zeros((shape.n_head_kv, n_mean // 4, 2, 4), np.float32),
                "n_head_kv": shape.n_head_kv,
                "room": self._room,
                "top": self._top,
            }
        return self._means[layer]

    def _record_estimate(self, rec: Recording, n_sample: int, given: dict[str, Any]) -> None:
        p, shape, n_mask = self._params, self.shape, len(given["mask"])
        tree = self._trees.get(n_mask)  # scratch: layers share it
        if tree is None:
            tree = self._trees[n_mask] = np.zeros((n_mask, 8, p.n_chunk), np.int32)
        rec.program.add(
            ops.HIP_ESTIMATE,
            (shape.head_dim, shape.n_head // self._n_row),
            cost=self._estimate_cost(n_sample, given["mask_block"]),
            tree=tree,
            n_head_kv=shape.n_head_kv,
            stride=p.b_sk,
            **given,
        )

    def _search_cost(self, n_sample: int, mask_block: int) -> Cost:
        """The cost of sinks and window, the first level's means, and up to 4 n_chunk a round."""
        p, shape = self._params, self.shape
        of_mean, n_flat = shape.head_dim + 8, self._n_flat(mask_block)

        def cost(n_tok: int, pos: int) -> tuple[int, int]:
            n_mask = -(-n_tok // mask_block) * self._n_row
            n_block = max(0, pos + n_tok - p.local) // p.b_k
            n_near = min(pos + n_tok, p.b_k * p.n_sink + p.local)
            n_mean = 0
            for level in range(self._top + 1):
                if n_block >> 2 * level <= n_flat:
                    n_mean += n_block >> 2 * level
                    break
                n_mean += ops.SIBLINGS * p.n_chunk
            n_bytes = 2 * shape.head_dim * n_near + of_mean * n_mean
            n_product = (n_near + n_mean) * n_sample * shape.n_head // self._n_row
            return n_mask * n_bytes, 2 * n_mask * n_product * shape.head_dim

        return cost

    def _estimate_cost(self, n_sample: int, mask_block: int) -> Cost:
        """The cost of two branches per chunk and round, each with the strided keys of one block."""
        p, shape = self._params, self.shape

        def cost(n_tok: int, pos: int) -> tuple[int, int]:
            n_mask = -(-n_tok // mask_block)
            # of the last mask, which has the longest search
            oldest = pos + (n_mask - 1) * mask_block
            n_block = max(0, (oldest + 1 - p.local) // p.b_k - p.n_sink)
            n_chunk = max(1, min(n_block, p.n_chunk))
            n_round = math.ceil(math.log2(max(1, n_block / n_chunk)))
            n = 2 * n_chunk * n_round * -(-p.b_k // p.b_sk) * shape.head_dim * n_mask
            return 2 * n * self._n_row, 2 * n * n_sample * shape.n_head

        return cost


METHOD = HiP
