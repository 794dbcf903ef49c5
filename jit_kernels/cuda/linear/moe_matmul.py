"""Products of rows with their experts' matrices; a slot is a (token, expert) pair.

For few rows, blocks share the slots, each of which is a product as in matmul_few.py. For many,
slots are ordered by expert, and tiles of TILE slots of one expert are multiplied as in gemm.py;
their weights are decoded on the way to shared memory, as few tiles share an expert's. scratch holds
the rows and, for many, the plan: the slots in order, the number of tiles, TILE_INTS numbers per
tile.
"""

from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import (
    MORE,
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_before,
    lane,
    sync_block,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    affine8,
    device,
    f16x8,
    load_f32,
    load_i32,
    load_i64,
    quotient,
    remainder,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    copy_async,
    load_shared,
    shared_address,
    store_shared_u128,
)
from tamis.jit_kernels.cuda.lang.scratch import DEPTH, FEW_ROW, TILE_INTS
from tamis.jit_kernels.cuda.linear.dequant import (
    bytes_of,
    element_of,
    is_quantised,
    quants_of,
    row_bytes_of,
)
from tamis.jit_kernels.cuda.linear.gemm import (
    GEMM_SHARED,
    PIECES,
    SUM_BYTES,
    TILE,
    fill,
    first_slice,
    multiplying,
    narrow_floats,
    padding,
    place,
)
from tamis.jit_kernels.cuda.linear.matmul_few import CHUNK, MOST, blocks_of, joined, rows_of
from tamis.jit_kernels.cuda.linear.pack import put_15_bits

EXPERTS = 1024  # counted at a time


@device
def row_of(slot, n_used, x_per_slot):
    """The row of x that a slot multiplies."""
    return slot if x_per_slot != 0 else quotient(slot, n_used)


# ---- few ---------------------------------------------------------------------------------------
def _packing() -> Launch:
    """The kernel that writes few rows to scratch as PACK_ROWS does: threads share all elements."""

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * (a.n_used if a.x_per_slot != 0 else 1)
        # Rows have a multiple of 32 elements: whole warps come here, each to one row.
        for i in range(tid * THREADS + thread(), n_row * a.n_in, n_thread * THREADS):
            r = quotient(i, a.n_in)
            to = a.scratch + FEW_ROW.size * a.n_in // 4 * r
            put_15_bits(to, a.n_in, i - a.n_in * r, load_f32(a.x + 4 * i), True)

    return Launch(kernel, blocks=2, rows="few")


def _few(type: str) -> Launch:
    """The kernel for few packed rows: each slot gets the same number of blocks."""
    row_bytes, (ready, begin, work, ring) = row_bytes_of(type), blocks_of(type)

    def kernel(tid, n_thread, a):
        sums = cuda.shared.array((WARPS, MOST), float32)
        shared, at = int64(shared_address(cuda.shared.array(0, uint8))), (int32(0), int32(0))
        n_slot, size = load_i64(a.step + STEP.n_tok) * a.n_used, row_bytes(a.n_in)
        n_chunk, n_part = (a.n_in + CHUNK - 1) // CHUNK, max(1, quotient(n_thread, n_slot))
        ready(shared)
        for i in range(tid, n_slot * n_part, n_thread):
            slot = quotient(i, n_part)
            matrix = a.w + size * a.n_out * load_i32(a.ids + 4 * slot)
            x_row = a.scratch + FEW_ROW.size * a.n_in // 4 * row_of(slot, a.n_used, a.x_per_slot)
            first, last = rows_of(i - n_part * slot, n_part, a.n_out)
            for row in range(first, last, MOST):
                rows = matrix + size * row, min(MOST, last - row), size
                begin(shared, rows, n_chunk, at[0])
                at = work(shared, sums, rows, n_chunk, x_row, a.n_in, at)
                sync_block()
                for r in range(thread(), rows[1], THREADS):
                    value = joined(sums, r, rows[1], n_chunk)
                    store_f32(a.y + 4 * (a.n_out * slot + row + r), value)
                sync_block()  # before the next sums overwrite what is read here

    return Launch(kernel, blocks=2, shared=ring.size, rows="few")


