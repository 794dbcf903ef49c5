"""GEMM of many rows: float16 weights and activations, multiplied in tiles on tensor cores.

scratch holds the weights f16 [n_out, padded] and packed the rows f16 [n_tok, padded], where padded
is n_in rounded up to a multiple of DEPTH, with zeros as padding. A block computes TILE x TILE
products; STAGES slices of DEPTH elements are in flight to shared memory. A row of a slice is 128
bytes; its 16-byte pieces are permuted by xor with the row, so that eight rows of one piece lie in
different banks.
"""

from typing import Any

from numba import cuda, float32, int64, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import WARP, WARPS, Launch, lane, sync_block, thread, warp
from tamis.jit_kernels.cuda.lang.intrinsic import (
    affine8,
    device,
    load_f32,
    load_f32x8,
    load_i64,
    store_f16,
    store_f16x8,
    store_f32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    copy_async,
    copy_commit,
    copy_wait,
    fence_async,
    load_matrices,
    load_shared,
    shared_address,
)
from tamis.jit_kernels.cuda.lang.register_tiles import (
    multiply_add,
    multiply_group,
    store_sums,
    zero_sums,
)
from tamis.jit_kernels.cuda.lang.scratch import DEPTH, padded
from tamis.jit_kernels.cuda.lang.target import current
from tamis.jit_kernels.cuda.linear.dequant import (
    bytes_of,
    element_of,
    is_quantised,
    quants_of,
    row_bytes_of,
)

TILE, STAGES = 128, 3
ROW_BYTES = 2 * DEPTH
SLICE = TILE * ROW_BYTES  # bytes of a slice of one operand
PIECES = TILE * ROW_BYTES // 16 // (WARPS * WARP)  # 16-byte pieces of a slice that a thread copies

SUM_BYTES = 4 * (TILE + 8)  # bytes of a row of sums in shared memory; rows start eight banks apart
assert TILE * SUM_BYTES <= 2 * STAGES * SLICE
GEMM_SHARED = 2 * STAGES * SLICE + 1024  # bytes: slices begin at a multiple of 1024

