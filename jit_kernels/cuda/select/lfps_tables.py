"""What the ops of `lfps` share: the levels of its tables, their sums and bits; products of a warp.

LFPS_START in contract/ops/select/lfps.py says how tables, bits and sums lie.
"""

import math
from typing import Any

from numba import float32, float64, int64, uint32

from tamis.jit_kernels.contract.ops import LFPS_META, LFPS_STATS_SIZE
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    lane,
    sync_block,
    thread,
    threads,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    load_f32,
    load_f64,
    store_f32,
    store_f64,
    store_i64,
)
from tamis.jit_kernels.cuda.lang.ptx import ballot
from tamis.jit_kernels.cuda.lang.readers import const_f16

META, STATS = 8 * len(LFPS_META), 8 * LFPS_STATS_SIZE
NEVER = 3e38  # a threshold that no entry exceeds


@device
def slash_shift(capacity, pos):
    """The offset from a position to its entry of the slash table, which is indexed by distance."""
    return capacity - PAGE - 1 - pos


@device
def mean_and_bar(sums, n, a):
    """Mean of the n entries of a table, and the threshold a * mean / kurtosis (Eq. 8)."""
    s1, s2 = load_f64(sums), load_f64(sums + 8)
    s3, s4 = load_f64(sums + 16), load_f64(sums + 24)
    mean, bar = s1 / n, NEVER
    second = s2 - n * mean * mean
    fourth = s4 - 4 * mean * s3 + 6 * mean * mean * s2 - 3 * n * mean * mean * mean * mean
    # Else all entries are alike (or too alike to tell): there is no pattern to follow.
    if second > 1e-12 * s2 and fourth > 0.0:
        bar = float64(a) * mean * second * second / fourth
    return float32(mean), float32(bar)


@device
def either_half(x, y):
    """The 64-bit ballot of a warp: bit i is lane i's x, bit 32 + i its y."""
    low, high = ballot(uint32(1 if x else 0)), ballot(uint32(1 if y else 0))
    return int64(low) | int64(high) << 32


@device
def compare(table, bits, n_word, levels, words, worker):
    """Recompute words first .. last - 1 of both bitmaps: above the threshold, above the mean.

    One warp's share; worker: its index, and the number of warps.
    """
    (mean, bar), (first, last), (number, n_worker) = levels, words, worker
    for word in range(first + number, last, n_worker):
        at = table + 4 * (64 * word + lane())
        x, y = load_f32(at), load_f32(at + 4 * WARP)
        hot, warm = either_half(x > bar, y > bar), either_half(x > mean, y > mean)
        if lane() == 0:
            store_i64(bits + 8 * word, hot)
            store_i64(bits + 8 * (n_word + word), warm)


@device
def gather(parts, first, sums):
    """Add the threads' four sums to rows first .. first + 3 of parts, [.., THREADS] float64.

    A block's work, of THREADS threads or a multiple of them; what the rows had is lost.
    """
    at = thread() % THREADS
    for turn in range(threads() // THREADS):
        sync_block()  # what an earlier sum left may still be read
        if thread() // THREADS == turn:
            for i in range(4):
                parts[first + i, at] = sums[i] + (parts[first + i, at] if turn > 0 else 0.0)


@device
def add_up(parts, n_row):
    """Sum each of n_row rows of THREADS float64 in shared memory to its first; a block's work."""
    half = THREADS // 2
    sync_block()
    while half > 0:
        if thread() < half:
            for i in range(n_row):
                parts[i, thread()] += parts[i, thread() + half]
        sync_block()
        half //= 2


@device
def rescale(table, sums, span, factor, parts):
    """Multiply a span of entries by `factor` and recompute the power sums; by one block.

    parts: a shared array of float64, [4, THREADS] or more.
    """
    s1, s2, s3, s4 = 0.0, 0.0, 0.0, 0.0
    for i in range(span[0] + thread(), span[1], threads()):
        x = load_f32(table + 4 * i) * factor
        store_f32(table + 4 * i, x)
        y = float64(x)
        s1, s2, s3, s4 = s1 + y, s2 + y * y, s3 + y * y * y, s4 + y * y * y * y
    gather(parts, 0, (s1, s2, s3, s4))
    add_up(parts, 4)
    if thread() < 4:
        store_f64(sums + 8 * thread(), parts[thread(), 0])
    sync_block()


def products_of(head_dim: int) -> tuple[Any, Any]:
    """The functions that multiply a query with a row of float32, of float16; a warp's work."""

    @device
    def with_floats(query, row):
        total = float32(0)
        for d in range(lane(), head_dim, WARP):
            total += load_f32(query + 4 * d) * load_f32(row + 4 * d)
        return warp_sum(total)

    @device
    def with_halves(query, row):
        total = float32(0)
        for d in range(lane(), head_dim, WARP):
            total += load_f32(query + 4 * d) * const_f16(row + 2 * d)
        return warp_sum(total)

    return with_floats, with_halves


def global_logit_of(head_dim: int) -> Any:
    """log(w_global) of Eq. 5: the weight of all keys, if their logits are normally distributed."""
    with_floats, _ = products_of(head_dim)

    @device
    def global_logit(query, mean_key, spread, n_kv, scale):
        norm, centre = with_floats(query, query), with_floats(query, mean_key)
        middle = float64(centre) * float64(scale)
        return middle + float64(norm) * spread / 2 + math.log(float64(n_kv))

    return global_logit
