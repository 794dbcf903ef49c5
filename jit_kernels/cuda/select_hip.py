"""HiP's ops: the Selection round the blocks of a mask."""

from numba import cuda, int32

from tamis.jit_kernels.cuda.best import write_range
from tamis.jit_kernels.cuda.grid import THREADS, WARPS, Launch, block_before, thread
from tamis.jit_kernels.cuda.intrinsic import device, load_i32, load_i64, store_i32
from tamis.jit_kernels.ops import STEP


@device
def row_at(step, mask, row, sizes):
    """A row's entries: sinks, then of its blocks from there to `high`, then up to `end`."""
    n_row, n_chunk, block, n_sink, n_local, mask_block, q_block = sizes
    n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
    first = row // n_row * q_block
    made = first // mask_block  # the mask, which was made for its first query
    high = max(0, pos + made * mask_block + 1 - n_local) // block
    end = (pos + min(n_tok, first + q_block) + block - 1) // block
    chosen = mask + 4 * (1 + n_chunk) * (made * n_row + row % n_row)
    return chosen, min(n_sink, high), high, end


@device
def around(chosen, j, sinks, high, n_near):
    """The entries that the j-th chosen block brings: first and end; they may be none."""
    b = load_i32(chosen + 4 * (1 + j))
    first = max(sinks, b - n_near)
    if j > 0:
        first = max(first, load_i32(chosen + 4 * j) + n_near + 1)
    return first, min(high, b + n_near + 1)


@device
def part(row, first_j, n_near):
    """A thread's entries of the chosen blocks from first_j on, one a thread."""
    chosen, sinks, high, _ = row
    j = first_j + thread()
    if j >= load_i32(chosen):
        return 0, 0
    first, end = around(chosen, j, sinks, high, n_near)
    return first, max(0, end - first)


def hip_select() -> list[Launch]:
    """Kernels of HIP_SELECT: rows' sizes, their sums, their entries; blocks take rows in turn."""

    def count(
        tid, n_thread, step, mask, indptr, indices, n_row, n_chunk, block, n_sink, n_local, n_near,
        mask_block, q_block,
    ):  # fmt: skip
        parts = cuda.shared.array(WARPS, int32)
        n_rows = (load_i64(step + STEP.n_tok) + q_block - 1) // q_block * n_row
        sizes = n_row, n_chunk, block, n_sink, n_local, mask_block, q_block
        for r in range(tid, n_rows, n_thread):
            row, mine = row_at(step, mask, r, sizes), 0
            for first_j in range(0, load_i32(row[0]), THREADS):
                mine += part(row, first_j, n_near)[1]
            _, total = block_before(int32(mine), parts)
            if thread() == 0:
                store_i32(indptr + 4 * (r + 1), row[1] + total + row[3] - row[2])

    def add_up(
        tid, n_thread, step, mask, indptr, indices, n_row, n_chunk, block, n_sink, n_local, n_near,
        mask_block, q_block,
    ):  # fmt: skip
        if tid != 0:
            return
        parts, begin = cuda.shared.array(WARPS, int32), 0
        n_rows = (load_i64(step + STEP.n_tok) + q_block - 1) // q_block * n_row
        for first in range(0, n_rows, THREADS):
            r = first + thread()
            mine = load_i32(indptr + 4 * (r + 1)) if r < n_rows else 0
            before, total = block_before(int32(mine), parts)
            if r < n_rows:
                store_i32(indptr + 4 * (r + 1), begin + before + mine)
            begin += total
        if thread() == 0:
            store_i32(indptr, 0)

    def write(
        tid, n_thread, step, mask, indptr, indices, n_row, n_chunk, block, n_sink, n_local, n_near,
        mask_block, q_block,
    ):  # fmt: skip
        parts = cuda.shared.array(WARPS, int32)
        n_rows = (load_i64(step + STEP.n_tok) + q_block - 1) // q_block * n_row
        sizes = n_row, n_chunk, block, n_sink, n_local, mask_block, q_block
        for r in range(tid, n_rows, n_thread):
            row, out = row_at(step, mask, r, sizes), indices + 4 * load_i32(indptr + 4 * r)
            write_range(out, 0, row[1])
            out += 4 * row[1]
            for first_j in range(0, load_i32(row[0]), THREADS):
                first, n = part(row, first_j, n_near)
                before, total = block_before(int32(n), parts)
                for i in range(n):
                    store_i32(out + 4 * (before + i), first + i)
                out += 4 * total
            write_range(out, row[2], row[3])

    return [Launch(count), Launch(add_up), Launch(write)]
