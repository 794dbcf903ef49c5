"""Radix-select top-k of a row of scores by one block: the k-th best, then all from it on."""

from typing import Any

from numba import cuda, int32, uint32

from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    block_before,
    lane,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_i32,
    load_i64,
    ordered,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cuda.lang.ptx import ballot, count_bits, or_i64

DIGIT = 11  # bits: a sign, an exponent and two more spread scores over many counters
BINS = 1 << DIGIT
SHARE = BINS // THREADS  # counters that a thread adds up
AT_ONCE = 4  # scores that a thread has in flight
SPAN, SUBSPAN = 256, 16  # positions with SUBSPAN maxima, each of as many positions SUBSPAN apart


@device
def some_of(scores, j, apart, high):
    """Order-preserving keys of scores j, j + apart, ...; 0, the lowest key, from `high` on."""
    last = high - 1
    a, b = ordered(load_f32(scores + 4 * min(j, last))), j + apart
    c, d = b + apart, b + 2 * apart
    return (
        a if j < high else uint32(0),
        ordered(load_f32(scores + 4 * min(b, last))) if b < high else uint32(0),
        ordered(load_f32(scores + 4 * min(c, last))) if c < high else uint32(0),
        ordered(load_f32(scores + 4 * min(d, last))) if d < high else uint32(0),
    )


def thresholding(some_of: Any) -> Any:
    """The function (scores, low, high, k, parts) that finds the k-th best score of a kind.

    some_of(scores, j, apart, high) reads AT_ONCE ordered scores from entry j on. It gives the k-th
    best ordered score of entries low .. high - 1, and how many equal ones are among k.
    """

    @device
    def digit_of(counts, k, parts):
        """The largest digit that k entries reach or exceed, and how many equal it."""
        found = cuda.shared.array(2, int32)
        first, mine = BINS - SHARE * (thread() + 1), int32(0)  # threads go down from the largest
        for i in range(SHARE):
            mine += counts[first + i]
        before, _ = block_before(int32(mine), parts)
        if before < k and k <= before + mine:
            i, left = SHARE - 1, k - before
            while left > counts[first + i]:
                left -= counts[first + i]
                i -= 1
            found[0], found[1] = first + i, left
        sync_block()
        return found[0], found[1]

    @device
    def threshold(scores, low, high, k, parts):
        counts = cuda.shared.array(BINS, int32)
        known = uint32(0)  # digits of the answer, from the highest on
        for pass_ in range(3):
            shift = (32 - DIGIT, 32 - 2 * DIGIT, 0)[pass_]
            width = DIGIT if pass_ < 2 else 32 - 2 * DIGIT
            for i in range(thread(), BINS, THREADS):
                counts[i] = 0
            sync_block()
            for j in range(low + thread(), high, AT_ONCE * THREADS):
                for x in some_of(scores, j, THREADS, high):
                    if x != 0 and (pass_ == 0 or x >> (shift + width) == known):
                        at = (x >> shift) & ((1 << width) - 1)
                        cuda.atomic.add(counts, at, 1)  # type: ignore[call-arg]
            sync_block()
            digit, k = digit_of(counts, k, parts)
            known = uint32((known << width) | digit)
            sync_block()
        return known, k

    return threshold


threshold = thresholding(some_of)


@device
def write_best(scores, low, high, k, out):
    """Write the 0 < k < high - low best of entries low .. high - 1, ascending.

    Ties go to the lower entry. A block's work; all threads call it.
    """
    parts, starts = cuda.shared.array(WARPS, int32), cuda.shared.array((2, WARPS), int32)
    bar, n_tie = threshold(scores, low, high, k, parts)
    share = (high - low + THREADS - 1) // THREADS * WARP  # of a warp
    begin = low + share * warp()
    end = min(begin + share, high)
    above, ties = int32(0), int32(0)
    for j in range(begin + lane(), end, AT_ONCE * WARP):
        for x in some_of(scores, j, WARP, end):
            above += 1 if x > bar else 0
            ties += 1 if x == bar else 0
    before, _ = block_before(int32(above), parts)
    tied, _ = block_before(int32(ties), parts)
    if lane() == 0:
        starts[0, warp()], starts[1, warp()] = before, tied
    sync_block()
    to, tied = starts[0, warp()] + min(starts[1, warp()], n_tie), starts[1, warp()]
    below = (uint32(1) << lane()) - uint32(1)
    for start in range(begin, end, AT_ONCE * WARP):
        j = start + lane()
        for x in some_of(scores, j, WARP, end):
            equal = ballot(uint32(1 if x == bar else 0))
            ahead = tied + count_bits(uint32(equal & below))
            keep = x > bar or (x == bar and ahead < n_tie)
            kept = ballot(uint32(1 if keep else 0))
            if keep:
                store_i32(out + 4 * (to + count_bits(uint32(kept & below))), j)
            to, tied, j = to + count_bits(kept), tied + count_bits(equal), j + WARP


@device
def write_range(out, low, high):
    """Write low .. high - 1, of which there may be none; a block's work."""
    for i in range(thread(), high - low, THREADS):
        store_i32(out + 4 * i, low + i)


