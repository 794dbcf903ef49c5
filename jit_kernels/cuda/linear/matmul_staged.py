"""Products of some rows with matrices that fit whole into the blocks' shared memory.

A block's rows of weights are copied there in bulk while the kernel before is still running. Rows of
x are normed if asked, converted to float16 beside them, and multiplied on tensor cores as in
matmul_some.py. Such products take little more than a launch, and save the one that packs the rows.
Only for GPUs that copy in bulk (sm_90), and if fusion.py finds that all of it fits. Registers allow
one block per multiprocessor: if two fit, the next launch's blocks come in pairs, and a step of 16
rows took half as long again.
"""

import math
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint8, uint32

from tamis.jit_kernels.cuda.lang.grid import (
    WARP,
    Launch,
    lane,
    step_of,
    sync_block,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    affine8,
    device,
    f16x8,
    load_f32x8,
    load_u128,
    quotient,
    remainder,
    store_f16,
    store_f32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    barrier_ended,
    barrier_expect,
    barrier_init,
    barrier_shown,
    copy_bulk,
    load_shared_u128,
    shared_address,
    store_shared_u128,
)
from tamis.jit_kernels.cuda.lang.scratch import (
    SOME_AT_ONCE,
    STAGED_HEAD,
    STAGED_ROOM,
    STAGED_ROWS,
    STAGED_WARPS,
    staged_width,
)
from tamis.jit_kernels.cuda.linear.activation import gelu, silu
from tamis.jit_kernels.cuda.linear.dequant import bytes_of, row_bytes_of, shared_quants_of
from tamis.jit_kernels.cuda.linear.gemm import padding
from tamis.jit_kernels.cuda.linear.gemv_epilogue import chosen, of_gates, of_three
from tamis.jit_kernels.cuda.linear.matmul_few import before_of
from tamis.jit_kernels.cuda.linear.matmul_some import add
from tamis.jit_kernels.cuda.linear.pack import squares_of

THREADS = WARP * STAGED_WARPS
UNIT = 64  # elements of a row of weights that a warp multiplies at a time, 16 a lane
SUMS = STAGED_ROWS * SOME_AT_ONCE
PIECE = 8 * WARP  # elements of a row that a warp reads at a time

stride_of = device(staged_width)


class Rows(NamedTuple):
    """The differences between ops: the rows, and the epilogue of their products."""

    n_group: int  # neighbouring tiles whose products belong together
    address: Any  # (weights, bytes of a row, row) -> its address
    ahead: Any  # (to, row, row of x): data that is read before the product is there
    put: Any  # (to, row, row of x, product, that of the next tile, what `ahead` read)


@device
def x_of(packed, width, n_tok, first, at):
    """A lane's 16 elements of row first + lane / 4 of x; the last row if there is none."""
    row = packed + 2 * (width * min(first + quotient(lane(), 4), n_tok - 1) + at)
    return load_u128(row), load_u128(row + 16)


@device
def put_sums(sums, parts, column):
    """Write the sums of a lane's two rows of weights and two of x."""
    g, t = quotient(lane(), 4), column + 2 * remainder(lane(), 4)
    parts[warp(), STAGED_ROWS * t + g] = sums[0]
    parts[warp(), STAGED_ROWS * (t + 1) + g] = sums[1]
    parts[warp(), STAGED_ROWS * t + g + 8] = sums[2]
    parts[warp(), STAGED_ROWS * (t + 1) + g + 8] = sums[3]


@device
def tiles_of(tid, n_thread, n_row, n_group):
    """A block's first tile, STAGED_ROWS rows of weights, and its number of tiles: whole groups."""
    n = quotient(n_row, STAGED_ROWS * n_group)
    first = quotient(n * tid, n_thread)
    return n_group * first, n_group * (quotient(n * (tid + 1), n_thread) - first)


@device
def warps_of(n_tile):
    """How many warps share a tile: a power of two."""
    n = 1
    while n < n_tile:
        n = 2 * n
    return quotient(STAGED_WARPS, n)


@device
def eight(row, i, n):
    """Elements i .. i + 7 of a row of n; the first ones if i is out of range."""
    return load_f32x8(row + 4 * (i if i < n else 0))


