"""Products of few rows with quantised weights: bytes of weights times those of x.

x's rows are numbers of 15 bits, two signed bytes each and one scale for 16 neighbours, as PACK_ROWS
leaves them. Weights come to shared memory some items ahead, each is read once.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.decode import halves_of, is_signed, row_bytes_of
from tamis.jit_kernels.cuda.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.intrinsic import (
    const_f32,
    device,
    load_f32,
    load_i64,
    quotient,
    remainder,
    store_f32,
)
from tamis.jit_kernels.cuda.ptx import (
    barrier_ended,
    barrier_expect,
    barrier_init,
    barrier_shown,
    copy_async,
    copy_bulk,
    copy_commit,
    copy_wait,
    dot_s8,
    dot_u8,
    shared_address,
    shuffle_xor,
    sync_warp,
)
from tamis.jit_kernels.cuda.readers import const_u128
from tamis.jit_kernels.cuda.scratch import FEW_ROW
from tamis.jit_kernels.cuda.target import current
from tamis.jit_kernels.ops import STEP

AT_ONCE = 4  # rows of weights that a warp multiplies at a time: they share what is read of x
CHUNK = 32 * WARP  # elements of each of them
ROOM = 72 << 10  # bytes for weights on their way to a block
MOST = 256  # rows whose sums lie in shared memory


@device
def x_unit(row, n, at):
    """Sixteen elements of a packed row: high bytes, low bytes, their scale and their sum."""
    quarter = n >> 2
    return (
        const_u128(row + at),
        const_u128(row + FEW_ROW.low * quarter + at),
        const_f32(row + FEW_ROW.scale * quarter + (at >> 2)),
        const_f32(row + FEW_ROW.sum * quarter + (at >> 2)),
    )


def _multiplying(type: str) -> Any:
    """The function (weights of two units, units x and y) -> the product of 32 elements."""
    dot = dot_s8 if is_signed(type) else dot_u8

    @device
    def unit(weights, x):
        (q, d, m), (high, low, scale, total), s = weights, x, int32(0)
        for j in range(4):
            s = dot(q[j], high[j], s)
        s = int32(s << 7)
        for j in range(4):
            s = dot(q[j], low[j], s)
        return d * scale * float32(s) + m * total

    @device
    def both(weights, x, y):
        _, one, other = weights
        return unit(one, x) + unit(other, y)

    return both


@device
def four_sums(sums):
    """The sums over a warp of four numbers a lane: lane 8 i has the i-th, and lanes beside it."""
    late = lane() & 16 != 0
    a, b = (sums[2], sums[3]) if late else (sums[0], sums[1])
    c, d = (sums[0], sums[1]) if late else (sums[2], sums[3])
    a, b = a + shuffle_xor(c, 16), b + shuffle_xor(d, 16)
    x, y = (b, a) if lane() & 8 != 0 else (a, b)
    x += shuffle_xor(y, 8)
    for i in range(3):
        x += shuffle_xor(x, 4 >> i)
    return x


@device
def put(y, bias, add, value):
    """Write value + bias (0: none) over, or onto, what is at y."""
    if bias != 0:
        value += load_f32(bias)
    store_f32(y, value + load_f32(y) if add else value)


@device
def rows_of(tid, n_thread, n_out):
    """The first and last of a block's rows of weights."""
    return quotient(n_out * tid, n_thread), quotient(n_out * (tid + 1), n_thread)


class Ring(NamedTuple):
    """A warp's places in shared memory for what is on its way: `stages` times AT_ONCE rows' parts.

    part: bytes of CHUNK elements; pieces: of 16 bytes, of a part that begins at any address.
    """

    part: int
    pieces: int
    stages: int

    @property
    def item(self) -> int:
        """Bytes of AT_ONCE rows' parts."""
        return 16 * AT_ONCE * self.pieces

    @property
    def places(self) -> int:
        """Bytes of all warps' places."""
        return WARPS * self.stages * self.item

    @property
    def size(self) -> int:
        """The same with a barrier for each item."""
        return self.places + 8 * WARPS * self.stages


