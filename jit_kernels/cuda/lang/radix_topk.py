"""Radix-select top-k of a row of scores by one block: finds the k-th best, then all from it on.

A block may have any number of threads. For rows that are read several times it holds the keys of
the first HELD entries in its dynamic shared memory, so that later passes do not wait for memory.
"""

from typing import Any

from numba import cuda, float32, int32, uint32

from tamis.jit_kernels.cuda.lang.grid import (
    MOST_WARPS,
    WARP,
    block_before,
    lane,
    least_of,
    sync_block,
    thread,
    threads,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    bits_f32,
    device,
    load_f32,
    load_i32,
    load_i64,
    ordered,
    quotient,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    ballot,
    count_bits,
    load_shared_i32,
    or_i64,
    shuffle_i32,
    store_shared_i32,
)

DIGIT = 11  # bits: a sign, an exponent and two more distribute scores over many counters
BINS = 1 << DIGIT
HELD = 1 << 14  # entries whose keys a block holds: 64 KiB, which every GPU has per block
FEW = 256  # entries of one counter that are compared with each other
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


@device
def value_of(key):
    """The float32 that an ordered key is of."""
    signed = int32(uint32(key ^ uint32(0x80000000)))
    size = bits_f32(uint32(-signed if signed < 0 else signed))
    return -size if signed < 0 else size


@device
def number_of(key):
    """A key as a float32, which is nearly linear in the logarithm of positive scores."""
    return float32(uint32(key))


def counting_by(measure: Any) -> Any:
    """The function that numbers the counter of a key; measure(key): what counters are linear in."""

    @device
    def bin_of(key, scale):
        """Counters cover the range from the least to the largest.

        If these are equal, one counter has all.
        """
        low, factor = scale
        return int32((measure(key) - low) * factor) if factor > float32(0) else int32(0)

    return bin_of


def narrowing(some_of: Any, bin_of: Any) -> tuple[Any, Any, Any, Any]:
    """The functions that clear counters, find that of the k-th best, and the k-th best in it.

    The last one compares digits of keys, or pairs.
    """

    @device
    def digit_of(counts, k, found, parts):
        """The largest digit that k entries reach or exceed, how many equal it, and have it."""
        share, mine = quotient(BINS, threads()), int32(0)
        first = BINS - share * (thread() + 1)  # threads go down from the largest
        for i in range(share):
            mine += counts[first + i]
        before, _ = block_before(int32(mine), parts)
        if before < k and k <= before + mine:
            i, left = share - 1, k - before
            while left > counts[first + i]:
                left -= counts[first + i]
                i -= 1
            found[0], found[1], found[2] = first + i, left, counts[first + i]
        sync_block()
        return found[0], found[1], found[2]

    @device
    def clear(counts):
        i = thread()
        while i < BINS:
            counts[i] = 0
            i += threads()
        sync_block()

    @device
    def by_digits(scores, low, high, chosen, k, shared, parts):
        """Do what threshold does, for the entries of one counter."""
        (number, scale), (counts, found) = chosen, shared
        known = uint32(0)  # the known digits of the answer, from the highest on
        for pass_ in range(3):
            shift = (32 - DIGIT, 32 - 2 * DIGIT, 0)[pass_]
            width = DIGIT if pass_ < 2 else 32 - 2 * DIGIT
            clear(counts)
            j = low + thread()
            while j < high:
                for x in some_of(scores, j, threads(), high):
                    alike = pass_ == 0 or x >> (shift + width) == known
                    if x != 0 and alike and bin_of(x, scale) == number:
                        at = (x >> shift) & ((1 << width) - 1)
                        cuda.atomic.add(counts, at, 1)  # type: ignore[call-arg]
                j += AT_ONCE * threads()
            sync_block()
            digit, k, _ = digit_of(counts, k, found, parts)
            known = uint32((known << width) | digit)
            sync_block()
        return known, k

    @device
    def by_pairs(scores, low, high, chosen, k, shared):
        """Do what by_digits does, for at most FEW entries, which overwrite the counters."""
        (number, scale), (counts, found) = chosen, shared
        if thread() == 0:
            found[0] = 0
        sync_block()
        j = low + thread()
        while j < high:
            for x in some_of(scores, j, threads(), high):
                if x != 0 and bin_of(x, scale) == number:
                    at = cuda.atomic.add(found, 0, 1)  # type: ignore[call-arg]
                    counts[at] = int32(x)
            j += AT_ONCE * threads()
        sync_block()
        n = found[0]
        i = thread()
        while i < n:
            mine, above, equal = uint32(counts[i]), int32(0), int32(0)
            for j in range(n):
                x = uint32(counts[j])
                above += 1 if x > mine else 0
                equal += 1 if x == mine else 0
            if above < k and k <= above + equal:
                found[1], found[2] = int32(mine), k - above  # equal entries write the same
            i += threads()
        sync_block()
        return uint32(found[1]), found[2]

    return clear, digit_of, by_digits, by_pairs


