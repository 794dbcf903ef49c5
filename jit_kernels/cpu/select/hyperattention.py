"""HyperAttention's ops: sort keys by LSH code, and select the blocks that a row's queries hit."""

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
    """Kernel of HYPER_SORT: threads stride over KV heads."""
    n_code = 1 << n_bit

    def kernel(tid, n_thread, a):
        pos, end = load_i64(a.step + STEP.pos), load_i64(a.begin)
        for h in range(tid, a.n_head_kv, n_thread):
            at, n = a.starts + 4 * (n_code + 1) * h, 0
            for rank in range(n_code):
                code = rank ^ rank >> 1
                first = load_i32(at + 4 * code)
                count = load_i32(at + 4 * (code + 1)) - first
                store_i32(a.ranks + 4 * (n_code * h + code), n + count // 2)
                source = a.order + 4 * (a.capacity * h + first)
                copy_row(source, a.ranked + 4 * (a.capacity * h + n), count)
                n += count
            drawn = a.samples + 4 * (1 + a.n_sample) * h
            n = max(0, min(a.n_sample, end - a.n_sink))
            store_i32(drawn, n)
            state = following(following((a.seed * a.n_head_kv + h) * 1048583 + pos))
            write_random(drawn + 4, a.n_sink, end, n, state)

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
    def vote(a, codes, ranks, n_query, n):
        """Count the queries that hash into each block of sorted keys; return the block count."""
        n_block, n_head = (n + a.size - 1) // a.size, a.n_head_kv * a.heads_per_kv
        for b in range(n_block):
            store_i32(a.votes + 4 * b, 0)
        for t in range(n_query if n > 0 else 0):
            for g in range(a.heads_per_kv):
                code = load_u16(codes + 2 * (n_head * t + g))
                b = min(load_i32(ranks + 4 * code), n - 1) // a.size
                for i in range(max(0, b - 1), min(n_block, b + 2)):
                    store_i32(a.votes + 4 * i, load_i32(a.votes + 4 * i) + 1 + (i == b))
        return n_block

    @njit(error_model="numpy")
    def elect(votes, n_block, most, ranked, size, n, bits):
        """Mark the keys of the `most` blocks with most votes; return their number."""
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

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n_tok = load_i64(a.step + STEP.n_tok)
        pos = load_i64(a.step + STEP.pos)
        end = load_i64(a.begin)
        n, n_word, n_head = max(0, end - a.n_sink), end // 64 + 1, a.n_head_kv * a.heads_per_kv
        sampled, count = a.bits + 8 * (a.capacity // 64 + 1), 0
        store_i32(a.indptr, 0)
        for first in range(0, n_tok, a.q_block):
            newest = pos + min(n_tok, first + a.q_block) - 1
            for h in range(a.n_head_kv):
                for w in range(n_word):
                    store_i64(a.bits + 8 * w, 0)
                    store_i64(sampled + 8 * w, 0)
                asked = a.codes + 2 * (n_head * first + a.heads_per_kv * h)
                n_blocks = vote(a, asked, a.ranks + 4 * n_code * h, newest + 1 - pos - first, n)
                own = a.ranked + 4 * a.capacity * h
                chosen = elect(a.votes, n_blocks, a.n_block, own, a.size, n, a.bits)
                drawn, fresh = a.samples + 4 * (1 + a.n_sample) * h, 0
                for i in range(load_i32(drawn)):
                    j = load_i32(drawn + 4 * (1 + i))
                    fresh += load_i64(a.bits + 8 * (j >> 6)) >> (j & 63) & 1 == 0
                mark(sampled, drawn + 4, load_i32(drawn))
                share = ZERO
                if fresh > 0:
                    share = np.float32(math.log((n - chosen) / fresh))
                start = count
                count = write_ends(a.indices, count, min(a.n_sink, newest + 1), 0, 0)
                sinks = count
                count = write(a.indices, a.log_weight, count, a.bits, sampled, n_word, share)
                ends = count
                count = write_ends(a.indices, count, 0, end, newest + 1)
                for i in range(start, sinks):
                    store_f32(a.log_weight + 4 * i, ZERO)
                for i in range(ends, count):
                    store_f32(a.log_weight + 4 * i, ZERO)
                store_i32(a.indptr + 4 * (first // a.q_block * a.n_head_kv + h + 1), count)

    return kernel
