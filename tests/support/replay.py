"""A selector's hooks over given q, k and v, without a model: what did it choose?

Used to hold methods against recorded attention. No test code of any method is here.
"""

from itertools import pairwise

import numpy as np

from tamis.graph.attention import PREFILL_Q_BLOCK
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView
from tamis.select.base import Attended, Recording, SelectorShape


class Replay:
    """One layer (or several alike) of a sequence whose last queries are known.

    q [n_layer, n_head, n_q, head_dim] of the last n_q positions; k, v [n_layer, n_head_kv, T,
    head_dim], T a multiple of 64. The first n_prefill queries come as one prompt chunk.
    """

    def __init__(self, method, q, k, v, *, n_prefill=32, n_thread=1, key_copy=8):
        self.q, self.n_layer = q, len(q)
        _, self.n_head, self.n_q, self.head_dim = q.shape
        self.n_head_kv, self.n_kv = k.shape[1:3]
        assert self.n_kv % PAGE == 0
        self.first, self.n_prefill = self.n_kv - self.n_q, n_prefill
        shape = SelectorShape(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_head_kv=self.n_head_kv,
            head_dim=self.head_dim,
            n_ctx=self.n_kv,
            n_ubatch=max(2, n_prefill),
            window=(0,) * self.n_layer,
            key_copy=key_copy,
        )
        self.state = method.open(shape)
        table = np.arange(self.n_kv // PAGE, dtype=np.int32)
        self.kv = [KVView(_paged(k[i]), _paged(v[i]), table, table) for i in range(self.n_layer)]
        self.step = np.zeros(ops.STEP_SIZE, np.int64)
        self.backend = CpuBackend(n_thread)
        self._scratch = np.zeros(
            n_thread * ops.attend_scratch(self.n_head // self.n_head_kv, self.head_dim), np.uint8
        )
        self.selections, self.n_done = [], n_prefill
        prefill = self._record(n_prefill)
        self.prefilled = self._out  # f32 [n_layer, n_prefill, n_head, head_dim]
        if n_prefill:
            self._set(0, n_prefill)
            self.backend.run(self.backend.link(prefill))
        self.selections = []
        self.decoding = self.backend.link(self._record(1))
        self.out = self._out  # f32 [n_layer, 1, n_head, head_dim]

    def decode(self):
        """Run the next query; its position."""
        pos = self.first + self.n_done
        self._set(self.n_done, 1)
        self.backend.run(self.decoding)
        self.n_done += 1
        return pos

    def rows(self, layer):
        """What the last query's rows read: one array of positions a row."""
        sel = self.selections[layer]
        found = []
        for a, b in pairwise(sel.indptr[: sel.n_row + 1].tolist()):
            blocks = sel.indices[a:b].astype(np.int64)
            row = (blocks[:, None] * sel.block + np.arange(sel.block)).ravel()
            found.append(row[row < self.first + self.n_done])
        return found

    def weights(self, layer, head):
        """Exact attention weights of the last query, float64 [position + 1]."""
        i = self.n_done - 1
        h = head * self.n_head_kv // self.n_head
        pages = self.kv[layer].k[:, h].reshape(-1, self.head_dim)[: self.first + i + 1]
        logits = pages.astype(np.float32) @ self.q[layer, head, i].astype(np.float32)
        weights = np.exp((logits - logits.max()) * self.head_dim**-0.5, dtype=np.float64)
        return weights / weights.sum()

    def _set(self, i, n):
        pos = self.first + i
        self.step[:] = n, pos, 0, pos, pos + n, 0
        self._q[:, :n] = self.q[:, :, i : i + n].transpose(0, 2, 1, 3)

    def _record(self, n_tok):
        rows = max(1, n_tok)
        self._q = np.zeros((self.n_layer, rows, self.n_head, self.head_dim), np.float32)
        self._out = np.zeros_like(self._q)
        rec = Recording(Program(), self.step, rows, 1 if n_tok == 1 else PREFILL_Q_BLOCK)
        choose = self.state.select_decode if n_tok == 1 else self.state.select_prefill
        for layer, kv in enumerate(self.kv):
            q, out = self._q[layer], self._out[layer]
            sel = choose(rec, layer, q, kv)
            self.selections.append(sel)
            chosen = Attended(rec.step, 1, sel, out, lse=self.state.lse if n_tok == 1 else None)
            self._attend(rec, q, kv, chosen)
            for rows in self.state.also_attend(rec, layer, chosen):
                self._attend(rec, q, kv, rows)
            self.state.correct(rec, layer, q, kv, sel, out)
            self.state.observe(rec, layer, q, kv, sel)
        return rec.program

    def _attend(self, rec, q, kv, rows):
        sel, group = rows.sel, self.n_head // rows.sel.n_row
        rec.program.add(
            ops.ATTEND, (self.head_dim, group, sel.q_block, *kv.types), step=rows.step, q=q,
            k_pages=kv.k, v_pages=kv.v, k_table=kv.k_table, v_table=kv.v_table, indptr=sel.indptr,
            indices=sel.indices, log_weight=sel.log_weight, block=sel.block, n_row=sel.n_row,
            heads_per_kv=self.n_head // self.n_head_kv, n_head_kv=self.n_head_kv, window=0,
            n_split=1, stride=rows.stride, partial=None, out=rows.out, lse=rows.lse,
            scratch=self._scratch, scale=self.head_dim**-0.5,
        )  # fmt: skip


def _paged(rows):
    """[n_head_kv, T, head_dim] as pages in order."""
    n_head_kv, n_kv, head_dim = rows.shape
    pages = rows.reshape(n_head_kv, n_kv // PAGE, PAGE, head_dim).transpose(1, 0, 2, 3)
    return np.ascontiguousarray(pages, np.float16)
