"""Ops on a GPU beside its ceilings: bytes and operations they must move, time, share of the limit.

Run it as `python -m tamis.tools.bench_cuda`; shapes are Llama-3.1-8B's. The last lines are JSON.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels import ops
from tamis.jit_kernels.cuda_backend import CudaBackend
from tamis.jit_kernels.program import Program
from tamis.jit_kernels.types import PAGE, zeros

N_RUN = 7
N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM = 4096, 14336, 32, 8, 128
COPIES = 8  # of a weight matrix: a run reads each once, more than the cache holds


class Row(NamedTuple):
    """One measurement: medians of N_RUN."""

    op: str
    seconds: float
    n_bytes: float
    n_flop: float


def timed(backend: CudaBackend, work: Callable[[], Any]) -> float:
    """Median seconds of work(), by the GPU's clock, after one run."""
    work()
    return statistics.median(backend.device.time(work) for _ in range(N_RUN))


def copy_rate(backend: CudaBackend) -> Row:
    """What the memory does: 2 GiB copied, counted as read and as written."""
    size = 2 << 30
    one, other = backend.device.allocate(size), backend.device.allocate(size)
    seconds = timed(backend, lambda: backend.device.copy(one.address, other.address, size))
    return Row("copy 2 GiB", seconds, 2 * size, 0)