def _staging(source: str) -> Any:
    """The function that leaves a row as float16 in shared memory, zeros from n on; a warp's."""
    is_norm = source == "norm"

    @device
    def scale_of(row, n, eps):
        squares = float32(0)
        for i in range(8 * lane(), n, 4 * PIECE):  # four loads are in flight
            a, b = eight(row, i, n), eight(row, i + PIECE, n)
            c, d = eight(row, i + 2 * PIECE, n), eight(row, i + 3 * PIECE, n)
            squares += squares_of(a)
            squares += squares_of(b) if i + PIECE < n else float32(0)
            squares += squares_of(c) if i + 2 * PIECE < n else float32(0)
            squares += squares_of(d) if i + 3 * PIECE < n else float32(0)
        return float32(1) / math.sqrt(warp_sum(squares) / float32(n) + eps)

    @device
    def weighted(x, w, scale):
        return (
            x[0] * scale * w[0], x[1] * scale * w[1], x[2] * scale * w[2], x[3] * scale * w[3],
            x[4] * scale * w[4], x[5] * scale * w[5], x[6] * scale * w[6], x[7] * scale * w[7],
        )  # fmt: skip

    @device
    def stage(row, other, n, eps, to):
        scale = scale_of(row, n, eps) if is_norm else float32(1)
        for i in range(8 * lane(), padding(n), PIECE):
            x = eight(row, i, n)
            if is_norm:
                x = weighted(x, eight(other, i, n), scale)
            words = f16x8(x)
            live = uint32(0xFFFFFFFF if i < n else 0)
            store_shared_u128(
                uint32(to + 2 * i),
                (words[0] & live, words[1] & live, words[2] & live, words[3] & live),
            )

    return stage


def _unpacking(type: str) -> Any:
    """The function (row in shared memory, i, n): elements i .. i + 15 as float16, 0 from n on."""
    quants, bytes_f32 = shared_quants_of(type), bytes_of(type)

    @device
    def unpacked(row, i, n):
        q, d, m = quants(row, i if i < n else 0)
        d, m = (float32(d) if i < n else float32(0)), (float32(m) if i < n else float32(0))
        one = f16x8(affine8(bytes_f32(uint32(q[0]), uint32(q[1])), d, m))
        other = f16x8(affine8(bytes_f32(uint32(q[2]), uint32(q[3])), d, m))
        return one[0], one[1], one[2], one[3], other[0], other[1], other[2], other[3]

    return unpacked


@device
def staged_x(rows, stride, at):
    """A lane's 16 elements of the row lane / 4 of those in shared memory."""
    row = rows + stride * quotient(lane(), 4) + 2 * at
    return load_shared_u128(uint32(row)), load_shared_u128(uint32(row + 16))


def _multiplying(type: str, source: str) -> Any:
    """The function that gives a warp's sums of every n_part-th unit of a tile."""
    unpacked, is_packed = _unpacking(type), source == "packed"

    @device
    def multiply(tile, size, x, n_in, rows, share):
        """The sums; x: packed rows, or those in shared memory.

        rows: how many, the first, the last one.
        """
        (part, n_part), (n_tok, first, more_rows), zero = share, rows, float32(0)
        one, width, stride = tile + size * quotient(lane(), 4), padding(n_in), stride_of(n_in)
        sums, more = (zero, zero, zero, zero), (zero, zero, zero, zero)
        i = UNIT * part + 16 * remainder(lane(), 4)
        while i < width:
            if is_packed:
                a = x_of(x, width, n_tok, first, i)
                b = x_of(x, width, n_tok, first + 8, i) if more_rows else a
            else:
                a = staged_x(x, stride, i)
                b = staged_x(x + 8 * stride, stride, i) if more_rows else a
            w, v = unpacked(one, i, n_in), unpacked(one + 8 * size, i, n_in)
            sums = add(sums, w, v, a)
            if more_rows:
                more = add(more, w, v, b)
            i += UNIT * n_part
        return sums, more

    return multiply


