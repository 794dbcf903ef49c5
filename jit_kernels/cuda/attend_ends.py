"""Both ends of attention over a row: which entries of its Selection it sees, and its results.

Scores are in units of log 2 inside of the kernels, of log e in their results.
"""

import math
from typing import Any

from numba import float32, uint32

from tamis.jit_kernels.cuda.grid import THREADS, thread
from tamis.jit_kernels.cuda.intrinsic import device, load_i32, quotient, store_f32
from tamis.jit_kernels.cuda.ptx import exp2, load_shared

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -1e30  # the maximum of no scores
MASKED = -3e38  # a score whose weight is 0 whatever the maximum is


@device
def first_at_least(indices, begin, end, value):
    """The first of the ascending indices begin .. end that is >= value."""
    while begin < end:
        middle = (begin + end) // 2
        if load_i32(indices + 4 * middle) < value:
            begin = middle + 1
        else:
            end = middle
    return begin


@device
def part_of(indptr, indices, blocks, split):
    """First and last entry of a part of a row, of those in the blocks' range."""
    (low, high), (part, n_split) = blocks, split
    begin, end = load_i32(indptr), load_i32(indptr + 4)
    # Most rows lie within the range: a search costs a dozen loads, one after the other.
    if low > 0:
        begin = first_at_least(indices, begin, end, low)
    if begin < end and load_i32(indices + 4 * (end - 1)) >= high:
        end = first_at_least(indices, begin, end, high)
    n = end - begin
    return begin + quotient(n * part, n_split), begin + quotient(n * (part + 1), n_split)


@device
def key_of(p, keys):
    """Position of the p-th key of a part, -1 where there is none, and its entry of indices."""
    begin, n_key, indices, block, low, high = keys
    if p >= n_key:
        return -1, begin
    s = quotient(p, block)
    j = load_i32(indices + 4 * (begin + s)) * block + (p - s * block)
    return (j if low <= j and j <= high else -1), begin + s


def finishing(head_dim: int, group: int, q_block: int, n_part: int) -> Any:
    """The function that joins a row's parts in shared memory and writes its results.

    shared: f32 [n_part, group, q_block, head_dim + 2], sums, maximum and total; the first n_live
    tokens are written. query: number of the first head in out and lse. All threads call it.
    """
    size, n_row = head_dim + 2, group * q_block

    @device
    def finish(shared, n_live, query, n_head, partial, split, out, lse):
        part, n_split = split
        for i in range(thread(), n_row * head_dim, THREADS):
            r, d = i // head_dim, i % head_dim
            if r % q_block >= n_live:
                continue
            at, top = shared + 4 * size * r, float32(LOWEST)
            for w in range(n_part):
                top = max(top, load_shared(uint32(at + 4 * (size * n_row * w + head_dim))))
            total, value = float32(0), float32(0)
            for w in range(n_part):
                there = at + 4 * size * n_row * w
                weight = exp2(load_shared(uint32(there + 4 * head_dim)) - top)
                total += weight * load_shared(uint32(there + 4 * head_dim + 4))
                value += weight * load_shared(uint32(there + 4 * d))
            to = query + r % q_block * n_head + r // q_block
            top *= float32(LN_2)
            if n_split > 1:
                there = partial + 4 * size * (to * n_split + part)
                store_f32(there + 4 * d, value)
                if d == 0:
                    store_f32(there + 4 * head_dim, top)
                    store_f32(there + 4 * head_dim + 4, total)
            else:
                store_f32(out + 4 * (head_dim * to + d), value / total if total > 0 else 0)
                if lse != 0 and d == 0:
                    store_f32(lse + 4 * to, top + math.log(total) if total > 0 else top)

    return finish
