"""Times of ops on a GPU, with the bytes and operations they must move, as shares of its limits.

Run it as `python -m tamis.tools.bench_cuda [products] [attention] [methods]`; shapes are
Llama-3.1-8B's. Methods are those of prompts: bench_select has decode steps. The last lines are
JSON.
"""

import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

from tamis.graph.attention import n_split
from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.backends.cuda_program import CudaProgram
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import KV_TYPES, PAGE, KVView, Selection, kv_row, zeros
from tamis.select.base import PREFILL, Attended, Recording, SelectorShape
from tamis.select.notation import parse_method
from tamis.tools.random_model import Pool

N_RUN = 7
N_EMBD, N_FF, N_HEAD, N_HEAD_KV, HEAD_DIM = 4096, 14336, 32, 8, 128
PROMPT_METHODS = ("window", "delta(window)", "hip:l_d=0", "delta(hip:l_d=0)")
COPIES = 8  # of a weight matrix: a run reads each once, in total more than the cache holds
LAYERS = 32  # of the model, whose attention runs layer by layer in a step


class Row(NamedTuple):
    """One measurement: medians of N_RUN runs."""

    op: str
    seconds: float
    n_bytes: float
    n_flop: float


class Work(NamedTuple):
    """A function to measure: run() calls it n times."""

    op: str
    run: Callable[[], Any]
    n: int
    n_bytes: float
    n_flop: float


def timed(backend: CudaBackend, work: Callable[[], Any]) -> float:
    """The median seconds of work(), by the GPU's clock, after one warm-up run."""
    work()
    return statistics.median(backend.device.time(work) for _ in range(N_RUN))