def _few_floats(type: str) -> Launch:
    """The kernel of _few for float weights, whose rows may have any length.

    Warps stride over rows.
    """
    row_bytes, element = row_bytes_of(type), element_of(type)

    def kernel(tid, n_thread, a):
        n_row = load_i64(a.step + STEP.n_tok) * a.n_used * a.n_out
        for r in range(tid * WARPS + warp(), n_row, n_thread * WARPS):
            slot = quotient(r, a.n_out)
            expert, sum = load_i32(a.ids + 4 * slot), float32(0)
            row = a.w + row_bytes(a.n_in) * (a.n_out * expert + r - a.n_out * slot)
            values = a.x + 4 * a.n_in * row_of(slot, a.n_used, a.x_per_slot)
            for i in range(lane(), a.n_in, WARP):
                sum += load_f32(values + 4 * i) * element(row, i)
            sum = warp_sum(sum)
            if lane() == 0:
                store_f32(a.y + 4 * r, sum)

    return Launch(kernel, blocks=4, rows="few")


# ---- many --------------------------------------------------------------------------------------
@device
def write_tiles(to, expert, first, n):
    """Write the tiles of an expert whose n slots begin at the first-th in order."""
    for i in range(0, n, TILE):
        store_i32(to, expert)
        store_i32(to + 4, first + i)
        store_i32(to + 8, min(TILE, n - i))
        to += 4 * TILE_INTS


