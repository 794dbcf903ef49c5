"""All scratch memory of a session, allocated once: activations, step records, logits."""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import zeros
from tamis.jit_kernels.contract.values import Buffer, Value
from tamis.model.hparams import HParams
from tamis.model.model import Model, Needs

HEAD_ROWS = 16  # rows of logits that an op computes if all positions are asked for


class Chunk:
    """What all devices of a session share: Python's data of a chunk, its rows, the logits."""

    def __init__(self, hp: HParams, n_tok: int, n_logits: int = HEAD_ROWS) -> None:
        # One array, so that both are sent at once.
        self.record = np.zeros(8 * ops.STEP_SIZE + 4 * n_tok, np.uint8)
        self.step = self.record[: 8 * ops.STEP_SIZE].view(np.int64)  # rows and position
        self.ids = self.record[8 * ops.STEP_SIZE :].view(np.int32)  # [n_tok]
        self.head_rows = np.zeros(ops.STEP_SIZE, np.int64)  # the rows that the output head reads
        self.head_step = np.zeros(ops.STEP_SIZE, np.int64)  # the same rows, counted from 0
        self.x = zeros((n_tok, hp.n_embd), np.float32)  # the residual stream
        self.logits = zeros((n_logits, hp.n_vocab), np.float32)

    @property
    def n_bytes(self) -> int:
        """Bytes of all of it."""
        step = self.record.nbytes + self.head_rows.nbytes + self.head_step.nbytes
        return step + self.x.nbytes + self.logits.nbytes


class Buffers:
    """Named buffers with a row for each token; layers that ask for one name share its buffer."""

    def __init__(self, chunk: Chunk, needs: Needs) -> None:
        self.record, self.step, self.ids = chunk.record, chunk.step, chunk.ids
        self.head_rows, self.head_step = chunk.head_rows, chunk.head_step
        self.x, self.logits = chunk.x, chunk.logits
        self._n_tok, self._n_in = len(chunk.ids), needs.n_in
        self._known: dict[str, Buffer] = {}  # what recording knows of the buffers in use
        self._rows = {name: zeros(self._n_tok * n, np.uint8) for name, n in needs.rows.items()}
        self.packed = zeros(ops.packed_bytes(max(self._n_tok, HEAD_ROWS), needs.n_in), np.uint8)
        self.scratch = zeros(0, np.uint8)  # per thread
        # [n_head, n_split, head_dim + 2], of parts of a query's keys
        self.partial = zeros(0, np.float32)

    def rows(self, name: str, *shape: int, dtype: DTypeLike = np.float32) -> np.ndarray:
        """The buffer of this name as [n_tok, *shape], as a value of its present contents."""
        n = self._n_tok * prod(shape) * np.dtype(dtype).itemsize
        rows = self._rows[name][:n].view(dtype).reshape(self._n_tok, *shape)
        return Value.of(rows, self._buffer(name))

    def current_x(self) -> np.ndarray:
        """The residual stream as a value of its present contents, f32 [n_tok, n_embd]."""
        return Value.of(self.x, self._buffer("x"))

    def _buffer(self, name: str) -> Buffer:
        if name not in self._known:
            self._known[name] = Buffer(name)
        return self._known[name]

    def packed_rows(self, n_in: int) -> np.ndarray:
        """Scratch for rows of n_in elements in the form that matrix products read, uint8."""
        assert n_in <= self._n_in
        return self.packed

    def experts(self, n_in: int, n_used: int, n_expert: int) -> np.ndarray:
        """Scratch of products with n_used of n_expert matrices per row of n_in elements, uint8."""
        return self.scratch


class Workspace(Buffers):
    """Buffers for up to n_tok rows of a chunk; kernels write only here and to the KV cache."""

    def __init__(self, model: Model, backend: Backend, chunk: Chunk) -> None:
        hp = model.hp
        super().__init__(chunk, model.needs)
        rooms = [ops.attend_scratch(own.group, own.head_dim) for own in hp.kinds]
        n = max(ops.matmul_scratch(self._n_in), *rooms)
        n_in, n_used, n_expert = model.needs.experts
        if n_used:
            n = max(n, ops.expert_scratch(n_in, self._n_tok * n_used, n_expert))
        self.scratch = zeros(backend.n_thread * n, np.uint8)
        n_head, wide = (max(getattr(own, n) for own in hp.kinds) for n in ("n_head", "head_dim"))
        self.partial = zeros((n_head, backend.n_part, wide + 2), np.float32)
        own = self.packed, self.scratch, self.partial, *self._rows.values()
        self.n_bytes = chunk.n_bytes + sum(array.nbytes for array in own)


class Measured(Buffers):
    """Buffers of one row, which measure a graph: its needs are known once it is recorded."""

    def __init__(self, hp: HParams) -> None:
        super().__init__(Chunk(hp, 1), Needs())
        self._asked: dict[str, int] = {}
        self._experts = 0, 0, 0
        self.kv_layers: set[int] = set()
        self.states: dict[tuple[int, str], tuple[int, ...]] = {}  # by layer and name

    @property
    def needs(self) -> Needs:
        """The largest size of each buffer that was asked for."""
        kv_layers = tuple(sorted(self.kv_layers))
        return Needs(dict(self._asked), dict(self.states), self._n_in, self._experts, kv_layers)

    def rows(self, name: str, *shape: int, dtype: DTypeLike = np.float32) -> np.ndarray:
        """An array of one row; its shape is noted."""
        row = zeros((1, *shape), dtype)
        self._asked[name] = max(self._asked.get(name, 0), row.nbytes)
        return Value.of(row, self._buffer(name))

    def packed_rows(self, n_in: int) -> np.ndarray:
        """An empty array; the width is noted."""
        self._n_in = max(self._n_in, n_in)
        return self.packed

    def experts(self, n_in: int, n_used: int, n_expert: int) -> np.ndarray:
        """An empty array; the sizes are noted."""
        before = self._experts
        self._experts = max(before[0], n_in), max(before[1], n_used), max(before[2], n_expert)
        return self.scratch


def workspaces(model: Model, n_tok: int, backends: Sequence[Backend]) -> list[Workspace]:
    """One workspace for each backend, over one Chunk."""
    chunk = Chunk(model.hp, n_tok)
    return [Workspace(model, backend, chunk) for backend in backends]


def workspace_bytes(model: Model, n_tok: int, backend: Backend) -> int:
    """Bytes of a Workspace; it is only address space until rows are used."""
    return Workspace(model, backend, Chunk(model.hp, n_tok)).n_bytes
