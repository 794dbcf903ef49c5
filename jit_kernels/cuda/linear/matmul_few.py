"""Products of few rows with quantised weights, in integers (dp4a).

x's rows are integers of 15 bits, two signed bytes each and one scale for 16 neighbours, as
PACK_ROWS leaves them. Weights are copied to shared memory some items ahead, each is read once.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    look_ahead,
    step_of,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_u128,
    quotient,
    remainder,
    store_f32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
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
    keep,
    shared_address,
    shuffle_xor,
    sync_warp,
)
from tamis.jit_kernels.cuda.lang.scratch import CHUNK, FEW_ROW
from tamis.jit_kernels.cuda.lang.target import current
from tamis.jit_kernels.cuda.linear.dequant import halves_of, is_signed, row_bytes_of

AT_ONCE = 4  # rows of weights that a warp multiplies at a time, CHUNK elements of each: they
# share what is read of x
ROOM = 72 << 10  # bytes for weights in flight to a block
MOST = THREADS  # rows whose sums lie in shared memory


@device
def x_unit(high, scale, n):
    """Sixteen elements of a packed row: high bytes, low bytes, their scale and their sum.

    high, scale: addresses of the first and the third of these. Loads of constants, which the
    assembler may move behind a barrier, would come after the copies that a block starts there.
    """
    quarter = n >> 2
    low, total = high + FEW_ROW.low * quarter, scale + (FEW_ROW.sum - FEW_ROW.scale) * quarter
    return load_u128(high), load_u128(low), load_f32(scale), load_f32(total)


def multiplying(type: str) -> Any:
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
    """Warp sums of four numbers a lane: lanes 8 i .. 8 i + 7 get the i-th."""
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
def before_of(y, bias, add, r):
    """The values that the product of row r is added to: its bias (0: none), and y if `add`."""
    value = load_f32(bias + 4 * r) if bias != 0 else float32(0)
    return value + load_f32(y) if add else value


@device
def rows_of(tid, n_thread, n_out):
    """The first and last of a block's rows of weights."""
    return quotient(n_out * tid, n_thread), quotient(n_out * (tid + 1), n_thread)


class Ring(NamedTuple):
    """A warp's stages in shared memory for data in flight: `stages` times AT_ONCE rows' parts.

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


class Fetcher(NamedTuple):
    """The functions of a warp that copy items to its stages.

    An item is a part of AT_ONCE rows. rows: address of the block's first, their number, their
    bytes. Stages are used cyclically; a stage's phase changes each time.
    """

    ready: Any  # (shared): called first
    fetch: Any  # (shared, rows, (quad, chunk), stage, whether it exists): starts its copy
    wait: Any  # (shared, stage, phase): waits until it has arrived


@device
def lies_at(rows, part, quad, r, chunk):
    """Where the part of an item's r-th row begins, and by how many bytes it is shorter."""
    first, n_row, size = rows
    row = min(int32(AT_ONCE * quad + r), int32(n_row - 1))  # 32 bits suffice, and are faster
    at = uint32(uint32(first & 15) + uint32(size) * uint32(row) + uint32(part) * uint32(chunk))
    return (first & ~15) + int64(at & uint32(0xFFFFFFF0)), int64(at & uint32(15))


def _in_bulk(ring: Ring) -> Fetcher:
    """The functions where one instruction copies a row's part (sm_90)."""
    part, pieces, stages, item, places = *ring, ring.item, ring.places

    @device
    def barrier(shared, place):
        return uint32(shared + places + 8 * (warp() * stages + place))

    @device
    def ready(shared):
        if lane() < stages:
            barrier_init(barrier(shared, lane()), uint32(AT_ONCE))
            barrier_shown()
        sync_warp()

    @device
    def fetch(shared, rows, which, place, live):
        if live and lane() < AT_ONCE:
            (quad, chunk), size = which, int32(rows[2])
            at, skip = lies_at(rows, part, quad, lane(), chunk)
            n = uint32((int32(skip) + min(int32(part), int32(size - part * chunk)) + 15) & ~15)
            to = shared + item * (warp() * stages + place) + 16 * pieces * lane()
            barrier_expect(barrier(shared, place), n)
            copy_bulk(uint32(to), at, n, barrier(shared, place))

    @device
    def wait(shared, place, phase):
        while barrier_ended(barrier(shared, place), uint32(phase)) == 0:
            pass

    return Fetcher(ready, fetch, wait)


