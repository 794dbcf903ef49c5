"""Fused GEMV launches: one packed row times neighbouring matrices, with an op's epilogue.

These are MATMUL and the op after it, if a decode step has both (see backends/fusion.py). A block
has a warp that fetches weights to shared memory and WORKERS that multiply. A worker has the same
chunk of x for all rows of weights, in registers; it takes a bundle of rows at a time. Few bytes are
in flight at once: with twice as many, memory delivers a fifth less; and x, which is requested when
the kernel before has ended, arrives after all earlier requests. Only for GPUs that copy in bulk
(sm_90).
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.kv.kv_rows import key_row
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
    const_f32,
    device,
    load_f32,
    quotient,
    remainder,
    store_f16,
    store_f32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    barrier_arrive,
    barrier_ended,
    barrier_expect,
    barrier_init,
    barrier_shown,
    copy_bulk,
    inverse_root,
    keep,
    shared_address,
    shuffle_xor,
    sync_threads,
    sync_warp,
)
from tamis.jit_kernels.cuda.lang.scratch import (
    CHUNK,
    FEW_ROW,
    LONGEST_NORM,
    ROOM,
    WORKERS,
    bundle_of,
)
from tamis.jit_kernels.cuda.linear import matmul_some
from tamis.jit_kernels.cuda.linear.activation import gelu, silu
from tamis.jit_kernels.cuda.linear.dequant import halves_of, row_bytes_of
from tamis.jit_kernels.cuda.linear.matmul_few import before_of, four_sums, multiplying, x_unit
from tamis.jit_kernels.cuda.linear.pack import put_15_bits

BLOCKS = 1  # a multiprocessor's
PLACES = 112 << 10  # bytes for weights in flight to a block, unless two groups need more
UNIT = 16  # elements of a packed row that share a scale


class Ring(NamedTuple):
    """Stages in shared memory for data in flight: `stages` groups of bundles.

    rows: of a bundle; part: bytes of CHUNK elements of a row; group: bytes of a stage, for as many
    bundles' parts as there are workers. After the stages there are two barriers for each: its data
    has arrived; all workers have used it.
    """

    rows: int
    part: int
    group: int
    stages: int

    @property
    def size(self) -> int:
        """Bytes of all places and barriers."""
        return self.stages * (self.group + 16)


def ring_of(type: str) -> Ring:
    """The places for a type's blocks."""
    kind, rows = GGMLType[type], bundle_of(type)
    part = CHUNK // kind.block_size * kind.type_size
    group = WORKERS * rows * part
    return Ring(rows, part, group, max(2, PLACES // group))


class Rows(NamedTuple):
    """The differences between ops: the rows of a block, and the epilogue of their products."""

    unit: int  # rows that stay in one block
    address: Any  # (weights, bytes of a row, row) -> address of the bundle that begins there
    # where: a row's number among all that the op multiplies, its token, its position, whether it
    # exists
    ahead: Any  # (to, where) -> data that is read for a row before its product is there
    finish: Any  # (to, where, value, ahead), called by whole warps


class Fetcher(NamedTuple):
    """The functions of a lane that fetches.

    A group is `per` rows, or of longer ones WORKERS chunks of a bundle.

    own: the block's first and last row, rows of a group, bytes from one of them to the next in
    shared memory. at: a group's first row, the bytes of each that were in earlier groups.
    """

    fetch: Any  # (shared, weights, bytes of a row, own, at, place): start the copies of a group
    after: Any  # (bytes of a row, own, at) -> the group after: after the last one the first
    rest: Any  # (shared, weights, bytes of a row, work): all groups but the first


def _fetcher(ring: Ring, address: Any) -> Fetcher:
    """The functions for an op's matrices."""
    rows, _, group, stages = ring

    @device
    def fetch(shared, weights, size, own, at, place):
        (_, last, per, stride), (row, skipped) = own, at
        full, to = uint32(shared + stages * group + 16 * place), shared + group * place
        n, n_byte = min(per, int32(last - row)), min(stride, int32(size) - skipped)
        together = int32(rows if stride == size else 1)
        barrier_expect(full, uint32(n * n_byte))
        r = int32(0)
        while r < n:
            of = address(weights, size, row + r) + skipped
            copy_bulk(uint32(to + stride * r), of, uint32(together * n_byte), full)
            r = int32(r + together)

    @device
    def after(size, own, at):
        (first, last, per, stride), (row, skipped) = own, at
        row = int32(row + per)
        if row < last:
            return row, skipped
        skipped = int32(skipped + stride)
        return first, skipped if skipped < size else int32(0)

    @device
    def fetch_rest(shared, weights, size, work):
        """Start the copies of all other groups, each to a stage that was multiplied."""
        own, at, n_group, phase = work.own, work.at, work.n_group, int32(0)
        place = min(int32(1), n_group)
        for i in range(place, n_group * int32(work.n_tok)):
            if place == stages:
                place = int32(0)
                phase ^= int32(1 if i > stages else 0)
            free = uint32(shared + stages * group + 16 * place + 8)
            while i >= stages and barrier_ended(free, uint32(phase)) == 0:
                pass
            fetch(shared, weights, size, own, at, place)
            at = after(size, own, at)
            place = int32(place + 1)

    return Fetcher(fetch, after, fetch_rest)


class Multiplying(NamedTuple):
    """A worker's functions. A lane has two units of a chunk."""

    x_at: Any  # (packed row, its elements, chunk) -> addresses of the lane's bytes and scales
    x_of: Any  # (these, elements) -> the data that a lane multiplies with all rows
    multiply: Any  # (address of a bundle's part, bytes between its rows, x) -> a lane's sums
    total: Any  # (sums) -> sums over the warp: lane 32 / rows * i has that of row i
    none: Any  # sums of nothing


def _multiplying(type: str, rows: int) -> Multiplying:
    """The functions for a type's blocks."""
    halves, both = halves_of(type), multiplying(type)

    @device
    def x_at(row, n, number):
        """The addresses of a lane's bytes and scales of a chunk.

        Of the first chunk if it has none.
        """
        u = lane() if CHUNK * number + WARP * lane() < n else 0
        at = CHUNK * number if CHUNK * number + WARP * u < n else 0
        at += halves(0, u)[0][0]  # nothing is read
        return row + at, row + FEW_ROW.scale * (n >> 2) + (at >> 2)

    @device
    def x_of(at, n):
        one, other = halves(0, lane())[0]
        apart = other - one
        return x_unit(at[0], at[1], n), x_unit(at[0] + apart, at[1] + (apart >> 2), n)

    @device
    def two(at, stride, x):
        u, (one, other) = lane(), x
        return both(halves(at, u), one, other), both(halves(at + stride, u), one, other)

    @device
    def four(at, stride, x):
        u, (first, second) = lane(), x
        one, other = halves(at, u), halves(at + stride, u)
        more, most = halves(at + 2 * stride, u), halves(at + 3 * stride, u)
        return (
            both(one, first, second), both(other, first, second),
            both(more, first, second), both(most, first, second),
        )  # fmt: skip

    if rows == 2:
        return Multiplying(x_at, x_of, two, two_sums, (float32(0),) * 2)
    return Multiplying(x_at, x_of, four, four_sums, (float32(0),) * 4)


@device
def two_sums(sums):
    """Warp sums of two numbers a lane: lanes 16 i .. 16 i + 15 get the i-th."""
    late = lane() & 16 != 0
    x, y = (sums[1], sums[0]) if late else (sums[0], sums[1])
    x += shuffle_xor(y, 16)
    for i in range(4):
        x += shuffle_xor(x, 8 >> i)
    return x


@device
def squares_of(row, n):
    """A thread's partial sum of a row's squares, from the sums that PRODUCT_NORM stored."""
    squares, at = float32(0), row + FEW_ROW.squares * (n >> 2)
    for j in range(LONGEST_NORM // UNIT // ROOM):
        i = thread() + ROOM * j
        squares += const_f32(at + 4 * i) if UNIT * i < n else float32(0)
    return squares


class Work(NamedTuple):
    """The result of the prologue: what a thread finds while the previous kernel still runs."""

    n_tok: Any  # of the step record
    pos: Any
    own: Any  # see Fetcher
    n_group: Any
    at: Any  # the first group that is not in flight yet
    n_chunk: Any  # of a row
    mine: Any  # the worker's first row of a group, its chunk, and their address
    chunk: Any
    skipped: Any
    x: Any  # the addresses of its lane's bytes of x and of their scales


def _running(type: str, which: Rows) -> tuple[Any, Any, Ring]:
    """The functions start (prologue) and run, for the rows and epilogue of `which`."""
    ring, row_bytes, (unit, address, ahead_of, finish) = ring_of(type), row_bytes_of(type), which
    rows, part, group, stages = ring
    fetch, after, fetch_rest = _fetcher(ring, address)
    x_at, x_of, multiply, total_of, none = _multiplying(type, rows)
    n_worker, apart = WORKERS * WARP, WARP // rows
    n_double, most = WORKERS.bit_length() - 1, (rows * WORKERS).bit_length() - 1

    @device
    def start(tid, n_thread, step, weights, packed, n_in, rows_of_op):
        """The prologue: starts the copies of the first group; returns the thread's Work.

        It is short, since no weights are in flight between two kernels until it has run.
        """
        shared, size = int64(shared_address(cuda.shared.array(0, uint8))), int32(row_bytes(n_in))
        fetches, (base, n_row) = thread() == n_worker, rows_of_op
        if fetches:
            for place in range(stages):
                full = uint32(shared + stages * group + 16 * place)
                barrier_init(full, uint32(1))
                barrier_init(uint32(full + 8), uint32(WORKERS))
            barrier_shown()
        # All blocks have equally many rows, except the last ones; groups have a power of two of
        # them.
        share = int32(quotient(quotient(n_row, unit) + n_thread - 1, n_thread) * unit)
        first = int32(base + min(int32(share * int32(tid)), int32(n_row)))
        last = min(int32(first + share), int32(base + n_row))
        n_chunk, doubled = int32(quotient(n_in + CHUNK - 1, CHUNK)), int32(0)
        for i in range(n_double):
            doubled = int32(doubled + (1 if n_chunk > 1 << i else 0))
        per = int32((rows * WORKERS) >> doubled)
        own = first, last, per, size if n_chunk <= WORKERS else int32(WORKERS * part)
        n_group = int32(int32(last - first + per - 1) >> int32(most - doubled))
        n_group = int32(n_group * int32((n_chunk + WORKERS - 1) >> n_double))
        at = first, int32(0)
        if fetches and n_group > 0:  # only one of them: further ones would arrive before x
            fetch(shared, weights, size, own, at, int32(0))
            at = after(size, own, at)
        n_tok, pos, _ = step_of(step)  # not earlier: the copies would wait for it
        number = int32(quotient(thread(), WARP))
        mine, chunk = int32(rows * (number >> doubled)), int32(number & ((1 << doubled) - 1))
        high, scale = x_at(packed, n_in, chunk)
        x, skipped = (keep(high), keep(scale)), int32(own[3] * mine + part * chunk)
        return Work(n_tok, pos, own, n_group, at, n_chunk, mine, chunk, skipped, x)

    @device
    def run(weights, x, n_in, to, work):
        sums = cuda.shared.array((WORKERS, ROOM), float32)
        parts = cuda.shared.array(WORKERS, float32)
        shared = int64(shared_address(cuda.shared.array(0, uint8)))
        n_tok, pos, (first, last, per, stride), _, _, n_chunk, mine, own_chunk, skipped, at = work
        packed, normed, eps = x
        units = x_of(at, n_in)  # first of all: it would wait behind the weights in flight
        sync_block()  # the barriers are initialised; all warps arrive here
        if warp() == WORKERS:
            if lane() == 0:
                fetch_rest(shared, weights, int32(row_bytes(n_in)), work)
            return
        place, phase = int32(0), int32(0)
        for t in range(n_tok):
            far = FEW_ROW.size * (n_in >> 2) * t
            if t > 0:
                units = x_of((at[0] + far, at[1] + far), n_in)
            squares = squares_of(packed + far, n_in) if normed else float32(0)
            for base in range(first, last, ROOM):
                end = min(last, int32(base + ROOM))
                where = base + thread(), t, pos + t, thread() < end - base
                ahead, chunk = ahead_of(to, where), own_chunk
                while chunk - own_chunk < n_chunk:  # a range divides by its step
                    if n_chunk > WORKERS and (chunk > own_chunk or base > first):
                        units = x_of(x_at(packed + far, n_in, chunk), n_in)
                    works = chunk < n_chunk
                    live = works and CHUNK * chunk + WARP * lane() < n_in
                    r = int32(base + mine)
                    while r < end + mine:
                        full = uint32(shared + stages * group + 16 * place)
                        while barrier_ended(full, uint32(phase)) == 0:
                            pass
                        if works and r < end:
                            some = none
                            if live:
                                some = multiply(shared + group * place + skipped, stride, units)
                            value = total_of(some)
                            if lane() % apart == 0:
                                i = r - base + lane() // apart
                                if chunk > own_chunk:
                                    value += sums[own_chunk, i]
                                sums[own_chunk, i] = value
                        sync_warp()
                        if lane() == 0:
                            barrier_arrive(uint32(full + 8))
                        place = int32(place + 1)
                        if place == stages:
                            place, phase = int32(0), phase ^ int32(1)
                        r = int32(r + per)
                    chunk = int32(chunk + WORKERS)
                if normed and base == first:
                    in_warp = warp_sum(squares)
                    if lane() == 0:
                        parts[warp()] = in_warp
                sync_threads(uint32(n_worker))
                if WARP * warp() < end - base:
                    factor = float32(1)
                    if normed:
                        total = float32(0)
                        for i in range(WORKERS):
                            total += parts[i]
                        factor = inverse_root(total / float32(n_in) + eps)
                    value = float32(0)
                    for c in range(WORKERS):  # all of them are read together
                        value += sums[c, thread()] if c < n_chunk else float32(0)
                    finish(to, where, factor * value, ahead)
                sync_threads(uint32(n_worker))  # before the next sums overwrite what is read here

    return start, run, ring


def _launch(kernel: Any, start: Any, ring: Ring) -> list[Launch]:
    threads = WARP * (WORKERS + 1)
    return [Launch(kernel, BLOCKS, ring.size, threads, "few", start, hands_on=True)]


@device
def of_three(weights, size, row):
    """The address of a row of up to three matrices, one after the other."""
    w, w2, w3, n, n2 = weights
    if row < n:
        return w + size * row
    return w2 + size * (row - n) if row < n + n2 else w3 + size * (row - n - n2)


@device
def chosen(three, r, n, n2):
    """The entry of `three` for the matrix that contains row r, and the row's index in it."""
    one, other, last = three
    if r < n:
        return one, r
    return (other, r - n) if r < n + n2 else (last, r - n - n2)


def _to_rows(rows: int) -> Rows:
    """The epilogue of PRODUCTS: y = product + bias, or y += product + bias."""

    @device
    def ahead(to, where):
        ys, biases, (n, n2, n3), add = to
        r, t, _, there = where
        if not there:
            return float32(0)
        y, i = chosen(ys, r, n, n2)
        bias, _ = chosen(biases, r, n, n2)
        width, _ = chosen((n, n2, n3), r, n, n2)
        return before_of(y + 4 * (width * t + i), bias, add, i)

    @device
    def finish(to, where, value, before):
        ys, _, (n, n2, n3), _ = to
        r, t, _, there = where
        if there:
            y, i = chosen(ys, r, n, n2)
            width, _ = chosen((n, n2, n3), r, n, n2)
            store_f32(y + 4 * (width * t + i), before + value)

    return Rows(rows, of_three, ahead, finish)


def products(type: str) -> list[Launch]:
    """Kernel of PRODUCTS."""
    begin, run, ring = _running(type, _to_rows(bundle_of(type)))

    def start(tid, n_thread, a):
        return begin(
            tid,
            n_thread,
            a.step,
            (a.w, a.w2, a.w3, a.n, a.n2),
            a.packed,
            a.n_in,
            (0, a.n + a.n2 + a.n3),
        )

    def kernel(tid, n_thread, a, work):
        to = (a.y, a.y2, a.y3), (a.bias, a.bias2, a.bias3), (a.n, a.n2, a.n3), a.add
        run((a.w, a.w2, a.w3, a.n, a.n2), (a.packed, a.normed, a.eps), a.n_in, to, work)

    return [*_launch(kernel, start, ring), _some_products(type)]


@device
def put_row(to, row, t, value, other):
    """Write one product of PRODUCTS, or add it."""
    ys, biases, (n, n2, n3), add = to
    y, i = chosen(ys, row, n, n2)
    bias, _ = chosen(biases, row, n, n2)
    width, _ = chosen((n, n2, n3), row, n, n2)
    at = y + 4 * (width * t + i)
    store_f32(at, before_of(at, bias, add, i) + value)


def _some_products(type: str) -> Launch:
    """Kernel of PRODUCTS for some rows, packed as float16 and never normed."""
    begin, run = matmul_some.running(type, matmul_some.Rows(1, of_three, put_row))

    def start(tid, n_thread, a):
        weights = a.w, a.w2, a.w3, a.n, a.n2
        begin(tid, n_thread, a.step, weights, a.n_in, a.n + a.n2 + a.n3)

    def kernel(tid, n_thread, a):
        weights, n_row = (a.w, a.w2, a.w3, a.n, a.n2), a.n + a.n2 + a.n3
        to = (a.y, a.y2, a.y3), (a.bias, a.bias2, a.bias3), (a.n, a.n2, a.n3), a.add
        run(tid, n_thread, a.step, (a.packed, a.n_in), (weights, n_row), to, a.scratch)

    return matmul_some.launched(type, kernel, start)


def _to_norm() -> Rows:
    """Add the products to the residual row; pack row * norm weights, and the row's squares."""

    @device
    def ahead(to, where):
        y, bias, n, add, weight, _ = to
        r, t, _, there = where
        if not there:
            return float32(0), float32(0)
        return before_of(y + 4 * (n * t + r), bias, add, r), const_f32(weight + 4 * r)

    @device
    def finish(to, where, value, ahead):
        y, _, n, _, _, packed = to
        r, t, _, there = where
        before, weight = ahead
        value += before
        row = packed + FEW_ROW.size * (n >> 2) * t
        if there:
            store_f32(y + 4 * (n * t + r), value)
        squares = value * value
        for lanes in range(4):
            squares += shuffle_xor(squares, 8 >> lanes)
        if there and r % UNIT == 0:
            store_f32(row + FEW_ROW.squares * (n >> 2) + r // UNIT * 4, squares)
        put_15_bits(row, n, r, value * weight, there)

    return Rows(UNIT, of_three, ahead, finish)


def product_norm(type: str) -> list[Launch]:
    """Kernel of PRODUCT_NORM."""
    begin, run, ring = _running(type, _to_norm())

    def start(tid, n_thread, a):
        return begin(tid, n_thread, a.step, (a.w, a.w, a.w, a.n, a.n), a.packed, a.n_in, (0, a.n))

    def kernel(tid, n_thread, a, work):
        where = a.y, a.bias, a.n, a.add, a.weight, a.to
        run((a.w, a.w, a.w, a.n, a.n), (a.packed, a.normed, a.eps), a.n_in, where, work)

    return _launch(kernel, start, ring)


@device
def of_gates(weights, size, row):
    """The address of a row of two matrices whose rows alternate, UNIT of each."""
    w, w2 = weights
    unit, i = quotient(row, 2 * UNIT), remainder(row, 2 * UNIT)
    return (w2 if i >= UNIT else w) + size * (UNIT * unit + (i & (UNIT - 1)))


def _to_gate(activation: str) -> Rows:
    """The epilogue of PRODUCT_GATE: activation(gate) * up, packed."""
    function = {"silu": silu, "gelu": gelu}[activation]

    @device
    def ahead(to, where):
        return float32(0)

    @device
    def finish(to, where, value, ahead):
        n, packed = to
        r, t, _, there = where
        other = shuffle_xor(value, UNIT)  # lanes 0 to 15 of a warp have gates
        late = lane() >= UNIT
        gate, up = (other, value) if late else (value, other)
        i = UNIT * (r // (2 * UNIT)) + r % UNIT
        row = packed + FEW_ROW.size * (n >> 2) * t
        put_15_bits(row, n, i, function(gate) * up, there and not late)

    return Rows(2 * UNIT, of_gates, ahead, finish)


def product_gate(type: str, activation: str) -> list[Launch]:
    """Kernel of PRODUCT_GATE."""
    begin, run, ring = _running(type, _to_gate(activation))

    def start(tid, n_thread, a):
        return begin(tid, n_thread, a.step, (a.w, a.w2), a.packed, a.n_in, (0, 2 * a.n))

    def kernel(tid, n_thread, a, work):
        run((a.w, a.w2), (a.packed, a.normed, a.eps), a.n_in, (a.n, a.to), work)

    return [*_launch(kernel, start, ring), _some_gates(type, activation)]


def _some_gates(type: str, activation: str) -> Launch:
    """Kernel of PRODUCT_GATE for some rows; `to` is float16."""
    function = {"silu": silu, "gelu": gelu}[activation]

    @device
    def put(to, row, t, gate, up):
        n, packed = to
        store_f16(packed + 2 * (n * t + row), function(gate) * up)

    begin, run = matmul_some.running(type, matmul_some.Rows(2, of_gates, put))

    def start(tid, n_thread, a):
        begin(tid, n_thread, a.step, (a.w, a.w2), a.n_in, 2 * a.n)

    def kernel(tid, n_thread, a):
        weights = (a.w, a.w2), 2 * a.n
        run(tid, n_thread, a.step, (a.packed, a.n_in), weights, (a.n, a.to), a.scratch)

    return matmul_some.launched(type, kernel, start)


def _rotated_pairs(neox: int, rows: int) -> tuple[Any, Any]:
    """The functions address and row_of: two bundles have the rows that are rotated together."""

    @device
    def row_of(r, n_half):
        """The matrix row of a block's r-th row."""
        if not neox:
            return r
        i, part = r // (2 * rows), n_half // rows
        h = quotient(i, part)
        return 2 * n_half * h + rows * (i - part * h) + r % rows + n_half * (r // rows % 2)

    @device
    def address(weights, size, row):
        w, w2, w3, n, n2, n_half = weights
        return of_three((w, w2, w3, n, n2), size, row_of(row, n_half))

    return address, row_of


def _to_keep(neox: int, rows: int) -> Rows:
    """The epilogue of a q/k/v projection: RoPE of q and k, and the append of f16 K and V."""
    address, row_of = _rotated_pairs(neox, rows)
    apart = rows if neox else 1  # from a row to the one with which it is rotated

    @device
    def ahead(to, where):
        biases, pages, (n, n2), n_half, (cos, sin), _ = to
        k_pages, v_pages, k_table, v_table = pages
        r, t, pos, there = where
        if not there:
            return float32(0), float32(1), float32(0), int64(0)
        row = row_of(r, n_half)
        bias, i = chosen(biases, row, n, n2)
        head = 2 * n_half
        h = quotient(i, head)
        d = i - head * h
        pair = d % n_half if neox else d >> 1
        at = n_half * t + pair
        c, s, page = float32(1), float32(0), int64(0)
        if row < n + n2:
            c, s = load_f32(cos + 4 * at), load_f32(sin + 4 * at)
        if row >= n:
            first = row < n + n2
            table = k_table if first else v_table
            page = k_pages if first else v_pages
            page += 2 * (head * key_row(table, quotient(n2, head), h, pos) + d)
        before = const_f32(bias + 4 * i) if bias != 0 else float32(0)
        return before, c, s, page

    @device
    def finish(to, where, value, ahead):
        _, _, (n, _), n_half, _, q = to
        r, t, _, there = where
        before, c, s, page = ahead
        value += before
        other = shuffle_xor(value, apart)
        value = value * c + (other * s if r & apart else -other * s)
        row = row_of(r, n_half)
        if there and row < n:
            store_f32(q + 4 * (n * t + row), value)
        if there and row >= n:
            store_f16(page, value)

    return Rows(2 * rows, address, ahead, finish)


def product_rope_append(type: str, neox: int) -> list[Launch]:
    """Kernel of PRODUCT_ROPE_APPEND."""
    begin, run, ring = _running(type, _to_keep(neox, bundle_of(type)))

    def start(tid, n_thread, a):
        weights = a.w, a.w2, a.w3, a.n, a.n2, a.n_half
        return begin(tid, n_thread, a.step, weights, a.packed, a.n_in, (a.first, a.n_row))

    def kernel(tid, n_thread, a, work):
        pages = a.k_pages, a.v_pages, a.k_table, a.v_table
        to = (a.bias, a.bias2, a.bias3), pages, (a.n, a.n2), a.n_half, (a.cos, a.sin), a.q
        run((a.w, a.w2, a.w3, a.n, a.n2, a.n_half), (a.packed, a.normed, a.eps), a.n_in, to, work)

    return _launch(kernel, start, ring)