def ring_of(type: str) -> Ring:
    """The places for a type's blocks."""
    kind = GGMLType[type]
    part = CHUNK // kind.block_size * kind.type_size
    ring = Ring(part, (part + 30) // 16, 1)
    return ring._replace(stages=max(2, min(4, ROOM // ring.places)))


class Bringing(NamedTuple):
    """Functions that copy items to a warp's places; a warp's work.

    An item is a part of AT_ONCE rows. rows: address of the block's first, how many, their bytes.
    `use` counts items: places are used in turn.
    """

    ready: Any  # shared: before all else
    bring: Any  # (shared, rows, (quad, chunk), use, is there one): start its copy
    wait: Any  # (shared, use): until it is there


@device
def lies_at(rows, part, quad, r, chunk):
    """Where the part of the r-th row of an item begins, and how many of its bytes are not in it."""
    first, n_row, size = rows
    row = uint32(min(AT_ONCE * quad + r, n_row - 1))  # 32 bits do, and are faster
    at = uint32(uint32(first & 15) + uint32(size) * row + uint32(part) * uint32(chunk))
    return (first & ~15) + int64(at & uint32(0xFFFFFFF0)), int64(at & uint32(15))


def _in_bulk(ring: Ring) -> Bringing:
    """The functions where one instruction copies a row's part (sm_90)."""
    part, pieces, stages, item, places = *ring, ring.item, ring.places

    @device
    def barrier(shared, use):
        return uint32(shared + places + 8 * (warp() * stages + remainder(use, stages)))

    @device
    def ready(shared):
        if lane() < stages:
            barrier_init(barrier(shared, lane()), uint32(AT_ONCE))
            barrier_shown()
        sync_warp()

    @device
    def bring(shared, rows, which, use, live):
        if live and lane() < AT_ONCE:
            (quad, chunk), size = which, rows[2]
            at, skip = lies_at(rows, part, quad, lane(), chunk)
            n = uint32((skip + min(part, size - part * chunk) + 15) & ~15)
            to = shared + item * (warp() * stages + remainder(use, stages)) + 16 * pieces * lane()
            barrier_expect(barrier(shared, use), n)
            copy_bulk(uint32(to), at, n, barrier(shared, use))

    @device
    def wait(shared, use):
        while barrier_ended(barrier(shared, use), uint32(quotient(use, stages) & 1)) == 0:
            pass

    return Bringing(ready, bring, wait)


def _in_pieces(ring: Ring) -> Bringing:
    """The functions where lanes copy 16 bytes each."""
    part, pieces, stages, item = *ring, ring.item
    n_turn, wait_for_items = -(-AT_ONCE * pieces // WARP), copy_wait(stages - 2)

    @device
    def ready(shared):
        pass

    @device
    def bring(shared, rows, which, use, live):
        to, (quad, chunk) = shared + item * (warp() * stages + remainder(use, stages)), which
        n = min(part, rows[2] - part * chunk)
        for turn in range(n_turn):
            i = lane() + WARP * turn
            r = quotient(i, pieces)
            at, skip = lies_at(rows, part, quad, r, chunk)
            p = 16 * (i - pieces * r)
            if live and r < AT_ONCE and p < skip + n:
                copy_async(uint32(to + 16 * i), at + p, uint32(16))
        copy_commit()

    @device
    def wait(shared, use):
        wait_for_items()

    return Bringing(ready, bring, wait)


@device
def items_of(w, n_row, n_chunk):
    """The first and last of a warp's items."""
    n = (n_row + AT_ONCE - 1) // AT_ONCE * n_chunk
    return n * w // WARPS, n * (w + 1) // WARPS


@device
def after(which, n_chunk):
    """The item after one."""
    quad, chunk = which
    return (quad, chunk + 1) if chunk + 1 < n_chunk else (quad + 1, 0 * chunk)


@device
def joined(sums, r, n_row, n_chunk):
    """The sum of a row, of the warps that had items of it."""
    value, first = float32(0), r // AT_ONCE * n_chunk
    for p in range(WARPS):
        begin_, end = items_of(p, n_row, n_chunk)
        value += sums[p, r] if begin_ < min(end, first + n_chunk) and end > first else 0
    return value


def _working(type: str, ring: Ring) -> tuple[Any, Any]:
    """The functions x_of, what a lane multiplies with an item, and multiply, the product."""
    product, halves, (part, pieces, stages) = _multiplying(type), halves_of(type), ring
    item_bytes, in_pieces = ring.item, GGMLType[type].type_size % 16 == 0  # all rows begin alike

    @device
    def skipped(rows, quad, r, chunk):
        return rows[0] & 15 if in_pieces else lies_at(rows, part, quad, r, chunk)[1]

    @device
    def x_of(which, x_row, n):
        """What a lane multiplies with an item: two units of x, where it has elements."""
        start = CHUNK * which[1]
        u = lane() if start + 32 * lane() < n else 0
        first, second = halves(0, u)[0]  # where they are: nothing is read
        return x_unit(x_row, n, start + first), x_unit(x_row, n, start + second)

    @device
    def multiply(shared, rows, which, use, units, n):
        """A lane's part of an item: four products."""
        u, (quad, chunk), (x, y) = lane(), which, units
        if CHUNK * chunk + 32 * u >= n:
            return float32(0), float32(0), float32(0), float32(0)
        at = shared + item_bytes * (warp() * stages + remainder(use, stages))
        one = halves(at + skipped(rows, quad, 0, chunk), u)
        other = halves(at + 16 * pieces + skipped(rows, quad, 1, chunk), u)
        more = halves(at + 32 * pieces + skipped(rows, quad, 2, chunk), u)
        most = halves(at + 48 * pieces + skipped(rows, quad, 3, chunk), u)
        return product(one, x, y), product(other, x, y), product(more, x, y), product(most, x, y)

    return x_of, multiply


def few(type: str) -> Launch:
    """The kernel for at most FEW_ROWS rows: a block takes neighbouring rows of weights.

    Its warps share items, CHUNK elements of four rows each, and copy them to shared memory some
    items ahead; the first of them while the kernel before still runs.
    """
    row_bytes, ring = row_bytes_of(type), ring_of(type)
    stages, (x_of, multiply) = ring.stages, _working(type, ring)
    ready, bring, wait = (_in_bulk if current().overlaps else _in_pieces)(ring)

    @device
    def begin(shared, rows, n_chunk, use):
        """Start the copies of a warp's first items."""
        item, last = items_of(warp(), rows[1], n_chunk)
        which = quotient(item, n_chunk), remainder(item, n_chunk)
        for ahead in range(stages - 1):
            bring(shared, rows, which, use + ahead, item + ahead < last)
            which = after(which, n_chunk)

    def start(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        shared = int64(shared_address(cuda.shared.array(0, uint8)))
        size, (first, last) = row_bytes(n_in), rows_of(tid, n_thread, n_out)
        rows = w + size * first, min(MOST, last - first), size
        ready(shared)
        begin(shared, rows, (n_in + CHUNK - 1) // CHUNK, 0)

    @device
    def work(shared, sums, rows, n_chunk, x_row, n, use):
        """All of a warp's items, whose first `begin` has on their way; how many were used."""
        item, last = items_of(warp(), rows[1], n_chunk)
        which = quotient(item, n_chunk), remainder(item, n_chunk)
        far = which  # the item that is to be copied next
        for _ in range(stages - 1):
            far = after(far, n_chunk)
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        while item < last:
            units = x_of(which, x_row, n)  # on its way while the warp waits
            wait(shared, use)
            sync_warp()
            bring(shared, rows, far, use + stages - 1, item + stages - 1 < last)
            far = after(far, n_chunk)
            four = multiply(shared, rows, which, use, units, n)
            a, b, c, d = a + four[0], b + four[1], c + four[2], d + four[3]
            item, use, (quad, chunk) = item + 1, use + 1, which
            if chunk + 1 == n_chunk or item == last:
                value = four_sums((a, b, c, d))
                if lane() % 8 == 0:
                    sums[warp(), AT_ONCE * quad + lane() // 8] = value
                a, b, c, d = float32(0), float32(0), float32(0), float32(0)
            which = after(which, n_chunk)
        return use

    def kernel(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        sums = cuda.shared.array((WARPS, MOST), float32)
        shared, use = int64(shared_address(cuda.shared.array(0, uint8))), 0
        n_tok, size, n_chunk = (
            load_i64(step + STEP.n_tok),
            row_bytes(n_in),
            (n_in + CHUNK - 1) // CHUNK,
        )
        first, last = rows_of(tid, n_thread, n_out)
        for t in range(n_tok):
            x = packed + FEW_ROW.size * n_in // 4 * t
            for row in range(first, last, MOST):
                rows = w + size * row, min(MOST, last - row), size
                if t > 0 or row > first:  # else it is what `start` did
                    begin(shared, rows, n_chunk, use)
                use = work(shared, sums, rows, n_chunk, x, n_in, use)
                sync_block()
                for r in range(thread(), rows[1], THREADS):
                    value, c = joined(sums, r, rows[1], n_chunk), row + r
                    put(y + 4 * (y_stride * t + c), bias + 4 * c if bias != 0 else 0, add, value)
                sync_block()  # before the next sums overwrite what is read here

    return Launch(kernel, blocks=2, shared=ring.size, rows="few", start=start)