padding = device(padded)
store_tile, store_group = store_sums(SUM_BYTES, 4, 4), store_sums(SUM_BYTES, 1, 16)
multiply = multiply_group(DEPTH // 16)
wait_for_slice = copy_wait(STAGES - 2)


@device
def narrow_floats(row, n, to):
    """Write n float32 as float16; a warp's work."""
    whole = n // 8 * 8 if n % 4 == 0 else 0  # rows of 16-byte units
    for i in range(8 * lane(), whole, 8 * WARP):
        store_f16x8(to + 2 * i, load_f32x8(row + 4 * i))
    for i in range(whole + lane(), n, WARP):
        store_f16(to + 2 * i, load_f32(row + 4 * i))


def _narrow(type: str) -> Any:
    """The function (row, n, to) that decodes a row of weights; a warp's work."""
    if is_quantised(type):
        quants, bytes_f32 = quants_of(type), bytes_of(type)

        @device
        def narrow(row, n, to):
            for i in range(16 * lane(), n, 16 * WARP):
                q, d, m = quants(row, i)
                store_f16x8(to + 2 * i, affine8(bytes_f32(q[0], q[1]), d, m))
                store_f16x8(to + 2 * i + 16, affine8(bytes_f32(q[2], q[3]), d, m))

        return narrow
    element = element_of(type)

    @device
    def narrow_elements(row, n, to):
        for i in range(lane(), n, WARP):
            store_f16(to + 2 * i, element(row, i))

    return narrow_elements


@device
def fill(row, n, width):
    """Write zeros from element n to the end of a row of float16."""
    for i in range(n + lane(), width, WARP):
        store_f16(row + 2 * i, float32(0))


def narrowing(type: str, n_row: str) -> Launch:
    """The kernel that writes the weights to scratch: warps stride over rows."""
    narrow, row_bytes = _narrow(type), row_bytes_of(type)

    def kernel(tid, n_thread, a):
        size, width = row_bytes(a.n_in), padding(a.n_in)
        for r in range(tid * WARPS + warp(), a.n_out, n_thread * WARPS):
            narrow(a.w + size * r, a.n_in, a.scratch + 2 * width * r)
            fill(a.scratch + 2 * width * r, a.n_in, width)

    return Launch(kernel, blocks=4, rows=n_row)


@device
def place(row, piece):
    """Byte offset of a 16-byte piece of a row in a slice."""
    return row * ROW_BYTES + ((piece ^ (row & 7)) << 4)


@device
def copy_slice(shared, of, k):
    """Start the copy of DEPTH elements, from k on, of TILE rows; missing rows are zeros.

    of: the rows' address, the first of them, their number, their width.
    """
    rows, first, n_row, width = of
    for i in range(PIECES):
        piece = thread() + i * WARPS * WARP
        line, part = piece >> 3, piece & 7
        row = min(first + line, n_row - 1)
        source = rows + 2 * (width * row + k) + 16 * part
        size = 16 if first + line < n_row else 0
        copy_async(uint32(shared + place(line, part)), source, uint32(size))


@device
def multiply_slice(sums, a, b):
    """Return sums + the product of slices a and b: a warp's tile of 64 rows, 32 columns."""
    row, column = (warp() & 1) * 64, (warp() >> 1) * 32
    left, right = row + (lane() & 15), column + (lane() & 7) + ((lane() >> 4) << 3)
    for k in range(DEPTH // 16):
        piece, other = 2 * k + (lane() >> 4), 2 * k + ((lane() >> 3) & 1)
        sums = multiply_add(
            sums,
            load_matrices(uint32(a + place(left, piece))),
            load_matrices(uint32(a + place(left + 16, piece))),
            load_matrices(uint32(a + place(left + 32, piece))),
            load_matrices(uint32(a + place(left + 48, piece))),
            load_matrices(uint32(b + place(right, other))),
            load_matrices(uint32(b + place(right + 16, other))),
        )
    return sums


@device
def place_sums(sums, shared):
    """Write a warp's accumulators to the tile at `shared`."""
    row, column = (warp() & 1) * 64 + (lane() >> 2), (warp() >> 1) * 32 + 2 * (lane() & 3)
    store_tile(sums, uint32(shared + row * SUM_BYTES + 4 * column))


@device
def described(address):
    """The wgmma descriptor of a slice: 128-byte swizzle (mode 1), 1024 bytes for eight rows."""
    return ((address & 0x3FFFF) >> 4) | (1 << 16) | (64 << 32) | (1 << 62)


@device
def multiply_slice_of_group(sums, a, b):
    """As multiply_slice, of four warps: 64 rows and all columns."""
    return multiply(sums, described(a + (warp() >> 2) * 64 * ROW_BYTES), described(b))


@device
def place_sums_of_group(sums, shared):
    """Write the sums of four warps (a warpgroup) to shared memory, as place_sums does."""
    row = 16 * warp() + (lane() >> 2)
    store_group(sums, uint32(shared + row * SUM_BYTES + 8 * (lane() & 3)))


@device
def write_tile(shared, origin, size, out):
    """Write the sums at `shared` that lie within y: threads take columns."""
    (m, n), (n_tok, n_out), (y, y_stride, bias, add) = origin, size, out
    c = n + thread() % TILE
    if c >= n_out:
        return
    start = load_f32(bias + 4 * c) if bias != 0 else float32(0)
    for r in range(thread() // TILE, min(TILE, n_tok - m), WARPS * WARP // TILE):
        value = start + load_shared(uint32(shared + SUM_BYTES * r + 4 * (c - n)))
        to = y + 4 * (y_stride * (m + r) + c)
        store_f32(to, value + load_f32(to) if add else value)


def multiplying(copy_left: Any, copy_right: Any) -> Any:
    """The function (shared, left, right, slices) that computes a tile's sums into `shared`.

    copy(shared, of, k) starts to fetch the DEPTH elements from k on of TILE rows of `of`.
    """
    groups = current().has_warpgroups
    multiply_tile = multiply_slice_of_group if groups else multiply_slice
    place_tile = place_sums_of_group if groups else place_sums

    @device
    def multiply_rows(shared, left, right, n_slice):
        sums = zero_sums()
        for s in range(STAGES - 1):
            if s < n_slice:
                copy_left(shared + 2 * s * SLICE, left, s * DEPTH)
                copy_right(shared + (2 * s + 1) * SLICE, right, s * DEPTH)
            copy_commit()
        for s in range(n_slice):
            wait_for_slice()
            if groups:
                fence_async()
            sync_block()
            ahead = s + STAGES - 1
            if ahead < n_slice:
                to = shared + 2 * (ahead % STAGES) * SLICE
                copy_left(to, left, ahead * DEPTH)
                copy_right(to + SLICE, right, ahead * DEPTH)
            copy_commit()
            at = shared + 2 * (s % STAGES) * SLICE
            sums = multiply_tile(sums, at, at + SLICE)
        sync_block()
        place_tile(sums, shared)
        sync_block()

    return multiply_rows


@device
def first_slice():
    """The shared-memory offset of the slices, a multiple of 1024 as the swizzle demands."""
    return (int64(shared_address(cuda.shared.array(0, uint8))) + 1023) & ~1023


def gemm(n_row: str) -> Launch:
    """The kernel that multiplies packed and scratch: blocks stride over tiles."""
    multiply_rows = multiplying(copy_slice, copy_slice)

    def kernel(tid, n_thread, a):
        n_tok, width, shared = load_i64(a.step + STEP.n_tok), padding(a.n_in), first_slice()
        n_m, n_n = (n_tok + TILE - 1) // TILE, (a.n_out + TILE - 1) // TILE
        for tile in range(tid, n_m * n_n, n_thread):
            m, n = TILE * (tile % n_m), TILE * (tile // n_m)
            left, right = (a.packed, m, n_tok, width), (a.scratch, n, a.n_out, width)
            multiply_rows(shared, left, right, width // DEPTH)
            write_tile(shared, (m, n), (n_tok, a.n_out), (a.y, a.y_stride, a.bias, a.add))
            sync_block()  # before the next tile's copies overwrite what is read here

    return Launch(kernel, blocks=2, shared=GEMM_SHARED, rows=n_row)
