"""HyperAttention's ops: keys sorted by their hash, and what a row of queries reads of them."""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_i32,
    load_i64,
    load_u16,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.lang.simd import lowest_bit
from tamis.jit_kernels.cpu.select.bigbird import following, write_random
from tamis.jit_kernels.cpu.select.common import copy_row, write_ends

ZERO = np.float32(0)


def hyper_sort(n_bit: int) -> Any:
    """Kernel of HYPER_SORT: threads take KV heads in turn."""
    n_code = 1 << n_bit

    def kernel(
        tid, n_thread, step, begin, starts, order, ranked, ranks, samples, n_head_kv, capacity,
        n_sink, n_sample, seed,
    ):  # fmt: skip
        pos, end = load_i64(step + STEP.pos), load_i64(begin)
        for h in range(tid, n_head_kv, n_thread):
            at, n = starts + 4 * (n_code + 1) * h, 0
            for rank in range(n_code):
                code = rank ^ rank >> 1
                first = load_i32(at + 4 * code)
                count = load_i32(at + 4 * (code + 1)) - first
                store_i32(ranks + 4 * (n_code * h + code), n + count // 2)
                source = order + 4 * (capacity * h + first)
                copy_row(source, ranked + 4 * (capacity * h + n), count)
                n += count
            drawn = samples + 4 * (1 + n_sample) * h
            n = max(0, min(n_sample, end - n_sink))
            store_i32(drawn, n)
            state = following(following((seed * n_head_kv + h) * 1048583 + pos))
            write_random(drawn + 4, n_sink, end, n, state)

    return kernel


@njit(error_model="numpy")
def mark(bits, positions, n):
    """Set the bits of n listed positions."""
    for i in range(n):
        j = load_i32(positions + 4 * i)
        at = bits + 8 * (j >> 6)
        store_i64(at, load_i64(at) | 1 << (j & 63))


def hyper_select(n_bit: int) -> Any:
    """Kernel of HYPER_SELECT: one thread writes, since a row starts where the last one ends."""
    n_code = 1 << n_bit

    @njit(error_model="numpy")
    def vote(codes, ranks, n_query, heads, n_head, n, size, votes):
        """Count the votes of n_query queries' `heads` heads; how many blocks there are."""
        n_block = (n + size - 1) // size
        for b in range(n_block):
            store_i32(votes + 4 * b, 0)
        for t in range(n_query if n > 0 else 0):
            for g in range(heads):
                code = load_u16(codes + 2 * (n_head * t + g))
                b = min(load_i32(ranks + 4 * code), n - 1) // size
                for i in range(max(0, b - 1), min(n_block, b + 2)):
                    store_i32(votes + 4 * i, load_i32(votes + 4 * i) + 1 + (i == b))
        return n_block

    @njit(error_model="numpy")
    def elect(votes, n_block, most, ranked, size, n, bits):
        """Mark the keys of the `most` blocks with most votes; how many keys. votes are used up."""
        chosen = 0
        for _ in range(most):
            best, top = -1, 0
            for b in range(n_block):
                if load_i32(votes + 4 * b) > top:
                    best, top = b, load_i32(votes + 4 * b)
            if best < 0:
                break
            store_i32(votes + 4 * best, 0)
            count = min(size, n - size * best)
            mark(bits, ranked + 4 * size * best, count)
            chosen += count
        return chosen

    @njit(error_model="numpy")
    def write(out, weights, count, bits, sampled, n_word, share):
        """Write the positions of both bitmaps, those in `sampled` alone with a log-weight."""
        for w in range(n_word):
            exact = load_i64(bits + 8 * w)
            word = exact | load_i64(sampled + 8 * w)
            while word != 0:
                i = lowest_bit(word)
                store_i32(out + 4 * count, 64 * w + i)
                store_f32(weights + 4 * count, ZERO if exact >> i & 1 else share)
                word &= word - 1
                count += 1
        return count

    def kernel(
        tid, n_thread, step, begin, codes, ranked, ranks, samples, indptr, indices, log_weight,
        votes, bits, n_head_kv, heads_per_kv, capacity, q_block, n_sink, n_block, size, n_sample,
    ):  # fmt: skip
        if tid != 0:
            return
        n_tok, pos, end = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos), load_i64(begin)
        n, n_word, n_head = max(0, end - n_sink), end // 64 + 1, n_head_kv * heads_per_kv
        sampled, count = bits + 8 * (capacity // 64 + 1), 0
        store_i32(indptr, 0)
        for first in range(0, n_tok, q_block):
            newest = pos + min(n_tok, first + q_block) - 1
            for h in range(n_head_kv):
                for w in range(n_word):
                    store_i64(bits + 8 * w, 0)
                    store_i64(sampled + 8 * w, 0)
                asked = codes + 2 * (n_head * first + heads_per_kv * h)
                n_blocks = vote(
                    asked, ranks + 4 * n_code * h, newest + 1 - pos - first, heads_per_kv, n_head,
                    n, size, votes,
                )  # fmt: skip
                own = ranked + 4 * capacity * h
                chosen = elect(votes, n_blocks, n_block, own, size, n, bits)
                drawn, fresh = samples + 4 * (1 + n_sample) * h, 0
                for i in range(load_i32(drawn)):
                    j = load_i32(drawn + 4 * (1 + i))
                    fresh += load_i64(bits + 8 * (j >> 6)) >> (j & 63) & 1 == 0
                mark(sampled, drawn + 4, load_i32(drawn))
                share = ZERO
                if fresh > 0:
                    share = np.float32(math.log((n - chosen) / fresh))
                start = count
                count = write_ends(indices, count, min(n_sink, newest + 1), 0, 0)
                sinks = count
                count = write(indices, log_weight, count, bits, sampled, n_word, share)
                ends = count
                count = write_ends(indices, count, 0, end, newest + 1)
                for i in range(start, sinks):
                    store_f32(log_weight + 4 * i, ZERO)
                for i in range(ends, count):
                    store_f32(log_weight + 4 * i, ZERO)
                store_i32(indptr + 4 * (first // q_block * n_head_kv + h + 1), count)

    return kernel