def counting(some_of: Any, measure: Any) -> Any:
    """The function (scores, low, high, k, shared, parts) that finds the counter of the k-th best.

    It returns the counter's number and scale, see counting_by, and of its entries: how many are
    among the best k, and how many there are. These are all 0 if there are fewer than k entries.
    shared: counters, and three words.
    """
    bin_of = counting_by(measure)
    clear, digit_of, _, _ = narrowing(some_of, bin_of)

    @device
    def scale_of(scores, low, high, parts):
        """The least score, and the factor from a distance to it to a counter's number.

        parts: also of the least numbers.
        """
        least, most = int32(0x7FFFFFFF), int32(0x7FFFFFFF)  # most: of all bits turned
        j = low + thread()
        while j < high:
            for x in some_of(scores, j, threads(), high):
                signed = int32(uint32(x ^ uint32(0x80000000)))
                least = min(least, signed if x != 0 else int32(0x7FFFFFFF))
                most = min(most, int32(~signed) if x != 0 else int32(0x7FFFFFFF))
            j += AT_ONCE * threads()
        least, most = least_of(least, parts), ~least_of(most, parts)
        first = measure(uint32(uint32(least) ^ uint32(0x80000000)))
        apart = measure(uint32(uint32(most) ^ uint32(0x80000000))) - first
        some = apart > float32(1e-30) and apart < float32(3e38)
        return first, float32(BINS - 1) / apart if some else float32(0)

    @device
    def count(scores, low, high, k, shared, parts):
        counts, found = shared
        scale = scale_of(scores, low, high, parts)
        if thread() < 3:
            found[thread()] = 0
        clear(counts)
        j = low + thread()
        while j < high:
            for x in some_of(scores, j, threads(), high):
                if x != 0:
                    cuda.atomic.add(counts, bin_of(x, scale), 1)  # type: ignore[call-arg]
            j += AT_ONCE * threads()
        sync_block()
        number, left, n = digit_of(counts, k, found, parts)
        sync_block()
        return (number, scale), left, n

    return count


def thresholding(some_of: Any, measure: Any = value_of) -> Any:
    """The function (scores, low, high, k, parts) that finds the k-th best score of a kind.

    some_of(scores, j, apart, high) reads AT_ONCE ordered scores from entry j on; 0 is none. It
    returns the k-th best ordered score of entries low .. high - 1, and how many equal ones are
    among the best k. Counters are linear between the least and the largest score, so that few
    threads increment the same one; the entries of the k-th one's counter are compared pair by pair,
    or digit by digit if there are more than FEW. Scores that are exponentials would share one
    counter: for these, see number_of.
    """
    count = counting(some_of, measure)
    _, _, by_digits, by_pairs = narrowing(some_of, counting_by(measure))

    @device
    def threshold(scores, low, high, k, parts):
        counts, found = cuda.shared.array(BINS, int32), cuda.shared.array(3, int32)
        shared = counts, found
        chosen, left, n = count(scores, low, high, k, shared, parts)
        if n <= FEW:
            bar, n_tie = by_pairs(scores, low, high, chosen, left, shared)
        else:
            bar, n_tie = by_digits(scores, low, high, chosen, left, shared, parts)
        sync_block()
        return bar, n_tie

    return threshold


