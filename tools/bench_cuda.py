"""Ops on a GPU beside its ceilings: bytes and operations they must move, time, share of the limit.

Run it as `python -m tamis.tools.bench_cuda`; shapes are Llama-3.1-8B's. The last lines are JSON.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tamis.attend import n_split
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels import ops
from tamis.jit_kernels.cuda_backend import CudaBackend
from tamis.jit_kernels.program import Program
from tamis.jit_kernels.types import PAGE, KVView, Selection, zeros
from tamis.select.base import Recording, SelectorShape
from tamis.select.notation import parse_method

N_RUN = 7
N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM = 4096, 14336, 32, 8, 128
METHODS = ("window", "quest:dense=0", "quest:dense=0,rows=group", "topk")
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


class Cache(NamedTuple):
    """Keys and values of n_kv positions, and queries of the last n_tok of them."""

    kv: KVView
    step: np.ndarray
    q: np.ndarray
    n_kv: int

    @classmethod
    def random(cls, n_tok: int, n_kv: int) -> "Cache":
        """Pages in random order."""
        rng, n_page = np.random.default_rng(0), n_kv // PAGE
        pages = [zeros((n_page, N_HEAD_KV, PAGE, HEAD_DIM), np.float16) for _ in range(2)]
        for array in pages:
            array[...] = rng.standard_normal((1, *array.shape[1:]))
        table = rng.permutation(n_page).astype(np.int32)
        q = zeros((n_tok, N_HEAD, HEAD_DIM), np.float32)
        q[...] = rng.standard_normal(q.shape)
        step = np.array([n_tok, n_kv - n_tok, 0, 0, n_kv])
        return cls(KVView(pages[0], pages[1], table, table), step, q, n_kv)


def record_attend(program: Program, cache: Cache, sel: Selection, n_part: int) -> None:
    """Record attention to a Selection, as the runner does."""
    q, kv, group = cache.q, cache.kv, N_HEAD // sel.n_row
    split = n_split(sel.n_row, n_part) if len(q) == 1 else 1
    out, partial = zeros(q.shape, np.float32), zeros((N_HEAD, split, HEAD_DIM + 2), np.float32)
    program.add(
        ops.ATTEND, (HEAD_DIM, group, sel.q_block, *kv.types), step=cache.step, q=q, k_pages=kv.k,
        v_pages=kv.v, k_table=kv.k_table, v_table=kv.v_table, indptr=sel.indptr,
        indices=sel.indices, log_weight=None, block=sel.block, n_row=sel.n_row,
        heads_per_kv=N_HEAD // N_HEAD_KV, n_head_kv=N_HEAD_KV, window=0, n_split=split, stride=1,
        partial=partial, out=out, lse=None, scratch=0, scale_f=HEAD_DIM**-0.5,
    )  # fmt: skip
    if split > 1:
        program.add(
            ops.ATTEND_MERGE, (HEAD_DIM,), step=cache.step, partial=partial, out=out, lse=None,
            n_head=N_HEAD, n_split=split,
        )  # fmt: skip


def attention(backend: CudaBackend, n_tok: int, n_kv: int, share: int = 1) -> Row:
    """Attention of the last n_tok of n_kv positions, over 1 / share of the blocks."""
    cache, q_block = Cache.random(n_tok, n_kv), 1 if n_tok == 1 else 16
    program, copies = Program(), COPIES if n_tok == 1 else 1
    first = range(0, n_tok, q_block)
    last = [n_kv - n_tok + min(n_tok, i + q_block) - 1 for i in first]
    for copy in range(copies):  # other blocks each time, so that they come from memory
        chosen = np.arange(copy % share, n_kv // PAGE, share, dtype=np.int32)
        rows = [chosen[chosen <= p // PAGE] for p in last for _ in range(N_HEAD_KV)]
        indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        sel = Selection(indptr, np.concatenate(rows), PAGE, q_block, N_HEAD_KV)
        record_attend(program, cache, sel, backend.n_part)
    linked = backend.link(program)
    seconds = timed(backend, lambda: backend.run(linked)) / copies
    n_bytes = 2 * 2 * HEAD_DIM * N_HEAD_KV * (n_kv // share)
    n_pair = n_tok * (n_kv - n_tok) + n_tok * (n_tok + 1) // 2
    name = f"attend {n_tok} tokens at {n_kv}" + (f", 1/{share} of it" if share > 1 else "")
    return Row(name, seconds, n_bytes, 4 * HEAD_DIM * N_HEAD * n_pair // share)


def method(backend: CudaBackend, attn: str, n_kv: int) -> list[Row]:
    """A decode step's attention of one layer with a method: choosing keys, and the whole."""
    cache = Cache.random(1, n_kv)
    shape = SelectorShape(1, N_HEAD, N_HEAD_KV, HEAD_DIM, n_kv, 1, (0,))
    program = Program()
    rec = Recording(program, cache.step, 1, 1)
    sel = parse_method(attn).open(shape).decode(rec, 0, cache.q, cache.kv)
    n_choose = len(program)
    record_attend(program, cache, sel, backend.n_part)
    linked = backend.link(program)
    backend.run(linked)  # what a method keeps of the whole context is made here
    choosing = timed(backend, lambda: backend.run(linked, 0, n_choose))
    whole = timed(backend, lambda: backend.run(linked))
    rows = [Row(f"{attn} at {n_kv}: choose", choosing, 0, 0), Row("  and attend", whole, 0, 0)]
    names = [call.spec.op.name for call in program.calls]
    for name, graph in zip(names, linked.launches(backend), strict=True):
        seconds = timed(backend, lambda graph=graph: backend.device.start(graph))  # type: ignore[misc]
        rows.append(Row(f"  {name}", seconds, 0, 0))
    return rows


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
        *(lambda m=m: method(backend, m, 131072) for m in METHODS),
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
