"""A method's decode step on given K and V, without a model: its Selection and its output.

`real_attention` is a slice of data/golden/attention_qwen05.npz: see data/golden/README.md.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from precompiled import Recorder

from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView
from tamis.select.base import Recording, SelectorShape, full_selection
from tamis.select.notation import parse_method

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "attention_qwen05.npz"


class Step(NamedTuple):
    """Of one query token: which positions each head keeps, and the attention output."""

    kept: np.ndarray  # bool [n_head, pos + 1]
    out: np.ndarray  # f32 [n_head, head_dim]


class Stage:
    """One layer's K and V [n_head_kv, n_kv, head_dim] and a method that chooses."""

    def __init__(self, text, k, v, *, n_head, backend=None):
        n_head_kv, n_kv, head_dim = k.shape
        n_page = -(-n_kv // PAGE)
        table = np.arange(n_page, dtype=np.int32)
        self._kv = KVView(self._pages(k, n_page), self._pages(v, n_page), table, table)
        shape = SelectorShape(
            n_layer=1, n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim,
            n_ctx=n_page * PAGE, n_ubatch=2, window=(0,),
            on_gpu=not (backend is None or backend.on_host),
            key_copy=8 if backend is None or backend.on_host else 4,
        )  # fmt: skip
        self._shape, self.state = shape, parse_method(text).open(shape)
        self._q = np.zeros((1, n_head, head_dim), np.float32)
        self._out, self._step = self._q.copy(), np.zeros(ops.STEP_SIZE, np.int64)
        self._backend, self._phases = backend or CpuBackend(1), {}

    @staticmethod
    def _pages(rows, n_page):
        n_head_kv, n_kv, head_dim = rows.shape
        pages = np.zeros((n_page * PAGE, n_head_kv, head_dim), np.float16)
        pages[:n_kv] = rows.transpose(1, 0, 2)
        pages = pages.reshape(n_page, PAGE, n_head_kv, head_dim)
        return np.ascontiguousarray(pages.transpose(0, 2, 1, 3))

    def decode(self, q, pos):
        """One step of queries [n_head, head_dim] at position pos."""
        phase = self.state.phase(pos)
        if phase not in self._phases:
            self._phases[phase] = self._record()
        program, sel = self._phases[phase]
        self._q[0], self._step[:] = q, (1, pos, 0, pos, pos + 1, 0)
        self._backend.run(program)
        kept = np.zeros((self._shape.n_head, pos + 1), bool)
        group = self._shape.n_head // sel.n_row
        for r in range(sel.n_row):
            blocks = sel.indices[sel.indptr[r] : sel.indptr[r + 1]]
            at = (blocks[:, None] * sel.block + np.arange(sel.block)).ravel()
            kept[r * group : (r + 1) * group, at[at <= pos]] = True
        return Step(kept, self._out[0].copy())

    def _record(self):
        shape, program = self._shape, Program()
        rec = Recording(program, self._step, 1, 1)
        sel = self.state.select_decode(rec, 0, self._q, self._kv)
        group = shape.n_head // sel.n_row
        program.add(
            ops.ATTEND, (shape.head_dim, group, 1, *self._kv.types), step=self._step, q=self._q,
            k_pages=self._kv.k, v_pages=self._kv.v, k_table=self._kv.k_table,
            v_table=self._kv.v_table, indptr=sel.indptr, indices=sel.indices,
            log_weight=sel.log_weight,
            block=sel.block, n_row=sel.n_row, heads_per_kv=shape.group,
            n_head_kv=shape.n_head_kv, window=0, n_split=1, stride=1, partial=None, out=self._out,
            lse=None, scratch=np.zeros(ops.attend_scratch(group, shape.head_dim), np.uint8),
            scale=shape.head_dim**-0.5,
        )  # fmt: skip
        self.state.observe(rec, 0, self._q, self._kv, sel)
        return self._backend.link(program), sel

    def see(self, q, pos):
        """Show the method queries [n, n_head, head_dim] of a prompt from position pos on."""
        program, step = Program(), np.array([len(q), pos, 0, pos, pos + len(q)], np.int64)
        rec = Recording(program, step, len(q), 1)
        sel = full_selection(self._shape, len(q), 1)
        self.state.observe(rec, 0, np.ascontiguousarray(q), self._kv, sel)
        self._backend.run(self._backend.link(program))


def kernels(texts, *shapes):
    """What methods need on stages of these (head_dim, n_head_kv, n_head): see KERNELS in guarded.

    They are compiled with those of other modules: the compilers start once, and not many times.
    """
    recorder = Recorder()
    for head_dim, n_head_kv, n_head in shapes:
        k = np.zeros((n_head_kv, 128, head_dim), np.float16)
        for text in texts:
            stage = Stage(text, k, k, n_head=n_head, backend=recorder)
            q = np.zeros((8, n_head, head_dim), np.float32)
            stage.see(q, 90)
            for pos in (98, 99, 100):
                stage.decode(q[0], pos)
    return [(spec.op, spec.constants) for spec in recorder.specs]


def weights_of(q, k):
    """Attention weights float64 [n_head, n_kv] of queries over keys [n_head_kv, n_kv, head_dim]."""
    k = np.repeat(k.astype(np.float64), len(q) // len(k), axis=0)
    s = np.einsum("hd,hjd->hj", q.astype(np.float64), k) / np.sqrt(q.shape[1])
    w = np.exp(s - s.max(axis=1, keepdims=True))
    return w / w.sum(axis=1, keepdims=True)


def real_attention():
    """k f16 [2, 3072, 64], q f32 [24, 14, 64] and the position of each query among the keys."""
    with np.load(GOLDEN) as f:
        return f["k"], f["q"].astype(np.float32), f["pos"]
