"""TAIL_SIZE: from the values of a row's first samples, how many it needs.

A block takes a row, a warp a head. Lanes share a value: eight elements each.
"""

import math
from typing import Any

from numba import cuda, float32

from tamis.jit_kernels.contract.ops.select.metered import ALL, METER
from tamis.jit_kernels.contract.ops.select.tail import DENOMINATOR, OUTPUT, READ_ALL
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sums_before,
    sync_block,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32x8, load_i32, quotient
from tamis.jit_kernels.cuda.lang.ptx import shuffle_xor

HUGE = 1e30  # samples: more than there are


@device
def plus(sums, x, v):
    """Eight sums plus x times eight elements."""
    return (
        sums[0] + x * v[0], sums[1] + x * v[1], sums[2] + x * v[2], sums[3] + x * v[3],
        sums[4] + x * v[4], sums[5] + x * v[5], sums[6] + x * v[6], sums[7] + x * v[7],
    )  # fmt: skip


def _moments(head_dim: int, group: int, type_v: str) -> Any:
    """The function moments(a, r, g): the sums that a head's need is made of, in every lane."""
    size, read = row_bytes(type_v, head_dim), reading(type_v, head_dim)
    n_piece = head_dim // 8
    n_lane = next(n for n in (1, 2, 4, 8, 16, 32) if n >= min(n_piece, WARP))
    whole = n_piece == n_lane

    @device
    def over_samples(x):
        """The sum over the lanes that have the same elements of other samples."""
        other = WARP // 2
        while other >= n_lane:
            x += shuffle_xor(x, other)
            other //= 2
        return x

    @device
    def summed(a, r, g, d):
        """The sums over the lane's samples of y v, y^2 v and y^2 v^2, of elements d .. d + 7."""
        h, zero = quotient(r * group, a.heads_per_kv), float32(0)
        of_v = of_square = (zero, zero, zero, zero, zero, zero, zero, zero)
        length, scale = zero, a.n_sample / (float32(1) + a.weights[r, g, a.n_sample])
        for i in range(lane() // n_lane, a.n_sample, WARP // n_lane):
            y = float32(a.weights[r, g, i] * scale)
            j = load_i32(a.indices + 4 * (a.n_sample * r + i))
            v = read(a.v_pages + size * key_row(a.v_table, a.n_head_kv, h, j), d)
            of_v, of_square = plus(of_v, y, v), plus(of_square, y * y, v)
            for e in range(8):
                length += y * y * v[e] * v[e]
        return of_v, of_square, length

    @device
    def moments(a, r, g):
        a_2, a_o, b_o = float32(0), float32(0), float32(0)
        o_2, of_v, n = float32(0), float32(0), float32(a.n_sample)
        below = float32(1) + a.weights[r, g, a.n_sample]
        for first in range(0, n_piece, n_lane):
            piece = first + lane() % n_lane
            d = 8 * min(piece, n_piece - 1)
            sums, squares, length = summed(a, r, g, d)
            kept = load_f32x8(a.kept[0, r * group + g] + 4 * d)
            counts = whole or piece < n_piece
            of_v += length if counts else float32(0)
            for e in range(8):
                mean, square = over_samples(sums[e]) / n, over_samples(squares[e]) / n
                o = kept[e] / below + mean
                if counts and lane() < n_lane:
                    a_2, a_o, b_o, o_2 = (
                        a_2 + mean * mean,
                        a_o + mean * o,
                        b_o + square * o,
                        o_2 + o * o,
                    )
        return warp_sum(a_2), warp_sum(a_o), warp_sum(b_o), warp_sum(o_2), warp_sum(of_v) / n

    return moments


def tail_size(head_dim: int, group: int, type_k: str, type_v: str) -> list[Launch]:
    """Kernel of TAIL_SIZE: blocks stride over rows."""
    moments = _moments(head_dim, group, type_v)

    @device
    def needed(a, r, g):
        """The samples that a head asks for, in every lane of a warp."""
        a_2, a_o, b_o, o_2, of_v = moments(a, r, g)
        n, total, of_y = a.n_sample, a.weights[r, g, a.n_sample], float32(0)
        below = float32(1) + total
        t = total / below
        for i in range(lane(), n, WARP):
            y = n * a.weights[r, g, i] / below
            of_y += float32(y * y)
        of_y = warp_sum(of_y) / n
        scaled = a.z * a.z / (a.epsilon * a.epsilon) * n / (n - 1.0)
        of_denominator = scaled * (of_y - t * t)
        asked = max(of_denominator, scaled * (of_v - a_2) / o_2)
        if a.bounded == OUTPUT:
            moved = a_2 - float32(2) * t * a_o + t * t * o_2
            asked = scaled * (of_v - float32(2) * b_o + o_2 * of_y - moved) / o_2
        elif a.bounded == DENOMINATOR:
            asked = of_denominator
        return float32(asked if asked < HUGE else HUGE)

    def kernel(tid, n_thread, a):
        asked, pair = cuda.shared.array(group, float32), cuda.shared.array(THREADS, "float64")
        n_unit = quotient(a.step[1] + a.unit, a.unit)
        for r in range(tid, a.n_row, n_thread):
            for g in range(warp(), group, WARPS):
                found = needed(a, r, g)
                if lane() == 0:
                    asked[g] = found
            mine, most = 0.0, float32(0)
            for u in range(thread(), n_unit, THREADS):
                mine += a.left[r, u]
            n_left = sums_before(mine, pair)[1]
            sync_block()
            for g in range(group):
                most = max(most, asked[g])
            whole = n_left <= a.n_sample or most > a.most * n_left
            if thread() == 0:
                a.needs[r] = READ_ALL if whole else max(a.n_sample, math.ceil(most))
            if whole and thread() < group:
                a.report[r * group + thread(), METER.held] = 1.0
                a.report[r * group + thread(), METER.needed] = ALL
            sync_block()  # before the next row's needs overwrite what is read here

    return [Launch(kernel)]
