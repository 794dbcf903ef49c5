"""A copy of keys in 4 or 8 bits: what is missing is copied, all are scored, the best exactly."""

import math
from typing import Any, NamedTuple

from llvmlite import ir
from numba import cuda, float32, int32, types, uint8, uint32

from tamis.jit_kernels.contract.op import POS
from tamis.jit_kernels.contract.ops.select.key_copy import COPY_SAMPLE, COPY_TIMES, copy_bytes
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading, reading_one, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    MOST_WARPS,
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    threads,
    total_of,
    warp,
    warp_max,
    warp_sum,
    warp_through,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    I32,
    I64,
    U4,
    address,
    device,
    half_f32,
    load_device,
    load_f16,
    load_f32,
    load_f32x8,
    load_i32,
    op,
    ordered,
    pack_f16,
    quotient,
    remainder,
    rounded,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    LOAD_SHARED_WORD,
    MMA_S8,
    MMA_U8_S8,
    add_i32,
    ballot,
    count_bits,
    emit,
    keep_u32,
    load_shared,
    load_shared_i32,
    reciprocal,
    shared_address,
    shuffle_i32,
    shuffle_xor,
    store_shared_f32,
    store_shared_i32,
    sync_warp,
)
from tamis.jit_kernels.cuda.lang.radix_topk import (
    BINS,
    HELD,
    SPAN,
    SUBSPAN,
    counting,
    counting_by,
    holding,
    some_of,
    value_of,
)
from tamis.jit_kernels.cuda.select.common import LOWEST, NOTHING, middle

HEADS, EIGHT = 8, 8  # heads of a product; elements of a key that a lane handles together
STEPS = {4: 7, 8: 127}  # codes of the largest element of a key
Q_STEPS = 127  # and of a query
LARGEST = 65504.0  # of a step, a float16
TINY = 1e-30
LEAST_SPREAD = 1e-3  # of the mean spread: elements that are nearly the same in all keys
LISTED = 4 * WARP  # positions that a warp lists at a time
WIDE = 512  # threads of a block of COPY_CANDIDATES


