"""Ops of `metered`: estimate by samples the weight that a method left out, and read more.

One thread block takes a row: it has few units, at most MOST_UNITS, and few samples. How many
positions it left out up to a position needs no sum over its units: it is that position minus the
number of positions in the blocks before it.
"""

from typing import Any

from llvmlite import ir
from numba import cuda, float32, float64, int32, types

from tamis.jit_kernels.contract.ops import SIBLINGS, STEP
from tamis.jit_kernels.contract.ops.select.metered import (
    ALL,
    METER,
    MOST_UNITS,
    WIDER,
    WITHIN,
    meter_work,
)
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_before,
    lane,
    sums_before,
    sync_block,
    thread,
    warp,
    warp_max,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    I32,
    I64,
    device,
    int64,
    load_constant,
    load_device,
    load_f32,
    load_f32x8,
    load_i32,
    load_i64,
    op,
    quotient,
    rounded,
    store_f32,
    store_i32,
    uint32,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    DOT_S8,
    emit,
    exp2,
    lowest_of_warp,
    shuffle,
    shuffle_xor,
)

row_work = device(meter_work)
N_START = MOST_UNITS + 1  # where units start, and where the last one ends
MOST_LOGIT = 60.0  # beyond the log-sum-exp; more than e^60 holds nothing as well
MOST_POWER = 120.0  # of 2, that a unit's score has of a head
MOST = 1e30  # of a sum of scores: beyond it chances are equal
SIZE = 127.0  # steps of a byte