@device
def write_plan(ids, n_slot, n_expert, plan, counts, parts):
    """Write slots in order, tiles and their number; a block's work, all threads call it.

    counts, parts: shared arrays of EXPERTS and WARPS int32.
    """
    n_done, n_tile, tiles = int32(0), int32(0), plan + 4 * (n_slot + 1)
    for low in range(0, n_expert, EXPERTS):
        for e in range(thread(), EXPERTS, THREADS):
            counts[e] = 0
        sync_block()
        for slot in range(thread(), n_slot, THREADS):
            e = load_i32(ids + 4 * slot) - low
            if 0 <= e < EXPERTS:
                cuda.atomic.add(counts, e, 1)  # type: ignore[call-arg]
        sync_block()
        for begin in range(0, min(EXPERTS, n_expert - low), THREADS):
            e = begin + thread()
            n = int32(counts[e])
            before, n_more = block_before(n, parts)
            tiles_before, more_tiles = block_before(int32((n + TILE - 1) // TILE), parts)
            first = int32(n_done + before)
            write_tiles(tiles + 4 * TILE_INTS * (n_tile + tiles_before), low + e, first, n)
            counts[e] = first  # the position of this expert's next slot
            n_done, n_tile = int32(n_done + n_more), int32(n_tile + more_tiles)
        sync_block()
        for slot in range(thread(), n_slot, THREADS):
            e = load_i32(ids + 4 * slot) - low
            if 0 <= e < EXPERTS:
                at: Any = cuda.atomic.add(counts, e, 1)  # type: ignore[call-arg]
                store_i32(plan + 4 * at, slot)
        sync_block()  # before counts are cleared
    if thread() == 0:
        store_i32(plan + 4 * n_slot, n_tile)


def _ordering() -> Launch:
    """The kernel that writes many rows to scratch as float16, and the plan after them."""

    def kernel(tid, n_thread, a):
        counts, parts = cuda.shared.array(EXPERTS, int32), cuda.shared.array(WARPS, int32)
        n_slot, width = load_i64(a.step + STEP.n_tok) * a.n_used, padding(a.n_in)
        n_row = row_of(n_slot, a.n_used, a.x_per_slot)
        if tid == 0:
            write_plan(a.ids, n_slot, a.n_expert, a.scratch + 2 * width * n_row, counts, parts)
        for r in range(tid * WARPS + warp(), n_row, n_thread * WARPS):
            narrow_floats(a.x + 4 * a.n_in * r, a.n_in, a.scratch + 2 * width * r)
            fill(a.scratch + 2 * width * r, a.n_in, width)

    return Launch(kernel, blocks=2, rows=MORE)


@device
def copy_rows(shared, of, k):
    """Start the copy of DEPTH elements, from k on, of rows at these addresses; zeros after n."""
    addresses, n = of
    for i in range(PIECES):
        piece = thread() + i * THREADS
        line, part = piece >> 3, piece & 7
        source = addresses[line] + 2 * k + 16 * part
        copy_async(uint32(shared + place(line, part)), source, uint32(16 if line < n else 0))


def _decoding(type: str) -> Any:
    """The function copy(shared, of, k) of rows of weights, padded with zeros.

    of: the matrix's address, its rows and their elements, the first of the TILE rows. After the
    last row, that row is repeated; the results are not read.
    """
    row_bytes = row_bytes_of(type)
    if not is_quantised(type):
        element = element_of(type)

        @device
        def value(row, n, i):
            return element(row, i) if i < n else float32(0)

        @device
        def copy_floats(shared, of, k):
            matrix, n_out, n_in, first = of
            for i in range(PIECES):
                piece = thread() + i * THREADS
                line, part = piece >> 3, piece & 7
                row, c = matrix + row_bytes(n_in) * min(first + line, n_out - 1), k + 8 * part
                eight = (
                    value(row, n_in, c), value(row, n_in, c + 1), value(row, n_in, c + 2),
                    value(row, n_in, c + 3), value(row, n_in, c + 4), value(row, n_in, c + 5),
                    value(row, n_in, c + 6), value(row, n_in, c + 7),
                )  # fmt: skip
                store_shared_u128(uint32(shared + place(line, part)), f16x8(eight))

        return copy_floats
    quants, bytes_f32 = quants_of(type), bytes_of(type)

    @device
    def copy_quants(shared, of, k):
        matrix, n_out, n_in, first = of
        for i in range(PIECES // 2):
            unit = thread() + i * THREADS
            line, part = unit >> 2, unit & 3
            row, c = matrix + row_bytes(n_in) * min(first + line, n_out - 1), k + 16 * part
            low = uint32(shared + place(line, 2 * part))
            high = uint32(shared + place(line, 2 * part + 1))
            if c < n_in:
                q, d, m = quants(row, c)
                store_shared_u128(low, f16x8(affine8(bytes_f32(q[0], q[1]), d, m)))
                store_shared_u128(high, f16x8(affine8(bytes_f32(q[2], q[3]), d, m)))
            else:
                zero = uint32(0), uint32(0), uint32(0), uint32(0)
                store_shared_u128(low, zero)
                store_shared_u128(high, zero)

    return copy_quants


@device
def write_slots(shared, slots, n_row, n, n_out, y):
    """Write the sums at `shared` of n_row slots, columns n on: threads take columns."""
    c = n + thread() % TILE
    if c < n_out:
        for r in range(thread() // TILE, n_row, THREADS // TILE):
            value = load_shared(uint32(shared + SUM_BYTES * r + 4 * (c - n)))
            store_f32(y + 4 * (n_out * slots[r] + c), value)


def _many(type: str) -> Launch:
    """The kernel that multiplies the data of `_ordering`: blocks stride over tiles."""
    row_bytes, multiply_rows = row_bytes_of(type), multiplying(copy_rows, _decoding(type))

    def kernel(tid, n_thread, a):
        addresses, slots = cuda.shared.array(TILE, int64), cuda.shared.array(TILE, int64)
        n_slot = load_i64(a.step + STEP.n_tok) * a.n_used
        width = padding(a.n_in)
        shared = first_slice()
        plan = a.scratch + 2 * width * row_of(n_slot, a.n_used, a.x_per_slot)
        n_m, n_n = load_i32(plan + 4 * n_slot), (a.n_out + TILE - 1) // TILE
        for i in range(tid, n_m * n_n, n_thread):
            n = TILE * quotient(i, n_m)
            tile = plan + 4 * (n_slot + 1 + TILE_INTS * remainder(i, n_m))
            matrix = a.w + row_bytes(a.n_in) * a.n_out * load_i32(tile)
            first, n_row = load_i32(tile + 4), load_i32(tile + 8)
            if thread() < TILE:
                slot = load_i32(plan + 4 * (first + min(thread(), n_row - 1)))
                slots[thread()] = slot
                addresses[thread()] = a.scratch + 2 * width * row_of(slot, a.n_used, a.x_per_slot)
            sync_block()
            left, right = (addresses, n_row), (matrix, a.n_out, a.n_in, n)
            multiply_rows(shared, left, right, width // DEPTH)
            write_slots(shared, slots, n_row, n, a.n_out, a.y)
            sync_block()  # before the next tile overwrites what is read here

    return Launch(kernel, blocks=2, shared=GEMM_SHARED, rows=MORE)


def moe_matmul(type: str) -> list[Launch]:
    """Kernels of MOE_MATMUL."""
    few = [_packing(), _few(type)] if is_quantised(type) else [_few_floats(type)]
    return [*few, _ordering(), _many(type)]