def width_of(head_dim: int) -> int:
    """Bytes of float32s of a head, filled up to whole 32."""
    return -(-head_dim // 32) * 128


def lanes_of(head_dim: int) -> int:
    """How many lanes share a key that is multiplied exactly."""
    return 16 if head_dim <= 128 else WARP


def multiplying_heads(n_word: int, bits: int) -> Any:
    """The intrinsic (queries, first, second, key, other key) that multiplies 8 heads by 16 keys.

    A lane has 8 n_word elements of a head and of two keys, lane / 4 and 8 further; first and second
    are what sums of its heads begin with.
    """
    key_kind, head_kind = (
        types.UniTuple(uint32, n_word * bits // 4),
        types.UniTuple(uint32, 2 * n_word),
    )
    low, four = ir.Constant(I32, 0x0F0F0F0F), ir.Constant(I32, 4)

    def halves(b: Any, key: list[Any], i: int) -> tuple[Any, Any]:
        if bits == 8:
            return key[2 * i], key[2 * i + 1]
        return b.and_(key[i], low), b.and_(b.lshr(key[i], four), low)

    @op(U4, head_kind, int32, int32, key_kind, key_kind)
    def multiply(b, heads, first, second, key, other):
        sums = [first, second, first, second]
        for i in range(n_word):
            (a, c), (d, e) = halves(b, key, i), halves(b, other, i)
            product = MMA_S8 if bits == 8 else MMA_U8_S8
            sums = emit(b, product, [a, d, c, e, heads[2 * i], heads[2 * i + 1], *sums])
        return sums

    return multiply


def loading_words(n: int) -> Any:
    """The intrinsic that loads n words of a multiple of their largest power of two."""
    wide = 4 if n % 4 == 0 else 2 if n % 2 == 0 else 1

    @op(types.UniTuple(uint32, n), types.int64)
    def words(b, at):
        found: list[Any] = []
        for i in range(0, n, wide):
            there = b.add(at, ir.Constant(I64, 4 * i))
            vector = load_device(b, there, ir.VectorType(I32, wide), 4 * wide)
            found += [b.extract_element(vector, ir.Constant(I32, j)) for j in range(wide)]
        return found

    return words


def loading_heads(n: int) -> Any:
    """The intrinsic that loads n words of shared memory, WARP words apart."""

    @op(types.UniTuple(uint32, n), uint32)
    def words(b, at):
        found: list[Any] = []
        for i in range(n):
            there = b.add(at, ir.Constant(I32, 4 * WARP * i))
            found += emit(b, LOAD_SHARED_WORD, [there])
        return found

    return words


@device
def asked_of(counts, heads, h):
    """How many of a KV head's query heads are scored; counts: see ScoreCopy."""
    return load_i32(counts + 4 * h) if counts != 0 else heads


@device
def asking_head(counts, i):
    """The i-th KV head of those that have any."""
    h = i
    if counts != 0:
        h = 0
        while i > 0 or load_i32(counts + 4 * h) == 0:
            i -= 1 if load_i32(counts + 4 * h) > 0 else 0
            h += 1
    return h


# ---- copying -------------------------------------------------------------------------------------
def centring(head_dim: int, type_k: str) -> Any:
    """The function that leaves a KV head's centre, spread and 1 / spread in shared memory.

    They follow each other, and are 0 after head_dim elements. It is a block's work.
    """
    size, read, width = (
        row_bytes(type_k, head_dim),
        reading_one(type_k, head_dim),
        width_of(head_dim),
    )

    @device
    def put(shared, d, mean, spread):
        inverse = reciprocal(spread) if spread > float32(0) else float32(0)
        store_shared_f32(uint32(shared + 4 * d), mean)
        store_shared_f32(uint32(shared + width + 4 * d), spread)
        store_shared_f32(uint32(shared + 2 * width + 4 * d), inverse)

    @device
    def sampled(a, h, n, d):
        """Mean and variance of element d over COPY_SAMPLE of the first n keys, or over all."""
        m = min(n, COPY_SAMPLE)
        rows, first, total, squares = 0, float32(0), float32(0), float32(0)
        for i in range(m):
            j = quotient(i * n, m)
            rows = a.k_pages + size * key_row(a.k_table, a.n_head_kv, h, j)
            x = read(rows, d)
            first = x if i == 0 else first
            total, squares = total + (x - first), squares + (x - first) * (x - first)
        mean = total / float32(m)
        return first + mean, max(squares / float32(m) - mean * mean, float32(0))

    @device
    def take(a, shared, h, n, is_first, parts):
        mine = float32(0)
        for d in range(thread(), head_dim, THREADS):
            mean, variance = sampled(a, h, n, d)
            spread = math.sqrt(variance)
            put(shared, d, mean, spread)
            mine += spread
        least = max(float32(LEAST_SPREAD / head_dim) * total_of(mine, parts), float32(TINY))
        for d in range(thread(), head_dim, THREADS):
            mean = load_shared(uint32(shared + 4 * d))
            spread = max(load_shared(uint32(shared + width + 4 * d)), least)
            put(shared, d, mean, spread)
            if is_first:
                a.centre[h, d], a.spread[h, d] = mean, spread

    @device
    def known(a, shared, h):
        for d in range(thread(), head_dim, THREADS):
            put(shared, d, a.centre[h, d], a.spread[h, d])

    @device
    def centre(a, shared, h, n, is_first, parts):
        for d in range(head_dim + thread(), width // 4, THREADS):
            put(shared, d, float32(0), float32(0))
        if a.filled[h] == 0:
            take(a, shared, h, n, is_first, parts)
        else:
            known(a, shared, h)

    return centre


def copying(head_dim: int, type_k: str, bits: int) -> Any:
    """The function of a warp that copies keys begin .. end - 1; shared: as centring leaves it."""
    size, read, width = row_bytes(type_k, head_dim), reading(type_k, head_dim), width_of(head_dim)
    most, n_eight, n_read = STEPS[bits], width // 4 // EIGHT, head_dim // EIGHT

    @device
    def part_of(shared, row, e, i):
        """Element i of an eight less its centre, in spreads."""
        at = shared + 4 * (EIGHT * e + i)
        return (row[i] - load_shared(uint32(at))) * load_shared(uint32(at + 2 * width))

    @device
    def code_of(shared, row, e, i, inverse):
        code = rounded(part_of(shared, row, e, i) * inverse) if e < n_read else int32(0)
        return max(min(code, int32(most)), int32(-most))

    @device
    def put(shared, row, e, inverse, at):
        low, high = uint32(0), uint32(0)
        for i in range(4):
            one = code_of(shared, row, e, i, inverse)
            other = code_of(shared, row, e, i + 4, inverse)
            if bits == 4:
                low |= uint32(((one + 8) | ((other + 8) << 4)) << (8 * i))
            else:
                low |= uint32((one & 255) << (8 * i))
                high |= uint32((other & 255) << (8 * i))
        store_i32(at + bits * e, low)
        if bits == 8:
            store_i32(at + bits * e + 4, high)

    @device
    def copy(a, shared, h, begin, end):
        for j in range(begin, end):
            me, shared = keep_u32(lane()), keep_u32(uint32(shared))  # as in `queries`
            row, mine = a.k_pages + size * key_row(a.k_table, a.n_head_kv, h, j), float32(0)
            for e in range(me, n_read, WARP):
                x = read(row, EIGHT * e)
                for i in range(EIGHT):
                    mine = max(mine, abs(part_of(shared, x, e, i)))
            step = min(warp_max(mine) * float32(1 / most), float32(LARGEST))
            step = half_f32(pack_f16(step, float32(0)))  # as it will be read
            inverse = reciprocal(step) if step > float32(0) else float32(0)
            for e in range(me, n_eight, WARP):
                x = read(row, EIGHT * min(e, n_read - 1))
                put(shared, x, e, inverse, address(a.codes[h, j]))
            if me == 0:
                a.steps[h, j] = step

    return copy


# ---- scores --------------------------------------------------------------------------------------
class Room(NamedTuple):
    """Byte offsets in a block's shared memory: what centring leaves comes first."""

    heads: int  # words of eight heads, WARP words apart, for each pass
    of_heads: int  # of each head: its step, what its sums begin with, and q . centre
    end: int


def room_of(head_dim: int, heads: int) -> Room:
    """The layout."""
    n_word, n_pass = width_of(head_dim) // 128, -(-heads // HEADS)
    at = 3 * width_of(head_dim)
    of_heads = at + 4 * WARP * 2 * n_word * n_pass
    return Room(at, of_heads, of_heads + 16 * HEADS * n_pass)


def preparing(head_dim: int, heads: int, bits: int) -> Any:
    """The function of a warp that leaves a head's query times spread, as bytes: four a lane."""
    n_word, width, room = width_of(head_dim) // 128, width_of(head_dim), room_of(head_dim, heads)

    @device
    def element(shared, q, d):
        """An element of a query, and of its product with the spread and the centre."""
        x = load_f32(q + 4 * min(d, head_dim - 1))
        at = shared + 4 * d  # 0 after head_dim elements
        return x * load_shared(uint32(at + width)), x * load_shared(uint32(at))

    @device
    def prepare(shared, q, head, live):
        shared = keep_u32(uint32(shared))  # as in `queries`
        own, top, centre = q + 4 * head_dim * (head if live else 0), float32(0), float32(0)
        for word in range(lane(), 8 * n_word, WARP):
            for i in range(4):
                x, part = element(shared, own, 4 * word + i)
                top, centre = max(top, abs(x)), centre + part
        top, centre = warp_max(top), warp_sum(centre)
        inverse = float32(Q_STEPS) * reciprocal(top) if top > float32(TINY) else float32(0)
        inverse = inverse if live else float32(0)
        total, pass_, g = float32(0), head // HEADS, head % HEADS
        for word in range(lane(), 8 * n_word, WARP):
            four = uint32(0)
            for i in range(4):
                code = rounded(element(shared, own, 4 * word + i)[0] * inverse)
                total += float32(code)
                four |= uint32((code & 255) << (8 * i))
            # Lane 4 g + t multiplies eights n_word t to n_word t + n_word - 1, a half a register.
            eight = word // 2
            at = WARP * (2 * (n_word * pass_ + eight % n_word) + word % 2) + 4 * g + eight // n_word
            store_shared_i32(uint32(shared + room.heads + 4 * at), int32(four))
        total = warp_sum(total)
        if lane() == 0:
            at = shared + room.of_heads + 16 * head
            store_shared_f32(uint32(at), top * float32(1 / Q_STEPS))
            # Codes of 4 bits have 8 added, for which the sums begin with so much less.
            begin = int32(-8) * rounded(total) if bits == 4 else int32(0)
            store_shared_i32(uint32(at + 4), begin)
            # The maximum of all heads is not that of a head that fills up the eight.
            store_shared_f32(uint32(at + 8), centre if live else float32(NOTHING))

    return prepare


@device
def scaled(products, steps, step, centre):
    """Scores of a head: the products of four keys by the steps of both, and q . centre."""
    return (
        float32(int32(products[0])) * (steps[0] * step) + centre,
        float32(int32(products[1])) * (steps[1] * step) + centre,
        float32(int32(products[2])) * (steps[2] * step) + centre,
        float32(int32(products[3])) * (steps[3] * step) + centre,
    )


@device
def larger(x, y):
    """The larger of each of four."""
    return max(x[0], y[0]), max(x[1], y[1]), max(x[2], y[2]), max(x[3], y[3])


@device
def within(x, j, low, high):
    """Scores of keys j, j + 8, ... of a span, LOWEST outside low .. high - 1."""
    no, second, third, fourth = float32(LOWEST), j + 8, j + 16, j + 24
    return (
        x[0] if low <= j and j < high else no,
        x[1] if low <= second and second < high else no,
        x[2] if low <= third and third < high else no,
        x[3] if low <= fourth and fourth < high else no,
    )


@device
def put_scores(to, x, top, live):
    """Store four scores; return the maxima of keys 16 apart."""
    if live:
        store_f32(to, x[0])
        store_f32(to + 32, x[1])
        store_f32(to + 64, x[2])
        store_f32(to + 96, x[3])
    return max(top[0], max(x[0], x[2])), max(top[1], max(x[1], x[3]))


@device
def put_maxima(to, top, live):
    """Store two maxima, of keys 8 apart."""
    if live:
        store_f32(to, top[0])
        store_f32(to + 32, top[1])


def multiplying(head_dim: int, heads: int, group: int, bits: int) -> Any:
    """The functions of a lane that read its keys and queries, and that score them.

    Lane 4 g + t has the products of keys g, g + 8, g + 16 and g + 24 of 32 with heads 2 t and
    2 t + 1 of eight (PTX ISA, m16n8k32).
    """
    n_word, room, n_pass = width_of(head_dim) // 128, room_of(head_dim, heads), -(-heads // HEADS)
    size, joint = copy_bytes(head_dim, bits), group > 1
    multiply, load_key = multiplying_heads(n_word, bits), loading_words(n_word * bits // 4)
    load_heads = loading_heads(2 * n_word)
    n_level = (min(heads, HEADS) - 1).bit_length() - 1 if joint else 0

    @device
    def keys_at(own, step_at):
        """A lane's part of four keys, and their step sizes."""
        words = (
            load_key(own),
            load_key(own + 8 * size),
            load_key(own + 16 * size),
            load_key(own + 24 * size),
        )
        steps = (
            load_f16(step_at),
            load_f16(step_at + 16),
            load_f16(step_at + 32),
            load_f16(step_at + 48),
        )
        return words, steps

    @device
    def queries(shared, pass_):
        """A lane's part of eight heads, and of two: what sums begin with, step, q . centre."""
        me = keep_u32(lane())  # kept, what is made of it does not fill registers meanwhile
        words = load_heads(uint32(shared + room.heads + 4 * (2 * WARP * n_word * pass_ + me)))
        of = shared + room.of_heads + 16 * (HEADS * pass_ + 2 * (me % 4))
        begin = load_shared_i32(uint32(of + 4)), load_shared_i32(uint32(of + 20))
        steps = load_shared(uint32(of)), load_shared(uint32(of + 16))
        return words, begin, steps, (load_shared(uint32(of + 8)), load_shared(uint32(of + 24)))

    @device
    def scores_of(own, keys):
        """Scores of four keys by one head, and by the next."""
        (head, begin, step, centre), (words, steps) = own, keys
        s = multiply(head, begin[0], begin[1], words[0], words[1])
        u = multiply(head, begin[0], begin[1], words[2], words[3])
        return (
            scaled((s[0], s[2], u[0], u[2]), steps, step[0], centre[0]),
            scaled((s[1], s[3], u[1], u[3]), steps, step[1], centre[1]),
        )

    @device
    def of_a_row(shared, x, keys):
        """The maxima over all heads; x: those of the lane's first two."""
        for pass_ in range(1, n_pass):
            y, z = scores_of(queries(shared, pass_), keys)
            x = larger(x, larger(y, z))
        for level in range(n_level):
            apart = 1 << level
            other = (
                shuffle_xor(x[0], apart), shuffle_xor(x[1], apart),
                shuffle_xor(x[2], apart), shuffle_xor(x[3], apart),
            )  # fmt: skip
            x = larger(x, other)
        return x

    return keys_at, queries, scores_of, of_a_row


def scoring(head_dim: int, heads: int, group: int, bits: int) -> Any:
    """The function of a warp that scores a span of keys by their copies, and takes its maxima.

    The keys of a maximum, SUBSPAN apart, are a lane's, see multiplying, and nothing is exchanged
    but the heads' maximum where they are one row.
    """
    size, joint, lane_bytes = (
        copy_bytes(head_dim, bits),
        group > 1,
        width_of(head_dim) // 128 * bits,
    )
    n_pass = -(-heads // HEADS)
    keys_at, queries, scores_of, of_a_row = multiplying(head_dim, heads, group, bits)

    @device
    def scan(a, shared, places, live, limits):
        """Score keys by the heads of a pass, or of all; live: whether the lane stores each."""
        (h, pass_, base, head), (low, high) = places, limits
        i, end = low // PAGE * (PAGE // WARP), (high + PAGE - 1) // PAGE * (PAGE // WARP)
        me, nothing = keep_u32(lane()), (float32(NOTHING), float32(NOTHING))
        g, first = me // 4, base + WARP * i
        own = address(a.codes[h, first]) + size * g + lane_bytes * (me % 4)
        step_at = address(a.steps[h]) + 2 * (first + g)
        to, apart = address(a.scores[head]) + 4 * (first + g), 4 * a.capacity
        heads_of_lane, is_edge = queries(shared, pass_), low > 0 or high < SPAN
        top, next_top = nothing, nothing
        while i < end:
            keys = keys_at(own, step_at)
            x, y = scores_of(heads_of_lane, keys)
            if joint:
                x = of_a_row(shared, larger(x, y), keys)
            if is_edge:
                x = within(x, WARP * i + g, low, high)
                y = within(y, WARP * i + g, low, high)
            top = put_scores(to, x, top, live[0])
            if not joint:
                next_top = put_scores(to + apart, y, next_top, live[1])
            own, step_at, to = own + WARP * size, step_at + 2 * WARP, to + 4 * WARP
            i += 1
        tops = address(a.maxima[head]) + 4 * (base // SUBSPAN + g)
        put_maxima(tops, top, live[0])
        if not joint:
            put_maxima(tops + quotient(apart, SUBSPAN), next_top, live[1])

    @device
    def score(a, shared, h, n, span, limits):
        base, t = SPAN * span, keep_u32(lane()) % 4
        low = int32(min(max(limits[0] - base, 0), SPAN))
        high = int32(min(max(limits[1] - base, 0), SPAN))
        if joint:
            scan(a, shared, (h, 0, base, heads * h), (t == 0, False), (low, high))
        else:
            for pass_ in range(n_pass):
                head = HEADS * pass_ + 2 * t
                if HEADS * pass_ < n:
                    live = head < n, head + 1 < n
                    row = heads * h + min(head, heads - 1)
                    scan(a, shared, (h, pass_, base, row), live, (low, high))

    return score


def score_copy(head_dim: int, heads: int, group: int, type_k: str, bits: int) -> list[Launch]:
    """Kernel of SCORE_COPY: blocks have shares of the KV heads that ask, warps take spans."""
    if group not in (1, heads):
        raise ValueError(f"SCORE_COPY: rows of {group} of {heads} heads, expected 1 or all")
    centre, copy = centring(head_dim, type_k), copying(head_dim, type_k, bits)
    prepare, score = preparing(head_dim, heads, bits), scoring(head_dim, heads, group, bits)
    room = room_of(head_dim, heads)

    def kernel(tid, n_thread, a):
        shared, parts = (
            shared_address(cuda.shared.array(0, uint8)),
            cuda.shared.array(WARPS, float32),
        )
        counts, limits = address(a.counts), middle(a.step[POS], a.n_sink, a.n_local, a.drop)
        low, high = limits
        if tid == 0:
            for r in range(thread(), a.n_row, THREADS):
                a.n_found[r] = 0
        n_asking = 0
        for h in range(a.n_head_kv):
            n_asking += 1 if asked_of(counts, heads, h) > 0 else 0
        n_part = max(1, quotient(n_thread, max(1, n_asking)))
        for item in range(tid, n_asking * n_part if high > low else 0, n_thread):
            h, part = asking_head(counts, remainder(item, n_asking)), quotient(item, n_asking)
            n, q = asked_of(counts, heads, h), address(a.q) + 4 * head_dim * heads * h
            centre(a, shared, h, high, part == 0, parts)
            sync_block()
            for head in range(warp(), (n + HEADS - 1) // HEADS * HEADS, WARPS):
                prepare(shared, q, head, head < n)
            sync_block()
            new = a.filled[h]
            first, end = min(low, new) // SPAN, (high + SPAN - 1) // SPAN
            for i in range(part + n_part * warp(), end - first, n_part * WARPS):
                span = end - 1 - i  # the last one, which has a key to copy, is the first
                copy(a, shared, h, max(new, SPAN * span), min(high, SPAN * (span + 1)))
                sync_warp()
                if SPAN * (span + 1) > low:
                    score(a, shared, h, n, span, limits)
            sync_block()  # before the next head's queries overwrite what is read here

    few = head_dim <= 128 and heads <= 2 * HEADS
    return [Launch(kernel, blocks=2 if few else 1, shared=room.end)]


# ---- candidates ----------------------------------------------------------------------------------
def exactly(head_dim: int, group: int, type_k: str) -> Any:
    """The function of a warp (a, h, q, four positions) that returns the lane's exact scores.

    Half of a warp has keys of up to 128 elements, and the other half others.
    """
    size, read = row_bytes(type_k, head_dim), reading(type_k, head_dim)
    lanes, n_eight = lanes_of(head_dim), head_dim // EIGHT
    n_turn, n_level = -(-n_eight // lanes), lanes.bit_length() - 1

    @device
    def product(x, y, live):
        total = float32(0)
        for i in range(EIGHT):
            total += x[i] * y[i]
        return total if live else float32(0)

    @device
    def row_of(a, h, j):
        return a.k_pages + size * key_row(a.k_table, a.n_head_kv, h, j)

    @device
    def exact(a, h, q, keys):
        rows = (
            row_of(a, h, keys[0]),
            row_of(a, h, keys[1]),
            row_of(a, h, keys[2]),
            row_of(a, h, keys[3]),
        )
        best = float32(NOTHING), float32(NOTHING), float32(NOTHING), float32(NOTHING)
        for g in range(group):
            x, y, z, w = float32(0), float32(0), float32(0), float32(0)
            for i in range(n_turn):
                e = lane() % lanes + lanes * i
                d, live = EIGHT * min(e, n_eight - 1), e < n_eight
                head = load_f32x8(q + 4 * (head_dim * g + d))
                x += product(read(rows[0], d), head, live)
                y += product(read(rows[1], d), head, live)
                z += product(read(rows[2], d), head, live)
                w += product(read(rows[3], d), head, live)
            for i in range(n_level):
                x, y = x + shuffle_xor(x, 1 << i), y + shuffle_xor(y, 1 << i)
                z, w = z + shuffle_xor(z, 1 << i), w + shuffle_xor(w, 1 << i)
            best = max(best[0], x), max(best[1], y), max(best[2], z), max(best[3], w)
        return best

    return exact


@device
def reaches(x, bar):
    """Whether a score is in a row's counter `bar`, see counting, or in one of larger scores."""
    number, scale = bar
    return x >= scale[0] and bin_of(ordered(x), scale) >= number


@device
def reaching(a, row, group, bar, limits):
    """A bit for each of a group's keys that reaches the bar; none of a group below 0."""
    (low, high), bits = limits, uint32(0)
    first = SPAN * (group // SUBSPAN) + group % SUBSPAN
    if group >= 0:
        for i in range(SUBSPAN):
            j = first + SUBSPAN * i
            x = a.scores[row, min(max(j, low), high - 1)]
            if low <= j and j < high and reaches(x, bar):
                bits |= uint32(1) << uint32(i)
    return bits


@device
def list_keys(mine, group, bits, before, start):
    """List a lane's keys, of which the warp has `before` before, from number `start` on."""
    first, to = SPAN * (group // SUBSPAN) + group % SUBSPAN, before - start
    for i in range(SUBSPAN):
        if bits >> uint32(i) & uint32(1) != uint32(0):
            if to >= 0 and to < LISTED:
                store_shared_i32(uint32(mine + 4 * to), int32(first + SUBSPAN * i))
            to += 1
    sync_warp()


@device
def some_maxima(maxima, i, apart, end):
    """Do what some_of does, but maxima of no position that is chosen from are none."""
    a, b, c, d = some_of(maxima, i, apart, end)
    least = ordered(float32(LOWEST))
    return (
        a if a > least else uint32(0),
        b if b > least else uint32(0),
        c if c > least else uint32(0),
        d if d > least else uint32(0),
    )


bin_of = counting_by(value_of)
hold, some_held = holding(some_maxima)
counter_of_maxima = counting(some_held, value_of)


def rescoring(head_dim: int, heads: int, group: int, type_k: str) -> Any:
    """The function of a warp that makes the scores of listed positions exact, as candidates."""
    exact, lanes, rows_per_kv = exactly(head_dim, group, type_k), lanes_of(head_dim), heads // group
    at_once = WARP // lanes

    @device
    def put(a, row, to, live, j, x):
        if lane() % lanes == 0 and live:
            a.found[row, to], a.exact[row, to] = j, x
            a.scores[group * row, j] = x

    @device
    def listed(mine, at, n):
        return load_shared_i32(uint32(mine + 4 * min(at, n - 1)))

    @device
    def rescore(a, h, r, mine, to, n):
        row = rows_per_kv * h + r
        q = address(a.q) + 4 * head_dim * group * row
        for i in range(0, n, 4 * at_once):
            at = i + lane() // lanes
            second, third, fourth = at + at_once, at + 2 * at_once, at + 3 * at_once
            keys = (
                listed(mine, at, n), listed(mine, second, n), listed(mine, third, n),
                listed(mine, fourth, n),
            )  # fmt: skip
            found = exact(a, h, q, keys)
            put(a, row, to + at, at < n, keys[0], found[0])
            put(a, row, to + second, second < n, keys[1], found[1])
            put(a, row, to + third, third < n, keys[2], found[2])
            put(a, row, to + fourth, fourth < n, keys[3], found[3])
        sync_warp()  # before the next list overwrites what is read here

    return rescore


def copy_candidates(head_dim: int, heads: int, group: int, type_k: str) -> list[Launch]:
    """Kernel of COPY_CANDIDATES: blocks have shares of the rows that ask.

    Each finds a row's bar by itself. Neighbouring groups of keys go to different warps, since heavy
    keys are often neighbours.
    """
    rescore, rows_per_kv = rescoring(head_dim, heads, group, type_k), heads // group

    @device
    def key_of(held, i):
        """The ordered maximum of a group."""
        shared, maxima, first = held
        if i - first < HELD:
            return uint32(load_shared_i32(uint32(shared + 4 * (i - first))))
        return some_maxima(maxima, i, 1, i + 1)[0]

    @device
    def take(a, h, r, group_, bar, limits, mine):
        """Add the keys of a lane's group, if it has any, to the row's candidates."""
        bits = reaching(a, heads * h + group * r, group_, bar, limits)
        n = int32(count_bits(bits))
        through, to = warp_through(n), int32(0)
        total = shuffle_i32(int32(through), WARP - 1)
        if lane() == 0 and total > 0:
            to = add_i32(address(a.n_found) + 4 * (rows_per_kv * h + r), total)
        to = shuffle_i32(int32(to), 0)
        start = 0
        while start < total:
            list_keys(mine, group_, bits, through - n, start)
            rescore(a, h, r, mine, to + start, min(LISTED, total - start))
            start += LISTED

    @device
    def choose(a, shared, h, r, share, limits, parts):
        """Find a row's bar, and add to its candidates those of a share of its groups."""
        (low, high), (part, n_part) = limits, share
        first, end = low // SPAN * SUBSPAN, (high + SPAN - 1) // SPAN * SUBSPAN
        maxima = address(a.maxima[heads * h + group * r])
        hold(shared, maxima, first, end)
        counters = cuda.shared.array(BINS, int32), cuda.shared.array(3, int32)
        held, n_top = (shared, maxima, first), COPY_TIMES * a.n_top
        bar, _, n_equal = counter_of_maxima(held, first, end, n_top, counters, parts)
        if n_equal == 0:  # no more maxima than that
            bar = int32(0), (float32(NOTHING), float32(0))
        n_warp, below = threads() // WARP, (uint32(1) << lane()) - uint32(1)
        mine = shared + 4 * HELD + 4 * (LISTED + 2 * WARP) * warp()
        kept, n_kept = mine + 4 * LISTED, int32(0)
        for start in range(first + n_warp * part + warp(), end, n_warp * n_part * WARP):
            i = start + n_warp * n_part * lane()
            key = key_of(held, min(i, end - 1))
            best = ballot(
                uint32(1 if i < end and key != 0 and bin_of(key, bar[1]) >= bar[0] else 0)
            )
            if best >> lane() & uint32(1) != uint32(0):
                at = n_kept + int32(count_bits(uint32(best & below)))
                store_shared_i32(uint32(kept + 4 * at), int32(i))
            n_kept += int32(count_bits(best))
            sync_warp()
            if n_kept >= WARP:
                group_ = load_shared_i32(uint32(kept + 4 * lane()))
                take(a, h, r, group_, bar, limits, mine)
                n_kept -= WARP
                if lane() < n_kept:  # those that follow come first, where none is read now
                    group_ = load_shared_i32(uint32(kept + 4 * (WARP + lane())))
                    store_shared_i32(uint32(kept + 4 * lane()), group_)
                sync_warp()
        group_ = int32(-1)
        if lane() < n_kept:
            group_ = load_shared_i32(uint32(kept + 4 * lane()))
        take(a, h, r, group_, bar, limits, mine)

    def kernel(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        parts = cuda.shared.array(MOST_WARPS, int32)
        counts, limits = address(a.counts), middle(a.step[POS], a.n_sink, a.n_local, a.drop)
        n_row, high = 0, limits[1]
        for h in range(a.n_head_kv):
            n_row += quotient(asked_of(counts, heads, h), group)
        n_part = max(1, quotient(n_thread, max(1, n_row)))
        is_some = high - limits[0] > a.n_top and a.n_top > 0
        for item in range(tid, n_row * n_part if is_some else 0, n_thread):
            r, h, part = remainder(item, n_row), 0, quotient(item, n_row)
            while r >= quotient(asked_of(counts, heads, h), group):
                r -= quotient(asked_of(counts, heads, h), group)
                h += 1
            choose(a, shared, h, r, (part, n_part), limits, parts)
            sync_block()  # before the next row's keys overwrite what is read here
        if tid == 0 and high > limits[0]:
            for h in range(thread(), a.n_head_kv, threads()):
                if asked_of(counts, heads, h) > 0:
                    a.filled[h] = max(a.filled[h], high)

    shared = 4 * HELD + 4 * (LISTED + 2 * WARP) * (WIDE // WARP)
    return [Launch(kernel, shared=shared, threads=WIDE, any_size=True)]
