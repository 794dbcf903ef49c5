"""MagicPIG: attention by sampling from hash tables (Chen et al. 2024, arXiv 2410.16179).

Decides: at decode and for each query head, a sample of the positions: those that share the
query's K-bit code in at least two of L hash tables (the paper's section 4.2). A bit is the sign
of the product with a random plane (SimHash), so that a key at angle theta to the query has it
with probability 1 - theta / pi, and is sampled with probability
    u = 1 - (1 - p)^L - L p (1 - p)^(L - 1),  p = (1 - theta / pi)^K.
A sampled key weighs exp(q . k) / u (self-normalised importance sampling, Eq. 4 to 6): -log u goes
to the Selection as its log-weight. Keys are hashed without their mean, which changes no attention
weight (4.3). The first `sink` and last `recent` positions always take part, with no log-weight.

Reads the codes' lists and, for their angles, the keys that are sampled. How many are depends on K
and L, not on a budget. Hashing the keys costs K L head_dim products each, once after each prompt;
what came after is attended exactly and hashed every `period` tokens. The tables take 4 L bytes a
position and KV head, more than K and V where L is large: the paper keeps them in host
memory.

Departures. Queries are hashed as they are. The planes are the same in all layers, float16. `dense`
first layers read everything (the paper leaves out layers 0 and 16).
State: the tables, made from the keys at the first decode step after a prompt or truncate(). Layers
that have a sliding window of their own stay as they are.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    DECODE,
    START,
    STEP,
    Recording,
    SelectorShape,
    SelectorState,
    Steps,
    check,
    common,
    packed,
)

N_BIAS = 1025  # entries of the table of log-weights
LEAST = 1e-9  # smaller probabilities count as this one


@dataclass(frozen=True, slots=True)
class MagicPIG:
    """K: bits of a code. L: tables. More bits sample fewer positions, more tables more."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    K: int = 10
    L: int = 150
    dense: int = common("dense_layers", 1)
    sink: int = 4
    recent: int = 64
    period: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "1 <= K <= 14",
            "2 <= L <= 1024",
            "dense >= 0",
            "sink >= 0",
            "recent >= 1",
            "period >= 1",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def sampling_probability(cosine: np.ndarray, K: int, L: int) -> np.ndarray:
    """The probability that two of L codes of K bits agree, at cosines of query and key.

    See section 4.2.
    """
    p = (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** K
    return 1 - (1 - p) ** L - L * p * (1 - p) ** (L - 1)


def codes(rows: np.ndarray, planes: np.ndarray, K: int, L: int) -> np.ndarray:
    """The code of each row in each table, int [.., L]: K signs of products with random planes.

    rows f64 [.., head_dim]; planes f64 [head_dim, >= K * L].
    """
    products = (rows @ planes[:, : K * L]).reshape(*rows.shape[:-1], L, K)
    signs: np.ndarray = (products > 0) @ (1 << np.arange(K))
    return signs


class _State(SelectorState):
    """Hash tables of every KV head."""

    def __init__(self, params: MagicPIG, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params, p = params, params
        self._steps, self._phase = Steps(p.period), START
        self._n_plane = -(-p.K * p.L // 32) * 32
        n_ctx = self._capacity = shape.n_ctx
        self._n_sink = min(p.sink, n_ctx)  # no list is longer
        rng = np.random.default_rng(p.seed)
        planes = rng.standard_normal((shape.head_dim, self._n_plane))
        self._planes = planes.astype(np.float16)
        chance = sampling_probability(np.linspace(-1, 1, N_BIAS), p.K, p.L)
        self._bias = -np.log(np.maximum(chance, LEAST)).astype(np.float32)
        per_head = shape.n_layer, shape.n_head_kv
        self._centre = np.zeros((*per_head, shape.head_dim), np.float32)
        self._norms = np.zeros((*per_head, n_ctx), np.float32)
        self._starts = np.zeros((*per_head, p.L, 2**p.K + 1), np.int32)
        self._lists = np.zeros((*per_head, p.L, n_ctx), np.int32)
        self._begin = np.zeros(1, np.int64)
        # Scratch of one layer, shared by all.
        self._codes = np.zeros((shape.n_head_kv, p.L, n_ctx), np.uint16)
        self._of_query = np.zeros((shape.n_head, p.L), np.uint16)
        n_rows = max(ops.LSH_ROWS, shape.group)
        size = ops.lsh_work(n_rows, self._n_plane, shape.head_dim)
        self._work = zeros((ops.LSH_WORKERS, size), np.float32)
        self._bits = np.zeros((shape.n_head, 2, n_ctx // 64 + 1), np.int64)
        self._sets = np.zeros((shape.n_head, n_ctx), np.int32)
        self._weights = np.zeros((shape.n_head, n_ctx), np.float32)
        self._counts = np.zeros(shape.n_head, np.int32)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer] or layer < self._params.dense:
            return super().select_decode(rec, layer, q, kv)
        if self._phase == START:
            self._record_tables(rec, layer, kv)
        self._record_sample(rec, layer, q, kv)
        sel = packed(rec, self._sets, self._counts)
        # All arrays have entries of 32 bits.
        weights = packed(rec, self._weights.view(np.int32), self._counts)
        return sel._replace(log_weight=weights.indices.view(np.float32))

    def truncate(self, n_tokens: int) -> None:
        self._steps.truncate(n_tokens)

    def phase(self, step: int) -> str:
        self._phase = START if self._steps.fresh(step) else STEP
        return self._phase

    @property
    def _hash(self) -> tuple[int, int, int]:
        return self._n_plane, self._params.K, self._params.L

    def _record_tables(self, rec: Recording, layer: int, kv: KVView) -> None:
        p, shape, add = self._params, self.shape, rec.program.add
        of_all: dict[str, Any] = {
            "begin": self._begin,
            "n_head_kv": shape.n_head_kv,
            "capacity": self._capacity,
            "n_sink": self._n_sink,
        }
        keys: dict[str, Any] = {
            "k_pages": kv.k,
            "k_table": kv.k_table,
            "centre": self._centre[layer],
        }
        add(
            ops.LSH_CENTRE,
            (shape.head_dim,),
            step=rec.step,
            norms=self._norms[layer],
            n_local=p.recent,
            **keys,
            **of_all,
        )
        add(
            ops.LSH_CODES,
            (shape.head_dim, *self._hash),
            planes=self._planes,
            codes=self._codes,
            work=self._work,
            work_size=self._work.shape[1],
            **keys,
            **of_all,
        )
        add(
            ops.LSH_TABLES,
            (p.K, p.L),
            codes=self._codes,
            starts=self._starts[layer],
            order=self._lists[layer],
            **of_all,
        )

    def _record_sample(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> None:
        p, shape = self._params, self.shape
        rec.program.add(
            ops.LSH_QUERY,
            (shape.head_dim, shape.group, *self._hash),
            q=q,
            planes=self._planes,
            codes=self._of_query,
            work=self._work,
            n_head_kv=shape.n_head_kv,
            work_size=self._work.shape[1],
        )
        rec.program.add(
            ops.LSH_SAMPLE,
            (shape.head_dim, p.K, p.L),
            cost=self._sample_cost,
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            centre=self._centre[layer],
            norms=self._norms[layer],
            begin=self._begin,
            codes=self._of_query,
            starts=self._starts[layer],
            order=self._lists[layer],
            bias=self._bias,
            sets=self._sets,
            log_weight=self._weights,
            counts=self._counts,
            bits=self._bits,
            n_head=shape.n_head,
            heads_per_kv=shape.group,
            n_head_kv=shape.n_head_kv,
            capacity=self._capacity,
            set_capacity=self._sets.shape[1],
            n_bias=N_BIAS,
            n_sink=self._n_sink,
        )

    def _sample_cost(self, _n_tok: int, pos: int) -> tuple[int, int]:
        """The cost of the last layer's sampled keys, and of its lists' average length."""
        exact = self._n_sink + pos + 1 - int(self._begin[0])
        n_key = int(np.maximum(self._counts - exact, 0).sum())
        n_listed = self.shape.n_head * self._params.L * (pos >> self._params.K)
        size = self.shape.head_dim
        return 2 * size * n_key + 4 * n_listed, 2 * size * n_key


METHOD = MagicPIG
