"""Products of some rows with quantised weights on tensor cores: each weight is read once.

PACK_ROWS leaves x as float16, as for many rows (see gemm.py). A warp has 16 rows of weights and
unpacks 64 elements of each, 16 a lane, to float16 in its registers: they are the matrix unit's left
side, up to 16 rows of x its right side. The order of a sum is arbitrary, so elements stay in the
lane that has unpacked them. If there are fewer rows of weights than warps, several warps share the
elements of 16 of them, and add their sums in shared memory. The first weights of a warp are in
flight while the kernel before is still running.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint32

from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARPS,
    Launch,
    lane,
    step_of,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    affine8,
    device,
    f16x8,
    load_u128,
    quotient,
    remainder,
)
from tamis.jit_kernels.cuda.lang.ptx import keep_f32, keep_u32, mma_f16
from tamis.jit_kernels.cuda.linear.dequant import bytes_of, quants_of, row_bytes_of
from tamis.jit_kernels.cuda.linear.gemm import padding

ROWS = 16  # of weights that a warp multiplies at a time
UNIT = 64  # elements of each of them
AT_ONCE = 16  # rows of x
SUMS = ROWS * AT_ONCE
BLOCKS = 2  # a multiprocessor's


class Rows(NamedTuple):
    """The differences between ops: the rows, and the epilogue of their products."""

    n_tile: int  # neighbouring ROWS whose products belong together
    address: Any  # (weights, bytes of a row, row) -> its address
    put: Any  # (to, row, row of x, product, that of the next ROWS); row: of every n_tile-th ROWS


@device
def sharing_of(n_tile, n_thread, most):
    """How many warps share the elements of ROWS rows of weights: a power of two."""
    n = int32(1)
    while n < most and 2 * n * n_tile <= n_thread * WARPS:
        n = int32(2 * n)
    return n


@device
def x_of(packed, width, n_tok, first, at):
    """A lane's 16 elements of row first + lane / 4 of x; the last row if there is none."""
    row = packed + 2 * (width * min(first + quotient(lane(), 4), n_tok - 1) + at)
    one, other = load_u128(row), load_u128(row + 16)
    return one[0], one[1], one[2], one[3], other[0], other[1], other[2], other[3]


@device
def add(sums, one, other, x):
    """The sums plus the products of 64 elements: of rows g and g + 8 of weights, and of x."""
    sums = mma_f16((one[0], other[0], one[1], other[1]), (x[0], x[1]), sums)
    sums = mma_f16((one[2], other[2], one[3], other[3]), (x[2], x[3]), sums)
    sums = mma_f16((one[4], other[4], one[5], other[5]), (x[4], x[5]), sums)
    return mma_f16((one[6], other[6], one[7], other[7]), (x[6], x[7]), sums)


@device
def put_sums(sums, parts, column):
    """Write the sums of a lane's two rows of weights and two of x."""
    g, t = quotient(lane(), 4), column + 2 * remainder(lane(), 4)
    parts[warp(), ROWS * t + g] = sums[0]
    parts[warp(), ROWS * (t + 1) + g] = sums[1]
    parts[warp(), ROWS * t + g + 8] = sums[2]
    parts[warp(), ROWS * (t + 1) + g + 8] = sums[3]


@device
def kept(looked):
    """The argument; the read happens here and is not moved later."""
    q, d, m = looked
    return (
        (keep_u32(q[0]), keep_u32(q[1]), keep_u32(q[2]), keep_u32(q[3])),
        keep_f32(d),
        keep_f32(m),
    )


def _unpacking(type: str) -> tuple[Any, Any]:
    """The functions look, which starts to read a lane's 16 elements, and unpacked, of those."""
    quants, bytes_f32 = quants_of(type), bytes_of(type)

    @device
    def look(row, i, n):
        """Elements i .. i + 15 of a row; zeros from n on."""
        q, d, m = quants(row, i if i < n else 0)
        four = uint32(q[0]), uint32(q[1]), uint32(q[2]), uint32(q[3])
        return four, (float32(d) if i < n else float32(0)), (float32(m) if i < n else float32(0))

    @device
    def unpacked(looked):
        q, d, m = looked
        one = f16x8(affine8(bytes_f32(q[0], q[1]), d, m))
        other = f16x8(affine8(bytes_f32(q[2], q[3]), d, m))
        return one[0], one[1], one[2], one[3], other[0], other[1], other[2], other[3]

    return look, unpacked