def writing(some_of: Any) -> Any:
    """The function (scores, low, high, bar, n_tie, out, parts) that writes the best of a kind.

    Those are the entries above the threshold `bar` and the first n_tie that equal it, ascending; it
    returns how many.
    """

    @device
    def write(scores, low, high, bar, n_tie, out, parts):
        share = quotient(high - low + threads() - 1, threads()) * WARP  # of a warp
        begin = low + share * warp()
        end = min(begin + share, high)
        above, ties = int32(0), int32(0)
        for j in range(begin + lane(), end, AT_ONCE * WARP):
            for x in some_of(scores, j, WARP, end):
                above += 1 if x > bar else 0
                ties += 1 if x == bar and x != 0 else 0
        to, n_above = block_before(int32(above), parts)
        tied, n_tied = block_before(int32(ties), parts)
        to, tied = shuffle_i32(int32(to), 0), shuffle_i32(int32(tied), 0)  # those of the warp
        to += min(tied, n_tie)
        below = (uint32(1) << lane()) - uint32(1)
        for start in range(begin, end, AT_ONCE * WARP):
            j = start + lane()
            for x in some_of(scores, j, WARP, end):
                equal = ballot(uint32(1 if x == bar and x != 0 else 0))
                ahead = tied + count_bits(uint32(equal & below))
                keep = x > bar or (x == bar and x != 0 and ahead < n_tie)
                kept = ballot(uint32(1 if keep else 0))
                if keep:
                    store_i32(out + 4 * (to + count_bits(uint32(kept & below))), j)
                to, tied, j = to + count_bits(kept), tied + count_bits(equal), j + WARP
        return n_above + min(n_tied, n_tie)

    return write


def holding(some_of: Any) -> tuple[Any, Any]:
    """The functions that hold the keys of entries of a kind in shared memory, and that read them.

    hold(shared, scores, low, high) is run by a block. The other one is like some_of, with (shared,
    scores, low); entries without room are read from memory.
    """

    @device
    def hold(shared, scores, low, high):
        end = min(high, low + HELD)
        start = low + thread()
        while start < end:
            j = start
            for x in some_of(scores, start, threads(), end):
                if j < end:
                    store_shared_i32(uint32(shared + 4 * (j - low)), int32(x))
                j += threads()
            start += AT_ONCE * threads()
        sync_block()

    @device
    def key_at(shared, i, live):
        return uint32(load_shared_i32(uint32(shared + 4 * i))) if live else uint32(0)

    @device
    def some_held(held, j, apart, high):
        shared, scores, low = held
        i = j - low
        if i + (AT_ONCE - 1) * apart >= HELD:
            return some_of(scores, j, apart, high)
        return (
            key_at(shared, i, j < high),
            key_at(shared, i + apart, j + apart < high),
            key_at(shared, i + 2 * apart, j + 2 * apart < high),
            key_at(shared, i + 3 * apart, j + 3 * apart < high),
        )

    return hold, some_held


threshold, write_from = thresholding(some_of), writing(some_of)
hold, some_held = holding(some_of)
threshold_held, write_held = thresholding(some_held), writing(some_held)
threshold_of_found = thresholding(some_held)
threshold_of_weights = thresholding(some_held, number_of)


@device
def write_best(scores, low, high, k, out):
    """Write the 0 < k < high - low best of entries low .. high - 1, ascending.

    Ties go to the lower entry. A block's work; all threads call it.
    """
    parts = cuda.shared.array(MOST_WARPS, int32)
    bar, n_tie = threshold(scores, low, high, k, parts)
    write_from(scores, low, high, bar, n_tie, out, parts)


@device
def write_best_held(held, low, high, k, out):
    """Do what write_best does, for (shared, scores, low) whose keys are held."""
    parts = cuda.shared.array(MOST_WARPS, int32)
    bar, n_tie = threshold_held(held, low, high, k, parts)
    write_held(held, low, high, bar, n_tie, out, parts)


@device
def write_best_weights(held, low, high, k, out):
    """Do what write_best_held does, for scores that are exponentials."""
    parts = cuda.shared.array(MOST_WARPS, int32)
    bar, n_tie = threshold_of_weights(held, low, high, k, parts)
    write_held(held, low, high, bar, n_tie, out, parts)


@device
def write_range(out, low, high):
    """Write low .. high - 1, which may be empty; run by a block."""
    i = thread()
    while i < high - low:
        store_i32(out + 4 * i, low + i)
        i += threads()


# ---- sets as bits --------------------------------------------------------------------------------
@device
def clear_bits(words, first, end):
    """Make int64s first .. end - 1 at `words` 0; a block's work."""
    w = first + thread()
    while w < end:
        store_i64(words + 8 * w, 0)
        w += threads()


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
    share, mine = quotient(end - first + threads() - 1, threads()), int32(0)
    begin = first + share * thread()
    stop = min(begin + share, end)
    for w in range(begin, stop):
        mine += size_of(load_i64(words + 8 * w))
    before, total = block_before(int32(mine), parts)
    to = out + 4 * before
    for w in range(begin, stop):
        word = load_i64(words + 8 * w)
        to = write_word(to, word & 0xFFFFFFFF, 64 * w)
        to = write_word(to, (word >> 32) & 0xFFFFFFFF, 64 * w + 32)
    return total


