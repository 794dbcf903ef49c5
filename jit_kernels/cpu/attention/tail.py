"""TAIL_SIZE: from the values of a row's first samples, how many it needs."""

import math
from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops.select.metered import ALL, METER
from tamis.jit_kernels.contract.ops.select.tail import DENOMINATOR, OUTPUT, READ_ALL
from tamis.jit_kernels.cpu.kv.kv_rows import row_at, rows_of_type
from tamis.jit_kernels.cpu.lang.blocks16 import dot_float
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, load_f, splat_f, store_f


@njit(error_model="numpy")
def plus(sums, x, row, size):
    """Add x times a row of `size` bytes to sums."""
    for d in range(0, size, 4 * LANES):
        store_f(sums + d, fma(splat_f(x), load_f(row + d), load_f(sums + d)))


def tail_size(head_dim: int, group: int, type_k: str, type_v: str) -> Any:
    """Kernel of TAIL_SIZE: threads stride over rows."""
    read, size = rows_of_type(type_v, head_dim).read, 4 * head_dim

    @njit(error_model="numpy")
    def add_samples(a, r, line, sums, squares):
        """The sums over a row's samples, for each head.

        sums: of y v and of y^2 v; squares: of y^2 and of y^2 |v|^2.
        """
        h = r * group // a.heads_per_kv
        for i in range((2 * head_dim + 2) * group):
            store_f32(sums + 4 * i, 0.0)
        for i in range(a.n_sample):
            j = load_i32(a.indices + 4 * (a.n_sample * r + i))
            read(a.v_pages, row_at(a.v_table, a.n_head_kv, h, j), line)
            length = dot_float(line, line, head_dim)
            for g in range(group):
                y = a.n_sample * a.weights[r, g, i] / (1.0 + a.weights[r, g, a.n_sample])
                plus(sums + 2 * size * g, y, line, size)
                plus(sums + 2 * size * g + size, y * y, line, size)
                own = squares + 8 * g
                store_f32(own, load_f32(own) + y * y)
                store_f32(own + 4, load_f32(own + 4) + y * y * length)

    @njit(error_model="numpy")
    def needed(a, r, g, sums, squares):
        """The samples that a head asks for."""
        n, total = a.n_sample, a.weights[r, g, a.n_sample]
        t, of_y, of_v = total / (1.0 + total), load_f32(squares) / n, load_f32(squares + 4) / n
        a_2, a_o, b_o, o_2 = 0.0, 0.0, 0.0, 0.0
        for d in range(head_dim):
            mean = load_f32(sums + 4 * d) / n
            o = a.kept[0, r * group + g, d] / (1.0 + total) + mean
            a_2, a_o, o_2 = a_2 + mean * mean, a_o + mean * o, o_2 + o * o
            b_o += load_f32(sums + size + 4 * d) / n * o
        scaled = a.z * a.z / (a.epsilon * a.epsilon) * n / (n - 1.0)
        if a.bounded == OUTPUT:
            moved = a_2 - 2.0 * t * a_o + t * t * o_2
            return scaled * (of_v - 2.0 * b_o + o_2 * of_y - moved) / o_2
        of_denominator = scaled * (of_y - t * t)
        if a.bounded == DENOMINATOR:
            return of_denominator
        return max(of_denominator, scaled * (of_v - a_2) / o_2)

    def kernel(tid, n_thread, a):
        for r in range(tid, a.n_row, n_thread):
            line, sums = a.work[r] + 0, a.work[r] + size
            squares, n_left, most = sums + 2 * size * group, 0, 0.0
            add_samples(a, r, line, sums, squares)
            for u in range((a.step[1] + a.unit) // a.unit):
                n_left += a.left[r, u]
            for g in range(group):
                asked = needed(a, r, g, sums + 2 * size * g, squares + 8 * g)
                most = max(most, asked) if asked == asked else math.inf
            if n_left <= a.n_sample or most > a.most * n_left:
                a.needs[r] = READ_ALL
                for g in range(group):
                    a.report[r * group + g, METER.held] = 1.0
                    a.report[r * group + g, METER.needed] = ALL
            else:
                a.needs[r] = max(a.n_sample, math.ceil(most))

    return kernel
