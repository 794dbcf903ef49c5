"""Vertical-slash prefill (MInference: Jiang et al. 2024, arXiv 2407.02490).

Decides: in prefill, which columns (positions that all queries read) and which diagonals (distances
at which every query reads). The exact attention of the last `last_q` queries is summed along both
(its Alg. 1); the best n_vertical and n_slash take part, always the first `sink` columns and the
last `local` distances.

The last queries are those of each chunk: prompts come in chunks, and what a chunk's end looks for
is nearer to it than what the prompt's end will. A chunk shorter than last_q is estimated by all
of its queries. Scoring a query's keys and adding its weights up costs what attending to them does,
so that the estimate costs last_q / n_ubatch of dense attention.
Departures: 16 queries of each chunk, not 64 of a prompt: in chunks of 256, 64 halved the speed for
an error smaller by 1 to 7 %. One set for the query heads that share a KV head, by the sum of their
weights; columns and distances are single positions, and a diagonal is as wide as the queries of a
row (the paper has blocks of 64). No decode role. State: none beyond a chunk.

Over another method, `vertical_slash(hip:l_d=0)`, a row reads what either chooses: HiP's "+VD"
(Lee et al. 2024, table 1 and 3). Where the other one reads everything, so does a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    PREFILL,
    Attended,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
    check,
    common,
)


@dataclass(frozen=True, slots=True)
class VerticalSlash:
    """n_vertical: columns. n_slash: diagonals. sink, local: those of them that are always kept.

    inner: a method whose positions are added; None: no other.
    """

    roles: ClassVar[tuple[str, ...]] = (PREFILL,)

    n_vertical: int = 1000
    n_slash: int = 200
    last_q: int = common("queries", 16)
    sink: int = 30
    local: int = common("recent", 100)
    l_d: int = common("dense_layers", 0)
    inner: Selector | None = None

    def __post_init__(self) -> None:
        check(
            self,
            "1 <= n_vertical",
            "0 <= sink <= n_vertical",
            "1 <= local <= n_slash",
            "last_q >= 1",
            "l_d >= 0",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def lines(p: VerticalSlash, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns and diagonals of a KV head, ascending: Alg. 2 of the paper.

    weights f64 [n_last, n]: attention weights of the last queries, summed over the query heads of
    the KV head, 0 beyond each query. A diagonal is identified by its column for the last query.
    """
    n_last, n = weights.shape
    columns, diagonals = weights.sum(axis=0), np.zeros(n)
    for t, row in enumerate(weights):
        ahead = n_last - 1 - t  # the last query's column on a diagonal is this much further right
        diagonals[ahead:] += row[: n - ahead]
    columns[: p.sink] = np.inf
    diagonals[max(0, n - p.local) :] = np.inf
    return _best(columns, p.n_vertical), _best(diagonals, p.n_slash)


def _best(weights: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-weights, kind="stable")[:k])


class _State(SelectorState):
    def __init__(self, params: VerticalSlash, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        n_row, n_pad = shape.n_head_kv, -(-shape.n_ctx // ops.TILE) * ops.TILE
        self._weights = np.zeros((2, n_row, n_pad), np.float32)  # of columns, of diagonals
        self._columns = np.zeros((n_row, 1 + params.n_vertical), np.int32)
        self._diagonals = np.zeros((n_row, 1 + params.n_slash), np.int32)
        self._n_last = min(params.last_q, shape.n_ubatch)
        work = ops.slash_work(shape.group, n_pad, self._n_last)
        self._work = np.zeros((n_row, work), np.float32)
        self._inner = SelectorState(shape) if params.inner is None else params.inner.open(shape)
        self.freezing, self.counters = self._inner.freezing, self._inner.counters

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer] or layer < p.l_d:
            return self._inner.windowed(rec, 0, shape.window[layer])
        if p.inner is None:
            return self._record_lines(rec, q, kv)
        chosen = self._inner.select_prefill(rec, layer, q, kv)
        if chosen.log_weight is not None:
            raise ValueError(
                f"vertical_slash({type(p.inner).__name__}): expected a method that gives keys no "
                "weights of its own, such as hip"
            )
        if self._inner.reads_all(rec, layer, chosen):
            return chosen
        return self._record_join(rec, chosen, self._record_lines(rec, q, kv))

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        return self._inner.also_attend(rec, layer, rows)

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        self._inner.correct(rec, layer, q, kv, sel, out)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        self._inner.observe(rec, layer, q, kv, sel)

    def frozen(self, layer: int, n_prompt: int) -> range:
        return self._inner.frozen(layer, n_prompt)

    def prompt_phase(self, pos: int) -> str:
        return self._inner.prompt_phase(pos)

    def truncate(self, n_tokens: int) -> None:
        self._inner.truncate(n_tokens)

    def reads_all(self, rec: Recording, layer: int, sel: Selection) -> bool:
        return self._inner.reads_all(rec, layer, sel)

    def _record_lines(self, rec: Recording, q: np.ndarray, kv: KVView) -> Selection:
        """Record the search for the best columns and diagonals; returns their Selection."""
        p, shape = self._params, self.shape
        rec.program.add(
            ops.SLASH_LINES,
            (shape.head_dim, shape.group),
            step=rec.step,
            q=q,
            k_pages=kv.k,
            k_table=kv.k_table,
            vertical=self._weights[0],
            slash=self._weights[1],
            columns=self._columns,
            diagonals=self._diagonals,
            work=self._work,
            n_row=shape.n_head_kv,
            n_last=self._n_last,
            n_vertical=p.n_vertical,
            n_slash=p.n_slash,
            n_sink=p.sink,
            n_local=p.local,
            capacity=self._weights.shape[2],
            scale=shape.scale,
        )
        sel = self._new_selection(rec, shape.n_head_kv, p.n_vertical + p.n_slash * rec.q_block)
        rec.program.add(
            ops.SLASH_SELECT,
            step=rec.step,
            columns=self._columns,
            diagonals=self._diagonals,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=shape.n_head_kv,
            n_vertical=p.n_vertical,
            n_slash=p.n_slash,
            q_block=rec.q_block,
        )
        return sel

    def _record_join(self, rec: Recording, chosen: Selection, lines: Selection) -> Selection:
        n_rows = len(chosen.indptr) - 1
        most = -(-len(chosen.indices) // n_rows) * chosen.block
        most += -(-len(lines.indices) // (len(lines.indptr) - 1))
        sel = self._new_selection(rec, chosen.n_row, most)
        rec.program.add(
            ops.SELECT_JOIN,
            step=rec.step,
            block_indptr=chosen.indptr,
            block_indices=chosen.indices,
            other_indptr=lines.indptr,
            other_indices=lines.indices,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=chosen.n_row,
            other_n_row=lines.n_row,
            block=chosen.block,
            q_block=rec.q_block,
        )
        return sel

    def _new_selection(self, rec: Recording, n_row: int, most: int) -> Selection:
        """Buffers for `most` single positions per row, or the whole context."""
        n_rows = -(-rec.n_tok // rec.q_block) * n_row
        return Selection(
            indptr=np.zeros(n_rows + 1, np.int32),
            indices=np.zeros(n_rows * min(self.shape.n_ctx, most), np.int32),
            block=1,
            q_block=rec.q_block,
            n_row=n_row,
        )


METHOD = VerticalSlash
