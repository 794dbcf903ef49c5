"""Ops that split clusters into zones, and estimate attention to clusters by their means."""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops.select.clusters import NO_WEIGHT
from tamis.jit_kernels.contract.types import kv_row
from tamis.jit_kernels.cpu.attention.attend_batch import MASKED
from tamis.jit_kernels.cpu.kv.kv_rows import loading_one, row_at
from tamis.jit_kernels.cpu.lang.intrinsic import load_i32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    fma,
    hmax,
    load_f,
    load_half,
    splat_f,
    store_f,
    store_half,
    vexp,
    vmax,
    zero_f,
)


def cluster_values(head_dim: int, type_k: str, type_v: str) -> Any:
    """Kernel of CLUSTER_VALUES: threads stride over clusters."""
    load, size = loading_one(type_v, head_dim), kv_row(type_v, head_dim).itemsize

    def kernel(tid, n_thread, a):
        first = max(0, a.extent[0] - a.n_sink) // a.per_cluster
        for item in range(first * a.n_head_kv + tid, a.extent[2] * a.n_head_kv, n_thread):
            h, c = item % a.n_head_kv, item // a.n_head_kv
            low, high, to = a.starts[h, c], a.starts[h, c + 1], a.values[h, c] + 0
            part = splat_f(1.0 / max(1, high - low))
            for d in range(0, head_dim, LANES):
                total = zero_f()
                for s in range(low, high):
                    row = row_at(a.v_table, a.n_head_kv, h, a.order[h, s])
                    total += load(a.v_pages + size * row, d)
                store_half(to + 2 * d, total * part)

    return kernel


def cluster_zones(group: int) -> Any:
    """Kernel of CLUSTER_ZONES: threads stride over KV heads."""

    @njit(error_model="numpy")
    def find_top(a, h, g, n):
        """Find the largest score of a head, and what its exponentials are multiplied by."""
        scores, shares = a.scores[group * h + g] + 0, a.shares[h] + 0
        end = (n + LANES - 1) // LANES * LANES
        for c in range(n, end):
            a.scores[group * h + g, c] = MASKED
        top, scale = splat_f(MASKED), splat_f(a.scale)
        for c in range(0, 4 * end, 4 * LANES):
            top = vmax(load_f(scores + c) * scale, top)
        best, total = splat_f(hmax(top)), 0.0
        for c in range(0, end, LANES):
            part = vexp(load_f(scores + 4 * c) * scale - best)
            store_f(shares + 4 * c, part)
            for i in range(c, min(n, c + LANES)):
                members = a.starts[h, i + 1] - a.starts[h, i]
                total += a.shares[h, i] * (members if a.by_share == 1 else min(1, members))
        a.tops[group * h + g, 0] = hmax(best)
        a.tops[group * h + g, 1] = 1.0 / (group * total) if total > 0.0 else 0.0

    @njit(error_model="numpy")
    def write_shares(a, h, n):
        for c in range(n):
            members, share = a.starts[h, c + 1] - a.starts[h, c], np.float32(0)
            for g in range(group):
                head = group * h + g
                x = np.float32(a.scores[head, c] * a.scale) - a.tops[head, 0]
                share += np.float32(math.exp(x)) * a.tops[head, 1]
            a.shares[h, c] = share * np.float32(members if a.by_share == 1 else min(1, members))

    @njit(error_model="numpy")
    def bar_of(a, h, n, need):
        """The largest bits of a share with which the clusters reach `need`."""
        shares, low, high = a.shares[h] + 0, 1, 0x7F800000
        while low + 1 < high:
            middle, found = (low + high) // 2, 0.0
            for c in range(n):
                if load_i32(shares + 4 * c) >= middle:
                    found += a.shares[h, c] if a.by_share == 1 else 1.0
            if found >= need:
                low = middle
            else:
                high = middle
        return low

    def kernel(tid, n_thread, a):
        n = a.extent[2]
        for h in range(tid, a.n_head_kv, n_thread):
            for g in range(group):
                find_top(a, h, g, n)
            write_shares(a, h, n)
            total = 0.0
            for c in range(n):
                total += a.shares[h, c] if a.by_share == 1 else 1.0
            a.bars[h, 0] = bar_of(a, h, n, a.exact * total) if a.exact > 0.0 else 0x7F800000
            a.bars[h, 1] = bar_of(a, h, n, a.both * total) if a.both > 0.0 else 0x7F800000
            for word in range(a.n_word):
                a.marks[h, word] = 0
            count, shares = 0, a.shares[h] + 0
            for c in range(n):
                if load_i32(shares + 4 * c) >= a.bars[h, 0]:
                    for s in range(a.starts[h, c], a.starts[h, c + 1]):
                        j = a.order[h, s]
                        a.marks[h, j // 64] |= 1 << (j % 64)
                    count += a.starts[h, c + 1] - a.starts[h, c]
            a.count[h] = count

    return kernel


def cluster_estimate(head_dim: int, group: int) -> Any:
    """Kernel of CLUSTER_ESTIMATE: threads stride over heads."""

    def kernel(tid, n_thread, a):
        for head in range(tid, a.n_head, n_thread):
            h, top, total = head // group, NO_WEIGHT, 0.0
            out, shares = a.out[0, head] + 0, a.shares[h] + 0
            for d in range(0, head_dim, LANES):
                store_f(out + 4 * d, zero_f())
            for c in range(a.extent[2]):
                bits = load_i32(shares + 4 * c)
                if a.bars[h, 1] <= bits < a.bars[h, 0]:
                    members = a.starts[h, c + 1] - a.starts[h, c]
                    x = a.scores[head, c] * a.scale + math.log(members)
                    before = math.exp(top - x) if x > top else 1.0
                    top = max(top, x)
                    weight, values = math.exp(x - top), a.values[h, c] + 0
                    total = total * before + weight
                    for d in range(0, head_dim, LANES):
                        own = load_f(out + 4 * d) * splat_f(before)
                        store_f(out + 4 * d, fma(splat_f(weight), load_half(values + 2 * d), own))
            part = splat_f(1.0 / total if total > 0.0 else 0.0)
            for d in range(0, head_dim, LANES):
                store_f(out + 4 * d, load_f(out + 4 * d) * part)
            a.lse[0, head] = top + math.log(total) if total > 0.0 else NO_WEIGHT

    return kernel
