"""Ops of the method `lfps`: score tables over positions and distances, and what they predict.

A score is entry * scale. The power sums of the entries are kept as entries change, so that mean and
kurtosis cost nothing; bitmaps tell which entries exceed the threshold and which the mean, so that
candidates are found 64 positions at a time.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import (
    LFPS_META,
    LFPS_NEAR,
    LFPS_STATS,
    LFPS_STATS_SIZE,
    STEP,
)
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cpu.attention.streamed_dot import picking, sweeping
from tamis.jit_kernels.cpu.lang.blocks16 import add_scaled_half, dot_float, dot_half
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.lang.simd import (
    bits_above,
    bits_from,
    hmax,
    hsum,
    load_f32x16,
    lowest_bit,
    prefetch,
    splat_f32x16,
    store_f32x16,
    vexp,
    vmax,
    zero_f32x16,
)
from tamis.jit_kernels.cpu.select.common import LOWEST, copy_row, keep_top, key_at, write_ends

META, STATS = 8 * len(LFPS_META), 8 * LFPS_STATS_SIZE
NEVER = np.float32(3e38)  # a threshold above every entry
ZERO = np.float32(0)
SMALLEST_SCALE = 1e-15  # below it, entries are rescaled: once in about 700 steps
AHEAD = 8  # entries of a table that are prefetched before they change


# ---- tables --------------------------------------------------------------------------------------
@njit
def slash_shift(capacity, pos):
    """The offset from a position to its entry of the slash table, which is indexed by distance."""
    return capacity - PAGE - 1 - pos


@njit(error_model="numpy")
def _mean_and_bar(sums, n, a):
    """The mean of a table's n entries, and the threshold a * mean / kurtosis (Eq. 8)."""
    s1, s2, s3, s4 = (
        load_f64(sums), load_f64(sums + 8), load_f64(sums + 16), load_f64(sums + 24),
    )  # fmt: skip
    mean = s1 / n
    second = s2 - n * mean * mean
    fourth = s4 - 4 * mean * s3 + 6 * mean * mean * s2 - 3 * n * mean * mean * mean * mean
    # If all entries are (almost) equal, there is no pattern to follow.
    if not second > 1e-12 * s2 or not fourth > 0.0:
        return np.float32(mean), NEVER
    return np.float32(mean), np.float32(a * mean * second * second / fourth)


@njit(error_model="numpy")
def _rescale(table, sums, first, last, factor):
    """Multiply entries first .. last - 1 by `factor` and recompute the power sums."""
    s1 = s2 = s3 = s4 = np.float64(0)
    for i in range(first, last):
        x = load_f32(table + 4 * i) * factor
        store_f32(table + 4 * i, x)
        y = np.float64(x)
        s1, s2, s3, s4 = s1 + y, s2 + y * y, s3 + y * y * y, s4 + y * y * y * y
    store_f64(sums, s1)
    store_f64(sums + 8, s2)
    store_f64(sums + 16, s3)
    store_f64(sums + 24, s4)


@njit(error_model="numpy")
def _renew(table, bits, n_word, levels, first, last):
    """Recompute words first .. last - 1 of both bitmaps: above the threshold, above the mean."""
    mean, bar = levels
    for word in range(first, last):
        hot, warm = 0, 0
        for i in range(0, 64, 16):
            x = load_f32x16(table + 4 * (64 * word + i))
            hot |= bits_above(x, splat_f32x16(bar)) << i
            warm |= bits_above(x, splat_f32x16(mean)) << i
        store_i64(bits + 8 * word, hot)
        store_i64(bits + 8 * (n_word + word), warm)


class Table(NamedTuple):
    """A row's vertical or slash table."""

    entries: Any
    bits: Any
    n_word: Any  # of a bitmap
    sums: Any  # see LFPS_STATS
    shift: Any  # from a position to its entry
    levels: Any  # mean and bar, see _mean_and_bar