@device
def mixed(x):
    """A 64-bit number whose bits all depend on those of x (splitmix64's finaliser)."""
    x = int64((x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687)
    x = int64((x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


@device
def uniform(key, i):
    """The i-th random number of a key, 0 <= u < 1, a multiple of 2^-53."""
    x = mixed(int64(key + int64((i + 1) * -7046029254386353131)))
    return float64(x >> 11 & 0x1FFFFFFFFFFFFF) * 2.0**-53


@device
def first_of_four(row, bars):
    """For each of four bars, the row's first entry that is at least as large.

    A search is a chain of loads: four of them are in flight together.
    """
    begin, end, blocks, _ = row
    a, b, c, d, n = begin, begin, begin, begin, end - begin
    while n > 0:
        half = (n + 1) >> 1
        at = blocks + 4 * (half - 1)
        a += half if load_i32(at + 4 * a) < bars[0] else 0
        b += half if load_i32(at + 4 * b) < bars[1] else 0
        c += half if load_i32(at + 4 * c) < bars[2] else 0
        d += half if load_i32(at + 4 * d) < bars[3] else 0
        n -= half
    return a, b, c, d


@device
def put_cut(row, j, c, u, cuts, kept):
    """Note for a unit's start j the first entry from there, and the number kept before it."""
    begin, _, blocks, block = row
    held = (c - begin) * block
    if c > begin:
        held -= max(0, (load_i32(blocks + 4 * (c - 1)) + 1) * block - j)
    cuts[u], kept[u] = c, held


@device
def cut(row, sizes, cuts, kept):
    """Note for each unit's start the row's first entry from there on, and the kept ones before."""
    (n, unit, n_unit), block, end = sizes, row[3], row[1]
    for first in range(thread(), n_unit, 4 * THREADS):
        j, apart = first * unit, THREADS * unit
        up = block - 1
        bars = (
            quotient(j + up, block), quotient(j + apart + up, block),
            quotient(j + 2 * apart + up, block), quotient(j + 3 * apart + up, block),
        )  # fmt: skip
        found = first_of_four(row, bars)
        for i in range(4):
            if first + THREADS * i < n_unit:
                put_cut(row, j + apart * i, found[i], first + THREADS * i, cuts, kept)
    if thread() == 0:
        put_cut(row, n, end, n_unit, cuts, kept)


@device
def left_before(kept, u, sizes):
    """How many positions before unit u the row lacks."""
    n, unit, _ = sizes
    return min(n, u * unit) - kept[u]


@device
def left_out(row, cuts, u, unit, i):
    """The i-th position of unit u that the row lacks."""
    begin, _, blocks, block = row
    low, first = cuts[u], u * unit
    if low > begin:
        first = max(first, (load_i32(blocks + 4 * (low - 1)) + 1) * block)
    # Entries before it: before the s-th there are so many positions less what they hold.
    start, stop = low, cuts[u + 1]
    while start < stop:
        s = (start + stop) // 2
        if load_i32(blocks + 4 * s) * block - first - (s - low) * block <= i:
            start = s + 1
        else:
            stop = s
    return first + i + (start - low) * block


@device
def unit_of(point, chances, kept, sums, sizes):
    """The unit in which the running sum of the chances passes `point`, or the last unit.

    chances: what a position has, and what its unit's score is multiplied by; sums: of the scores of
    positions before each unit.
    """
    even, per = chances
    low, high = 0, sizes[2] - 1
    while low < high:
        u = (low + high) // 2
        if even * left_before(kept, u + 1, sizes) + per * sums[u + 1] > point:
            high = u
        else:
            low = u + 1
    return low


@device
def sum_scores(left, scores, kept, sizes, sums, pair):
    """Write how many positions of each unit are left out, and the sums of the scores before it."""
    n_unit = sizes[2]
    share = quotient(n_unit + THREADS - 1, THREADS)
    low = min(n_unit, share * thread())
    high, mine = min(n_unit, low + share), 0.0
    for u in range(low, high):
        some = left_before(kept, u + 1, sizes) - left_before(kept, u, sizes)
        store_i32(left + 4 * u, some)
        mine += some * float64(load_f32(scores + 4 * u))
    before, total = sums_before(mine, pair)
    for u in range(low, high):
        sums[u] = before
        before += load_i32(left + 4 * u) * float64(load_f32(scores + 4 * u))
    if thread() == 0:
        sums[n_unit] = total
    sync_block()


@device
def draw(row, scores, found, sizes, given, out):
    """Draw positions of a row; a block's work. given: samples, the key, the equal share."""
    cuts, kept, sums = found
    n, unit, n_unit = sizes
    n_sample, key, even = given
    to, factors = out
    n_left, total = left_before(kept, n_unit, sizes), sums[n_unit]
    some = total > 0.0 and total < MOST
    share = even if some else 1.0
    per = (1.0 - share) / total if some else 0.0
    each = share / n_left if n_left > 0 else 0.0
    for i in range(thread(), n_sample, THREADS):
        j, factor = int64(0), 0.0
        if n_left > n_sample:
            point = (i + uniform(key, i)) / n_sample
            u = unit_of(point, (each, per), kept, sums, sizes)
            chance = each + per * load_f32(scores + 4 * u)
            before = left_before(kept, u, sizes)
            most = left_before(kept, u + 1, sizes) - before - 1
            nth = int64((point - (each * before + per * sums[u])) / chance)
            j = left_out(row, cuts, u, unit, min(most, max(0, nth)))
            factor = 1.0 / (n_sample * chance)
        elif n_left > 0:
            nth = min(i, n_left - 1)
            u = unit_of(nth + 0.5, (1.0, 0.0), kept, sums, sizes)
            j = left_out(row, cuts, u, unit, nth - left_before(kept, u, sizes))
            factor = 1.0 if i < n_left else 0.0
        store_i32(to + 4 * i, min(j, n - 1))
        store_f32(factors + 4 * i, float32(factor))


def siblings_of(head_dim: int) -> tuple[Any, Any, Any]:
    """Functions of one of four lanes, which has every fourth word of SIBLINGS means and of a head.

    They read the means and a head's bytes, which begin at an address, and return the sums of the
    products of each mean with the head.
    """
    n = head_dim // 16
    means, head = types.UniTuple(uint32, SIBLINGS * n), types.UniTuple(uint32, n)

    @op(means, int64)
    def read_means(b: Any, p: Any) -> list[Any]:
        found = []
        for i in range(n):
            at = b.add(p, ir.Constant(I64, 64 * i))
            four = load_constant(b, at, ir.VectorType(I32, SIBLINGS), 16)
            found += [b.extract_element(four, ir.Constant(I32, k)) for k in range(SIBLINGS)]
        return found

    @op(head, int64)
    def read_head(b: Any, p: Any) -> list[Any]:
        return [load_device(b, b.add(p, ir.Constant(I64, 16 * i)), I32, 4) for i in range(n)]

    @op(types.UniTuple(int32, SIBLINGS), means, head)
    def multiply(b: Any, four: Any, one: Any) -> list[Any]:
        sums = [ir.Constant(I32, 0)] * SIBLINGS
        for i, word in enumerate(one):
            for k in range(SIBLINGS):
                sums[k] = emit(b, DOT_S8, [four[SIBLINGS * i + k], word, sums[k]])[0]
        return sums

    return read_means, read_head, multiply


def _rating(head_dim: int, group: int) -> tuple[Any, Any]:
    """Functions shorten, which writes heads as bytes, and rate, which scores units.

    numbers: for each head the factor of its products, the sum of its bytes times that factor, and
    its negative log-sum-exp, all for powers of 2.
    """
    n_word = head_dim // 4
    read_means, read_head, multiply = siblings_of(head_dim)

    @device
    def shorten(q, lse, words, numbers, factor):
        for g in range(warp(), group, WARPS):
            head, most, total = q + 4 * head_dim * g, float32(0), 0
            for d in range(lane(), head_dim, WARP):
                most = max(most, abs(load_f32(head + 4 * d)))
            most = warp_max(most)
            per = float32(SIZE) / most if most > float32(0) else float32(0)
            for w in range(lane(), n_word, WARP):
                word = 0
                for i in range(4):
                    x = rounded(load_f32(head + 16 * w + 4 * i) * per)
                    word |= (x & 255) << 8 * i
                    total += x
                store_i32(words + head_dim * g + 4 * w, word)
            scale = most / float32(SIZE) * factor
            of_low = warp_sum(float32(total)) * scale
            if lane() == 0:
                numbers[3 * g], numbers[3 * g + 1] = scale, of_low
                numbers[3 * g + 2] = -load_f32(lse + 4 * g) * float32(LOG2_E)

    @device
    def own_sum(s):
        """The sum of the lane's own mean, from the sums that four lanes have for four means."""
        late, odd = lane() & 2 != 0, lane() & 1 != 0
        a, b = float32(s[2] if late else s[0]), float32(s[3] if late else s[1])
        a += shuffle_xor(float32(s[0] if late else s[2]), 2)
        b += shuffle_xor(float32(s[1] if late else s[3]), 2)
        return (b if odd else a) + shuffle_xor(a if odd else b, 1)

    @device
    def rate(own, words, numbers, scores, n_whole):
        means, extents = own
        n_parent = quotient(n_whole + SIBLINGS - 1, SIBLINGS)
        for first in range(8 * warp(), n_parent, 8 * WARPS):
            p, t = min(first + lane() // 4, n_parent - 1), lane() % 4
            four, total = read_means(means + SIBLINGS * head_dim * p + 16 * t), float32(0)
            width = load_f32(extents + 32 * p + 4 * t)
            bottom = load_f32(extents + 32 * p + 16 + 4 * t)
            for g in range(group):
                one = read_head(words + head_dim * g + 4 * t)
                x = own_sum(multiply(four, one)) * width * numbers[3 * g]
                x += bottom * numbers[3 * g + 1] + numbers[3 * g + 2]
                total += exp2(min(x, float32(MOST_POWER)))
            u = SIBLINGS * (first + lane() // 4) + t
            if u < n_whole:
                store_f32(scores + 4 * u, total)

    return shorten, rate


def meter_sample(head_dim: int, group: int) -> list[Launch]:
    """Kernel of METER_SAMPLE: blocks stride over rows."""
    assert head_dim % 16 == 0
    shorten, rate = _rating(head_dim, group)
    n_number = 3 * group

    def kernel(tid, n_thread, a):
        cuts = cuda.shared.array(N_START, int32)
        kept = cuda.shared.array(N_START, int32)
        sums = cuda.shared.array(N_START, float64)
        pair = cuda.shared.array(THREADS, float64)
        numbers = cuda.shared.array(n_number, float32)
        pos = load_i64(a.step + STEP.pos)
        n, n_whole = pos + 1, quotient(pos + 1, a.unit)
        sizes = n, a.unit, quotient(pos + a.unit, a.unit)
        for r in range(tid, a.n_row, n_thread):
            row = load_i32(a.chosen + 4 * r), load_i32(a.chosen + 4 * r + 4), a.blocks, a.block
            left, scores = a.left + 4 * a.n_unit * r, a.scores + 4 * a.n_unit * r
            h = quotient(r * group, a.heads_per_kv)
            words = (a.work + 4 * row_work(head_dim, group, a.room) * r + 15) // 16 * 16
            q, lse = a.q + 4 * head_dim * group * r, a.lse + 4 * group * r
            shorten(q, lse, words, numbers, a.scale * float32(LOG2_E))
            cut(row, sizes, cuts, kept)
            if thread() == 0 and n_whole < sizes[2]:
                store_f32(scores + 4 * n_whole, float32(0))
            sync_block()
            own = a.means + head_dim * a.room * h, a.extents + 8 * a.room * h
            rate(own, words, numbers, scores, n_whole)
            sync_block()
            sum_scores(left, scores, kept, sizes, sums, pair)
            key = mixed(mixed(mixed(a.seed) + a.layer * 65536 + r) + pos)
            out = a.indices + 4 * a.n_sample * r, a.factors + 4 * a.n_sample * r
            given = a.n_sample, key, float64(a.even)
            draw(row, scores, (cuts, kept, sums), sizes, given, out)
            sync_block()  # before the next row's numbers overwrite what is read here

    return [Launch(kernel)]


@device
def over_quad(x):
    """The sum over four lanes."""
    x += shuffle_xor(x, 1)
    return x + shuffle_xor(x, 2)


@device
def by_score(order, units, scores, marks, n):
    """List n samples by descending score of their unit; equal ones keep their order.

    marks: the scores. This is a block's work.
    """
    for i in range(thread(), n, THREADS):
        store_f32(marks + 4 * i, load_f32(scores + 4 * load_i32(units + 4 * i)))
    sync_block()
    for i in range(thread(), n, THREADS):
        own, rank = load_f32(marks + 4 * i), 0
        for j in range(n):
            x = load_f32(marks + 4 * j)
            rank += 1 if x > own or (x == own and j < i) else 0
        store_i32(order + 4 * rank, i)
    sync_block()


@device
def taken(weights, order, n, most):
    """How many samples are taken, in order, until the others weigh at most `most`.

    This is a warp's work. Sums are of the remaining samples, from the last one on.
    """
    share = quotient(n + WARP - 1, WARP)
    low = min(n, share * lane())
    high, own = min(n, low + share), float32(0)
    for k in range(low, high):
        own += load_f32(weights + 4 * load_i32(order + 4 * k))
    rest = own
    for i in range(5):
        later = shuffle(rest, min(WARP - 1, lane() + (1 << i)))
        rest += later if lane() + (1 << i) < WARP else float32(0)
    later = shuffle(rest, min(WARP - 1, lane() + 1))
    rest = later if lane() < WARP - 1 else float32(0)
    count = high if rest <= most else n
    for i in range(low, high):
        k = high - 1 - (i - low)
        rest += load_f32(weights + 4 * load_i32(order + 4 * k))
        count = k if rest <= most else count
    return lowest_of_warp(int32(count))


@device
def widened(left, scores, n_unit, bar, parts):
    """The number of positions left out, and of those in units whose score reaches the bar."""
    n_left, n_more = 0, 0
    for u in range(thread(), n_unit, THREADS):
        some = load_i32(left + 4 * u)
        n_left += some
        n_more += some if load_f32(scores + 4 * u) >= bar else 0
    all_, more = block_before(int32(n_left), parts)[1], block_before(int32(n_more), parts)[1]
    return all_, more


def _weighing(head_dim: int, group: int, type_k: str) -> tuple[Any, Any]:
    """Functions weigh, which writes the weights of a row's samples, and report, for its heads."""
    size, read = row_bytes(type_k, head_dim), reading(type_k, head_dim)
    n_piece, whole, fields = (head_dim + 31) // 32, head_dim % 32 == 0, 4 * len(METER)

    @device
    def weigh(a, r, weights, units):
        """Write the weights of a row's samples; four lanes share a key."""
        h, first = quotient(r * group, a.heads_per_kv), a.indices + 4 * a.n_sample * r
        q, lane_of = a.q + 4 * head_dim * group * r, lane() % 4
        for start in range(8 * warp(), a.n_sample, 8 * WARPS):
            i = start + lane() // 4
            j = load_i32(first + 4 * i)
            row = a.k_pages + size * key_row(a.k_table, a.n_head_kv, h, j)
            factor = load_f32(a.factors + 4 * (a.n_sample * r + i))
            for g in range(group):
                x = float32(0)
                for piece in range(n_piece):
                    d = 32 * piece + 8 * lane_of
                    if whole or d < head_dim:
                        one, k = load_f32x8(q + 4 * (head_dim * g + d)), read(row, d)
                        for e in range(8):
                            x += one[e] * k[e]
                x = over_quad(x) * a.scale - load_f32(a.lse + 4 * (group * r + g))
                if lane_of == g % 4:
                    w = exp2(min(x, float32(MOST_LOGIT)) * float32(LOG2_E)) * factor
                    store_f32(weights + 4 * ((a.n_sample + 1) * g + i), w)
            if lane_of == 0:
                store_i32(units + 4 * i, quotient(j, a.unit))
        sync_block()

    @device
    def report(a, r, weights, masses):
        """Write each head's sum of weights and estimated mass, and return the row's least mass."""
        for g in range(warp(), group, WARPS):
            mine, own = weights + 4 * (a.n_sample + 1) * g, a.report + fields * (group * r + g)
            total = float32(0)
            for i in range(lane(), a.n_sample, WARP):
                total += load_f32(mine + 4 * i)
            total = warp_sum(total)
            mass = float32(1) / (float32(1) + total)
            if lane() == 0:
                store_f32(mine + 4 * a.n_sample, total)
                store_f32(own + 4 * METER.mass, mass)
                store_f32(own + 4 * METER.held, mass)
                store_f32(own + 4 * METER.needed, float32(WITHIN))
                masses[g] = mass
        sync_block()
        lowest = float32(1)
        for g in range(group):
            lowest = min(lowest, masses[g])
        return lowest

    return weigh, report


def _widening(group: int) -> tuple[Any, Any]:
    """Functions bar_of, for a row whose heads keep too little, and report_wider, for its heads."""
    fields = 4 * len(METER)

    @device
    def bar_of(a, r, weights, lists, scores, counts):
        """The largest score of a sample's unit with which all heads keep enough mass; 0 if none."""
        units, order, marks = lists
        by_score(order, units, scores, marks, a.n_sample)
        for g in range(warp(), group, WARPS):
            mine = weights + 4 * (a.n_sample + 1) * g
            most = (float32(1) - a.least) * (float32(1) + load_f32(mine + 4 * a.n_sample))
            found = taken(mine, order, a.n_sample, most)
            if lane() == 0:
                counts[g] = found
        sync_block()
        most_taken = 1
        for g in range(group):
            most_taken = max(most_taken, counts[g])
        return load_f32(marks + 4 * load_i32(order + 4 * (most_taken - 1)))

    @device
    def report_wider(a, r, weights, marks, bar):
        for g in range(warp(), group, WARPS):
            mine, own = weights + 4 * (a.n_sample + 1) * g, a.report + fields * (group * r + g)
            rest = float32(0)
            for i in range(lane(), a.n_sample, WARP):
                outside = load_f32(marks + 4 * i) < bar
                rest += load_f32(mine + 4 * i) if outside else float32(0)
            rest = warp_sum(rest) / (float32(1) + load_f32(mine + 4 * a.n_sample))
            if lane() == 0:
                store_f32(own + 4 * METER.held, float32(1) - rest)
                store_f32(own + 4 * METER.needed, float32(WIDER))

    return bar_of, report_wider


def meter_weigh(head_dim: int, group: int, q_block: int, type_k: str) -> list[Launch]:
    """Kernel of METER_WEIGH: blocks stride over rows."""
    assert q_block == 1
    weigh, report = _weighing(head_dim, group, type_k)
    bar_of, report_wider = _widening(group)

    def kernel(tid, n_thread, a):
        masses, counts = cuda.shared.array(group, float32), cuda.shared.array(group, int32)
        parts = cuda.shared.array(WARPS, int32)
        n = load_i64(a.step + STEP.pos) + 1
        for r in range(tid, a.n_row, n_thread):
            weights = a.weights + 4 * (a.n_sample + 1) * group * r
            units, marks = a.units + 4 * a.n_sample * r, a.rows + 4 * a.n_sample * r
            weigh(a, r, weights, units)
            need = WITHIN
            if report(a, r, weights, masses) < a.least:
                left, scores = a.left + 4 * a.n_unit * r, a.scores + 4 * a.n_unit * r
                n_unit = quotient(n + a.unit - 1, a.unit)
                lists = units, a.order + 4 * a.n_sample * r, marks
                bar = bar_of(a, r, weights, lists, scores, counts)
                n_left, n_more = widened(left, scores, n_unit, bar, parts)
                need = ALL if bar <= float32(0) or 2 * (n - n_left + n_more) > n else WIDER
                if need == WIDER:
                    report_wider(a, r, weights, marks, bar)
                    if thread() == 0:
                        store_f32(a.bars + 4 * r, bar)
            if thread() == 0:
                store_i32(a.needs + 4 * r, need)
            sync_block()  # before the next row's masses overwrite what is read here

    return [Launch(kernel)]


@device
def grains_of(a, r, u, n):
    """Whether unit u is added whole, how many grains it has then, and how many were chosen."""
    size = min(a.unit, n - u * a.unit)
    some = load_i32(a.left + 4 * (a.n_unit * r + u))
    chosen = quotient(size - some + a.grain - 1, a.grain)
    added = some > 0 and load_f32(a.scores + 4 * (a.n_unit * r + u)) >= load_f32(a.bars + 4 * r)
    return added, quotient(size + a.grain - 1, a.grain) if added else chosen, chosen


@device
def count_rows(a, r, n_unit, n, parts):
    """The number of blocks that the rows before the r-th have."""
    mine = 0
    for before in range(warp(), r, WARPS):
        if load_i32(a.needs + 4 * before) == WIDER:
            for u in range(lane(), n_unit, WARP):
                mine += grains_of(a, before, u, n)[1]
    return block_before(int32(mine), parts)[1]


@device
def place_units(a, r, sizes, places, parts):
    """Find where the blocks of each unit begin, and return how many there are.

    places: shared memory; for each unit where its blocks begin, how many chosen ones are before it,
    and with how many blocks it is added, 0 where it is not.
    """
    n, n_unit = sizes
    starts, ranks, counts = places
    share = quotient(n_unit + THREADS - 1, THREADS)
    low = min(n_unit, share * thread())
    high, mine, chosen = min(n_unit, low + share), 0, 0
    for u in range(low, high):
        found = grains_of(a, r, u, n)
        mine, chosen = mine + found[1], chosen + found[2]
    before, total = block_before(int32(mine), parts)
    rank, _ = block_before(int32(chosen), parts)
    for u in range(low, high):
        found = grains_of(a, r, u, n)
        starts[u], ranks[u], counts[u] = before, rank, found[1] if found[0] else 0
        before, rank = before + found[1], rank + found[2]
    sync_block()
    return total


@device
def write_wider(a, r, sizes, places, out):
    """Write the blocks of a row: those of units that are added, and the chosen ones of others."""
    n, n_unit = sizes
    starts, ranks, counts = places
    begin, end = load_i32(a.chosen + 4 * r), load_i32(a.chosen + 4 * r + 4)
    n_grain, per = quotient(a.block, a.grain), quotient(a.unit, a.grain)
    for u in range(warp(), n_unit, WARPS):
        for i in range(lane(), counts[u], WARP):
            store_i32(out + 4 * (starts[u] + i), u * per + i)
    for i in range(thread(), (end - begin) * n_grain, THREADS):
        s = quotient(i, n_grain)
        j = load_i32(a.blocks + 4 * (begin + s)) * n_grain + i - s * n_grain
        u = quotient(j, per)
        if j * a.grain < n and counts[u] == 0:
            store_i32(out + 4 * (starts[u] + i - ranks[u]), j)


@device
def write_whole(a, parts):
    """Write the indptr of KV heads that have a row of ALL; this is a block's work."""
    rows, begin = quotient(a.n_row, a.n_head_kv), 0
    for start in range(0, a.n_head_kv, THREADS):
        h, mine = start + thread(), 0
        if h < a.n_head_kv:
            for r in range(rows * h, rows * (h + 1)):
                mine = a.n_all if load_i32(a.needs + 4 * r) == ALL else mine
        before, total = block_before(int32(mine), parts)
        if h < a.n_head_kv:
            store_i32(a.whole + 4 * (h + 1), begin + before + mine)
        begin += total
    if thread() == 0:
        store_i32(a.whole, 0)


def meter_widen() -> list[Launch]:
    """Kernel of METER_WIDEN: blocks stride over rows, each after the sum of those before."""

    def kernel(tid, n_thread, a):
        parts = cuda.shared.array(WARPS, int32)
        starts = cuda.shared.array(MOST_UNITS, int32)
        ranks = cuda.shared.array(MOST_UNITS, int32)
        counts = cuda.shared.array(MOST_UNITS, int32)
        n = load_i64(a.step + STEP.pos) + 1
        sizes = n, quotient(n + a.unit - 1, a.unit)
        for r in range(tid, a.n_row, n_thread):
            begin, total = count_rows(a, r, sizes[1], n, parts), 0
            if load_i32(a.needs + 4 * r) == WIDER:
                places = starts, ranks, counts
                total = place_units(a, r, sizes, places, parts)
                write_wider(a, r, sizes, places, a.indices + 4 * begin)
            if thread() == 0:
                store_i32(a.indptr + 4 * (r + 1), begin + total)
                if r == 0:
                    store_i32(a.indptr, 0)
            sync_block()  # before the next row's places overwrite what is read here
        if tid == n_thread - 1:
            write_whole(a, parts)

    return [Launch(kernel)]


def meter_take(head_dim: int) -> list[Launch]:
    """Kernel of METER_TAKE: blocks stride over heads."""
    fields = 4 * len(METER)

    def kernel(tid, n_thread, a):
        for head in range(tid, a.n_head, n_thread):
            r, h = quotient(head * a.n_row, a.n_head), quotient(head * a.n_head_kv, a.n_head)
            whole = load_i32(a.whole + 4 * h) < load_i32(a.whole + 4 * h + 4)
            if not whole and load_i32(a.needs + 4 * r) != WIDER:
                continue
            source, lse = (a.dense, a.dense_lse) if whole else (a.wider, a.wider_lse)
            for d in range(thread(), head_dim, THREADS):
                at = 4 * (head_dim * head + d)
                store_f32(a.out + at, load_f32(source + at))
            if thread() == 0:
                store_f32(a.lse + 4 * head, load_f32(lse + 4 * head))
                if whole:
                    store_f32(a.report + fields * head + 4 * METER.held, float32(1))
                    store_f32(a.report + fields * head + 4 * METER.needed, float32(ALL))

    return [Launch(kernel)]
