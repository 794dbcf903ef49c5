"""Ops of the method `lfps`: it keeps statistics of queries, and scores candidates of two tables.

LFPS_PROPOSE is two launches: the first renews a part of the bitmaps, the second lists the
candidates. A step's choice is three: the first finds which rows are bypassed and scores the
candidates; the second, with several heads, makes the mean of their weights; the third keeps the
best, from which the tables learn.
"""

import math
from typing import Any

from numba import cuda, float32, float64, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import LFPS_META, LFPS_NEAR, LFPS_STATS, STEP
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row
from tamis.jit_kernels.cuda.lang.grid import (
    MOST_WARPS,
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_before,
    lane,
    most_of,
    sync_block,
    thread,
    threads,
    total_of,
    warp,
    warp_max,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    bits_from,
    device,
    int64,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    quotient,
    remainder,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    and_i64,
    count_bits,
    exp2,
    load_shared,
    or_i64,
    shared_address,
)
from tamis.jit_kernels.cuda.lang.radix_topk import (
    HELD,
    hold,
    size_of,
    write_best_held,
    write_best_weights,
    write_range,
    write_word,
)
from tamis.jit_kernels.cuda.select.common import LOWEST
from tamis.jit_kernels.cuda.select.lfps_start import lfps_start
from tamis.jit_kernels.cuda.select.lfps_tables import (
    META,
    STATS,
    add_up,
    compare,
    gather,
    global_logit_of,
    mean_and_bar,
    products_of,
    rescale,
    slash_shift,
)

__all__ = ["lfps_bypass", "lfps_keep", "lfps_propose", "lfps_sets", "lfps_start"]
WORDS = 4  # of bits, or numbers, that a thread has in flight
SMALLEST_SCALE = 1e-15  # below it, entries are multiplied out: once in about 700 steps


def lfps_keep(head_dim: int) -> list[Launch]:
    """Kernel of LFPS_KEEP: threads share the numbers of all queries that are kept."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n, first = a.n_head * head_dim, max(0, n_tok - a.n_past)
        for item in range(tid * THREADS + thread(), (n_tok - first) * n, n_thread * THREADS):
            t, i = first + quotient(item, n), remainder(item, n)
            slot = remainder(pos + t, a.n_past)
            store_f32(a.past + 4 * (n * slot + i), load_f32(a.q + 4 * (n * t + i)))
            if i == 0:
                store_i64(a.past_pos + 8 * slot, pos + t)

    return [Launch(kernel)]


# ---- sparsity ------------------------------------------------------------------------------------
def _all_sparse(head_dim: int, group: int) -> Any:
    """The function that says whether all heads of a row are bypassed (Eq. 6); a block's work."""
    (_, with_halves), global_logit = products_of(head_dim), global_logit_of(head_dim)

    @device
    def all_sparse(a, first, h, n_kv, ends, scratch):
        # All weights are relative to exp(w_global): only the sums can overflow, to infinity.
        (begin, end, n_near), (logits, products, sums) = ends, scratch
        queries, mean_key = a.q + 4 * head_dim * first, a.means + 8 * head_dim * h
        for g in range(warp(), group, WARPS):
            ratio = load_f64(a.spread + 8 * (first + g))
            logit = global_logit(queries + 4 * head_dim * g, mean_key, ratio, n_kv, a.scale)
            if lane() == 0:
                logits[g] = logit
        for i in range(lane(), 2 * group, WARP):
            sums[warp(), i] = 0.0
        sync_block()
        for i in range(warp(), a.n_sink + n_near, WARPS):
            at = begin + i if i < a.n_sink else end - n_near + i - a.n_sink
            j = load_i32(a.places + 4 * at)
            key = a.k_pages + 2 * head_dim * key_row(a.k_table, a.n_head_kv, h, j)
            for g in range(group):
                x = with_halves(queries + 4 * head_dim * g, key) * a.scale
                if lane() == 0:
                    products[warp(), g] = x
            cuda.syncwarp()
            for g in range(lane(), group, WARP):
                at = g if i < a.n_sink else group + g
                sums[warp(), at] += math.exp(float64(products[warp(), g]) - logits[g])
            cuda.syncwarp()
        sync_block()
        sparse = True
        for g in range(group):
            sinks, others = 0.0, 1.0
            for w in range(WARPS):
                sinks, others = sinks + sums[w, g], others + sums[w, group + g]
            if not sinks > float64(a.epsilon) * (sinks + others):
                sparse = False
        sync_block()  # before the next row's sums overwrite what is read here
        return sparse

    return all_sparse


