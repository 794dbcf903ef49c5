"""Prologue and epilogue of attention: a row's Selection entries, and merging of its parts.

Inside kernels scores are base-2 logarithms (exp2); results are natural ones.
"""

import math
from typing import Any

from llvmlite import ir
from numba import float32, types, uint32

from tamis.jit_kernels.cuda.lang.grid import THREADS, thread
from tamis.jit_kernels.cuda.lang.intrinsic import (
    I32,
    I64,
    device,
    int64,
    load_i32,
    op,
    quotient,
    store_f32,
)
from tamis.jit_kernels.cuda.lang.ptx import LOAD_PAIR_IF, emit, exp2, load_shared
from tamis.jit_kernels.cuda.linear.pack import put_15_bits, put_two_15_bits

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -1e30  # the maximum of no scores
MASKED = -3e38  # a score whose weight is 0 for any maximum
AT_ONCE = 16  # parts of a head that a thread has in flight
PAIRS = types.UniTuple(float32, 2 * AT_ONCE)


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
def entries_of(indptr, indices, blocks):
    """The range of a row's entries of indices that lie in blocks[0] .. blocks[1] - 1."""
    low, high = blocks
    begin, end = load_i32(indptr), load_i32(indptr + 4)
    # Most rows lie within the range: a search costs a dozen loads, one after the other.
    if low > 0:
        begin = first_at_least(indices, begin, end, low)
    if begin < end and load_i32(indices + 4 * (end - 1)) >= high:
        end = first_at_least(indices, begin, end, high)
    return begin, end


@device
def share_of(begin, end, split):
    """The range of entries of a split-KV part."""
    n, (part, n_split) = end - begin, split
    return begin + quotient(n * part, n_split), begin + quotient(n * (part + 1), n_split)


@device
def part_of(indptr, indices, blocks, split):
    """The range of a split-KV part's entries, of those in blocks[0] .. blocks[1] - 1."""
    begin, end = entries_of(indptr, indices, blocks)
    return share_of(begin, end, split)


@device
def key_of(p, keys):
    """The position of a part's p-th key (-1: none) and its entry of indices."""
    begin, n_key, indices, block, low, high = keys
    if p >= n_key:
        return -1, begin
    s = quotient(p, block)
    j = load_i32(indices + 4 * (begin + s)) * block + (p - s * block)
    return (j if low <= j and j <= high else -1), begin + s


def finishing(head_dim: int, group: int, q_block: int, n_part: int, packs: bool = False) -> Any:
    """The function that reduces a row's parts in shared memory and writes its results.

    a: ATTEND's record. shared: f32 [n_part, group, q_block, head_dim + 2]: sums, row_max, row_sum;
    the first n_live tokens are written. query: number of the first head in out and lse. split: the
    number of the part that this is, how many the row has, and how many partial has room for. row:
    where packs, a packed row (0: none), its elements, the number of its first head. All threads
    call it.
    """
    size, n_row = head_dim + 2, group * q_block

    @device
    def finish(a, shared, n_live, query, n_head, split, row):
        part, n_split, room = split
        for i in range(thread(), n_row * head_dim, THREADS):
            r, d = i // head_dim, i % head_dim
            if r % q_block >= n_live:
                continue
            at, row_max = shared + 4 * size * r, float32(LOWEST)
            for w in range(n_part):
                row_max = max(row_max, load_shared(uint32(at + 4 * (size * n_row * w + head_dim))))
            row_sum, value = float32(0), float32(0)
            for w in range(n_part):
                there = at + 4 * size * n_row * w
                weight = exp2(load_shared(uint32(there + 4 * head_dim)) - row_max)
                row_sum += weight * load_shared(uint32(there + 4 * head_dim + 4))
                value += weight * load_shared(uint32(there + 4 * d))
            to = query + r % q_block * n_head + r // q_block
            row_max *= float32(LN_2)
            if n_split > 1:
                there = a.partial + 4 * size * (to * room + part)
                store_f32(there + 4 * d, value)
                if d == 0:
                    store_f32(there + 4 * head_dim, row_max)
                    store_f32(there + 4 * head_dim + 4, row_sum)
            else:
                value = value / row_sum if row_sum > 0 else float32(0)
                store_f32(a.out + 4 * (head_dim * to + d), value)
                if packs and row[0] != 0:  # whole warps come here; all lanes have neighbours
                    put_15_bits(row[0], row[1], head_dim * (to - row[2]) + d, value, True)
                if a.lse != 0 and d == 0:
                    store_f32(
                        a.lse + 4 * to, row_max + math.log(row_sum) if row_sum > 0 else row_max
                    )

    return finish


@op(PAIRS, int64, int64, int64, float32)
def pairs(b, p, apart, n, otherwise):
    """Load AT_ONCE pairs of float32, `apart` bytes apart; `otherwise` from the n-th on."""
    found = []
    for i in range(AT_ONCE):
        index = ir.Constant(I64, i)
        live = b.zext(b.icmp_signed(">", n, index), I32)
        found += emit(b, LOAD_PAIR_IF, [b.add(p, b.mul(apart, index)), live, otherwise])
    return found


def joining(head_dim: int, packs: bool = False) -> Any:
    """The function that merges the split-KV parts of n neighbouring heads, by one block.

    query: number of the first of them in out and lse; count: how many parts they have, and how many
    partial has room for; row: see finishing. A thread has two elements of a head.
    """
    size, half = 4 * head_dim + 8, head_dim // 2

    @device
    def join(query, n, partial, count, out, lse, row):
        n_part, room = count
        for i in range(thread(), n * half, THREADS):
            to, d = query + i // half, 2 * (i % half)
            parts, row_max, row_sum = partial + size * room * to, float32(LOWEST), float32(0)
            one, other = float32(0), float32(0)
            for p in range(0, n_part, AT_ONCE):
                part, left = parts + size * p, n_part - p
                ends = pairs(part + 4 * head_dim, size, left, float32(LOWEST))
                values = pairs(part + 4 * d, size, left, float32(0))
                most = row_max
                for j in range(AT_ONCE):
                    most = max(most, ends[2 * j])
                alpha = exp2((row_max - most) * float32(LOG2_E))
                row_sum, one, other, row_max = row_sum * alpha, one * alpha, other * alpha, most
                for j in range(AT_ONCE):
                    weight = exp2((ends[2 * j] - most) * float32(LOG2_E))
                    row_sum += weight * ends[2 * j + 1]
                    one, other = one + weight * values[2 * j], other + weight * values[2 * j + 1]
            there = out + 4 * (head_dim * to + d)
            one = one / row_sum if row_sum > 0 else float32(0)
            other = other / row_sum if row_sum > 0 else float32(0)
            store_f32(there, one)
            store_f32(there + 4, other)
            if packs and row[0] != 0:
                put_two_15_bits(row[0], row[1], head_dim * (to - row[2]) + d, one, other)
            if lse != 0 and d == 0:
                store_f32(lse + 4 * to, row_max + math.log(row_sum) if row_sum > 0 else row_max)

    return join
