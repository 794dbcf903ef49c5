"""Ops that make Selections: windows, scores of keys, the best k."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import LEAST_EXTRA, LIST_PAD, STEP, TILE, rescore_work
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.jit_kernels.cpu.attention.gathered_scores import pad_list, products_of
from tamis.jit_kernels.cpu.attention.key_codes import scoring_codes
from tamis.jit_kernels.cpu.attention.streamed_dot import sweeping_up_to
from tamis.jit_kernels.cpu.kv.kv_rows import row_at
from tamis.jit_kernels.cpu.lang.intrinsic import (
    f32_bits,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.lang.simd import (
    as_i32,
    bits_at_least,
    count_at_least,
    count_bits,
    count_i32x16,
    hmax,
    load_f32x16,
    load_i32x16,
    lowest_bit,
    shift_right_signed,
    splat_i32x16,
    store_chosen,
    store_f32x16,
    store_i32x16,
    vmax,
    vmin,
)


@njit(error_model="numpy")
def key_at(k_pages, k_table, n_head_kv, h, j, head_dim):
    """Address of KV head h's f16 key of position j."""
    row = (load_i32(k_table + 4 * (j // PAGE)) * n_head_kv + h) * PAGE + j % PAGE
    return k_pages + 2 * head_dim * row


@njit
def write_ends(indices, count, sinks, low, high):
    """Append 0 .. sinks - 1 and low .. high - 1 to indices at `count`; return the new count."""
    for i in range(sinks):
        store_i32(indices + 4 * (count + i), i)
    for i in range(low, high):
        store_i32(indices + 4 * (count + sinks + i - low), i)
    return count + sinks + max(0, high - low)


@njit
def copy_row(source, to, n):
    """Copy n 32-bit entries."""
    whole = n - n % 16
    for i in range(0, whole, 16):
        store_i32x16(to + 4 * i, load_i32x16(source + 4 * i))
    for i in range(whole, n):
        store_i32(to + 4 * i, load_i32(source + 4 * i))


def select_window() -> Any:
    """Kernel of SELECT_WINDOW. A few thousand integers at most: one thread writes them."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        count = 0
        store_i32(a.indptr, 0)
        for qb in range((n_tok + a.q_block - 1) // a.q_block):
            oldest = pos + qb * a.q_block
            newest = pos + min(n_tok, (qb + 1) * a.q_block) - 1
            low = max(0, oldest - a.n_recent + 1) // a.block if a.n_recent != 0 else 0
            sinks = min(low, (a.n_sink + a.block - 1) // a.block)
            for r in range(a.n_row):
                count = write_ends(a.indices, count, sinks, low, newest // a.block + 1)
                store_i32(a.indptr + 4 * (qb * a.n_row + r + 1), count)

    return kernel


LOWEST = np.float32(-3e38)  # the score of positions that are not chosen from
SPAN = 4 * PAGE  # positions that 16 maxima stand for


@njit(error_model="numpy")
def window_start(pos, n_local, drop):
    """The first position after the sinks that a query at `pos` sees.

    The share drop / 2^32 of the past is hidden, but never one of the last n_local positions.
    """
    return max(0, min(drop * pos >> 32, pos + 1 - n_local))


@njit(error_model="numpy")
def middle(pos, n_sink, n_local, drop):
    """The range of positions between sinks and local window that a method chooses from."""
    low = max(n_sink, window_start(pos, n_local, drop))
    return low, max(n_sink, pos + 1 - n_local)


def _in_spans(group: int) -> tuple[Any, Any]:
    """Functions of what SCORE_KEYS and SCORE_CODES share.

    share(tid, n_thread, low, high): the pages of a thread, whole spans. finish(at, tops, sizes,
    page, middle): join the heads of n rows of a page's scores, write their maxima.
    """

    @njit(error_model="numpy")
    def share(tid, n_thread, low, high):
        first, last = low // PAGE, (high + PAGE - 1) // PAGE
        span = first // 4
        n_span = (last + 3) // 4 - span
        begin = max(first, 4 * (span + n_span * tid // n_thread))
        return begin, min(last, 4 * (span + n_span * (tid + 1) // n_thread))

    @njit(error_model="numpy")
    def join(scores, stride, n):
        """Reduce each row's heads by maximum, into its first head's scores."""
        for r in range(0, n, group):
            for i in range(0, 4 * PAGE, 64):
                at = scores + stride * r + i
                best = load_f32x16(at)
                for g in range(1, group):
                    best = vmax(best, load_f32x16(at + stride * g))
                store_f32x16(at, best)

    @njit(error_model="numpy")
    def leave_out(scores, stride, n, page, low, high):
        """Set the scores of the page's positions outside low .. high - 1 to LOWEST."""
        for r in range(0, n, group):
            for i in range(PAGE):
                if page * PAGE + i < low or page * PAGE + i >= high:
                    store_f32(scores + stride * r + 4 * i, LOWEST)

    @njit(error_model="numpy")
    def finish(at, tops, sizes, page, middle):
        (n, stride), (low, high) = sizes, middle
        if group > 1:
            join(at, stride, n)
        if page * PAGE < low or (page + 1) * PAGE > high:
            leave_out(at, stride, n, page, low, high)
        fresh = page % 4 == 0 or page == low // PAGE
        for r in range(0, n, group):
            top = load_f32x16(at + stride * r)
            for i in range(64, 4 * PAGE, 64):
                top = vmax(top, load_f32x16(at + stride * r + i))
            to = tops + stride // 16 * r + 64 * (page // 4)
            store_f32x16(to, top if fresh else vmax(top, load_f32x16(to)))

    return share, finish


def score_keys(head_dim: int, heads: int, group: int, type_k: str) -> Any:
    """Kernel of SCORE_KEYS: threads share the positions of each KV head, in whole spans."""
    sweep, size = sweeping_up_to(head_dim, heads, PAGE, type_k), kv_row(type_k, head_dim).itemsize
    share, finish = _in_spans(group)

    def kernel(tid, n_thread, a):
        low, high = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, a.drop)
        begin, end = share(tid, n_thread, low, high)
        stride = 4 * a.capacity
        for h in range(a.n_head_kv):
            n = load_i32(a.counts + 4 * h) if a.counts != 0 else heads
            if n == 0 or high <= low:
                continue
            queries, row, tops = (
                a.q + 4 * head_dim * heads * h, a.scores + stride * heads * h,
                a.maxima + stride // 16 * heads * h,
            )  # fmt: skip
            for page in range(begin, end):
                keys = a.k_pages + size * row_at(a.k_table, a.n_head_kv, h, page * PAGE)
                following = min(page + 1, end - 1) * PAGE
                ahead = a.k_pages + size * row_at(a.k_table, a.n_head_kv, h, following)
                at = row + 4 * PAGE * page
                sweep(n, queries, keys, ahead, at, stride)
                finish(at, tops, (n, stride), page, (low, high))

    return kernel


def score_codes(head_dim: int, heads: int, group: int) -> Any:
    """Kernel of SCORE_CODES: threads share the positions of each KV head, in whole spans."""
    score, (share, finish) = scoring_codes(head_dim, heads), _in_spans(group)

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        low, high = middle(pos, a.n_sink, a.n_local, a.drop)
        begin, end = share(tid, n_thread, low, high)
        stride = 4 * a.capacity
        for h in range(a.n_head_kv):
            if tid == 0:
                store_i64(a.filled + 8 * h, pos)
            n = load_i32(a.counts + 4 * h) if a.counts != 0 else heads
            if n == 0 or high <= low:
                continue
            i = heads * h
            queries = (
                a.q_codes + head_dim * i, a.q_sums + 4 * i, a.q_steps + 4 * i, a.q_centre + 4 * i,
            )  # fmt: skip
            codes, steps = a.codes + head_dim * a.capacity * h, a.steps + stride * h
            row, tops = a.scores + stride * i, a.maxima + stride // 16 * i
            for page in range(begin, end):
                first = PAGE * page
                at = row + 4 * first
                score(n, queries, codes + head_dim * first, steps + 4 * first, at, stride)
                finish(at, tops, (n, stride), page, (low, high))

    return kernel


LEAST = -0x80000000  # below `ordered` of any score


@njit
def ordered(score):
    """An int32 key that orders like the floats; +0 and -0 give the same key."""
    bits = f32_bits(score)
    sign = bits >> 31  # without a branch: signs are unpredictable
    return ((bits & 0x7FFFFFFF) ^ -sign) + sign


@njit
def _in_order(x):
    """The keys of `ordered` for a vector."""
    bits = as_i32(x)
    sign = shift_right_signed(bits, 31)  # -1 where negative: there size becomes -size
    return ((bits & splat_i32x16(0x7FFFFFFF)) ^ sign) - sign


@njit
def _range_of(scores, low, high):
    """The smallest and the largest score key (see `ordered`) of entries low .. high - 1."""
    whole = high - (high - low) % 16
    least, most = splat_i32x16(0x7FFFFFFF), splat_i32x16(LEAST)
    for j in range(low, whole, 16):
        x = _in_order(load_f32x16(scores + 4 * j))
        least, most = vmin(x, least), vmax(x, most)
    bottom, top = -hmax(splat_i32x16(-1) - least) - 1, int(hmax(most))
    for j in range(whole, high):
        x = ordered(load_f32(scores + 4 * j))
        bottom, top = min(bottom, x), max(top, x)
    return bottom, top


@njit
def threshold(scores, low, high, k):
    """A score key that exactly k of entries low .. high - 1 reach, by bisection on its bits.

    It is the k-th best key, or a smaller one that the same k entries reach. Ties: more than k.
    """
    return bound_of(scores, low, high, k, k)


@njit
def bound_of(scores, low, high, k, most):
    """A score key that k to `most` of entries low .. high - 1 reach; more only with ties."""
    whole = high - (high - low) % 16
    found, above = _range_of(scores, low, high)
    while found < above:  # at least k entries reach found, fewer reach above + 1
        candidate = (found + above + 1) >> 1
        bar = splat_i32x16(candidate)
        count = 0
        for j in range(low, whole, 16):
            count += count_at_least(_in_order(load_f32x16(scores + 4 * j)), bar)
        for j in range(whole, high):
            count += ordered(load_f32(scores + 4 * j)) >= candidate
        if count >= k:
            found = candidate
            if count <= most:
                break
        else:
            above = candidate - 1
    return found


@njit(error_model="numpy")
def keep_best(scores, items, n, k, out):
    """Copy the k < n items with the best scores, in order; ties go to earlier ones."""
    bar = threshold(scores, 0, n, k)
    ties = k
    for i in range(n):
        ties -= ordered(load_f32(scores + 4 * i)) > bar
    count = 0
    for i in range(n):
        # Written always, counted if kept: no mispredicted branches.
        store_i32(out + 4 * count, load_i32(items + 4 * i))
        order = ordered(load_f32(scores + 4 * i))
        tie = order == bar and ties > 0
        ties -= tie
        count += order > bar or tie
        if count == k:
            break


@njit(error_model="numpy")
def survivors(scores, maxima, low, high, k, order):
    """Compact like survivors_in, to the front of the row itself."""
    return survivors_in(scores, maxima, (low, high), k, (scores, order))


@njit(error_model="numpy")
def survivors_in(scores, maxima, middle, k, to):
    """Compact the scores that may be among the best k; returns how many.

    scores and maxima as in SCORE_KEYS for positions low .. high - 1; to: the addresses for the
    scores and their positions, ascending. At least k scores reach the k-th best maximum: lower ones
    are not among the best k.
    """
    (low, high), (kept, order) = middle, to
    first, last = low // PAGE * PAGE, (high + PAGE - 1) // PAGE * PAGE
    least, most = first // SPAN * 16, (last + SPAN - 1) // SPAN * 16
    bound = ordered(LOWEST) + 1
    if most - least > k:
        bound = max(bound, bound_of(maxima, least, most, k, k + k // 8))
    bar, count = splat_i32x16(bound), 0
    for j in range(first, last, 16):
        x = load_f32x16(scores + 4 * j)
        bits = bits_at_least(_in_order(x), bar)
        if bits != 0:
            store_chosen(kept + 4 * count, x, bits)
            store_chosen(order + 4 * count, count_i32x16() + splat_i32x16(j), bits)
            count += count_bits(bits)
    return count


@njit(error_model="numpy")
def bar_of(scores, n, k):
    """The key that the best k of n scores reach (see `threshold`), and its ties among them."""
    bar, above = threshold(scores, 0, n, k), 0
    for i in range(0, n, 16):
        live = (1 << min(16, n - i)) - 1
        x = _in_order(load_f32x16(scores + 4 * i))
        above += count_bits(bits_at_least(x, splat_i32x16(bar + 1)) & live)
    return bar, k - above


@njit(error_model="numpy")
def best_lanes(score, live, bar, ties):
    """The bits of live lanes above the threshold and of the first `ties` at it.

    How many ties are left.
    """
    x = _in_order(score)
    bits = bits_at_least(x, splat_i32x16(bar + 1)) & live
    tied = (bits_at_least(x, splat_i32x16(bar)) & live) ^ bits
    while tied != 0 and ties > 0:
        bits |= tied & -tied
        tied &= tied - 1
        ties -= 1
    return bits, ties


@njit(error_model="numpy")
def keep_top(scores, items, n, k):
    """Move the k <= n best scores and their items to the front, in order; ties go to earlier ones.

    Both are rows of whole vectors, of which the last may hold more than n.
    """
    bar, ties = bar_of(scores, n, k)
    count = 0
    for i in range(0, n, 16):
        score, item = load_f32x16(scores + 4 * i), load_i32x16(items + 4 * i)
        bits, ties = best_lanes(score, (1 << min(16, n - i)) - 1, bar, ties)
        store_chosen(scores + 4 * count, score, bits)
        store_chosen(items + 4 * count, item, bits)
        count += count_bits(bits)


@njit(error_model="numpy")
def write_best(scores, low, high, k, out):
    """Write the k < high - low entries of low .. high - 1 with the best scores, in order."""
    bar, ties = threshold(scores, low, high, k), k
    whole = high - (high - low) % 16
    for j in range(low, whole, 16):
        x = _in_order(load_f32x16(scores + 4 * j))
        ties -= count_at_least(x, splat_i32x16(bar + 1))
    for j in range(whole, high):
        ties -= ordered(load_f32(scores + 4 * j)) > bar
    for j in range(low, whole, 16):
        bits = bits_at_least(_in_order(load_f32x16(scores + 4 * j)), splat_i32x16(bar))
        while bits != 0:
            i = j + lowest_bit(bits)
            bits &= bits - 1
            tie = ordered(load_f32(scores + 4 * i)) == bar
            if not tie or ties > 0:
                store_i32(out, i)
                out += 4
            ties -= tie
    for j in range(whole, high):
        order = ordered(load_f32(scores + 4 * j))
        if order > bar or (order == bar and ties > 0):
            store_i32(out, j)
            out += 4
        ties -= order == bar


def rescore_keys(head_dim: int, heads: int, group: int, type_k: str) -> Any:
    """Kernel of RESCORE_KEYS: threads stride over rows."""
    products, work_size = products_of(head_dim, group, type_k), njit(rescore_work)
    rows_per_kv = heads // group

    @njit(error_model="numpy")
    def borderline(row, tops, middle, sizes, lists):
        """List the positions to be scored again; return how many."""
        (low, high), (n_top, n_extra), (kept, order) = middle, sizes, lists
        count = survivors_in(row, tops, middle, min(n_top + n_extra, high - low), (kept, order))
        bar, sure = LEAST, 0x7FFFFFFF
        if count > n_top + n_extra:
            bar = threshold(kept, 0, count, n_top + n_extra)
        if n_top > n_extra:
            sure = threshold(kept, 0, count, n_top - n_extra)
        n = 0
        for i in range(count):
            x = ordered(load_f32(kept + 4 * i))
            store_i32(order + 4 * n, load_i32(order + 4 * i))
            n += x >= bar and x < sure
        return n

    @njit(error_model="numpy")
    def rescore(a, keys, queries, row, lists, n):
        """Replace the row's scores of n listed positions by exact ones."""
        (order, lines, tile), h = lists, keys
        for i in range(n):
            line = row_at(a.k_table, a.n_head_kv, h, load_i32(order + 4 * i))
            store_i32(lines + 4 * i, line)
        pad_list(lines, n)
        for first in range(0, n, TILE):
            count = min(TILE, n - first)
            products(tile, queries, lines + 4 * first, a.k_pages, count)
            for i in range(count):
                best = load_f32(tile + 4 * i)
                for g in range(1, group):
                    best = max(best, load_f32(tile + 4 * (TILE * g + i)))
                store_f32(row + 4 * load_i32(order + 4 * (first + i)), best)

    @njit(error_model="numpy")
    def renew(row, tops, middle, order, n):
        """Recompute the maxima that include listed positions."""
        first, last = middle[0] // PAGE * PAGE, (middle[1] + PAGE - 1) // PAGE * PAGE
        for i in range(n):
            j = load_i32(order + 4 * i)
            span, best = j // SPAN * SPAN, LOWEST
            for other in range(span + j % 16, span + SPAN, 16):
                if first <= other < last:
                    best = max(best, load_f32(row + 4 * other))
            store_f32(tops + 4 * (j // SPAN * 16 + j % 16), best)

    def kernel(tid, n_thread, a):
        ends = middle(load_i64(a.step + STEP.pos), a.n_sink, a.n_local, a.drop)
        stride, n_extra = 4 * a.capacity, max((a.n_top + 3) // 4, LEAST_EXTRA)
        for r in range(tid, a.n_head_kv * rows_per_kv, n_thread):
            h, i = r // rows_per_kv, r % rows_per_kv * group
            n = load_i32(a.counts + 4 * h) if a.counts != 0 else heads
            if i >= n or ends[1] - ends[0] <= a.n_top or a.n_top == 0:
                continue
            head, kept = heads * h + i, a.work + 4 * work_size(a.capacity, group) * r
            order = kept + stride
            lists = order, order + stride, order + 2 * stride + 4 * LIST_PAD
            row, tops = a.scores + stride * head, a.maxima + stride // 16 * head
            n = borderline(row, tops, ends, (a.n_top, n_extra), (kept, order))
            if n > 0:
                rescore(a, h, a.q + 4 * head_dim * head, row, lists, n)
                renew(row, tops, ends, order, n)

    return kernel


def select_best() -> Any:
    """Kernel of SELECT_BEST: threads stride over rows."""

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        low, high = middle(pos, a.n_sink, a.n_local, 0)
        for r in range(tid, a.n_row, n_thread):
            out, row = a.sets + 4 * a.set_capacity * r, a.scores + 4 * a.capacity * a.group * r
            tops, found = a.maxima + a.capacity // 4 * a.group * r, a.order + 4 * a.capacity * r
            n = write_ends(out, 0, min(a.n_sink, pos + 1), 0, 0)
            if high - low <= a.n_top:
                n = write_ends(out, n, 0, low, high)
            elif a.n_top > 0:
                count = survivors(row, tops, low, high, a.n_top, found)
                keep_top(row, found, count, a.n_top)
                copy_row(found, out + 4 * n, a.n_top)
                n += a.n_top
            store_i32(a.counts + 4 * r, write_ends(out, n, 0, high, pos + 1))

    return kernel


def select_top_k() -> Any:
    """Kernel of SELECT_TOP_K: threads stride over rows; all rows have the same size."""

    def kernel(tid, n_thread, a):
        n_block = load_i64(a.step + STEP.pos) // a.block + 1
        size = min(n_block, a.n_sink + a.n_recent + a.n_top)
        everything = size == n_block
        for r in range(tid, a.n_row, n_thread):
            store_i32(a.indptr, 0)
            store_i32(a.indptr + 4 * (r + 1), (r + 1) * size)
            row, low, high = a.scores + 4 * a.capacity * r, a.n_sink, n_block - a.n_recent
            at = a.indices + 4 * size * r
            if everything:
                write_ends(at, 0, n_block, 0, 0)
                continue
            write_ends(at, 0, a.n_sink, 0, 0)
            if a.n_top > 0:
                write_best(row, low, high, a.n_top, at + 4 * a.n_sink)
            write_ends(at, a.n_sink + a.n_top, 0, high, n_block)

    return kernel


def select_union() -> Any:
    """Kernel of SELECT_UNION: threads stride over KV heads."""

    def kernel(tid, n_thread, a):
        n = load_i64(a.step + STEP.pos) // 64 + 1
        for h in range(tid, a.n_head_kv, n_thread):
            words, out, count = a.bits + 8 * a.n_word * h, a.joined + 4 * a.joined_capacity * h, 0
            for w in range(n):
                store_i64(words + 8 * w, 0)
            for r in range(h * a.rows_per_kv, (h + 1) * a.rows_per_kv):
                row = a.sets + 4 * a.capacity * r
                for i in range(load_i32(a.counts + 4 * r)):
                    j = load_i32(row + 4 * i)
                    at = words + 8 * (j >> 6)
                    store_i64(at, load_i64(at) | (1 << (j & 63)))
            for w in range(n):
                word = load_i64(words + 8 * w)
                while word != 0:
                    store_i32(out + 4 * count, 64 * w + lowest_bit(word))
                    word &= word - 1
                    count += 1
            store_i32(a.n_joined + 4 * h, count)

    return kernel


@njit(error_model="numpy")
def join_rows(out, blocks, n_block, block, others, n_other, end):
    """Write the positions before `end` of n_block blocks and of n_other positions.

    Returns how many.
    """
    count, at = 0, 0
    for i in range(n_block + 1):
        # After the last block, the remaining positions.
        first = min(end, load_i32(blocks + 4 * i) * block) if i < n_block else end
        while at < n_other and load_i32(others + 4 * at) < first:
            store_i32(out + 4 * count, load_i32(others + 4 * at))
            at, count = at + 1, count + 1
        last = min(end, first + block)
        for j in range(first, last):
            store_i32(out + 4 * count, j)
            count += 1
        while at < n_other and load_i32(others + 4 * at) < last:
            at += 1
    return count


def select_join() -> Any:
    """Kernel of SELECT_JOIN: one thread writes, since a row starts where the last one ends."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        count, each = 0, a.n_row // a.other_n_row
        store_i32(a.indptr, 0)
        for qb in range((n_tok + a.q_block - 1) // a.q_block):
            end = pos + min(n_tok, (qb + 1) * a.q_block)
            for h in range(a.n_row):
                r, s = qb * a.n_row + h, qb * a.other_n_row + h // each
                begin, other = load_i32(a.block_indptr + 4 * r), load_i32(a.other_indptr + 4 * s)
                count += join_rows(
                    a.indices + 4 * count,
                    a.block_indices + 4 * begin,
                    load_i32(a.block_indptr + 4 * (r + 1)) - begin,
                    a.block,
                    a.other_indices + 4 * other,
                    load_i32(a.other_indptr + 4 * (s + 1)) - other,
                    end,
                )
                store_i32(a.indptr + 4 * (r + 1), count)

    return kernel


def select_pack() -> Any:
    """Kernel of SELECT_PACK: threads stride over rows; each adds up the sizes before its own."""

    def kernel(tid, n_thread, a):
        begin = 0
        for r in range(a.n_row):
            count = load_i32(a.counts + 4 * r)
            if r % n_thread == tid:
                store_i32(a.indptr, 0)
                store_i32(a.indptr + 4 * (r + 1), begin + count)
                copy_row(a.sets + 4 * a.capacity * r, a.indices + 4 * begin, count)
            begin += count

    return kernel