def running(type: str, which: Rows) -> tuple[Any, Any]:
    """The functions start (prologue) and run, for the rows and epilogue of `which`."""
    row_bytes, (look, unpacked) = row_bytes_of(type), _unpacking(type)
    n_group, address, put = which

    @device
    def sides(tile, weights, size):
        """The addresses of a lane's two rows of weights."""
        row = ROWS * tile + quotient(lane(), 4)
        return address(weights, size, row), address(weights, size, row + 8)

    @device
    def multiply(x, n_in, rows, share, looked):
        """A warp's sums of every share[1]-th unit of ROWS rows of weights."""
        (packed, n_tok, first), (one_row, other_row), (part, n_part) = x, rows, share
        width, zero, (one, other) = padding(n_in), float32(0), looked
        sums, more = (zero, zero, zero, zero), (zero, zero, zero, zero)
        i = UNIT * part + 16 * remainder(lane(), 4)
        while i < width:
            ahead = i + UNIT * n_part
            next_one, next_other = look(one_row, ahead, n_in), look(other_row, ahead, n_in)
            w, v = unpacked(one), unpacked(other)
            sums = add(sums, w, v, x_of(packed, width, n_tok, first, i))
            if n_tok - first > 8:
                more = add(more, w, v, x_of(packed, width, n_tok, first + 8, i))
            i, one, other = ahead, next_one, next_other
        return sums, more

    @device
    def begin(tid, n_thread, weights, n_in, n_row):
        """The prologue: starts to read a warp's first weights."""
        n_tile, size = quotient(n_row + ROWS - 1, ROWS), row_bytes(n_in)
        n_part = sharing_of(n_tile, n_thread, WARPS // n_group)
        part = remainder(warp(), n_part)
        tile = tid * quotient(WARPS, n_part) + quotient(warp(), n_part)
        one_row, other_row = sides(min(tile, n_tile - 1), weights, size)
        i = UNIT * part + 16 * remainder(lane(), 4)
        return kept(look(one_row, i, n_in)), kept(look(other_row, i, n_in))

    @device
    def run(tid, n_thread, step, x, of, to, looked):
        parts, (packed, n_in), (weights, n_row) = cuda.shared.array((WARPS, SUMS), float32), x, of
        n_tok, _, _ = step_of(step)
        n_tile, size = quotient(n_row + ROWS - 1, ROWS), row_bytes(n_in)
        n_part = sharing_of(n_tile, n_thread, WARPS // n_group)
        at_once = quotient(WARPS, n_part)  # tiles of a block
        part, number = remainder(warp(), n_part), quotient(warp(), n_part)
        i = UNIT * part + 16 * remainder(lane(), 4)
        for first in range(0, n_tok, AT_ONCE):
            n = min(AT_ONCE, n_tok - first)
            for tile in range(tid * at_once, n_tile, n_thread * at_once):
                rows = sides(min(tile + number, n_tile - 1), weights, size)
                if first > 0 or tile > tid * at_once:
                    looked = look(rows[0], i, n_in), look(rows[1], i, n_in)
                sums, more = multiply((packed, n_tok, first), n_in, rows, (part, n_part), looked)
                put_sums(sums, parts, 0)
                put_sums(more, parts, 8)
                sync_block()
                n_own = quotient(at_once, n_group) * ROWS
                for j in range(thread(), n_own * n, THREADS):
                    t, r = quotient(j, n_own), remainder(j, n_own)
                    base, mine = n_group * quotient(r, ROWS) * n_part, ROWS * t + r % ROWS
                    value, other = float32(0), float32(0)
                    for p in range(n_part):
                        value += parts[base + p, mine]
                        if n_group > 1:
                            other += parts[base + n_part + p, mine]
                    row = quotient(ROWS * tile, n_group) + r
                    if n_group * row < n_row:
                        put(to, row, first + t, value, other)
                sync_block()  # before the next sums overwrite what is read here

    return begin, run


def launched(kernel: Any, start: Any) -> Launch:
    """The kernel for more than FEW_ROWS and at most SOME_ROWS rows."""
    return Launch(kernel, blocks=BLOCKS, rows="some", start=start, hands_on=True)