@device
def note(own, n_kv, sparse, limits):
    """Count a row's step; the first thread's work."""
    has_middle, bypass, n_sink = limits
    store_i64(own + LFPS_META.bypassed, 1 if sparse else 0)
    store_i64(own + LFPS_META.n_step, load_i64(own + LFPS_META.n_step) + 1)
    store_i64(own + LFPS_META.n_seen, load_i64(own + LFPS_META.n_seen) + n_kv)
    if has_middle:
        store_i64(own + LFPS_META.next, n_kv)
        if bypass != 0:
            n = load_i64(own + LFPS_META.n_bypass)
            store_i64(own + LFPS_META.n_bypass, n + 1 if sparse else n)
            n = load_i64(own + LFPS_META.n_scanned)
            store_i64(own + LFPS_META.n_scanned, n + n_sink + LFPS_NEAR)


@device
def slice_of(first, last, turn, period):
    """The part of words first .. last - 1 whose turn it is."""
    n = last - first
    return first + n * turn // period, first + n * (turn + 1) // period


# ---- candidates ----------------------------------------------------------------------------------
@device
def either(ver, sla, word, shift):
    """64 positions' bits, from those of their entries in the two tables."""
    at = 64 * word + shift
    by_dist = sla + 8 * (at >> 6)
    return load_i64(ver + 8 * word) | bits_from(load_i64(by_dist), load_i64(by_dist + 8), at & 63)


@device
def inside(word, middle):
    """The bits of a word's positions in the middle; any word's."""
    low, high = middle
    bits = -1 << min(63, max(0, low - 64 * word))
    if 64 * word + 64 > high:
        bits &= (1 << max(0, high - 64 * word)) - 1
    return bits if 64 * word + 64 > low else 0


