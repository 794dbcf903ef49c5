"""The best k of a row of scores, by a block: the k-th best by its digits, then all from it on."""

from numba import cuda, int32, uint32

from tamis.jit_kernels.cuda.grid import (
    THREADS,
    WARP,
    WARPS,
    block_before,
    lane,
    sync_block,
    thread,
    warp,
)
from tamis.jit_kernels.cuda.intrinsic import device, load_f32, ordered, store_i32
from tamis.jit_kernels.cuda.ptx import ballot, count_bits

DIGIT = 11  # bits: a sign, an exponent and two more spread scores over many counters
BINS = 1 << DIGIT
SHARE = BINS // THREADS  # counters that a thread adds up
AT_ONCE = 4  # scores that a thread has on their way


@device
def some_of(scores, j, apart, high):
    """Ordered scores j, j + apart and so on; 0, which is below all, from `high` on."""
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
def digit_of(counts, k, parts):
    """The largest digit that k entries have or exceed, and how many of these have it."""
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
    """The k-th best ordered score of entries low .. high - 1; how many equal ones are among k."""
    counts = cuda.shared.array(BINS, int32)
    known = uint32(0)  # digits of the answer, from the highest on
    for turn in range(3):
        shift = (32 - DIGIT, 32 - 2 * DIGIT, 0)[turn]
        width = DIGIT if turn < 2 else 32 - 2 * DIGIT
        for i in range(thread(), BINS, THREADS):
            counts[i] = 0
        sync_block()
        for j in range(low + thread(), high, AT_ONCE * THREADS):
            for x in some_of(scores, j, THREADS, high):
                if x != 0 and (turn == 0 or x >> (shift + width) == known):
                    at = (x >> shift) & ((1 << width) - 1)
                    cuda.atomic.add(counts, at, 1)  # type: ignore[call-arg]
        sync_block()
        digit, k = digit_of(counts, k, parts)
        known = uint32((known << width) | digit)
        sync_block()
    return known, k


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