def alternating(backend: CudaBackend, *works: Work) -> list[Row]:
    """Rows of works that run alternately.

    Each but the first also has its speed-up over the first.
    """
    for work in works:
        work.run()
    turns = [[backend.device.time(work.run) / work.n for work in works] for _ in range(N_RUN)]
    rows: list[Row] = []
    for work, seconds in zip(works, zip(*turns, strict=True), strict=True):
        faster = sorted(turn[0] / own for turn, own in zip(turns, seconds, strict=True))
        few, half, most = faster[0], faster[N_RUN // 2], faster[-1]
        op = work.op + (f": {half:.2f} times faster ({few:.2f} to {most:.2f})" if rows else "")
        rows.append(Row(op, statistics.median(seconds), work.n_bytes, work.n_flop))
    return rows


def copy_rate(backend: CudaBackend) -> Row:
    """The memory's rate: 2 GiB copied, counted as read and as written."""
    size = 2 << 30
    one, other = backend.device.allocate(size), backend.device.allocate(size)
    seconds = timed(backend, lambda: backend.device.copy(one.address, other.address, size))
    return Row("copy 2 GiB", seconds, 2 * size, 0)


def random_weights(type_: str, n_in: int, n_out: int) -> np.ndarray:
    """Bytes of a matrix, as in a model of random weights."""
    return Pool(GGMLQuantizationType[type_]).matrix(n_out, n_in).view(np.uint8).reshape(-1)


def product(backend: CudaBackend, type_: str, n_tok: int, n_in: int, n_out: int) -> Row:
    """The row of MATMUL with n_tok rows, over COPIES matrices; a single row is not packed.

    A decode step fuses it with the op that follows: see tamis.jit_kernels.backends.fusion.
    """
    rng = np.random.default_rng(0)
    data = random_weights(type_, n_in, n_out)
    step, x = np.array([n_tok, 0, 0, 0, n_tok, 0]), zeros((n_tok, n_in), np.float32)
    x[...] = rng.standard_normal(x.shape)
    program = Program()
    matrices = [data.copy() for _ in range(COPIES)]
    y = zeros((n_tok, n_out), np.float32)
    packed = zeros(ops.packed_bytes(n_tok, n_in), np.uint8)
    program.add(
        ops.PACK_ROWS, (ops.packed_form(type_), "rows"), step=step, x=x, other=None, packed=packed,
        n=n_in, scratch=0, eps=0.0,
    )  # fmt: skip
    for w in matrices:
        w.flags.writeable = True
        program.add(
            ops.MATMUL, (type_,), step=step, packed=packed, w=w, bias=None, y=y, n_in=n_in,
            n_out=n_out, y_stride=n_out, add=0, scratch=0,
        )  # fmt: skip
    linked = backend.link(program)
    backend.run(linked)
    seconds = timed(backend, lambda: backend.run(linked, int(n_tok == 1))) / COPIES
    n_bytes = data.nbytes + 4 * n_tok * (n_in + n_out)
    return Row(f"matmul {type_} {n_tok}x{n_in}x{n_out}", seconds, n_bytes, 2 * n_tok * n_in * n_out)


def launches(backend: CudaBackend, type_: str, n_tok: int, n_in: int, n_out: int) -> list[Row]:
    """The same product's kernels one by one."""
    step = np.array([n_tok, 0, 0, 0, n_tok, 0])
    program, packed = Program(), zeros(ops.packed_bytes(n_tok, n_in), np.uint8)
    program.add(
        ops.MATMUL, (type_,), step=step, packed=packed,
        w=random_weights(type_, n_in, n_out), bias=None,
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


@functools.cache
def random_pages(n_kv: int, type_: str) -> list[np.ndarray]:
    """A random paged KV cache of n_kv positions; its standard deviation is 1."""
    rng, pages = np.random.default_rng(0), []
    for _ in range(2):
        row = kv_row(type_, HEAD_DIM)
        pages.append(zeros((n_kv // PAGE, N_HEAD_KV, PAGE, row.itemsize), np.uint8))
        rows = np.ndarray(pages[-1].shape[:-1], row, pages[-1])
        if type_ == "f16":
            rows[...] = rng.standard_normal(rows.shape, np.float32)
        else:
            rows["q"] = rng.integers(0, 256, rows["q"].shape, np.uint8).view(rows["q"].dtype)
            rows["d"] = {"q8_0": 1 / 74, "q4_0": 1 / 4.6}[type_]
        pages[-1] = rows
    return pages


class Cache(NamedTuple):
    """A KV cache of n_kv positions, and queries of the last n_tok of them."""

    kv: KVView
    step: np.ndarray
    q: np.ndarray
    n_kv: int

    @classmethod
    def random(cls, n_tok: int, n_kv: int, type_: str = "f16") -> "Cache":
        """Pages in random order, of a type of KV_TYPES."""
        rng, n_page = np.random.default_rng(0), n_kv // PAGE
        pages = random_pages(n_kv, type_)
        table = rng.permutation(n_page).astype(np.int32)
        q = zeros((n_tok, N_HEAD, HEAD_DIM), np.float32)
        q[...] = 3 * rng.standard_normal(q.shape)  # 4 % of the keys then have 90 % of the weight
        step = np.array([n_tok, n_kv - n_tok, 0, 0, n_kv, 0])
        return cls(KVView(pages[0], pages[1], table, table), step, q, n_kv)


def record_attend(program: Program, cache: Cache, rows: Attended, n_part: int) -> None:
    """Record attention to a Selection, as the runner does."""
    step, stride, sel, out, partial, lse = rows
    q, kv = cache.q, cache.kv
    group, split = N_HEAD // sel.n_row, n_split(sel.n_row, n_part) if len(q) == 1 else 1
    if partial is None:
        partial = zeros((N_HEAD, split, HEAD_DIM + 2), np.float32)
    else:
        split = partial.shape[2]
    program.add(
        ops.ATTEND, (HEAD_DIM, group, sel.q_block, *kv.types), step=step, q=q, k_pages=kv.k,
        v_pages=kv.v, k_table=kv.k_table, v_table=kv.v_table, indptr=sel.indptr,
        indices=sel.indices, log_weight=None, block=sel.block, n_row=sel.n_row,
        heads_per_kv=N_HEAD // N_HEAD_KV, n_head_kv=N_HEAD_KV, window=0, n_split=split,
        stride=stride, partial=partial, out=out, lse=lse, scratch=0, scale=HEAD_DIM**-0.5,
    )  # fmt: skip
    if split > 1:
        program.add(
            ops.ATTEND_MERGE, (HEAD_DIM, sel.q_block), step=step, partial=partial, out=out,
            lse=lse, n_head=N_HEAD, n_split=split,
        )  # fmt: skip


def attention(
    backend: CudaBackend, n_tok: int, n_kv: int, share: int = 1, type_: str = "f16"
) -> Work:
    """Attention of the last n_tok of n_kv positions, over 1 / share of the blocks.

    Of one token, that of a decode step: as many launches as there are layers.
    """
    cache, q_block = Cache.random(n_tok, n_kv, type_), 1 if n_tok == 1 else 16
    program, n_launch = Program(), LAYERS if n_tok == 1 else 1
    first = range(0, n_tok, q_block)
    last = [n_kv - n_tok + min(n_tok, i + q_block) - 1 for i in first]
    for i in range(n_launch):  # different blocks each time, so that they come from memory
        chosen = np.arange(i % share, n_kv // PAGE, share, dtype=np.int32)
        rows = [chosen[chosen <= p // PAGE] for p in last for _ in range(N_HEAD_KV)]
        indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        sel = Selection(indptr, np.concatenate(rows), PAGE, q_block, N_HEAD_KV)
        rows_ = Attended(cache.step, 1, sel, zeros(cache.q.shape, np.float32))
        record_attend(program, cache, rows_, backend.n_part)
    linked = backend.link(program)
    n_bytes = cache.kv.row_bytes * N_HEAD_KV * (n_kv // share)
    n_pair = n_tok * (n_kv - n_tok) + n_tok * (n_tok + 1) // 2
    name = f"attend {n_tok} tokens at {n_kv}" + (f", 1/{share} of it" if share > 1 else "")
    name += "" if type_ == "f16" else f", {type_}"
    n_flop = 4 * HEAD_DIM * N_HEAD * n_pair // share
    return Work(name, lambda: backend.run(linked), n_launch, n_bytes, n_flop)


def one_by_one(backend: CudaBackend, linked: CudaProgram) -> list[Row]:
    """The rows of a Program's ops, each measured alone."""
    rows = []
    for i, call in enumerate(linked.program.calls):
        seconds = timed(backend, lambda i=i: backend.run(linked, i, i + 1))  # type: ignore[misc]
        rows.append(Row(f"  {call.spec.op.name}", seconds, 0, 0))
    return rows


def prompt_method(backend: CudaBackend, prefill: str, n_tok: int, n_kv: int) -> list[Row]:
    """Attention of one layer for the last n_tok of n_kv positions with a method of prompts."""
    cache = Cache.random(n_tok, n_kv)
    cache.step[4] += n_tok  # as if the prompt continued: its last rows are dense
    n_ctx = -(-(n_kv + n_tok) // PAGE) * PAGE
    shape = SelectorShape(1, N_HEAD, N_HEAD_KV, HEAD_DIM, n_ctx, n_tok, (0,))
    state, program = parse_method(prefill, PREFILL).open(shape), Program()
    rec, out = Recording(program, cache.step, n_tok, 16), zeros(cache.q.shape, np.float32)
    sel = state.select_prefill(rec, 0, cache.q, cache.kv)
    chosen = Attended(cache.step, 1, sel, out)
    record_attend(program, cache, chosen, backend.n_part)
    for rows in state.also_attend(rec, 0, chosen):
        record_attend(program, cache, rows, backend.n_part)
    state.correct(rec, 0, cache.q, cache.kv, sel, out)
    linked = backend.link(program)
    backend.run(linked)
    seconds = timed(backend, lambda: backend.run(linked))
    name = f"{prefill}: {n_tok} tokens at {n_kv}"
    return [Row(name, seconds, 0, 0), *one_by_one(backend, linked)]


PARTS: dict[str, list[Callable[[CudaBackend], list[Row]]]] = {
    "products": [
        *(
            lambda gpu, t=t, a=a, b=b: [product(gpu, t, 1, a, b)]
            for t in ("Q8_0", "Q4_K", "Q6_K", "Q4_1", "F16")
            for a, b in ((N_EMBD, N_FF), (N_FF, N_EMBD))
        ),
        lambda gpu: [product(gpu, "Q8_0", 2048, N_EMBD, N_FF)],
        lambda gpu: launches(gpu, "Q8_0", 2048, N_EMBD, N_FF),
        lambda gpu: launches(gpu, "Q4_K", 2048, N_FF, N_EMBD),
    ],
    "attention": [
        lambda gpu: alternating(gpu, attention(gpu, 1, 16384)),
        lambda gpu: alternating(gpu, attention(gpu, 1, 131072), attention(gpu, 1, 131072, 16)),
        lambda gpu: alternating(gpu, attention(gpu, 2048, 16384)),
        lambda gpu: alternating(gpu, attention(gpu, 2048, 131072)),
        *(
            lambda gpu, t=t, n=n: alternating(gpu, attention(gpu, n, 131072, type_=t))
            for t in KV_TYPES[1:]
            for n in (1, 2048)
        ),
    ],
    "methods": [
        *(lambda gpu, m=m: prompt_method(gpu, m, 2048, 131072) for m in PROMPT_METHODS),
    ],
}


def main() -> None:
    """Print each row of the parts that are named (all by default) as it is measured, then JSON."""
    backend = CudaBackend()
    copied = copy_rate(backend)
    ceiling = copied.n_bytes / copied.seconds
    rows = [copied]
    for work in (work for part in sys.argv[1:] or PARTS for work in PARTS[part]):
        for row in work(backend):
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
