"""All scratch of one session, allocated once: activations, step records, logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Runner
from tamis.jit_kernels.contract.types import zeros
from tamis.model.hparams import HParams

RECORDED = "step", "ids"  # parts of `record`
SHARED = ("record", "step", "head_rows", "head_step", "ids", "x", "logits")
HEAD_ROWS = 16  # rows of logits computed at once where all positions are asked for


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers for up to n_tok rows; kernels write only here and to the KV."""

    record: np.ndarray  # uint8: step, then ids
    step: np.ndarray  # int64 [STEP_SIZE]: rows and position of the chunk
    head_rows: np.ndarray  # int64 [STEP_SIZE]: which rows the output head reads
    head_step: np.ndarray  # int64 [STEP_SIZE]: the same rows, counted from 0
    ids: np.ndarray  # int32 [n_tok]
    x: np.ndarray  # f32 [n_tok, n_embd] the residual stream
    xn: np.ndarray  # f32 [n_tok, n_embd], experts only
    q: np.ndarray  # f32 [n_tok, n_head, head_dim]
    k: np.ndarray  # f32 [n_tok, n_head_kv, head_dim]
    v: np.ndarray  # f32 [n_tok, n_head_kv, head_dim]
    att: np.ndarray  # f32 [n_tok, n_head, head_dim]
    branch: np.ndarray  # f32 [n_tok, n_embd] a branch's output before its norm
    gate: np.ndarray  # f32 [n_tok, n_used, n_ff]
    up: np.ndarray  # f32 [n_tok, n_used, n_ff]
    down: np.ndarray  # f32 [n_tok, n_used, n_embd], experts only
    route: np.ndarray  # f32 [n_tok, n_expert]
    expert_ids: np.ndarray  # int32 [n_tok, n_used]
    expert_weights: np.ndarray  # f32 [n_tok, n_used]
    partial: np.ndarray  # f32 [n_head, n_split, head_dim + 2]
    cos: np.ndarray  # f32 [2, n_tok, n_rot / 2]: full layers, sliding-window layers
    sin: np.ndarray  # f32 [2, n_tok, n_rot / 2]
    logits: np.ndarray  # f32 [HEAD_ROWS, n_vocab]
    packed: np.ndarray  # uint8, rows as matrix products read them
    scratch: np.ndarray  # uint8, per thread

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(getattr(self, name).nbytes for name in self.__slots__ if name not in RECORDED)


def new_workspace(hp: HParams, n_tok: int, backend: Runner) -> Workspace:
    """Buffers for chunks of up to n_tok tokens."""

    def f32(*shape: int) -> np.ndarray:
        return zeros(shape, np.float32)

    # One array, so that both are sent at once.
    record = np.zeros(8 * ops.STEP_SIZE + 4 * n_tok, np.uint8)
    n_used = max(1, hp.n_expert_used)
    n_ff = hp.n_ff_expert if hp.n_expert else hp.n_ff
    widest = max(hp.n_embd, hp.n_embd_q, n_ff)
    scratch = max(ops.matmul_scratch(widest), ops.attend_scratch(hp.group, hp.head_dim))
    return Workspace(
        record=record,
        step=record[: 8 * ops.STEP_SIZE].view(np.int64),
        head_rows=np.zeros(ops.STEP_SIZE, np.int64),
        head_step=np.zeros(ops.STEP_SIZE, np.int64),
        ids=record[8 * ops.STEP_SIZE :].view(np.int32),
        x=f32(n_tok, hp.n_embd),
        xn=f32(n_tok if hp.n_expert else 0, hp.n_embd),
        q=f32(n_tok, hp.n_head, hp.head_dim),
        k=f32(n_tok, hp.n_head_kv, hp.head_dim),
        v=f32(n_tok, hp.n_head_kv, hp.head_dim),
        att=f32(n_tok, hp.n_head, hp.head_dim),
        branch=f32(n_tok, hp.n_embd),
        gate=f32(n_tok, n_used, n_ff),
        up=f32(n_tok, n_used, n_ff),
        down=f32(n_tok if hp.n_expert else 0, n_used, hp.n_embd),
        route=f32(n_tok, max(1, hp.n_expert)),
        expert_ids=np.zeros((n_tok, n_used), np.int32),
        expert_weights=f32(n_tok, n_used),
        partial=f32(hp.n_head, backend.n_part, hp.head_dim + 2),
        cos=f32(2, n_tok, hp.n_rot // 2),
        sin=f32(2, n_tok, hp.n_rot // 2),
        logits=f32(HEAD_ROWS, hp.n_vocab),
        packed=zeros(ops.packed_bytes(max(n_tok, HEAD_ROWS), widest), np.uint8),
        scratch=zeros(backend.n_thread * scratch, np.uint8),
    )


def workspaces(hp: HParams, n_tok: int, backends: Sequence[Runner]) -> list[Workspace]:
    """One for each backend: what Python writes and reads, and the rows, are the same in all."""
    first, *rest = (new_workspace(hp, n_tok, backend) for backend in backends)
    same = {name: getattr(first, name) for name in SHARED}
    return [first, *(replace(ws, **same) for ws in rest)]


def workspace_bytes(hp: HParams, n_tok: int, backend: Runner) -> int:
    """Bytes of `new_workspace`, which reserves address space only until rows are used."""
    return new_workspace(hp, n_tok, backend).n_bytes