# ---- sets as bits --------------------------------------------------------------------------------
@device
def clear_bits(words, first, end):
    """Make int64s first .. end - 1 at `words` 0; a block's work."""
    for w in range(first + thread(), end, THREADS):
        store_i64(words + 8 * w, 0)


@device
def set_bit(words, j):
    """Set bit j of the int64s at `words`, atomically."""
    or_i64(words + 8 * (j >> 6), 1 << (j & 63))


@device
def size_of(word):
    """The number of set bits of an int64 (popcount)."""
    return int32(count_bits(uint32(word))) + int32(count_bits(uint32(word >> 32)))


@device
def write_word(out, word, first):
    """Write the indices of a word's set bits, bit 0 as `first`; return the next address."""
    bits = uint32(word)
    while bits != 0:
        low = uint32(bits & (uint32(0) - bits))
        store_i32(out, first + count_bits(uint32(low - uint32(1))))
        bits, out = uint32(bits ^ low), out + 4
    return out


@device
def write_bits(words, first, end, out, parts):
    """Write the indices of set bits of int64s first .. end - 1, ascending; return their number."""
    count = 0
    for start in range(first, end, THREADS):
        w = start + thread()
        word = load_i64(words + 8 * w) if w < end else 0
        before, total = block_before(int32(size_of(word)), parts)
        to = write_word(out + 4 * (count + before), word & 0xFFFFFFFF, 64 * w)
        write_word(to, (word >> 32) & 0xFFFFFFFF, 64 * w + 32)
        count += total
    return count


@device
def add_first_bits(words, others, n, first, end, parts):
    """Set in `words` the n lowest set bits of `others` (disjoint bitmaps); a block's work."""
    for start in range(first, end, THREADS):
        w = start + thread()
        other = load_i64(others + 8 * w) if w < end else 0
        before, total = block_before(int32(size_of(other)), parts)
        left, word = min(n - before, size_of(other)), load_i64(words + 8 * w) if w < end else 0
        while left > 0:
            low = other & -other
            word, other, left = word | low, other ^ low, left - 1
        if w < end:
            store_i64(words + 8 * w, word)
        n -= total


# ---- of scores with maxima -----------------------------------------------------------------------
@device
def of_group(source, i):
    """Position and key of entry i of the listed groups; the key is 0 outside the middle."""
    scores, groups, low, high = source
    group = load_i32(groups + 4 * (i // SUBSPAN))
    j = SPAN * (group // SUBSPAN) + group % SUBSPAN + SUBSPAN * (i % SUBSPAN)
    inside = low <= j and j < high
    return j, ordered(load_f32(scores + 4 * j)) if inside else uint32(0)


@device
def some_of_groups(source, i, apart, end):
    """As some_of, of entries of listed groups."""
    b, c, d = i + apart, i + 2 * apart, i + 3 * apart
    return (
        of_group(source, i)[1] if i < end else uint32(0),
        of_group(source, b)[1] if b < end else uint32(0),
        of_group(source, c)[1] if c < end else uint32(0),
        of_group(source, d)[1] if d < end else uint32(0),
    )


threshold_of_maxima, threshold_of_groups = thresholding(some_of), thresholding(some_of_groups)


@device
def list_groups(maxima, first, end, bar, groups, parts):
    """List the groups whose maximum is at least the bar; return their number."""
    count = 0
    for start in range(first, end, THREADS):
        m = start + thread()
        keep = ordered(load_f32(maxima + 4 * m)) >= bar if m < end else False
        before, total = block_before(int32(1 if keep else 0), parts)
        if keep:
            store_i32(groups + 4 * (count + before), m)
        count += total
    return count


@device
def write_best_by_maxima(rows, low, high, k, order, out):
    """As write_best, of rows of scores and of maxima as SCORE_KEYS leaves them.

    Only groups whose maximum is among the k best maxima can have one of the k best. order: scratch,
    as many int32 as there are scores.
    """
    parts, (scores, maxima, capacity) = cuda.shared.array(WARPS, int32), rows
    words, tied = order + capacity // 4, order + capacity // 4 + capacity // 8
    first, end = low // SPAN * SUBSPAN, (high + SPAN - 1) // SPAN * SUBSPAN
    bar = uint32(0)
    if end - first > k:
        bar, _ = threshold_of_maxima(maxima, first, end, k, parts)
    n = SUBSPAN * list_groups(maxima, first, end, bar, order, parts)
    clear_bits(words, low // 64, (high + 63) // 64)
    clear_bits(tied, low // 64, (high + 63) // 64)
    sync_block()
    source = scores, order, low, high
    bar, n_tie = threshold_of_groups(source, 0, n, k, parts)
    for i in range(thread(), n, THREADS):
        j, x = of_group(source, i)
        if x > bar:
            set_bit(words, j)
        elif x == bar:
            set_bit(tied, j)
    sync_block()
    add_first_bits(words, tied, n_tie, low // 64, (high + 63) // 64, parts)
    sync_block()
    write_bits(words, low // 64, (high + 63) // 64, out, parts)