def random_blocks(rng: np.random.Generator, type_: str, n: int) -> np.ndarray:
    """Bytes of n elements: random quants; scales that are small positive float16."""
    kind = GGMLType[type_]
    blocks = rng.integers(0, 256, (n // kind.block_size, kind.type_size), np.uint8)
    at = {"Q6_K": [208], "Q4_K": [0, 2], "Q4_1": [0, 2]}.get(type_, [0])
    if type_ == "F16":
        return (0.02 * rng.standard_normal(n)).astype(np.float16).view(np.uint8)
    for i in at:
        scale = np.full(len(blocks), 0.01, np.float16).view(np.uint8).reshape(-1, 2)
        blocks[:, i : i + 2] = scale
    return blocks.reshape(-1)


def product(backend: CudaBackend, type_: str, n_tok: int, n_in: int, n_out: int) -> Row:
    """MATMUL of n_tok rows, over COPIES matrices."""
    rng = np.random.default_rng(0)
    data = random_blocks(rng, type_, n_in * n_out)
    step, x = np.array([n_tok, 0, 0, 0, n_tok]), zeros((n_tok, n_in), np.float32)
    x[...] = rng.standard_normal(x.shape)
    program = Program()
    matrices = [data.copy() for _ in range(COPIES)]
    y = zeros((n_tok, n_out), np.float32)
    packed = zeros(ops.packed_bytes(n_tok, n_in), np.uint8)
    program.add(
        ops.PACK_ROWS, (ops.packed_form(type_), "rows"), step=step, x=x, other=None, packed=packed,
        n=n_in, scratch=0, eps_f=0.0,
    )  # fmt: skip
    for w in matrices:
        w.flags.writeable = True
        program.add(
            ops.MATMUL, (type_,), step=step, packed=packed, w=w, bias=None, y=y, n_in=n_in,
            n_out=n_out, y_stride=n_out, add=0, scratch=0,
        )  # fmt: skip
    linked = backend.link(program)
    seconds = timed(backend, lambda: backend.run(linked)) / COPIES
    n_bytes = data.nbytes + 4 * n_tok * (n_in + n_out)
    return Row(f"matmul {type_} {n_tok}x{n_in}x{n_out}", seconds, n_bytes, 2 * n_tok * n_in * n_out)


def launches(backend: CudaBackend, type_: str, n_tok: int, n_in: int, n_out: int) -> list[Row]:
    """The same product's kernels one by one."""
    step = np.array([n_tok, 0, 0, 0, n_tok])
    program, packed = Program(), zeros(ops.packed_bytes(n_tok, n_in), np.uint8)
    program.add(
        ops.MATMUL, (type_,), step=step, packed=packed,
        w=random_blocks(np.random.default_rng(0), type_, n_in * n_out), bias=None,
        y=zeros((n_tok, n_out), np.float32), n_in=n_in, n_out=n_out, y_stride=n_out, add=0,
        scratch=0,
    )  # fmt: skip
    linked, rows = backend.link(program), []
    flop = 2 * n_tok * n_in * n_out
    for i, graph in enumerate(linked.launches(backend)):
        seconds = timed(backend, lambda graph=graph: backend.device.start(graph))  # type: ignore[misc]
        rows.append(
            Row(f"  launch {i} of {type_} {n_tok}x{n_in}x{n_out}", seconds, 0, flop if i else 0)
        )
    return rows


def attention(backend: CudaBackend, n_tok: int, n_kv: int, share: int = 1) -> Row:
    """Attention of the last n_tok of n_kv positions, over 1 / share of the blocks."""
    rng = np.random.default_rng(0)
    group, q_block, n_page = N_HEAD // N_HEAD_KV, 1 if n_tok == 1 else 16, n_kv // PAGE
    pages = [zeros((n_page, N_HEAD_KV, PAGE, HEAD_DIM), np.float16) for _ in range(2)]
    for array in pages:
        array[...] = rng.standard_normal((1, *array.shape[1:]))
    table = rng.permutation(n_page).astype(np.int32)
    n_q_block = -(-n_tok // q_block)
    chosen = np.arange(0, n_page, share, dtype=np.int32)
    last = [min(n_kv, n_kv - n_tok + (i + 1) * q_block) - 1 for i in range(n_q_block)]
    rows = [chosen[chosen <= p // PAGE] for p in last for _ in range(N_HEAD_KV)]
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    split = backend.n_thread // N_HEAD_KV if n_tok == 1 else 1
    q, out = (
        zeros((n_tok, N_HEAD, HEAD_DIM), np.float32),
        zeros((n_tok, N_HEAD, HEAD_DIM), np.float32),
    )
    q[...] = rng.standard_normal(q.shape)
    step, partial = (
        np.array([n_tok, n_kv - n_tok, 0, 0, n_kv]),
        zeros((N_HEAD, split, HEAD_DIM + 2), np.float32),
    )
    program = Program()
    program.add(
        ops.ATTEND, (HEAD_DIM, group, q_block, "f16", "f16"), step=step, q=q, k_pages=pages[0],
        v_pages=pages[1], k_table=table, v_table=table, indptr=indptr, indices=np.concatenate(rows),
        log_weight=None, block=PAGE, n_row=N_HEAD_KV, heads_per_kv=group, n_head_kv=N_HEAD_KV,
        window=0, n_split=split, stride=1, partial=partial, out=out, lse=None, scratch=0,
        scale_f=HEAD_DIM**-0.5,
    )  # fmt: skip
    if split > 1:
        program.add(
            ops.ATTEND_MERGE, (HEAD_DIM,), step=step, partial=partial, out=out, lse=None,
            n_head=N_HEAD, n_split=split,
        )  # fmt: skip
    linked = backend.link(program)
    seconds = timed(backend, lambda: backend.run(linked))
    n_bytes = 2 * 2 * HEAD_DIM * N_HEAD_KV * len(chosen) * PAGE
    n_pair = n_tok * (n_kv - n_tok) + n_tok * (n_tok + 1) // 2
    name = f"attend {n_tok} tokens at {n_kv}" + (f", 1/{share} of it" if share > 1 else "")
    return Row(name, seconds, n_bytes, 4 * HEAD_DIM * N_HEAD * n_pair // share)


def main() -> None:
    """Print each row as it is measured, then JSON lines."""
    backend = CudaBackend()
    copied = copy_rate(backend)
    ceiling = copied.n_bytes / copied.seconds
    rows = [copied]
    for work in (
        *(
            lambda t=t, a=a, b=b: [product(backend, t, 1, a, b)]
            for t in ("Q8_0", "Q4_K", "Q6_K", "Q4_1", "F16")
            for a, b in ((N_EMBD, N_FF), (N_FF, N_EMBD))
        ),
        lambda: [product(backend, "Q8_0", 2048, N_EMBD, N_FF)],
        lambda: launches(backend, "Q8_0", 2048, N_EMBD, N_FF),
        lambda: launches(backend, "Q4_K", 2048, N_FF, N_EMBD),
        *(lambda n=n: [attention(backend, 1, n)] for n in (16384, 131072)),
        lambda: [attention(backend, 1, 131072, 16)],
        lambda: [attention(backend, 2048, 16384)],
        lambda: [attention(backend, 2048, 131072)],
    ):
        for row in work():
            rows.append(row)
            read, done = row.n_bytes / row.seconds, row.n_flop / row.seconds
            sys.stdout.write(
                f"{row.op:42} {row.seconds * 1e6:10.1f} us {read / 1e9:8.0f} GB/s "
                f"({read / ceiling:4.0%}) {done / 1e12:7.1f} TFLOP/s\n"
            )
            sys.stdout.flush()
    for row in rows:
        sys.stdout.write(json.dumps({"device": backend.device.name, **row._asdict()}) + "\n")


if __name__ == "__main__":
    main()