def _running(type: str, source: str, which: Rows) -> tuple[Any, Any]:
    """The functions start (prologue) and run, for the rows and epilogue of `which`."""
    n_group, address, ahead_of, put = which
    row_bytes, multiply = row_bytes_of(type), _multiplying(type, source)
    stage, is_packed = _staging(source), source == "packed"

    @device
    def start(tid, n_thread, weights, n_in, n_row):
        """The prologue: starts the copy of all of a block's weights."""
        first, n_tile = tiles_of(tid, n_thread, n_row, n_group)
        shared, n_byte = int64(shared_address(cuda.shared.array(0, uint8))), row_bytes(n_in)
        if thread() == 0 and n_tile > 0:
            barrier_init(uint32(shared), uint32(1))
            barrier_shown()
            barrier_expect(uint32(shared), uint32(STAGED_ROWS * n_byte * n_tile))
            to = shared + STAGED_HEAD
            for i in range(n_tile):
                at = address(weights, n_byte, STAGED_ROWS * (first + i))
                copy_bulk(uint32(to), at, uint32(STAGED_ROWS * n_byte), uint32(shared))
                to += STAGED_ROWS * n_byte
        return first, n_tile

    @device
    def run(step, x, n_in, to, tiles):
        parts = cuda.shared.array((STAGED_WARPS, SUMS), float32)
        shared, size = int64(shared_address(cuda.shared.array(0, uint8))), row_bytes(n_in)
        (n_tok, _, _), (first_tile, n_tile), (rows, other, eps) = step_of(step), tiles, x
        if n_tile == 0:
            return
        n_part, tile_bytes, stride = warps_of(n_tile), STAGED_ROWS * size, stride_of(n_in)
        part, slot = remainder(warp(), n_part), quotient(warp(), n_part)
        own, n_own = shared + STAGED_HEAD, quotient(n_tile, n_group) * STAGED_ROWS
        staged, first_row = own + tile_bytes * n_tile, quotient(STAGED_ROWS * first_tile, n_group)
        for first in range(0, n_tok, SOME_AT_ONCE):
            n = min(SOME_AT_ONCE, n_tok - first)
            r, t = remainder(thread(), n_own), quotient(thread(), n_own)
            before = ahead_of(to, first_row + r, first + min(t, n - 1))  # in flight meanwhile
            if not is_packed and warp() < n:
                row = rows + 4 * n_in * (first + warp())
                stage(row, other, n_in, eps, staged + stride * warp())
            sync_block()
            while barrier_ended(uint32(shared), uint32(0)) == 0:
                pass
            if slot < n_tile:
                sums, more = multiply(
                    own + tile_bytes * slot, size, rows if is_packed else staged, n_in,
                    (n_tok, first, n > 8), (part, n_part),
                )  # fmt: skip
                put_sums(sums, parts, 0)
                put_sums(more, parts, 8)
            sync_block()
            for j in range(thread(), n_own * n, THREADS):
                r, t = remainder(j, n_own), quotient(j, n_own)
                if j >= THREADS:
                    before = ahead_of(to, first_row + r, first + t)
                base = n_group * quotient(r, STAGED_ROWS) * n_part
                mine = STAGED_ROWS * t + r % STAGED_ROWS
                value, beside = float32(0), float32(0)
                for p in range(n_part):
                    value += parts[base + p, mine]
                    if n_group > 1:
                        beside += parts[base + n_part + p, mine]
                put(to, first_row + r, first + t, value, beside, before)
            sync_block()  # before the next sums overwrite what is read here

    return start, run


def _launch(kernel: Any, start: Any) -> list[Launch]:
    return [Launch(kernel, 1, STAGED_ROOM, THREADS, "some", start, hands_on=True)]


@device
def sum_before(to, row, t):
    """The value that a product of STAGED_PRODUCTS is added to."""
    ys, biases, (n, n2, n3), adds = to
    y, i = chosen(ys, row, n, n2)
    bias, _ = chosen(biases, row, n, n2)
    width, _ = chosen((n, n2, n3), row, n, n2)
    return before_of(y + 4 * (width * t + i), bias, adds, i)


@device
def put_row(to, row, t, value, beside, before):
    """Write a product of STAGED_PRODUCTS."""
    ys, _, (n, n2, n3), _ = to
    y, i = chosen(ys, row, n, n2)
    width, _ = chosen((n, n2, n3), row, n, n2)
    store_f32(y + 4 * (width * t + i), before + value)


def staged_products(type: str, source: str) -> list[Launch]:
    """Kernel of STAGED_PRODUCTS."""
    begin, run = _running(type, source, Rows(1, of_three, sum_before, put_row))

    def start(tid, n_thread, a):
        weights = a.w, a.w2, a.w3, a.n, a.n2
        return begin(tid, n_thread, weights, a.n_in, a.n + a.n2 + a.n3)

    def kernel(tid, n_thread, a, tiles):
        to = (a.y, a.y2, a.y3), (a.bias, a.bias2, a.bias3), (a.n, a.n2, a.n3), a.add
        run(a.step, (a.x, a.other, a.eps), a.n_in, to, tiles)

    return _launch(kernel, start)


@device
def nothing_before(to, row, t):
    """Zero: a gate is not added to anything."""
    return float32(0)


def staged_gate(type: str, activation: str, source: str) -> list[Launch]:
    """Kernel of STAGED_GATE."""
    function = {"silu": silu, "gelu": gelu}[activation]

    @device
    def put(to, row, t, gate, up, before):
        n, packed = to
        store_f16(packed + 2 * (n * t + row), function(gate) * up)

    begin, run = _running(type, source, Rows(2, of_gates, nothing_before, put))

    def start(tid, n_thread, a):
        return begin(tid, n_thread, (a.w, a.w2), a.n_in, 2 * a.n)

    def kernel(tid, n_thread, a, tiles):
        run(a.step, (a.x, a.other, a.eps), a.n_in, (a.n, a.to), tiles)

    return _launch(kernel, start)
