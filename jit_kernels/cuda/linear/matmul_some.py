"""Products of some rows with quantised weights on tensor cores: each weight is read once.

PACK_ROWS leaves x as float16, as for many rows (see gemm.py). Blocks share all chunks of all tiles
evenly: a tile is rows of weights, a chunk some of their elements. Both the weights' bytes and x
are copied to shared memory some chunks ahead. A warp has 32 rows of weights and unpacks 128
elements of each to float16 in its registers: they are the matrix unit's left side, up to MOST rows
of x its right side. The order of a sum is arbitrary, so elements stay in the lane that has unpacked
them. Several warps share a chunk of the same rows. The blocks of a tile that several of them have
parts of leave their sums in scratch; the last one adds them, in the order of blocks. The first
weights are in flight while the kernel before is still running.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int64, uint8, uint32

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.lang.grid import (
    WARP,
    Launch,
    is_last,
    lane,
    step_of,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32x8,
    pack_f16,
    quotient,
    remainder,
    store_f32x8,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    bytes_f16,
    copy_async,
    copy_commit,
    copy_wait,
    load_shared,
    load_shared_f32x8,
    load_shared_i32,
    load_shared_u128,
    mma_f16,
    shared_address,
    signed_bytes_f16,
    store_shared_f32,
    store_shared_f32x8,
    store_shared_i32,
)
from tamis.jit_kernels.cuda.lang.scratch import COUNTERS, SOME_MOST, some_tile
from tamis.jit_kernels.cuda.lang.target import current
from tamis.jit_kernels.cuda.linear.dequant import halves_of, is_signed, row_bytes_of
from tamis.jit_kernels.cuda.linear.gemm import padding

SIDE = 32  # rows of weights of a warp
UNIT = 16  # neighbouring rows whose products may belong together
COPIED = 16  # bytes of a copy
ROOM = 224 << 10  # bytes of shared memory of a block on sm_90
LESS_ROOM = 97 << 10  # on any other GPU
FOUR = "Q4_K"  # its second units are 16 times their numbers

wait_for_all, wait_for_one, wait_for_two = copy_wait(0), copy_wait(1), copy_wait(2)


class Rows(NamedTuple):
    """The differences between ops: the rows, and the epilogue of their products."""

    n_group: int  # neighbouring UNIT rows whose products belong together
    address: Any  # (weights, bytes of a row, row) -> its address
    put: Any  # (to, row, row of x, product, that of the next UNIT): row of every n_group-th UNIT


class Tile(NamedTuple):
    """Sizes of the blocks of a type: rows of weights, rows of x, bytes of shared memory.

    parts: warps that share a chunk of rows; part: bytes of a row in a chunk; row: of its place in a
    stage, where it may begin at any byte of the first sixteen unless it is aligned.
    """

    rows: int
    most: int
    parts: int
    part: int
    row: int
    aligned: bool
    room: int

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return 128 * self.parts

    @property
    def x_row(self) -> int:
        """Bytes of a row of x in a stage."""
        return 2 * self.chunk

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.parts * self.rows // SIDE

    @property
    def sum_row(self) -> int:
        """Bytes of a row of sums: those of two rows begin eight banks apart."""
        return 4 * (self.rows + 8)

    @property
    def stages(self) -> int:
        """Bytes before the first stage: of the sums."""
        return self.most * self.sum_row

    @property
    def weights(self) -> int:
        """Bytes of a stage's weights, and of how many bytes each row's begin late."""
        return self.rows * (self.row + (0 if self.aligned else 4))


def tile_of(type: str) -> Tile:
    """The sizes of a type's tiles."""
    kind, big = GGMLType[type], current().overlaps
    parts, aligned = 4 if big else 2, kind.type_size % COPIED == 0
    part = 128 * parts // kind.block_size * kind.type_size
    pieces = -(-part // COPIED) if aligned else (part + 30) // COPIED
    # Lanes read 16 bytes of two rows at a time, or words of eight rows.
    while pieces % 8 != 4 if aligned else pieces % 2 == 0:
        pieces += 1
    room = ROOM if big else LESS_ROOM
    rows, most = some_tile(big=big), SOME_MOST
    found = Tile(rows, most, parts, part, COPIED * pieces, aligned, room)
    assert found.stages + 2 * (found.weights + most * found.x_row) <= room
    return found


# ---- a warp's products ---------------------------------------------------------------------------
@device
def add(sums, one, other, x):
    """The sums plus the products of 64 elements: of rows g and g + 8 of weights, and of x."""
    low, high = x
    sums = mma_f16((one[0], other[0], one[1], other[1]), (low[0], low[1]), sums)
    sums = mma_f16((one[2], other[2], one[3], other[3]), (low[2], low[3]), sums)
    sums = mma_f16((one[4], other[4], one[5], other[5]), (high[0], high[1]), sums)
    return mma_f16((one[6], other[6], one[7], other[7]), (high[2], high[3]), sums)


@device
def add_both(sums, first, second, x):
    """The sums of both halves of a warp's rows and of eight rows of x."""
    return add(sums[0], first[0], first[1], x), add(sums[1], second[0], second[1], x)


def _adding(x_row: int) -> Any:
    """The function (sums, first, second, x, n) that adds the products of n rows of x."""

    @device
    def eight_rows(x, n):
        """A lane's elements of the row n after the one whose two addresses are x."""
        one, other = x[0] + x_row * n, x[1] + x_row * n
        return load_shared_u128(uint32(one)), load_shared_u128(uint32(other))

    @device
    def add_all(sums, first, second, x, n):
        """No branch between rows of x, so that their products are in flight together."""
        a, b, c, d = sums
        if n <= 8:
            return add_both(a, first, second, eight_rows(x, 0)), b, c, d
        one, two = eight_rows(x, 0), eight_rows(x, 8)
        if n <= 16:
            return add_both(a, first, second, one), add_both(b, first, second, two), c, d
        three, four = eight_rows(x, 16), eight_rows(x, 24)
        return (
            add_both(a, first, second, one), add_both(b, first, second, two),
            add_both(c, first, second, three), add_both(d, first, second, four),
        )  # fmt: skip

    return add_all


@device
def zeros():
    """The sums of no products."""
    zero = float32(0)
    none = (zero, zero, zero, zero)
    two = (none, none)
    return two, two, two, two


def _unpacking(type: str) -> tuple[Any, Any]:
    """The functions (unit, whether it exists) -> its 16 elements as float16, of halves' two."""
    as_f16 = signed_bytes_f16 if is_signed(type) else bytes_f16

    bias = 1152 if is_signed(type) else 1024  # of a byte that is the last of a float16

    def unpacking(factor: float) -> Any:
        """The function for numbers that are `factor` times a unit's."""
        times, less = _two_f16(factor), _two_f16(-bias * factor)

        @device
        def unpacked(unit, live):
            q, d, m = unit
            scale, offset = float32(d) / float32(factor), float32(m)
            if not live:
                scale, offset = float32(0), float32(0)
            four = uint32(q[0]), uint32(q[1]), uint32(q[2]), uint32(q[3])
            scales, offsets = pack_f16(scale, scale), pack_f16(offset, offset)
            return as_f16(four, uint32(times), uint32(less), scales, offsets)

        return unpacked

    return unpacking(1), unpacking(1 / 16 if type == FOUR else 1)


def _two_f16(value: float) -> int:
    """Twice the bits of a float16."""
    return int(np.array([value, value], np.float16).view(np.uint32)[0])


def _multiplying(type: str, tile: Tile) -> tuple[Any, Any]:
    """The functions x_of, where a lane's elements of x are in a stage, and multiply."""
    halves, (near_f16, far_f16) = halves_of(type), _unpacking(type)
    row_size, rows, aligned, weights = tile.row, tile.rows, tile.aligned, tile.weights
    parts, x_row, add_all = tile.parts, tile.x_row, _adding(tile.x_row)
    whole = GGMLType[type].block_size % tile.chunk == 0

    @device
    def unit_of():
        """A lane's unit of a chunk."""
        return 4 * remainder(warp(), parts) + lane() % 4

    @device
    def swizzled(i):
        """The offset of elements i .. i + 7 of the row lane / 4 of x."""
        piece, row = i >> 3, lane() >> 2
        return x_row * row + 16 * (piece ^ ((piece >> 3) & 1) ^ (7 * (row & 1)))

    @device
    def x_of():
        one, other = halves(0, unit_of())[0]  # nothing is read
        return (
            (weights + swizzled(one), weights + swizzled(one + 8)),
            (weights + swizzled(other), weights + swizzled(other + 8)),
        )

    @device
    def begins(stage, row):
        late = 0 if aligned else int64(load_shared_i32(uint32(stage + row_size * rows + 4 * row)))
        return stage + row_size * row + late

    @device
    def multiply(sums, stage, x, left, n):
        """The sums plus a warp's products of a chunk; left: the row's elements from there on."""
        row, u = SIDE * quotient(warp(), parts) + (lane() >> 2), unit_of()
        live = whole or 32 * u < left
        a, b = halves(begins(stage, row), u), halves(begins(stage, row + 8), u)
        c, d = halves(begins(stage, row + 16), u), halves(begins(stage, row + 24), u)
        near, far = x
        first = near_f16(a[1], live), near_f16(b[1], live)
        second = near_f16(c[1], live), near_f16(d[1], live)
        sums = add_all(sums, first, second, (stage + near[0], stage + near[1]), n)
        first = far_f16(a[2], live), far_f16(b[2], live)
        second = far_f16(c[2], live), far_f16(d[2], live)
        return add_all(sums, first, second, (stage + far[0], stage + far[1]), n)

    return x_of, multiply


# ---- copies to shared memory ---------------------------------------------------------------------
def _copying(tile: Tile) -> tuple[Any, Any]:
    """The functions that start a thread's copies of a chunk: of weights and of x."""
    rows, _, _, part, row_size, aligned, _ = tile
    x_row = tile.x_row
    n_thread, weights = tile.threads, tile.weights
    each = n_thread // rows  # threads of a row of weights
    n_turn = -(-row_size // COPIED // each)
    across = x_row // COPIED  # threads of a row of x
    down = n_thread // across

    @device
    def copy_weights(stage, at, left):
        """The part of a thread's row at `at`; left: the row's bytes from there on."""
        row, nth = quotient(thread(), each), remainder(thread(), each)
        late = 0 if aligned else at & 15
        first, to = at - late, stage + row_size * row
        n = min(part, left) + late
        for i in range(n_turn):
            p = COPIED * (each * i + nth)
            if p < n:
                copy_async(uint32(to + p), first + p, uint32(min(int64(COPIED), n - p)))
        if nth == 0 and not aligned:
            store_shared_i32(uint32(stage + row_size * rows + 4 * row), late)

    @device
    def copy_x(stage, packed, width, k, n):
        """Elements from k on of n rows; zeros after the last one."""
        row, piece = quotient(thread(), across), remainder(thread(), across)
        place = piece ^ ((piece >> 3) & 1) ^ (7 * (row & 1))  # other rows of a thread: `down` apart
        to, at = stage + weights + COPIED * place, k + 8 * piece
        size = uint32(COPIED if at < width else 0)
        source = packed + 2 * (width * row + (at if at < width else 0))
        while row < n:
            copy_async(uint32(to + x_row * row), source, size)
            row, source = row + down, source + 2 * width * down

    return copy_weights, copy_x


@device
def work_of(tid, n_thread, n_chunk, n_row, rows):
    """A block's share: first chunk, last; chunks of all tiles; blocks that have any.

    n_chunk: of a row.
    """
    n_all = n_chunk * quotient(n_row + rows - 1, rows)
    n_block = min(int64(n_thread), n_all)
    if tid >= n_block:
        return n_all, n_all, n_all, n_block
    first, last = quotient(n_all * tid, n_block), quotient(n_all * (tid + 1), n_block)
    return first, last, n_all, n_block


@device
def block_of(chunk, n_all, n_block):
    """The block whose share a chunk is in."""
    return quotient((chunk + 1) * n_block - 1, n_all)


@device
def wait_for(n_stage):
    """Wait for the oldest of n_stage - 1 groups of copies."""
    if n_stage == 4:
        wait_for_two()
    elif n_stage == 3:
        wait_for_one()
    else:
        wait_for_all()


# ---- the end of a tile ---------------------------------------------------------------------------
def _collecting(tile: Tile) -> Any:
    """The function (shared, sums, n) that adds all warps' sums of n rows of x in shared memory."""
    parts, sum_row = tile.parts, tile.sum_row

    @device
    def place(at, value, later):
        store_shared_f32(uint32(at), load_shared(uint32(at)) + value if later else value)

    @device
    def place_two(at, sums, later):
        """The sums of 16 rows of weights and 8 of x."""
        place(at, sums[0], later)
        place(at + sum_row, sums[1], later)
        place(at + 32, sums[2], later)
        place(at + sum_row + 32, sums[3], later)

    @device
    def place_both(at, sums, live, later):
        if live:
            place_two(at, sums[0], later)
            place_two(at + 64, sums[1], later)

    @device
    def place_four(at, sums, n, later):
        place_both(at, sums[0], n > 0, later)
        place_both(at + 8 * sum_row, sums[1], n > 8, later)
        place_both(at + 16 * sum_row, sums[2], n > 16, later)
        place_both(at + 24 * sum_row, sums[3], n > 24, later)

    @device
    def collect(shared, sums, n):
        row, t = SIDE * quotient(warp(), parts) + (lane() >> 2), 2 * (lane() & 3)
        at = shared + sum_row * t + 4 * row
        for part in range(parts):
            if remainder(warp(), parts) == part:
                place_four(at, sums, n, part > 0)
            sync_block()

    return collect


@device
def eight_plus(one, other):
    """The sums of eight values and eight others."""
    return (
        one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3],
        one[4] + other[4], one[5] + other[5], one[6] + other[6], one[7] + other[7],
    )  # fmt: skip


def _exchanging(tile: Tile) -> Any:
    """The function that joins the sums of a tile that several blocks have chunks of."""
    rows, most, sum_row = tile.rows, tile.most, tile.sum_row
    across = rows // 8
    down = tile.threads // across  # from a thread's row of x to its next one
    n_turn = most // down
    assert n_turn <= 2

    @device
    def eight(at, t, n):
        return load_f32x8(at + 4 * rows * (t if t < n else 0))

    @device
    def eights(at, t, n):
        """Eight sums of each row of x of a thread; those of row 0 where there are no more."""
        return eight(at, t, n), eight(at, t + down, n)

    @device
    def plus(total, more):
        return eight_plus(total[0], more[0]), eight_plus(total[1], more[1])

    @device
    def keep_eight(at, t, n, total):
        if t < n:
            store_shared_f32x8(uint32(at + sum_row * t), total)

    @device
    def exchange(shared, parts, tid, blocks, n):
        """Leave a block's sums to the others of a tile; whether it was the last, and has them all.

        blocks: the first and the last one of the tile. parts: address of their sums.
        """
        first, last = blocks
        slot = 2 * tid + (1 if tid == first else 0)
        r, t = 8 * remainder(thread(), across), quotient(thread(), across)
        own, there, size = 4 * r + parts, shared + 4 * r, 4 * rows * most
        for i in range(n_turn):
            at = t + down * i
            if at < n:
                found = load_shared_f32x8(uint32(there + sum_row * at))
                store_f32x8(own + size * slot + 4 * rows * at, found)
        if not is_last(parts - COUNTERS + 4 * first, last - first + 1):
            return False
        total = eights(own + size * (2 * first + 1), t, n)
        for block in range(first + 1, last + 1):
            total = plus(total, eights(own + size * (2 * block), t, n))
        keep_eight(there, t, n, total[0])
        keep_eight(there, t + down, n, total[1])
        sync_block()
        return True

    return exchange


def _finishing(tile: Tile, which: Rows) -> Any:
    """The function that writes the products of a tile, or leaves them to the block that ends it."""
    collect, exchange, sum_row = _collecting(tile), _exchanging(tile), tile.sum_row
    n_thread, n_group, put = tile.threads, which.n_group, which.put
    n_own = tile.rows // n_group

    @device
    def write(shared, tile, n_row, to, first, n):
        """The epilogue of a tile's products of n rows of x from `first` on."""
        for j in range(thread(), n_own * n, n_thread):
            t, r = quotient(j, n_own), remainder(j, n_own)
            at = shared + sum_row * t + 4 * (n_group * (r & ~15) + (r & 15))
            row, value = n_own * tile + r, load_shared(uint32(at))
            if n_group * row < n_row:
                other = load_shared(uint32(at + 4 * UNIT)) if n_group > 1 else float32(0)
                put(to, row, first + t, value, other)

    @device
    def finish(shared, sums, tile, work, of, first, n):
        (begin, end, n_chunk, n_all, n_block, tid), (n_row, to, parts) = work, of
        collect(shared, sums, n)
        done, start = True, n_chunk * tile
        if start < begin or start + n_chunk > end:
            blocks = block_of(start, n_all, n_block), block_of(start + n_chunk - 1, n_all, n_block)
            done = exchange(shared, parts, tid, blocks, n)
        if done:
            write(shared, tile, n_row, to, first, n)

    return finish


class Feeder(NamedTuple):
    """The functions that copy a block's chunks to its stages."""

    stage_of: Any  # (rows of x) -> bytes of a stage, number of stages
    begin: Any  # the prologue: starts the copies of a block's first weights
    # (shared, what was copied, end of the work, weights, x, whether weights too) -> the same, one
    # chunk later: the chunk, its tile, its number in it, a thread's row of weights, the stage
    copy_next: Any
    first: Any  # (weights, the first chunk, its tile, its number): what copy_next begins with


def _feeding(type: str, tile: Tile, address: Any) -> Feeder:
    """The functions for a type and the places of an op's rows."""
    rows, most, part, room = tile.rows, tile.most, tile.part, tile.room
    stages, weights_size, each = tile.stages, tile.weights, tile.threads // tile.rows
    row_bytes, (copy_weights, copy_x) = row_bytes_of(type), _copying(tile)
    elements, x_row = tile.chunk, tile.x_row

    @device
    def stage_of(n):
        size = weights_size + x_row * ((n + 7) & ~7)
        return size, min(int64(4), quotient(room - stages, size))

    @device
    def row_at(weights, size, n_row, tile):
        """The address of the row of weights that a thread copies."""
        row = rows * tile + quotient(thread(), each)
        return address(weights, size, min(row, n_row - 1))

    @device
    def begin(tid, n_thread, step, weights, n_in, n_row):
        shared = int64(shared_address(cuda.shared.array(0, uint8)))
        (n_tok, _, _), size = step_of(step), row_bytes(n_in)
        n_chunk = quotient(n_in + elements - 1, elements)
        chunk, last, _, _ = work_of(tid, n_thread, n_chunk, n_row, rows)
        stage, n_stage = stage_of(min(n_tok, most))
        last, to = min(last, chunk + n_stage - 1), shared + stages
        while chunk < last:
            tile = quotient(chunk, n_chunk)
            skipped = part * (chunk - n_chunk * tile)
            copy_weights(to, row_at(weights, size, n_row, tile) + skipped, size - skipped)
            chunk, to = chunk + 1, to + stage

    @device
    def first(weights, chunk, tile, number):
        of, size, n_row = weights
        return chunk, tile, number, row_at(of, size, n_row, tile), int64(0)

    @device
    def copy_next(shared, ahead, work, weights, x, with_weights):
        (far, tile, number, row, free), (end, n_chunk), (of, size, n_row) = ahead, work, weights
        rows_of_x, width, n, stage, n_stage = x
        if far < end:
            to, skipped = shared + stages + stage * free, part * number
            if with_weights:
                copy_weights(to, row + skipped, size - skipped)
            copy_x(to, rows_of_x, width, elements * number, n)
            far, number = far + 1, number + 1
            free = int64(0) if free == n_stage - 1 else free + 1
            if number == n_chunk:
                number, tile = int64(0), tile + 1
                row = row_at(of, size, n_row, tile)
        copy_commit()
        return far, tile, number, row, free

    return Feeder(stage_of, begin, copy_next, first)


def running(type: str, which: Rows) -> tuple[Any, Any]:
    """The functions start (prologue) and run, for the rows and epilogue of `which`."""
    tile, row_bytes = tile_of(type), row_bytes_of(type)
    rows, most, stages, elements = tile.rows, tile.most, tile.stages, tile.chunk
    (x_of, multiply), finish = _multiplying(type, tile), _finishing(tile, which)
    stage_of, begin, copy_next, first_of = _feeding(type, tile, which.address)

    @device
    def run(tid, n_thread, step, x, of, to, parts):
        shared = int64(shared_address(cuda.shared.array(0, uint8)))
        (packed, n_in), (weights, n_row), (n_tok, _, _) = x, of, step_of(step)
        size, width, x_at = row_bytes(n_in), padding(n_in), x_of()
        n_chunk = quotient(n_in + elements - 1, elements)
        first_chunk, end, n_all, n_block = work_of(tid, n_thread, n_chunk, n_row, rows)
        stage, n_stage = stage_of(min(n_tok, most))
        work, of_w = (first_chunk, end, n_chunk, n_all, n_block, int64(tid)), (weights, size, n_row)
        ends, to_rows = (end, n_chunk), (n_row, to, parts)
        for first in range(0, n_tok, most):
            n, tile = min(int64(most), n_tok - first), quotient(first_chunk, n_chunk)
            of_x = packed + 2 * width * first, width, n, stage, n_stage
            chunk, number, place = first_chunk, first_chunk - n_chunk * tile, int64(0)
            ahead = first_of(of_w, chunk, tile, number)
            for _ in range(n_stage - 1):  # `begin` has started the first copies of weights
                ahead = copy_next(shared, ahead, ends, of_w, of_x, first > 0)
            sums = zeros()
            while chunk < end:
                wait_for(n_stage)
                sync_block()
                ahead = copy_next(shared, ahead, ends, of_w, of_x, True)
                at = shared + stages + stage * place
                sums = multiply(sums, at, x_at, n_in - elements * number, n)
                chunk, number = chunk + 1, number + 1
                place = int64(0) if place == n_stage - 1 else place + 1
                if number == n_chunk or chunk == end:
                    finish(shared, sums, tile, work, to_rows, first, n)
                    sums, tile, number = zeros(), tile + 1, int64(0)

    return begin, run


def launched(type: str, kernel: Any, start: Any) -> Launch:
    """The kernel for more than FEW_ROWS and at most SOME_ROWS rows."""
    tile = tile_of(type)
    return Launch(kernel, 1, tile.room, tile.threads, "some", start)
