"""HyperAttention: keys that hash alike, samples of the rest (Han et al. 2023, arXiv 2310.05869).

Decides, in prefill: keys are sorted by a hash whose neighbours differ in one bit (the paper's
Definition 1 of sortLSH, by signs of products with `bits` random planes), and queries read the
blocks of the sorted keys where their own hash belongs, `block` keys of them. Of the other keys
`sample` are drawn uniformly, and each stands for as many as there are to one (Alg. 3): that is the
log-weight of its index. The first `sink` positions, the last `recent` before each chunk and the
chunk itself are read exactly.

Departures. The paper halves a causal matrix recursively and is exact in the smallest halves (Alg.
4); here the chunk and `recent` are what is exact, and all before is its unmasked half. A row of
neighbouring queries and the heads that share a KV head read one set: the blocks that most of them
hash to, a block beside one's own counting half. Keys are hashed without their mean, which changes
no weight; samples are drawn anew for each chunk and KV head. No decode role. State: none beyond a
chunk. Layers that have a sliding window of their own stay as they are.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    PREFILL,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
)

N_PLANE = 32  # the number of planes is padded to a multiple of it


@dataclass(frozen=True, slots=True)
class HyperAttention:
    """block: keys read by their hash, in sorted runs of `size`.

    sample: keys drawn from the rest.
    """

    roles: ClassVar[tuple[str, ...]] = (PREFILL,)

    block: int = 256
    sample: int = 256
    recent: int = 512
    bits: int = 7
    size: int = 32
    sink: int = 4
    l_d: int = common("dense_layers", 0)
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "block >= 0",
            "sample >= 0",
            "sink >= 0",
            "l_d >= 0",
            "recent >= 1",
            "1 <= bits <= 14",
            "size >= 1",
            "block % size == 0",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


class Sorted(NamedTuple):
    """The keys of a KV head in the order of their hash: sortLSH, Definition 1."""

    positions: list[int]
    ranks: list[int]  # of each code, the middle of its keys in `positions`


def sort_keys(codes: np.ndarray, n_bit: int, keys: range) -> Sorted:
    """Keys sorted so that neighbouring codes differ in one bit (Gray code).

    codes int [n]: of all positions; keys: the positions to sort.
    """
    positions: list[int] = []
    ranks = [0] * (1 << n_bit)
    for code in (rank ^ rank >> 1 for rank in range(1 << n_bit)):
        alike = [i for i in keys if codes[i] == code]
        ranks[code] = len(positions) + len(alike) // 2
        positions += alike
    return Sorted(positions, ranks)


def voted(p: HyperAttention, order: Sorted, codes: np.ndarray) -> list[int]:
    """The blocks of sorted keys that the queries of a row read: where most of them hash to.

    codes: of the row's queries and heads. A block beside a query's own counts half.
    """
    n = len(order.positions)
    votes = np.zeros(-(-n // p.size) + 2)
    for code in codes.ravel() if n else ():
        at = min(order.ranks[code], n - 1) // p.size
        votes[at : at + 3] += 1, 2, 1
    of_block = votes[1:-1]
    best = np.argsort(-of_block, kind="stable")[: p.block // p.size]
    return [int(b) for b in best if of_block[b]]


def chosen(
    p: HyperAttention, order: Sorted, codes: np.ndarray, samples: list[int]
) -> dict[int, float]:
    """The keys of the unmasked half that a row reads, each with its log-weight: Alg. 3.

    samples: positions drawn uniformly from the sorted ones.
    """
    exact = set()
    for b in voted(p, order, codes):
        exact |= set(order.positions[p.size * b : p.size * (b + 1)])
    rest = set(samples) - exact
    weight = np.log((len(order.positions) - len(exact)) / len(rest)) if rest else 0.0
    return {i: weight if i in rest else 0.0 for i in sorted(exact | rest)}


class _State(SelectorState):
    """Scratch of one chunk and layer, shared by all."""

    def __init__(self, params: HyperAttention, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params, p = params, params
        n_ctx = self._capacity = shape.n_ctx
        self._n_sink = min(p.sink, n_ctx)  # no list is longer
        n_kv, n_code = shape.n_head_kv, 1 << p.bits
        rng = np.random.default_rng(p.seed)
        self._planes = rng.standard_normal((shape.head_dim, N_PLANE)).astype(np.float16)
        self._centre = np.zeros((n_kv, shape.head_dim), np.float32)
        self._norms = np.zeros((n_kv, n_ctx), np.float32)
        self._begin = np.zeros(1, np.int64)
        self._codes = np.zeros((n_kv, 1, n_ctx), np.uint16)
        self._of_queries = np.zeros((shape.n_ubatch, shape.n_head), np.uint16)
        size = ops.lsh_work(max(ops.LSH_ROWS, shape.group), N_PLANE, shape.head_dim)
        self._work = zeros((ops.LSH_WORKERS, size), np.float32)
        self._starts = np.zeros((n_kv, 1, n_code + 1), np.int32)
        self._lists, self._ranked = np.zeros((2, n_kv, 1, n_ctx), np.int32)
        self._ranks = np.zeros((n_kv, n_code), np.int32)
        self._samples = np.zeros((n_kv, 1 + p.sample), np.int32)
        self._votes = np.zeros(n_ctx // p.size + 1, np.int32)
        self._bits = np.zeros((2, n_ctx // 64 + 1), np.int64)

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer] or layer < self._params.l_d:
            return super().select_prefill(rec, layer, q, kv)
        self._record_sorted(rec, layer, kv)
        self._record_queries(rec, q)
        return self._record_selection(rec)

    def _record_sorted(self, rec: Recording, layer: int, kv: KVView) -> None:
        p, shape, add = self._params, self.shape, rec.program.add
        of_all: dict[str, Any] = {
            "begin": self._begin,
            "n_head_kv": shape.n_head_kv,
            "capacity": self._capacity,
            "n_sink": self._n_sink,
        }
        keys: dict[str, Any] = {"k_pages": kv.k, "k_table": kv.k_table, "centre": self._centre}
        add(
            ops.LSH_CENTRE,
            (shape.head_dim,),
            step=rec.step,
            norms=self._norms,
            n_local=p.recent,
            **keys,
            **of_all,
        )
        add(
            ops.LSH_CODES,
            (shape.head_dim, N_PLANE, p.bits, 1),
            planes=self._planes,
            codes=self._codes,
            work=self._work,
            work_size=self._work.shape[1],
            **keys,
            **of_all,
        )
        lists: dict[str, Any] = {"starts": self._starts, "order": self._lists}
        add(ops.LSH_TABLES, (p.bits, 1), codes=self._codes, **lists, **of_all)
        add(
            ops.HYPER_SORT,
            (p.bits,),
            step=rec.step,
            ranked=self._ranked,
            ranks=self._ranks,
            samples=self._samples,
            n_sample=p.sample,
            seed=p.seed * shape.n_layer + layer,
            **lists,
            **of_all,
        )

    def _record_queries(self, rec: Recording, q: np.ndarray) -> None:
        shape = self.shape
        rec.program.add(
            ops.LSH_QUERY,
            (shape.head_dim, shape.group, N_PLANE, self._params.bits, 1),
            q=q,
            planes=self._planes,
            codes=self._of_queries,
            work=self._work,
            n_head_kv=rec.n_tok * shape.n_head_kv,  # the heads of one token after those of another
            work_size=self._work.shape[1],
        )

    def _record_selection(self, rec: Recording) -> Selection:
        p, shape = self._params, self.shape
        n_rows = -(-rec.n_tok // rec.q_block) * shape.n_head_kv
        most = min(shape.n_ctx, p.sink + p.block + p.sample + p.recent + rec.n_tok)
        sel = Selection(
            indptr=np.zeros(n_rows + 1, np.int32),
            indices=np.zeros(n_rows * most, np.int32),
            block=1,
            q_block=rec.q_block,
            n_row=shape.n_head_kv,
            log_weight=np.zeros(n_rows * most, np.float32),
        )
        rec.program.add(
            ops.HYPER_SELECT,
            (p.bits,),
            step=rec.step,
            begin=self._begin,
            codes=self._of_queries,
            ranked=self._ranked,
            ranks=self._ranks,
            samples=self._samples,
            indptr=sel.indptr,
            indices=sel.indices,
            log_weight=sel.log_weight,
            votes=self._votes,
            bits=self._bits,
            n_head_kv=shape.n_head_kv,
            heads_per_kv=shape.group,
            capacity=self._capacity,
            q_block=rec.q_block,
            n_sink=self._n_sink,
            n_block=p.block // p.size,
            size=p.size,
            n_sample=p.sample,
        )
        return sel


METHOD = HyperAttention