@device
def masked(tables, word, shift, middle):
    """The bits of a word's positions in the middle in either of two bitmaps; any word's.

    Nothing depends on what is read, so that the reads of several words do not wait.
    """
    (ver, sla), (low, high) = tables, middle
    there = min(max(word, low // 64), (high - 1) // 64)
    return either(ver, sla, there, shift) & inside(word, middle)


@device
def with_neighbours(before, here, after):
    """The candidates and their neighbours -1 .. 2 (Eq. 9)."""
    near = bits_from(before, here, 63) | bits_from(before, here, 62)
    return here | near | bits_from(here, after, 1)


@device
def candidates_of(bits, n_word, word, shift, middle):
    """The bits of WORDS words: candidates and their neighbours (Eq. 7, 9)."""
    hot = bits, bits + 16 * n_word
    warm = bits + 8 * n_word, bits + 24 * n_word
    a = masked(hot, word - 1, shift, middle)
    b, c = masked(hot, word, shift, middle), masked(hot, word + 1, shift, middle)
    d, e = masked(hot, word + 2, shift, middle), masked(hot, word + 3, shift, middle)
    f = masked(hot, word + 4, shift, middle)
    return (
        with_neighbours(a, b, c) & masked(warm, word, shift, middle),
        with_neighbours(b, c, d) & masked(warm, word + 1, shift, middle),
        with_neighbours(c, d, e) & masked(warm, word + 2, shift, middle),
        with_neighbours(d, e, f) & masked(warm, word + 3, shift, middle),
    )


@device
def put_some(out, bits, at, first, part, n_part):
    """Write the numbers of the set bits of 32 that are in a part's spans; `first` is the lowest's.

    at: where the list has the first of them. Returns the place after the last.
    """
    left, n = uint32(bits), int32(count_bits(uint32(bits)))
    begin, last = at // SPAN, (at + n - 1) // SPAN
    if remainder(begin, n_part) != part and remainder(last, n_part) != part:
        return at + n
    if begin == last:
        write_word(out + 4 * at, bits, first)
        return at + n
    while left != 0:
        low = uint32(left & (uint32(0) - left))
        if remainder(at // SPAN, n_part) == part:
            store_i32(out + 4 * at, first + count_bits(uint32(low - uint32(1))))
        left, at = uint32(left ^ low), at + 1
    return at


@device
def propose(bits, n_word, shift, middle, order, share, parts):
    """List the candidates in ascending order, and return how many there are.

    A block does the work of its part of n_part. Each part finds all of them and writes every
    n_part-th span of SPAN.
    """
    (low, high), (part, n_part), count = middle, share, 0
    for start in range(low // 64, (high + 63) // 64, WORDS * THREADS):
        word, n = start + WORDS * thread(), int32(0)
        found = candidates_of(bits, n_word, word, shift, middle)
        for x in found:
            n += size_of(x)
        before, total = block_before(int32(n), parts)
        at = count + before
        for x in found:
            at = put_some(order, x & 0xFFFFFFFF, at, 64 * word, part, n_part)
            at = put_some(order, (x >> 32) & 0xFFFFFFFF, at, 64 * word + 32, part, n_part)
            word += 1
        count += total
    return count


# ---- the choice ----------------------------------------------------------------------------------
def _summarising(group: int) -> Any:
    """The function that writes each head's best product with a span, and a sum.

    The sum is that of the exponentials of all products relative to the best.
    """

    @device
    def summarise(shared, n, factor, out):
        for g in range(warp(), group, WARPS):
            top, total = float32(LOWEST), float32(0)
            for i in range(lane(), min(n, SPAN), WARP):
                top = max(top, load_shared(uint32(shared + ROW * g + 4 * i)))
            top = warp_max(top)
            for i in range(lane(), min(n, SPAN), WARP):
                x = load_shared(uint32(shared + ROW * g + 4 * i))
                total += exp2((x - top) * factor)
            total = warp_sum(total)
            if lane() == 0:
                store_f32(out + 8 * g, top)
                store_f32(out + 8 * g + 4, total)

    return summarise


def _averaging(heads: int, group: int) -> Any:
    """The kernel that replaces the first head's row with the mean of the heads' softmax over it.

    Blocks take parts of rows.
    """

    @device
    def weight_of(row, stride, i, n, factor, tops, shares):
        at, weight = row + 4 * min(i, n - 1), float32(0)
        for g in range(group):
            weight += exp2((load_f32(at + stride * g) - tops[g]) * factor) * shares[g]
        return weight

    @device
    def weigh(spans, n, factor, tops, shares):
        """Find each head's largest score, and the factor of a weight that is relative to it."""
        for g in range(warp(), group, WARPS):
            top, total = float32(LOWEST), float32(0)
            for span in range(lane(), (n + SPAN - 1) // SPAN, WARP):
                top = max(top, load_f32(spans + 8 * (group * span + g)))
            top = warp_max(top)
            for span in range(lane(), (n + SPAN - 1) // SPAN, WARP):
                at = spans + 8 * (group * span + g)
                total += load_f32(at + 4) * exp2((load_f32(at) - top) * factor)
            total = warp_sum(total)
            if lane() == 0:
                tops[g], shares[g] = top, float32(1) / (float32(group) * total)
        sync_block()

    @device
    def fill(row, stride, first, n, factor, tops, shares):
        for i in range(first + thread(), n, WORDS * THREADS):
            j, k, m = i + THREADS, i + 2 * THREADS, i + 3 * THREADS
            a = weight_of(row, stride, i, n, factor, tops, shares)
            b = weight_of(row, stride, j, n, factor, tops, shares)
            c = weight_of(row, stride, k, n, factor, tops, shares)
            d = weight_of(row, stride, m, n, factor, tops, shares)
            store_f32(row + 4 * i, a)
            if j < n:
                store_f32(row + 4 * j, b)
            if k < n:
                store_f32(row + 4 * k, c)
            if m < n:
                store_f32(row + 4 * m, d)

    def average(tid, n_thread, a):
        tops, shares = cuda.shared.array(group, float32), cuda.shared.array(group, float32)
        n_row, has_middle = heads // group * a.n_head_kv, is_chosen_from(a)
        n_part = max(1, n_thread // n_row)
        for item in range(tid, n_row * n_part, n_thread):
            r, part = quotient(item, n_part), remainder(item, n_part)
            if not has_middle or load_i64(a.meta + META * r + LFPS_META.bypassed) != 0:
                continue
            n, row = load_i32(a.counts + 4 * r), a.scores + 4 * a.capacity * group * r
            spans, factor = a.order + 4 * a.capacity * (2 * r + 1), a.scale * float32(LOG2_E)
            weigh(spans, n, factor, tops, shares)
            share = quotient(n + n_part - 1, n_part)
            end = min(n, share * (part + 1))
            fill(row, 4 * a.capacity, share * part, end, factor, tops, shares)
            sync_block()  # before the next row's tops overwrite what is read here

    return average


@device
def is_chosen_from(a):
    """Whether there are positions between sinks and window."""
    return load_i64(a.step + STEP.pos) + 1 - a.n_local > a.n_sink


def _choosing(group: int) -> Any:
    """The function choose(a, shared, row, n, limit, lists, parts) -> (how many, sum).

    lists: the n candidates, where the best `limit` of them go, and scratch: numbers of candidates,
    then the weights of those that are kept: the row's, of a single head relative to the best.
    """
    best = write_best_weights if group > 1 else write_best_held

    @device
    def choose(a, shared, row, n, limit, lists, parts):
        (listed, found, kept), factor = lists, a.scale * float32(LOG2_E)
        if n > limit:
            hold(shared, row, 0, n)
            best((shared, row, 0), 0, n, limit, kept)
            n = limit
        else:
            write_range(kept, 0, n)
        sync_block()
        top, total = float32(LOWEST), float32(0)
        if group == 1:
            for i in range(thread(), n, threads()):
                top = max(top, load_f32(row + 4 * load_i32(kept + 4 * i)))
            top = most_of(top, parts)
        for i in range(thread(), n, threads()):
            item = load_i32(kept + 4 * i)
            weight = load_f32(row + 4 * item)
            if group == 1:
                weight = exp2((weight - top) * factor)
            store_i32(found + 4 * i, load_i32(listed + 4 * item))
            store_f32(kept + 4 * i, weight)
            total += weight
        return n, total_of(total, parts)

    return choose


@device
def put_bit(word, bit, value):
    """Set or clear a bit of the int64 at `word`, atomically."""
    if value:
        or_i64(word, bit)
    else:
        and_i64(word, ~bit)


@device
def gain(sums, at, bits, n_word, levels, i, by):
    """Add to entry i of a table and renew its bits, and return the power sums after that."""
    (s1, s2, s3, s4), (old, new), (mean, bar) = sums, by, levels
    store_f32(at, new)
    word, bit = bits + 8 * (i >> 6), 1 << (i & 63)
    put_bit(word, bit, new > bar)
    put_bit(word + 8 * n_word, bit, new > mean)
    x, y = float64(old), float64(new)
    third, fourth = y * y * y - x * x * x, y * y * y * y - x * x * x * x
    return s1 + (y - x), s2 + (y * y - x * x), s3 + third, s4 + fourth


@device
def learn(a, r, middle, shift, gains, parts):
    """Add (w - 1 / (2 n)) / scale to the entries of n kept positions (Eq. 10); renew their bits.

    gains: addresses of positions and of weights, how many, 1 over the sum of the weights, scale.
    Returns the scale from now on.
    """
    found, weights, n, factor, scale = gains
    ver, sla = a.ver + 4 * a.capacity * r, a.sla + 4 * a.capacity * r
    state, n_word = a.stats + STATS * r, a.capacity // 64 + 1
    bits = a.bits + 32 * n_word * r
    n_middle, by_dist = middle[1] - middle[0], bits + 16 * n_word
    for_ver = mean_and_bar(state + LFPS_STATS.ver, n_middle, a.a)
    for_sla = mean_and_bar(state + LFPS_STATS.sla, n_middle, a.a)
    one, other = (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
    for i in range(thread(), n, threads()):
        j = load_i32(found + 4 * i)
        x = float32((float64(load_f32(weights + 4 * i) * factor) - 0.5 / n) / scale)
        at, at_dist = ver + 4 * j, sla + 4 * (j + shift)
        old, old_dist = load_f32(at), load_f32(at_dist)
        one = gain(one, at, bits, n_word, for_ver, j, (old, old + x))
        by = old_dist, old_dist + x
        other = gain(other, at_dist, by_dist, n_word, for_sla, j + shift, by)
    gather(parts, 0, one)
    gather(parts, 4, other)
    add_up(parts, 8)
    if thread() < 8:  # the sums of both lie together
        to = state + LFPS_STATS.ver + 8 * thread()
        store_f64(to, load_f64(to) + parts[thread(), 0])
    sync_block()
    if scale < SMALLEST_SCALE:
        times, span = float32(scale), (middle[0] + shift, middle[1] + shift)
        rescale(ver, state + LFPS_STATS.ver, middle, times, parts)
        rescale(sla, state + LFPS_STATS.sla, span, times, parts)
        scale = 1.0
    return scale


@device
def ends_of(a, r, n_kv):
    """A row's first proposed position, their end, and how many at the end are last keys."""
    begin, end = load_i32(a.indptr + 4 * r), load_i32(a.indptr + 4 * r + 4)
    return begin, end, n_kv - max(a.n_sink, n_kv - LFPS_NEAR)


def lfps_propose() -> list[Launch]:
    """Kernels of LFPS_PROPOSE: a part of the bitmaps, the candidates; blocks take parts of rows."""

    def renew(tid, n_thread, a):
        n_kv = load_i64(a.step + STEP.pos) + 1
        low, high, n_word = a.n_sink, max(a.n_sink, n_kv - a.n_local), a.capacity // 64 + 1
        n_part, shift = max(1, n_thread // a.n_row), slash_shift(a.capacity, n_kv - 1)
        turn = (n_kv - 1) % a.period
        for item in range(tid, a.n_row * n_part if high > low else 0, n_thread):
            r, part = quotient(item, n_part), remainder(item, n_part)
            state = a.stats + STATS * r
            words, worker = a.bits + 32 * n_word * r, (WARPS * part + warp(), WARPS * n_part)
            levels = mean_and_bar(state + LFPS_STATS.ver, high - low, a.a)
            part_of = slice_of(low // 64, (high + 63) // 64, turn, a.period)
            compare(a.ver + 4 * a.capacity * r, words, n_word, levels, part_of, worker)
            levels = mean_and_bar(state + LFPS_STATS.sla, high - low, a.a)
            part_of = slice_of((low + shift) // 64, (high + shift + 63) // 64, turn, a.period)
            compare(
                a.sla + 4 * a.capacity * r, words + 16 * n_word, n_word, levels, part_of, worker
            )

    def propose_rows(tid, n_thread, a):
        parts, n_kv = cuda.shared.array(WARPS, int32), load_i64(a.step + STEP.pos) + 1
        middle, n_word = (a.n_sink, n_kv - a.n_local), a.capacity // 64 + 1
        n_part, shift = max(1, n_thread // a.n_row), slash_shift(a.capacity, n_kv - 1)
        for item in range(tid, a.n_row * n_part, n_thread):
            r, share = quotient(item, n_part), (remainder(item, n_part), n_part)
            row, n = a.sets + 4 * a.capacity * r, int64(0)
            if middle[1] > a.n_sink:
                to, near = row + 4 * a.n_sink, max(a.n_sink, n_kv - LFPS_NEAR)
                n = propose(a.bits + 32 * n_word * r, n_word, shift, middle, to, share, parts)
                if share[0] == 0:
                    write_range(row, 0, a.n_sink)
                    write_range(to + 4 * n, near, n_kv)
                n += a.n_sink + n_kv - near
            if share[0] == 0 and thread() == 0:
                store_i32(a.counts + 4 * r, n)

    return [Launch(renew), Launch(propose_rows)]


def _scoring(head_dim: int, heads: int, group: int) -> Any:
    """The kernel that says which rows are bypassed, and scores the candidates of the others.

    Blocks take parts of rows.
    """
    summarise, size = _summarising(group), 4 * head_dim
    all_sparse, n_sum = _all_sparse(head_dim, group), 2 * group

    @device
    def key_at(keys, i):
        k_pages, k_table, n_head_kv, h, places, n = keys
        row = key_row(k_table, n_head_kv, h, load_i32(places + 4 * i)) if i < n else 0
        return k_pages + 2 * head_dim * row if i < n else 0

    stage = staging(head_dim, group, key_at)

    def score(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        logits = cuda.shared.array(group, float64)
        products = cuda.shared.array((WARPS, group), float32)
        sums = cuda.shared.array((WARPS, n_sum), float64)
        n_kv, n_row = load_i64(a.step + STEP.pos) + 1, heads // group * a.n_head_kv
        high = max(a.n_sink, n_kv - a.n_local)
        n_part = max(1, n_thread // n_row)
        for item in range(tid, n_row * n_part, n_thread):
            r, part, sparse = quotient(item, n_part), remainder(item, n_part), False
            own, h = a.meta + META * r, r * group // heads
            ends = ends_of(a, r, n_kv)
            if a.bypass != 0 and high > a.n_sink:
                sparse = all_sparse(a, group * r, h, n_kv, ends, (logits, products, sums))
            if part == 0 and thread() == 0:
                note(own, n_kv, sparse, (high > a.n_sink, a.bypass, a.n_sink))
            if sparse or high <= a.n_sink:
                continue
            begin, n = ends[0] + a.n_sink, ends[1] - ends[0] - a.n_sink - ends[2]
            row, lists = a.scores + 4 * a.capacity * group * r, a.order + 8 * a.capacity * r
            keys = a.k_pages, a.k_table, a.n_head_kv, h, a.places + 4 * begin, n
            for start in range(SPAN * part, n, SPAN * n_part):
                stage(shared, a.q + size * group * r, group, keys, start)
                i = start + thread()
                for g in range(group if i < n else 0):
                    x = load_shared(uint32(shared + ROW * g + 4 * thread()))
                    store_f32(row + 4 * (a.capacity * g + i), x)
                if group > 1:
                    to = lists + 4 * a.capacity + 8 * group * (start // SPAN)
                    summarise(shared, n - start, a.scale * float32(LOG2_E), to)
                sync_block()  # before the next products overwrite what is read here
            if part == 0 and thread() == 0:
                store_i32(a.counts + 4 * r, n)
                store_i64(own + LFPS_META.n_scanned, load_i64(own + LFPS_META.n_scanned) + n)

    return score


def _settling(heads: int, group: int) -> Any:
    """The kernel that keeps the best candidates and learns from them; blocks stride over rows."""
    choose = _choosing(group)

    def settle(tid, n_thread, a):
        parts = cuda.shared.array((8, THREADS), float64)
        shared = shared_address(cuda.shared.array(0, uint8))
        warps, n_kv = cuda.shared.array(MOST_WARPS, float32), load_i64(a.step + STEP.pos) + 1
        low, high = a.n_sink, max(a.n_sink, n_kv - a.n_local)
        limit, shift = max(1, int(float64(a.budget) * n_kv)), slash_shift(a.capacity, n_kv - 1)
        for r in range(tid, heads // group * a.n_head_kv, n_thread):
            out, kept = a.sets + 4 * a.set_capacity * r, a.order + 8 * a.capacity * r
            kept += 4 * a.capacity
            n = min(a.n_sink, n_kv)
            state = a.stats + STATS * r
            row = a.scores + 4 * a.capacity * group * r
            write_range(out, 0, n)
            if high > low and load_i64(a.meta + META * r + LFPS_META.bypassed) == 0:
                listed, found = a.indices + 4 * (load_i32(a.indptr + 4 * r) + n), out + 4 * n
                lists, count = (listed, found, kept), load_i32(a.counts + 4 * r)
                count, total = choose(a, shared, row, count, limit, lists, warps)
                n, scale = n + count, load_f64(state + LFPS_STATS.scale) * float64(a.decay)
                gains = found, kept, count, float32(1) / total, scale
                scale = learn(a, r, (low, high), shift, gains, parts)
                if thread() == 0:
                    store_f64(state + LFPS_STATS.scale, scale)
            write_range(out + 4 * n, high, n_kv)
            sync_block()  # all have read the count
            if thread() == 0:
                store_i32(a.counts + 4 * r, n + max(0, n_kv - high))

    return settle


def lfps_sets(head_dim: int, heads: int, group: int) -> list[Launch]:
    """Kernels of LFPS_SETS: the gate and the scores, the heads' mean weights, the choice."""
    # The summaries of a span are where the numbers of its candidates will be.
    assert group <= PAGE, "a row of `order` has room for two numbers a head: at least two pages"
    return [
        Launch(_scoring(head_dim, heads, group), shared=ROW * group),
        *([Launch(_averaging(heads, group))] if group > 1 else []),
        Launch(_settling(heads, group), shared=4 * HELD, threads=512),
    ]


def lfps_bypass(head_dim: int, heads: int, group: int) -> list[Launch]:
    """Kernel of LFPS_BYPASS: blocks stride over heads."""
    global_logit = global_logit_of(head_dim)

    def kernel(tid, n_thread, a):
        n_kv = load_i64(a.step + STEP.pos) + 1
        for head in range(tid, heads * a.n_head_kv, n_thread):
            r, h, share = head // group, head // heads, float32(1)  # of the mean value
            if load_i64(a.meta + META * r + LFPS_META.bypassed) == 0:
                continue
            query, mean_key = a.q + 4 * head_dim * head, a.means + 8 * head_dim * h
            if a.bypass != 2:
                logit = global_logit(query, mean_key, load_f64(a.spread + 8 * head), n_kv, a.scale)
                kept = math.exp(float64(load_f32(a.lse + 4 * head)) - logit)
                share = float32(1.0 / (1.0 + kept))
            for d in range(thread(), head_dim, THREADS):
                at, mean = a.out + 4 * (head_dim * head + d), mean_key + 4 * (head_dim + d)
                x = load_f32(at)
                store_f32(at, x + share * (load_f32(mean) - x))

    return [Launch(kernel)]