def _in_pieces(ring: Ring) -> Fetcher:
    """The functions where lanes copy 16 bytes each."""
    part, pieces, stages, item = *ring, ring.item
    n_pass, wait_for_items = -(-AT_ONCE * pieces // WARP), copy_wait(stages - 2)

    @device
    def ready(shared):
        pass

    @device
    def fetch(shared, rows, which, place, live):
        to, (quad, chunk) = shared + item * (warp() * stages + place), which
        n = min(part, rows[2] - part * chunk)
        for pass_ in range(n_pass):
            i = lane() + WARP * pass_
            r = quotient(i, pieces)
            at, skip = lies_at(rows, part, quad, r, chunk)
            p = 16 * (i - pieces * r)
            if live and r < AT_ONCE and p < skip + n:
                copy_async(uint32(to + 16 * i), at + p, uint32(16))
        copy_commit()

    @device
    def wait(shared, place, phase):
        wait_for_items()

    return Fetcher(ready, fetch, wait)


@device
def items_of(w, n_row, n_chunk):
    """The first and last of a warp's items."""
    n = (n_row + AT_ONCE - 1) // AT_ONCE * n_chunk
    return int32(n * w // WARPS), int32(n * (w + 1) // WARPS)


@device
def first_of(item, n_chunk):
    """The rows and the chunk of an item."""
    return int32(quotient(item, n_chunk)), int32(remainder(item, n_chunk))


@device
def after(which, n_chunk):
    """The item after one."""
    quad, chunk = which
    following = int32(chunk + 1)
    ends = following == int32(n_chunk)
    return int32(quad + 1) if ends else quad, int32(0) if ends else following


@device
def joined(sums, r, n_row, n_chunk):
    """A row's sum over the warps that had items of it."""
    value, first = float32(0), r // AT_ONCE * n_chunk
    for p in range(WARPS):
        begin_, end = items_of(p, n_row, n_chunk)
        value += sums[p, r] if begin_ < min(end, first + n_chunk) and end > first else 0
    return value


def _working(type: str, ring: Ring) -> tuple[Any, Any, Any]:
    """The functions x_at and x_of, what a lane multiplies with an item, and multiply."""
    product, halves, (part, pieces, stages) = multiplying(type), halves_of(type), ring
    # all rows have the same alignment
    item_bytes, in_pieces = ring.item, GGMLType[type].type_size % 16 == 0

    @device
    def skipped(rows, quad, r, chunk):
        return rows[0] & 15 if in_pieces else lies_at(rows, part, quad, r, chunk)[1]

    @device
    def x_at(x_row, n):
        """The addresses of a lane's two units of x in the first chunk: bytes and scales."""
        first, second = halves(0, lane() if 32 * lane() < n else 0)[0]  # nothing is read
        high, scale = keep(x_row + first), keep(x_row + FEW_ROW.scale * (n >> 2) + (first >> 2))
        apart = second - first
        return (high, scale), (high + apart, scale + (apart >> 2))

    @device
    def x_of(which, units_at, n):
        """The data that a lane multiplies with an item, if it has elements."""
        start, (one, other) = int32(CHUNK * which[1]), units_at
        far = start if int32(start + 32 * lane()) < int32(n) else int32(0)
        near = far >> 2
        return x_unit(one[0] + far, one[1] + near, n), x_unit(other[0] + far, other[1] + near, n)

    @device
    def multiply(shared, rows, which, place, units, n):
        """A lane's part of an item: four products."""
        u, (quad, chunk), (x, y) = lane(), which, units
        if int32(CHUNK * chunk + 32 * u) >= int32(n):
            return float32(0), float32(0), float32(0), float32(0)
        at = shared + item_bytes * (warp() * stages + place)
        one = halves(at + skipped(rows, quad, 0, chunk), u)
        other = halves(at + 16 * pieces + skipped(rows, quad, 1, chunk), u)
        more = halves(at + 32 * pieces + skipped(rows, quad, 2, chunk), u)
        most = halves(at + 48 * pieces + skipped(rows, quad, 3, chunk), u)
        return product(one, x, y), product(other, x, y), product(more, x, y), product(most, x, y)

    return x_at, x_of, multiply


class Blocks(NamedTuple):
    """The functions that multiply a block's rows of weights with a packed row of x.

    Its warps share items, CHUNK elements of four rows each, and copy them to shared memory some
    items ahead.
    """

    ready: Any  # (shared): called first
    begin: Any  # (shared, rows, chunks of a row, place): start the copies of a warp's first items
    work: Any  # (shared, sums, rows, chunks, x's row, n, at) -> at: all of its items; where the
    # next will be: a place and its phase
    ring: Ring


def blocks_of(type: str) -> Blocks:
    """The functions for a type's blocks."""
    ring = ring_of(type)
    stages, (x_at, x_of, multiply) = ring.stages, _working(type, ring)
    ready, fetch, wait = (_in_bulk if current().overlaps else _in_pieces)(ring)

    @device
    def next_place(place):
        return int32(0) if place == stages - 1 else int32(place + 1)

    @device
    def begin(shared, rows, n_chunk, place):
        item, last = items_of(warp(), rows[1], n_chunk)
        which = first_of(item, n_chunk)
        for ahead in range(stages - 1):
            fetch(shared, rows, which, place, item + ahead < last)
            which, place = after(which, n_chunk), next_place(place)

    @device
    def work(shared, sums, rows, n_chunk, x_row, n, at):
        (item, last), (place, phase) = items_of(warp(), rows[1], n_chunk), at
        which, units_at = first_of(item, n_chunk), x_at(x_row, n)
        far = which  # the item that is copied next, to the stage before this one's
        for _ in range(stages - 1):
            far = after(far, n_chunk)
        free = int32(stages - 1 if place == 0 else place - 1)
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        while item < last:
            units = x_of(which, units_at, n)  # in flight while the warp waits
            wait(shared, place, phase)
            sync_warp()
            fetch(shared, rows, far, free, int32(item + stages - 1) < last)
            far = after(far, n_chunk)
            four = multiply(shared, rows, which, place, units, n)
            a, b, c, d = a + four[0], b + four[1], c + four[2], d + four[3]
            item, free, place, (quad, chunk) = int32(item + 1), place, next_place(place), which
            phase ^= int32(1 if place == 0 else 0)
            if int32(chunk + 1) == int32(n_chunk) or item == last:
                value = four_sums((a, b, c, d))
                if lane() % 8 == 0:
                    sums[warp(), AT_ONCE * quad + lane() // 8] = value
                a, b, c, d = float32(0), float32(0), float32(0), float32(0)
            which = after(which, n_chunk)
        return place, phase

    return Blocks(ready, begin, work, ring)


def few(type: str) -> Launch:
    """The kernel for at most FEW_ROWS rows: a block takes neighbouring rows of weights.

    The first of them are in flight while the previous kernel still runs.
    """
    row_bytes, (ready, begin, work, ring) = row_bytes_of(type), blocks_of(type)
    read_ahead = device(look_ahead)

    def start(tid, n_thread, a):
        read_ahead(tid, n_thread, a)
        shared = int64(shared_address(cuda.shared.array(0, uint8)))
        size, (first, last) = row_bytes(a.n_in), rows_of(tid, n_thread, a.n_out)
        rows = a.w + size * first, min(MOST, last - first), size
        ready(shared)
        begin(shared, rows, (a.n_in + CHUNK - 1) // CHUNK, int32(0))

    def kernel(tid, n_thread, a):
        sums = cuda.shared.array((WARPS, MOST), float32)
        shared, at = int64(shared_address(cuda.shared.array(0, uint8))), (int32(0), int32(0))
        (n_tok, _, _), size = step_of(a.step), row_bytes(a.n_in)
        n_chunk = (a.n_in + CHUNK - 1) // CHUNK
        first, last = rows_of(tid, n_thread, a.n_out)
        for t in range(n_tok):
            x = a.packed + FEW_ROW.size * a.n_in // 4 * t
            for row in range(first, last, MOST):
                rows = a.w + size * row, min(MOST, last - row), size
                if t > 0 or row > first:  # otherwise `start` has done it
                    begin(shared, rows, n_chunk, at[0])
                to, before = a.y + 4 * (a.y_stride * t + row + thread()), float32(0)
                if thread() < rows[1]:  # there are no more rows than threads
                    before = before_of(to, a.bias, a.add, row + thread())
                at = work(shared, sums, rows, n_chunk, x, a.n_in, at)
                sync_block()
                if thread() < rows[1]:
                    store_f32(to, before + joined(sums, thread(), rows[1], n_chunk))
                sync_block()  # before the next sums overwrite what is read here

    return Launch(kernel, blocks=2, shared=ring.size, rows="few", start=start)
