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
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    PREFILL,
    Recording,
    SelectorShape,
    SelectorState,
    check_numbers,
    common,
)


@dataclass(frozen=True, slots=True)
class VerticalSlash:
    """n_vertical: columns. n_slash: diagonals. sink, local: of them, those always kept."""

    roles: ClassVar[tuple[str, ...]] = (PREFILL,)

    n_vertical: int = 1000
    n_slash: int = 200
    last_q: int = common("queries", 16)
    sink: int = 30
    local: int = common("recent", 100)
    l_d: int = common("dense_layers", 0)

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.sink <= self.n_vertical or not 1 <= self.local <= self.n_slash:
            raise ValueError(f"{self}: expected sink <= n_vertical and 1 <= local <= n_slash")
        if self.n_vertical < 1 or self.last_q < 1 or self.l_d < 0:
            raise ValueError(f"{self}: expected n_vertical, last_q >= 1 and l_d >= 0")

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


class _State(SelectorState):
    def __init__(self, params: VerticalSlash, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        n_row, n_pad = shape.n_head_kv, -(-shape.n_ctx // ops.TILE) * ops.TILE
        self._weights = np.zeros((2, n_row, n_pad), np.float32)  # of columns, of diagonals
        self._columns = np.zeros((n_row, 1 + params.n_vertical), np.int32)
        self._diagonals = np.zeros((n_row, 1 + params.n_slash), np.int32)
        self._work = np.zeros((n_row, ops.slash_work(shape.group, n_pad)), np.float32)

    def prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer] or layer < p.l_d:
            return super().prefill(rec, layer, q, kv)
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
            n_last=p.last_q,
            n_vertical=p.n_vertical,
            n_slash=p.n_slash,
            n_sink=p.sink,
            n_local=p.local,
            capacity=self._weights.shape[2],
            scale=shape.scale,
        )
        return self._record_selection(rec)

    def _record_selection(self, rec: Recording) -> Selection:
        p, shape = self._params, self.shape
        n_rows = -(-rec.n_tok // rec.q_block) * shape.n_head_kv
        most = min(shape.n_ctx, p.n_vertical + p.n_slash * rec.q_block)
        sel = Selection(
            indptr=np.zeros(n_rows + 1, np.int32),
            indices=np.zeros(n_rows * most, np.int32),
            block=1,
            q_block=rec.q_block,
            n_row=shape.n_head_kv,
        )
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


METHOD = VerticalSlash