@njit(error_model="numpy")
def _learn(table, scale, order, weights, n):
    """Add (w - 1 / (2 n)) / scale to the entries of n positions (Eq. 10); update their bits."""
    mean, bar = table.levels
    s1 = s2 = s3 = s4 = np.float64(0)
    for i in range(n):
        later = load_i32(order + 4 * min(i + AHEAD, n - 1))
        prefetch(table.entries + 4 * (later + table.shift))
        at = load_i32(order + 4 * i) + table.shift
        old = load_f32(table.entries + 4 * at)
        new = old + np.float32((np.float64(load_f32(weights + 4 * i)) - 0.5 / n) / scale)
        store_f32(table.entries + 4 * at, new)
        x, y = np.float64(old), np.float64(new)
        s1, s2 = s1 + (y - x), s2 + (y * y - x * x)
        s3, s4 = s3 + (y * y * y - x * x * x), s4 + (y * y * y * y - x * x * x * x)
        word, bit = table.bits + 8 * (at >> 6), 1 << (at & 63)
        store_i64(word, load_i64(word) & ~bit | bit * (new > bar))
        word += 8 * table.n_word
        store_i64(word, load_i64(word) & ~bit | bit * (new > mean))
    sums = table.sums
    store_f64(sums, load_f64(sums) + s1)
    store_f64(sums + 8, load_f64(sums + 8) + s2)
    store_f64(sums + 16, load_f64(sums + 16) + s3)
    store_f64(sums + 24, load_f64(sums + 24) + s4)


# ---- rows of scores: whole vectors ---------------------------------------------------------------
@njit(error_model="numpy")
def _pad(row, n):
    """Pad a row with LOWEST from entry n to a whole vector; return the padded length."""
    whole = (n + 15) // 16 * 16
    for i in range(n, whole):
        store_f32(row + 4 * i, LOWEST)
    return whole


@njit(error_model="numpy")
def _exponentials(row, first, last, scale):
    """Replace entries x first .. last - 1 by exp((x - max) * scale); return the sum."""
    top, total, factor = splat_f32x16(LOWEST), zero_f32x16(), splat_f32x16(scale)
    for i in range(first, last, 16):
        top = vmax(top, load_f32x16(row + 4 * i))
    top = splat_f32x16(hmax(top))
    for i in range(first, last, 16):
        weight = vexp((load_f32x16(row + 4 * i) - top) * factor)
        store_f32x16(row + 4 * i, weight)
        total += weight
    return hsum(total)


@njit(error_model="numpy")
def _add_scaled(to, row, first, last, factor):
    """Add factor * row to `to`, entries first .. last - 1: whole vectors."""
    scale = splat_f32x16(factor)
    for i in range(first, last, 16):
        x = load_f32x16(to + 4 * i) + load_f32x16(row + 4 * i) * scale
        store_f32x16(to + 4 * i, x)


@njit(error_model="numpy")
def _scale(row, n, factor):
    """Multiply n entries, and those after them in the last vector."""
    for i in range(0, n, 16):
        store_f32x16(row + 4 * i, load_f32x16(row + 4 * i) * splat_f32x16(factor))


@njit
def _norm(x, n):
    """The squared L2 norm of f32 x [n]."""
    return np.float64(dot_float(x, x, n))


# ---- kernels -------------------------------------------------------------------------------------
def lfps_keep(head_dim: int) -> Any:
    """Kernel of LFPS_KEEP: threads share the tokens."""

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n = a.n_head * head_dim
        for t in range(max(0, n_tok - a.n_past) + tid, n_tok, n_thread):
            slot = (pos + t) % a.n_past
            copy_row(a.q + 4 * n * t, a.past + 4 * n * slot, n)
            store_i64(a.past_pos + 8 * slot, pos + t)

    return kernel


def _average(head_dim: int) -> Any:
    @njit(error_model="numpy")
    def average(pages, table, n_head_kv, h, low, high, out):
        """Mean of the rows low .. high - 1."""
        for i in range(head_dim):
            store_f32(out + 4 * i, ZERO)
        share = np.float32(1.0 / (high - low))
        for j in range(low, high):
            row = key_at(pages, table, n_head_kv, h, j, head_dim)
            add_scaled_half(out, share, row, head_dim)

    return average