@device
def add_first_bits(words, others, n, first, end, parts):
    """Set in `words` the n lowest set bits of `others` (disjoint bitmaps); a block's work."""
    share, mine = quotient(end - first + threads() - 1, threads()), int32(0)
    begin = first + share * thread()
    stop = min(begin + share, end)
    for w in range(begin, stop):
        mine += size_of(load_i64(others + 8 * w))
    left = n - block_before(int32(mine), parts)[0]
    for w in range(begin, stop):
        word, other = load_i64(words + 8 * w), load_i64(others + 8 * w)
        while left > 0 and other != 0:
            low = other & -other
            word, other, left = word | low, other ^ low, left - 1
        store_i64(words + 8 * w, word)


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
    """Read like some_of, from entries of listed groups."""
    b, c, d = i + apart, i + 2 * apart, i + 3 * apart
    return (
        of_group(source, i)[1] if i < end else uint32(0),
        of_group(source, b)[1] if b < end else uint32(0),
        of_group(source, c)[1] if c < end else uint32(0),
        of_group(source, d)[1] if d < end else uint32(0),
    )


hold_groups, some_of_held_groups = holding(some_of_groups)
threshold_of_maxima, write_groups = thresholding(some_held), writing(some_held)
threshold_of_groups = thresholding(some_of_held_groups)


@device
def write_best_by_maxima(shared, rows, low, high, k, order, out):
    """Do what write_best does, for rows of scores and of maxima as SCORE_KEYS leaves them.

    Only groups whose maximum is among the k best maxima can have one of the k best. order: scratch,
    as many int32 as there are scores. shared: room for the keys of HELD entries.
    """
    parts, (scores, maxima, capacity) = cuda.shared.array(MOST_WARPS, int32), rows
    words, tied = order + capacity // 4, order + capacity // 4 + capacity // 8
    first, end = low // SPAN * SUBSPAN, (high + SPAN - 1) // SPAN * SUBSPAN
    clear_bits(words, low // 64, (high + 63) // 64)
    clear_bits(tied, low // 64, (high + 63) // 64)
    hold(shared, maxima, first, end)
    bar, held = uint32(0), (shared, maxima, first)
    if end - first > k:
        bar, _ = threshold_of_maxima(held, first, end, k, parts)
    n = SUBSPAN * write_groups(held, first, end, bar, end - first, order, parts)
    sync_block()
    source = scores, order, low, high
    hold_groups(shared, source, 0, n)
    bar, n_tie = threshold_of_groups((shared, source, 0), 0, n, k, parts)
    i = thread()
    while i < n:
        j, x = of_group(source, i)
        if x > bar:
            set_bit(words, j)
        elif x == bar:
            set_bit(tied, j)
        i += threads()
    sync_block()
    add_first_bits(words, tied, n_tie, low // 64, (high + 63) // 64, parts)
    sync_block()
    write_bits(words, low // 64, (high + 63) // 64, out, parts)


@device
def write_best_found(shared, found, low, high, k, order, out):
    """Do what write_best does, for (positions, their scores, number) in any order.

    The number is above k, positions are from low to high - 1. order: scratch, two bits a position
    up to `high`, rounded up to 64.
    """
    parts, (positions, scores, n) = cuda.shared.array(MOST_WARPS, int32), found
    words, tied = order, order + (high + 63) // 64 * 8
    clear_bits(words, low // 64, (high + 63) // 64)
    hold(shared, scores, 0, n)
    bar, n_tie = threshold_of_found((shared, scores, 0), 0, n, k, parts)
    i, mine = thread(), int32(0)
    while i < n:
        j, x = load_i32(positions + 4 * i), ordered(load_f32(scores + 4 * i))
        if x > bar:
            set_bit(words, j)
        mine += 1 if x == bar else 0
        i += threads()
    _, n_equal = block_before(int32(mine), parts)
    if n_equal > n_tie:
        clear_bits(tied, low // 64, (high + 63) // 64)
        sync_block()
    i = thread() if mine > 0 else n
    while i < n:
        if ordered(load_f32(scores + 4 * i)) == bar:
            set_bit(words if n_equal == n_tie else tied, load_i32(positions + 4 * i))
        i += threads()
    sync_block()
    if n_equal > n_tie:
        add_first_bits(words, tied, n_tie, low // 64, (high + 63) // 64, parts)
        sync_block()
    write_bits(words, low // 64, (high + 63) // 64, out, parts)
