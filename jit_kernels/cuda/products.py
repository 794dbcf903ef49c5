"""Products of one packed row with neighbouring matrices in one launch, and what is made of them.

These are MATMUL and the op after it, where a decode step has both (see jit_kernels/fusion.py). A
block has a warp that brings weights to shared memory and WORKERS that multiply. A worker has the
same chunk of x for all rows of weights, in registers; four rows of a matrix (a quad) are what it
takes at a time. Only for GPUs that copy in bulk (sm_90).
"""

import math
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.activation import gelu, silu
from tamis.jit_kernels.cuda.decode import halves_of, row_bytes_of
from tamis.jit_kernels.cuda.grid import (
    WARP,
    Launch,
    lane,
    step_of,
    sync_block,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.intrinsic import (
    const_f32,
    device,
    load_f32,
    quotient,
    remainder,
    store_f16,
    store_f32,
)
from tamis.jit_kernels.cuda.kv_rows import key_row
from tamis.jit_kernels.cuda.matmul_few import AT_ONCE, before_of, four_sums, multiplying, x_unit
from tamis.jit_kernels.cuda.pack import put_15_bits
from tamis.jit_kernels.cuda.ptx import (
    barrier_arrive,
    barrier_ended,
    barrier_expect,
    barrier_init,
    barrier_shown,
    copy_bulk,
    shared_address,
    shuffle_xor,
    sync_threads,
    sync_warp,
)
from tamis.jit_kernels.cuda.scratch import CHUNK, FEW_ROW, ROOM, WORKERS

BLOCKS = 2  # a multiprocessor's
PLACES = 104 << 10  # bytes for weights on their way to a block
UNIT = 16  # elements of a packed row that share a scale


class Ring(NamedTuple):
    """Places in shared memory for what is on its way: `stages` groups of quads.

    part: bytes of CHUNK elements of a row; group: bytes of a place, for WORKERS chunks of four
    rows. Behind them are two barriers a place: all of it is there; all workers are done with it.
    """

    part: int
    group: int
    stages: int

    @property
    def size(self) -> int:
        """Bytes of all places and barriers."""
        return self.stages * (self.group + 16)


def ring_of(type: str) -> Ring:
    """The places for a type's blocks."""
    kind = GGMLType[type]
    part = CHUNK // kind.block_size * kind.type_size
    group = WORKERS * AT_ONCE * part
    return Ring(part, group, max(2, min(6, PLACES // (group + 16))))


class Rows(NamedTuple):
    """What is particular to an op: which rows a block has, and what becomes of their products."""

    unit: int  # quads that stay in one block
    address: Any  # (weights, bytes of a row, quad) -> address of its first row
    ahead: Any  # (to, where) -> what is read for a row before its product is there
    finish: Any  # (to, where, value, ahead), called by whole warps


# where: a row's number among all that the op multiplies, its token, its position, is there one


@device
def quads_of(tid, n_thread, n_quad, unit):
    """The first and last of a block's quads."""
    n = quotient(n_quad, unit)
    return unit * quotient(n * tid, n_thread), unit * quotient(n * (tid + 1), n_thread)


@device
def division_of(n_in):
    """Chunks of a row, chunks at a time, quads at a time: a power of two."""
    n_chunk = quotient(n_in + CHUNK - 1, CHUNK)
    at_a_time, n_quad = min(n_chunk, WORKERS), 1
    while 2 * n_quad * at_a_time <= WORKERS:
        n_quad *= 2
    return n_chunk, at_a_time, n_quad


def _bringing(ring: Ring, rows: Rows) -> Any:
    """The function that starts the copies of a group: a warp's work.

    A group is `per` quads, or, of rows longer than WORKERS chunks, so many chunks of a quad.
    """
    part, group, stages = ring
    address, step = rows.address, WORKERS * part

    @device
    def bring(shared, weights, size, quads, division, i, place):
        (first, last), (n_chunk, _, per) = quads, division
        full = uint32(shared + stages * group + 16 * place)
        n_group = quotient(last - first + per - 1, per)
        quad, to = first + per * remainder(i, n_group), shared + group * place
        if n_chunk <= WORKERS:
            n_quad, a_copy = min(int64(per), last - quad), AT_ONCE * size
            if lane() == 0:
                barrier_expect(full, uint32(n_quad * a_copy))
            sync_warp()
            if lane() < n_quad:
                at = address(weights, size, quad + lane())
                copy_bulk(uint32(to + a_copy * lane()), at, uint32(a_copy), full)
        else:
            skipped = step * quotient(i, n_group)
            a_copy = min(int64(step), size - skipped)
            if lane() == 0:
                barrier_expect(full, uint32(AT_ONCE * a_copy))
            sync_warp()
            if lane() < AT_ONCE:
                at = address(weights, size, quad) + size * lane() + skipped
                copy_bulk(uint32(to + step * lane()), at, uint32(a_copy), full)

    return bring


def _multiplying(type: str) -> tuple[Any, Any]:
    """The functions x_of, what a lane multiplies with all rows, and multiply."""
    halves, both = halves_of(type), multiplying(type)

    @device
    def x_of(x_row, n, chunk):
        """A lane's two units of x in a chunk; those of the first where it has none."""
        here = lane() if CHUNK * chunk + WARP * lane() < n else 0
        first, second = halves(0, here)[0]  # nothing is read
        at = CHUNK * chunk if CHUNK * chunk + WARP * here < n else 0
        scales = x_row + FEW_ROW.scale * (n >> 2)
        return (
            x_unit(x_row + at + first, scales + ((at + first) >> 2), n),
            x_unit(x_row + at + second, scales + ((at + second) >> 2), n),
        )

    @device
    def multiply(at, stride, units):
        """A lane's part of four rows' chunks."""
        u, (x, y) = lane(), units
        one, other = halves(at, u), halves(at + stride, u)
        more, most = halves(at + 2 * stride, u), halves(at + 3 * stride, u)
        return both(one, x, y), both(other, x, y), both(more, x, y), both(most, x, y)

    return x_of, multiply


@device
def root_of(squares, parts):
    """A thread's part of the sum of a row's squares, to parts of the workers' warps."""
    total = warp_sum(squares)
    if lane() == 0:
        parts[warp()] = total


def _running(type: str, rows: Rows) -> tuple[Any, Any, Ring]:
    """The functions start and run: all of an op's work but what `rows` does."""
    ring, row_bytes = ring_of(type), row_bytes_of(type)
    bring, (x_of, multiply) = _bringing(ring, rows), _multiplying(type)
    (part, group, stages), unit, n_worker = ring, rows.unit, WORKERS * WARP
    ahead_of, finish = rows.ahead, rows.finish

    @device
    def groups_of(quads, division):
        """How many groups a block multiplies with each row of x."""
        n_chunk, at_a_time, per = division
        n = quotient(quads[1] - quads[0] + per - 1, per)
        return n * quotient(n_chunk + at_a_time - 1, at_a_time)

    @device
    def start(tid, n_thread, step, weights, n_in, n_quad):
        """Start the copies of the first groups."""
        shared = int64(shared_address(cuda.shared.array(0, uint8)))
        if thread() < 2 * stages:
            count = 1 if thread() % 2 == 0 else WORKERS
            barrier_init(uint32(shared + stages * group + 8 * thread()), uint32(count))
            barrier_shown()
        sync_block()
        if warp() == WORKERS:
            n_tok, quads = step_of(step)[0], quads_of(tid, n_thread, n_quad, unit)
            division, size = division_of(n_in), row_bytes(n_in)
            n = groups_of(quads, division)
            for i in range(min(int64(stages), n * n_tok)):
                bring(shared, weights, size, quads, division, remainder(i, n), i)

    @device
    def bring_rest(shared, weights, size, quads, division, n_tok):
        """Start the copies of all other groups, each where another one was multiplied."""
        n, place, phase = groups_of(quads, division), int32(0), int32(0)
        for i in range(stages, n * n_tok):
            free = uint32(shared + stages * group + 16 * place + 8)
            while barrier_ended(free, uint32(phase)) == 0:
                pass
            bring(shared, weights, size, quads, division, remainder(i, n), place)
            place = int32(place + 1)
            if place == stages:
                place, phase = int32(0), phase ^ int32(1)

    @device
    def run(tid, n_thread, step, weights, x, n_in, n_quad, to):
        sums, parts = (
            cuda.shared.array((WORKERS, ROOM), float32),
            cuda.shared.array(WORKERS, float32),
        )
        shared, size = int64(shared_address(cuda.shared.array(0, uint8))), row_bytes(n_in)
        (n_tok, pos, _), division = step_of(step), division_of(n_in)
        quads = quads_of(tid, n_thread, n_quad, unit)
        (first, last), (n_chunk, at_a_time, per) = quads, division
        if warp() == WORKERS:
            bring_rest(shared, weights, size, quads, division, n_tok)
            return
        packed, normed, eps = x
        mine, chunk_of = quotient(warp(), at_a_time), remainder(warp(), at_a_time)
        stride = size if n_chunk <= WORKERS else int64(WORKERS * part)
        skipped = AT_ONCE * stride * mine + part * chunk_of
        place, phase = int32(0), int32(0)
        for t in range(n_tok):
            row, factor = packed + FEW_ROW.size * (n_in >> 2) * t, float32(1)
            squares = float32(0)
            if normed:
                for i in range(thread(), n_in // UNIT, n_worker):
                    squares += const_f32(row + FEW_ROW.squares * (n_in >> 2) + 4 * i)
            root_of(squares, parts)
            for base in range(first, last, ROOM // AT_ONCE):
                end = min(last, base + ROOM // AT_ONCE)
                there = thread() < AT_ONCE * (end - base)
                where = AT_ONCE * base + thread(), t, pos + t, there
                ahead = ahead_of(to, where)
                chunk = chunk_of
                while chunk - chunk_of < n_chunk:  # a range divides by its step
                    units = x_of(row, n_in, chunk)
                    works = mine < per and chunk < n_chunk
                    live = works and CHUNK * chunk + WARP * lane() < n_in
                    q = base
                    while q < end:
                        full = uint32(shared + stages * group + 16 * place)
                        while barrier_ended(full, uint32(phase)) == 0:
                            pass
                        if works and q + mine < end:
                            four = float32(0), float32(0), float32(0), float32(0)
                            if live:
                                four = multiply(shared + group * place + skipped, stride, units)
                            value = four_sums(four)
                            if lane() % 8 == 0:
                                r = AT_ONCE * (q + mine - base) + lane() // 8
                                if chunk > chunk_of:
                                    value += sums[chunk_of, r]
                                sums[chunk_of, r] = value
                        sync_warp()
                        if lane() == 0:
                            barrier_arrive(uint32(full + 8))
                        place = int32(place + 1)
                        if place == stages:
                            place, phase = int32(0), phase ^ int32(1)
                        q += per
                    chunk += at_a_time
                sync_threads(uint32(n_worker))
                if WARP * warp() < AT_ONCE * (end - base):
                    if normed:
                        total = float32(0)
                        for i in range(WORKERS):
                            total += parts[i]
                        factor = float32(1) / math.sqrt(total / float32(n_in) + eps)
                    value = float32(0)
                    for c in range(at_a_time):
                        value += sums[c, thread()]
                    finish(to, where, factor * value, ahead)
                sync_threads(uint32(n_worker))  # before the next sums overwrite what is read here

    return start, run, ring


def _launch(kernel: Any, start: Any, ring: Ring) -> list[Launch]:
    threads = WARP * (WORKERS + 1)
    return [Launch(kernel, BLOCKS, ring.size, threads, "few", start)]


@device
def of_three(weights, size, quad):
    """The address of a quad of up to three matrices, one after the other."""
    w, w2, w3, n, n2 = weights
    row = AT_ONCE * quad
    if row < n:
        return w + size * row
    return w2 + size * (row - n) if row < n + n2 else w3 + size * (row - n - n2)


@device
def chosen(three, r, n, n2):
    """Of three numbers that of the matrix which row r is in, and the row's number there."""
    one, other, last = three
    if r < n:
        return one, r
    return (other, r - n) if r < n + n2 else (last, r - n - n2)


def _to_rows() -> Rows:
    """Products go to rows of their own, added to a bias and to what is there."""

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

    return Rows(1, of_three, ahead, finish)


def products(type: str) -> list[Launch]:
    """Kernel of PRODUCTS."""
    begin, run, ring = _running(type, _to_rows())

    def start(
        tid, n_thread, step, packed, normed, eps_f, n_in, w, w2, w3, bias, bias2, bias3, y, y2, y3,
        n, n2, n3, add,
    ):  # fmt: skip
        begin(tid, n_thread, step, (w, w2, w3, n, n2), n_in, (n + n2 + n3) // AT_ONCE)

    def kernel(
        tid, n_thread, step, packed, normed, eps_f, n_in, w, w2, w3, bias, bias2, bias3, y, y2, y3,
        n, n2, n3, add,
    ):  # fmt: skip
        to = (y, y2, y3), (bias, bias2, bias3), (n, n2, n3), add
        run(
            tid, n_thread, step, (w, w2, w3, n, n2), (packed, normed, eps_f), n_in,
            (n + n2 + n3) // AT_ONCE, to,
        )  # fmt: skip

    return _launch(kernel, start, ring)


def _to_norm() -> Rows:
    """Products are added to a row, which times a norm's weights is packed, and its squares."""

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

    return Rows(UNIT // AT_ONCE, of_three, ahead, finish)


def product_norm(type: str) -> list[Launch]:
    """Kernel of PRODUCT_NORM."""
    begin, run, ring = _running(type, _to_norm())

    def start(tid, n_thread, step, packed, normed, eps_f, n_in, w, bias, y, n, add, weight, to):
        begin(tid, n_thread, step, (w, w, w, n, n), n_in, n // AT_ONCE)

    def kernel(tid, n_thread, step, packed, normed, eps_f, n_in, w, bias, y, n, add, weight, to):
        run(
            tid, n_thread, step, (w, w, w, n, n), (packed, normed, eps_f), n_in, n // AT_ONCE,
            (y, bias, n, add, weight, to),
        )  # fmt: skip

    return _launch(kernel, start, ring)


@device
def of_gates(weights, size, quad):
    """The address of a quad of two matrices, of which rows lie in turn, UNIT of each."""
    w, w2 = weights
    unit, i = quad >> 3, quad & 7
    return (w2 if i & 4 else w) + size * (UNIT * unit + AT_ONCE * (i & 3))


def _to_gate(activation: str) -> Rows:
    """The activation of a row of gates, times the other branch, is packed."""
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

    return Rows(2 * UNIT // AT_ONCE, of_gates, ahead, finish)


def product_gate(type: str, activation: str) -> list[Launch]:
    """Kernel of PRODUCT_GATE."""
    begin, run, ring = _running(type, _to_gate(activation))

    def start(tid, n_thread, step, packed, normed, eps_f, n_in, w, w2, n, to):
        begin(tid, n_thread, step, (w, w2), n_in, 2 * n // AT_ONCE)

    def kernel(tid, n_thread, step, packed, normed, eps_f, n_in, w, w2, n, to):
        run(tid, n_thread, step, (w, w2), (packed, normed, eps_f), n_in, 2 * n // AT_ONCE, (n, to))

    return _launch(kernel, start, ring)


def _turned(neox: int) -> tuple[Any, Any]:
    """The functions address and row_of: two quads have the rows that are turned together."""

    @device
    def row_of(r, n_half):
        """The row of the r-th of the rows that a block has in turn."""
        if not neox:
            return r
        i = r >> 3  # of four pairs
        quarter = n_half >> 2
        h = quotient(i, quarter)
        return 2 * n_half * h + AT_ONCE * (i - quarter * h) + (r & 3) + (n_half if r & 4 else 0)

    @device
    def address(weights, size, quad):
        w, w2, w3, n, n2, n_half = weights
        row = row_of(AT_ONCE * quad, n_half)
        return of_three((w, w2, w3, n, n2), size, row // AT_ONCE)

    return address, row_of


def _to_keep(neox: int) -> Rows:
    """Queries and keys are turned by their positions; keys and values go to the pages, f16."""
    address, row_of = _turned(neox)
    apart = AT_ONCE if neox else 1  # from a row to the one that it is turned with

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

    return Rows(2, address, ahead, finish)


def product_keep(type: str, neox: int) -> list[Launch]:
    """Kernel of PRODUCT_KEEP."""
    begin, run, ring = _running(type, _to_keep(neox))

    def start(
        tid, n_thread, step, packed, normed, eps_f, n_in, w, w2, w3, bias, bias2, bias3, q, n, n2,
        cos, sin, n_half, k_pages, v_pages, k_table, v_table,
    ):  # fmt: skip
        begin(tid, n_thread, step, (w, w2, w3, n, n2, n_half), n_in, (n + 2 * n2) // AT_ONCE)

    def kernel(
        tid, n_thread, step, packed, normed, eps_f, n_in, w, w2, w3, bias, bias2, bias3, q, n, n2,
        cos, sin, n_half, k_pages, v_pages, k_table, v_table,
    ):  # fmt: skip
        pages = k_pages, v_pages, k_table, v_table
        to = (bias, bias2, bias3), pages, (n, n2), n_half, (cos, sin), q
        run(
            tid, n_thread, step, (w, w2, w3, n, n2, n_half), (packed, normed, eps_f), n_in,
            (n + 2 * n2) // AT_ONCE, to,
        )  # fmt: skip

    return _launch(kernel, start, ring)