def lfps_start(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of LFPS_START: threads stride over KV heads."""
    size, sweep, average = 4 * head_dim, sweeping(head_dim, heads, PAGE), _average(head_dim)

    @njit(error_model="numpy")
    def spread_of(row, low, high, scale, norm):
        """Variance of the logits of a query over its squared length."""
        mean, square = np.float64(0), np.float64(0)
        for j in range(low, high):
            mean += np.float64(load_f32(row + 4 * j) * scale) / (high - low)
        for j in range(low, high):
            square += (np.float64(load_f32(row + 4 * j) * scale) - mean) ** 2
        return square / (high - low) / norm if norm > 0.0 else 0.0

    @njit(error_model="numpy")
    def n_kept(past_pos, n_past, low, pos, n_local):
        """How many consecutive stored queries, ending just before `pos`, see the middle."""
        n = 0
        while n < n_past and pos - n - n_local > low:
            p = pos - 1 - n
            if load_i64(past_pos + 8 * (p % n_past)) != p:
                break
            n += 1
        return n

    @njit(error_model="numpy")
    def weigh(a, queries, h, last, scores):
        """Write the scores of keys from the sinks to `last`; return the range of entries written.

        The range is of whole pages.
        """
        low, stride = a.n_sink, 4 * a.capacity
        first, end = low // PAGE * PAGE, (last + PAGE - 1) // PAGE * PAGE
        for j in range(first, end, PAGE):
            keys = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
            following = min(j + PAGE, end - PAGE)
            ahead = key_at(a.k_pages, a.k_table, a.n_head_kv, h, following, head_dim)
            sweep(queries, keys, ahead, scores + 4 * j, stride)
        for g in range(heads):
            for j in range(first, low):
                store_f32(scores + stride * g + 4 * j, LOWEST)
            for j in range(last, end):
                store_f32(scores + stride * g + 4 * j, LOWEST)
        return first, end

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        low, high, stride = a.n_sink, pos + 1 - a.n_local, 4 * a.capacity
        rows_per_kv, n_word = heads // group, a.capacity // 64 + 1
        for h in range(tid, a.n_head_kv, n_thread):
            rows = rows_per_kv * h
            if high <= low or load_i64(a.meta + META * rows + LFPS_META.next) == pos:
                continue
            for i in range(0, stride * rows_per_kv, 64):
                store_f32x16(a.ver + stride * rows + i, zero_f32x16())
                store_f32x16(a.sla + stride * rows + i, zero_f32x16())
            n_query = n_kept(a.past_pos, a.n_past, low, pos, a.n_local)
            share = np.float32(1.0 / (2.0 * max(1, n_query) * (1.0 - a.decay) * group))
            own = a.scores + stride * heads * h
            for i in range(max(1, n_query)):
                # If no query is stored (a loaded session), this one is better than none.
                p = pos - 1 - i if n_query > 0 else pos
                queries = a.q + size * heads * h
                if n_query > 0:
                    queries = a.past + size * heads * (a.n_head_kv * (p % a.n_past) + h)
                last = p + 1 - a.n_local
                first, end = weigh(a, queries, h, last, own)
                for g in range(heads):
                    row, r = own + stride * g, rows + g // group
                    if i == 0:
                        norm = _norm(queries + size * g, head_dim)
                        ratio = spread_of(row, low, last, a.scale, norm)
                        store_f64(a.spread + 8 * (heads * h + g), ratio)
                    factor = share / _exponentials(row, first, end, a.scale)
                    by_dist = a.sla + stride * r + 4 * slash_shift(a.capacity, p)
                    _add_scaled(a.ver + stride * r, row, first, end, factor)
                    _add_scaled(by_dist, row, first, end, factor)
            for r in range(rows, rows + rows_per_kv):
                at, shift = a.stats + STATS * r, slash_shift(a.capacity, pos)
                store_f64(at + LFPS_STATS.scale, 1.0)
                _rescale(a.ver + stride * r, at + LFPS_STATS.ver, low, high, np.float32(1))
                by_dist = a.sla + stride * r
                _rescale(by_dist, at + LFPS_STATS.sla, low + shift, high + shift, np.float32(1))
                words = a.bits + 32 * n_word * r
                levels = _mean_and_bar(at + LFPS_STATS.ver, high - low, np.float64(a.a))
                _renew(a.ver + stride * r, words, n_word, levels, 0, a.capacity // 64)
                levels = _mean_and_bar(at + LFPS_STATS.sla, high - low, np.float64(a.a))
                _renew(a.sla + stride * r, words + 16 * n_word, n_word, levels, 0, a.capacity // 64)
            mean = a.means + 2 * size * h
            average(a.k_pages, a.k_table, a.n_head_kv, h, low, high, mean)
            average(a.v_pages, a.v_table, a.n_head_kv, h, low, high, mean + size)

    return kernel


def _global_logit(head_dim: int) -> Any:
    """log(w_global) of Eq. 5: the weight of all keys, if their logits are normally distributed."""

    @njit(error_model="numpy")
    def global_logit(query, mean_key, spread, n_kv, scale):
        norm = _norm(query, head_dim)
        centre = np.float64(dot_float(query, mean_key, head_dim)) * scale
        return centre + norm * spread / 2 + math.log(np.float64(n_kv))

    return global_logit


def _is_sparse(head_dim: int) -> Any:
    """Whether the sinks have more than epsilon of the estimated total weight (Eq. 6)."""

    @njit(error_model="numpy")
    def weigh(a, query, h, low, high, w_global):
        """The sum of the weights of keys low .. high - 1 of places, relative to exp(w_global)."""
        total = np.float64(0)
        for i in range(low, high):
            j = load_i32(a.places + 4 * i)
            key = key_at(a.k_pages, a.k_table, a.n_head_kv, h, j, head_dim)
            total += np.exp(np.float64(dot_half(query, key, head_dim) * a.scale) - w_global)
        return total

    @njit(error_model="numpy")
    def is_sparse(a, query, h, ends, w_global, epsilon):
        # Only the two sums can overflow, to infinity.
        begin, end, n_near = ends
        sinks = weigh(a, query, h, begin, begin + a.n_sink, w_global)
        near = weigh(a, query, h, end - n_near, end, w_global)
        return sinks > epsilon * (sinks + 1.0 + near)

    return is_sparse


@njit(error_model="numpy")
def _either(ver, sla, word, shift):
    """The 64 bits of a word of positions: set in the vertical or in the slash table."""
    at = 64 * word + shift
    by_dist = sla + 8 * (at >> 6)
    return load_i64(ver + 8 * word) | bits_from(load_i64(by_dist), load_i64(by_dist + 8), at & 63)


@njit(error_model="numpy")
def _inside(word, low, high):
    """The mask of a word's positions that lie in low .. high - 1."""
    bits = -1
    if 64 * word < low:
        bits = -1 << (low - 64 * word)
    if 64 * word + 64 > high:
        bits &= (1 << (high - 64 * word)) - 1
    return bits


@njit(error_model="numpy")
def _propose(bits, n_word, shift, middle, listed):
    """List the candidates in the middle (Eq. 7) and their neighbours (Eq. 9), ascending."""
    low, high = middle
    hot_ver, hot_sla = bits, bits + 16 * n_word
    warm_ver, warm_sla = hot_ver + 8 * n_word, hot_sla + 8 * n_word
    first, last = low // 64, (high + 63) // 64
    before, count = 0, 0
    here = _either(hot_ver, hot_sla, first, shift) & _inside(first, low, high)
    for word in range(first, last):
        after = 0
        if word + 1 < last:
            after = _either(hot_ver, hot_sla, word + 1, shift) & _inside(word + 1, low, high)
        near = here | bits_from(before, here, 63) | bits_from(before, here, 62)
        near |= bits_from(here, after, 1)
        if near != 0:
            near &= _either(warm_ver, warm_sla, word, shift) & _inside(word, low, high)
            while near != 0:
                store_i32(listed + 4 * count, 64 * word + lowest_bit(near))
                near &= near - 1
                count += 1
        before, here = here, after
    return count


def _choosing(head_dim: int, group: int) -> Any:
    """The function choose(a, queries, lines, order, n, limit, scores).

    It scores the n candidates; moves the best `limit` and their positions to the front, and their
    weights (sum 1) to `scores`: the mean of the heads' softmax. Returns how many are left.
    """
    pick = picking(head_dim, group)

    @njit(error_model="numpy")
    def choose(a, queries, lines, order, n, limit, scores):
        if n == 0:
            return 0
        stride, scale = 4 * a.capacity, a.scale
        pick(queries, a.k_pages, lines, n, scores, stride)
        whole = _pad(scores, n)
        if group > 1:
            factor = np.float32(1.0 / group)
            total = _exponentials(scores, 0, whole, scale)
            _scale(scores, n, factor / total)
            for g in range(1, group):
                row = scores + stride * g
                _pad(row, n)
                total = _exponentials(row, 0, whole, scale)
                _add_scaled(scores, row, 0, whole, factor / total)
        if n > limit:
            keep_top(scores, order, n, limit)
            n = limit
        if group > 1:
            for i in range(n, (n + 15) // 16 * 16):
                store_f32(scores + 4 * i, ZERO)
            total = ZERO
            for i in range(0, n, 16):
                total += hsum(load_f32x16(scores + 4 * i))
        else:
            total = _exponentials(scores, 0, _pad(scores, n), scale)
        _scale(scores, n, np.float32(1) / total)
        return n

    return choose


def lfps_propose() -> Any:
    """Kernel of LFPS_PROPOSE: threads stride over rows."""

    @njit(error_model="numpy")
    def slice_of(n, turn, period):
        return n * turn // period, n * (turn + 1) // period

    @njit(error_model="numpy")
    def renew(table, bits, n_word, levels, span, turn):
        """Recompute part at / period of a table's bitmaps; turn: (at, period)."""
        at, period = turn
        first, last = span[0] // 64, (span[1] + 63) // 64
        begin, end = slice_of(last - first, at, period)
        _renew(table, bits, n_word, levels, first + begin, first + end)

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        n_kv, low, stride = pos + 1, a.n_sink, 4 * a.capacity
        high, n_word = max(low, n_kv - a.n_local), a.capacity // 64 + 1
        shift, turn = slash_shift(a.capacity, pos), (pos % a.period, a.period)
        for r in range(tid, a.n_row, n_thread):
            if high <= low:
                store_i32(a.counts + 4 * r, 0)
                continue
            words, state = a.bits + 32 * n_word * r, a.stats + STATS * r
            levels = _mean_and_bar(state + LFPS_STATS.ver, high - low, np.float64(a.a))
            renew(a.ver + stride * r, words, n_word, levels, (low, high), turn)
            levels = _mean_and_bar(state + LFPS_STATS.sla, high - low, np.float64(a.a))
            span = low + shift, high + shift
            renew(a.sla + stride * r, words + 16 * n_word, n_word, levels, span, turn)
            row = a.sets + stride * r
            count = write_ends(row, 0, low, 0, 0)
            count += _propose(words, n_word, shift, (low, high), row + 4 * count)
            near = max(low, n_kv - LFPS_NEAR)
            store_i32(a.counts + 4 * r, write_ends(row, count, 0, near, n_kv))

    return kernel


def lfps_sets(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of LFPS_SETS: threads stride over rows."""
    global_logit, is_sparse = _global_logit(head_dim), _is_sparse(head_dim)
    choose, size = _choosing(head_dim, group), 4 * head_dim

    @njit
    def add(at, n):
        store_i64(at, load_i64(at) + n)

    @njit(error_model="numpy")
    def all_sparse(a, r, h, n_kv, ends):
        """Whether every head of row r, of KV head h, is bypassed; ends: its sinks and last keys."""
        mean_key = a.means + 2 * size * h
        for head in range(group * r, group * (r + 1)):
            query = a.q + size * head
            w_global = global_logit(query, mean_key, load_f64(a.spread + 8 * head), n_kv, a.scale)
            if not is_sparse(a, query, h, ends, w_global, np.float64(a.epsilon)):
                return False
        return True

    @njit(error_model="numpy")
    def take(a, first, h, count, found, lines):
        """Copy the positions of `count` candidates, and list their rows of the key pages."""
        copy_row(a.indices + 4 * first, found, count)
        for i in range(count):
            j = load_i32(a.places + 4 * (first + i))
            page = load_i32(a.k_table + 4 * (j // PAGE)) * a.n_head_kv + h
            store_i32(lines + 4 * i, page * PAGE + j % PAGE)

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        n_kv, low, stride = pos + 1, a.n_sink, 4 * a.capacity
        high, n_word = max(low, n_kv - a.n_local), a.capacity // 64 + 1
        limit, shift = max(1, int(np.float64(a.budget) * n_kv)), slash_shift(a.capacity, pos)
        for r in range(tid, heads // group * a.n_head_kv, n_thread):
            h, queries = r * group // heads, a.q + size * group * r
            own = a.meta + META * r
            out = a.sets + 4 * a.set_capacity * r
            state = a.stats + STATS * r
            add(own + LFPS_META.n_step, 1)
            add(own + LFPS_META.n_seen, n_kv)
            n, sparse = write_ends(out, 0, min(a.n_sink, n_kv), 0, 0), False
            if high > low:
                store_i64(own + LFPS_META.next, n_kv)
                begin, end = load_i32(a.indptr + 4 * r), load_i32(a.indptr + 4 * r + 4)
                n_near = n_kv - max(a.n_sink, n_kv - LFPS_NEAR)
                if a.bypass != 0:
                    sparse = all_sparse(a, r, h, n_kv, (begin, end, n_near))
                    add(own + LFPS_META.n_bypass, sparse)
                    add(own + LFPS_META.n_scanned, a.n_sink + LFPS_NEAR)
                if not sparse:
                    words, row = a.bits + 32 * n_word * r, a.scores + stride * group * r
                    found, n_mid = a.order + 2 * stride * r, high - low
                    sums = state + LFPS_STATS.ver
                    levels = _mean_and_bar(sums, n_mid, np.float64(a.a))
                    ver = Table(a.ver + stride * r, words, n_word, sums, 0, levels)
                    sums = state + LFPS_STATS.sla
                    levels = _mean_and_bar(sums, n_mid, np.float64(a.a))
                    sla = Table(
                        a.sla + stride * r, words + 16 * n_word, n_word, sums, shift, levels
                    )
                    lines = found + stride
                    count = end - begin - a.n_sink - n_near
                    take(a, begin + a.n_sink, h, count, found, lines)
                    add(own + LFPS_META.n_scanned, count)
                    count = choose(a, queries, lines, found, count, limit, row)
                    copy_row(found, out + 4 * n, count)
                    n += count
                    scale = load_f64(state + LFPS_STATS.scale) * a.decay
                    store_f64(state + LFPS_STATS.scale, scale)
                    _learn(ver, scale, found, row, count)
                    _learn(sla, scale, found, row, count)
                    if scale < SMALLEST_SCALE:
                        factor = np.float32(scale)
                        _rescale(ver.entries, ver.sums, low, high, factor)
                        _rescale(sla.entries, sla.sums, low + shift, high + shift, factor)
                        store_f64(state + LFPS_STATS.scale, 1.0)
            store_i64(own + LFPS_META.bypassed, sparse)
            store_i32(a.counts + 4 * r, write_ends(out, n, 0, high, n_kv))

    return kernel


def lfps_bypass(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of LFPS_BYPASS: threads stride over heads."""
    global_logit = _global_logit(head_dim)

    def kernel(tid, n_thread, a):
        n_kv = load_i64(a.step + STEP.pos) + 1
        for head in range(tid, heads * a.n_head_kv, n_thread):
            r, h = head // group, head // heads
            if load_i64(a.meta + META * r + LFPS_META.bypassed) == 0:
                continue
            query, at = a.q + 4 * head_dim * head, a.out + 4 * head_dim * head
            mean_key = a.means + 8 * head_dim * h
            mean_value = mean_key + 4 * head_dim
            share = np.float32(1)  # of the mean value
            if a.bypass != 2:
                w_global = global_logit(
                    query, mean_key, load_f64(a.spread + 8 * head), n_kv, a.scale
                )
                kept = np.exp(np.float64(load_f32(a.lse + 4 * head)) - w_global)
                share = np.float32(1.0 / (1.0 + kept))
            for i in range(head_dim):
                x = load_f32(at + 4 * i)
                store_f32(at + 4 * i, x + share * (load_f32(mean_value + 4 * i) - x))

    return kernel
