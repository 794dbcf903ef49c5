"""Twilight's ops: weights of chosen positions, and the fewest of them that reach a share."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.op import POS
from tamis.jit_kernels.contract.ops import TILE
from tamis.jit_kernels.contract.ops.select.twilight import ROUNDS
from tamis.jit_kernels.cpu.attention.attend_batch import MASKED
from tamis.jit_kernels.cpu.attention.gathered_scores import key_row, pad_list, products_of
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hmax,
    hsum,
    load_f,
    splat_f,
    store_f,
    vexp,
    vmax,
    where_less,
    zero_f,
)


@njit(error_model="numpy")
def entry(a, r, i):
    """The number of the Selection's entry that holds the i-th position of a row."""
    return load_i32(a.indptr + 4 * r) + i // a.block


@njit(error_model="numpy")
def position(a, r, i):
    """The i-th position of a row."""
    return load_i32(a.indices + 4 * entry(a, r, i)) * a.block + i % a.block


@njit(error_model="numpy")
def seen(a, r):
    """How many positions of a row are not after the query's."""
    low, high = 0, (load_i32(a.indptr + 4 * r + 4) - load_i32(a.indptr + 4 * r)) * a.block
    while low < high:
        middle = (low + high) // 2
        if position(a, r, middle) <= a.step[POS]:
            low = middle + 1
        else:
            high = middle
    return low


def twilight_weigh(head_dim: int, group: int, type_k: str) -> Any:
    """Kernel of TWILIGHT_WEIGH: threads stride over tiles."""
    products = products_of(head_dim, group, type_k)

    def kernel(tid, n_thread, a):
        for r in range(a.n_row):
            h, n = r * group // a.heads_per_kv, seen(a, r)
            for t in range(tid, (n + TILE - 1) // TILE, n_thread):
                count, rows = min(TILE, n - TILE * t), a.rows[r, t] + 0
                for i in range(count):
                    j = position(a, r, TILE * t + i)
                    store_i32(rows + 4 * i, key_row(a.k_table, a.n_head_kv, h, j))
                pad_list(rows, count)
                products(a.logits[r, t] + 0, a.q[0, r * group] + 0, rows, a.k_pages, count)

    return kernel


def twilight_prune(group: int) -> Any:
    """Kernel of TWILIGHT_PRUNE: threads stride over rows."""

    @njit(error_model="numpy")
    def scale_logits(a, r, g, n):
        """Scale a head's n logits, add log weights, and return the largest one."""
        top = splat_f(MASKED)
        for i in range(0, n, TILE):
            own, scale = a.logits[r, i // TILE, g] + 0, splat_f(a.scale)
            for d in range(0, TILE, LANES):
                store_f(own + 4 * d, load_f(own + 4 * d) * scale)
            if a.log_weight != 0:
                for d in range(min(TILE, n - i)):
                    more = load_f32(a.log_weight + 4 * entry(a, r, i + d))
                    store_f32(own + 4 * d, load_f32(own + 4 * d) + more)
            for d in range(max(0, n - i), TILE):
                store_f32(own + 4 * d, MASKED)
            for d in range(0, TILE, LANES):
                top = vmax(load_f(own + 4 * d), top)
        return hmax(top)

    @njit(error_model="numpy")
    def weigh(a, r, g, n, top):
        """Make weights of a head's logits, the largest one 1, and return their sum."""
        total = zero_f()
        for i in range(0, n, TILE):
            own = a.logits[r, i // TILE, g] + 0
            for d in range(0, TILE, LANES):
                weight = vexp(load_f(own + 4 * d) - splat_f(top))
                store_f(own + 4 * d, weight)
                total += weight
        return hsum(total)

    @njit(error_model="numpy")
    def above(a, r, g, n, bar):
        """The sum of a head's weights that are at least bar."""
        total, least = zero_f(), splat_f(bar)
        for i in range(0, n, TILE):
            own = a.logits[r, i // TILE, g] + 0
            for d in range(0, TILE, LANES):
                weight = load_f(own + 4 * d)
                total += where_less(weight, least, zero_f(), weight)
        return hsum(total)

    @njit(error_model="numpy")
    def subtract_bar(a, r, g, n):
        """Replace a head's weights by how far they are above its threshold."""
        need = np.float32(a.share) * weigh(a, r, g, n, scale_logits(a, r, g, n))
        low, high = np.float32(0), np.float32(1)
        for _ in range(ROUNDS if a.share < 1.0 else 0):
            middle = np.float32(0.5) * (low + high)
            if above(a, r, g, n, middle) >= need:
                low = middle
            else:
                high = middle
        for i in range(0, n, TILE):
            own = a.logits[r, i // TILE, g] + 0
            for d in range(0, TILE, LANES):
                store_f(own + 4 * d, load_f(own + 4 * d) - splat_f(low))

    def kernel(tid, n_thread, a):
        for r in range(tid, a.n_row, n_thread):
            n, count = seen(a, r), 0
            for g in range(group):
                subtract_bar(a, r, g, n)
            for i in range(n):
                needed = False
                for g in range(group):
                    needed |= a.logits[r, i // TILE, g, i % TILE] >= 0.0
                if needed:
                    a.sets[r, count] = position(a, r, i)
                    if a.log_weight != 0:
                        a.weights[r, count] = load_f32(a.log_weight + 4 * entry(a, r, i))
                    count += 1
            a.counts[r] = count

    return kernel
