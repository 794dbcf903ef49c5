"""Ops of `metered`: estimates of what a method left out, and what is read for it."""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import LIST_PAD, SIBLINGS, STEP, TILE
from tamis.jit_kernels.contract.ops.select.metered import (
    ALL,
    METER,
    WIDER,
    WITHIN,
    meter_work,
)
from tamis.jit_kernels.cpu.attention.gathered_scores import (
    TILE_ROW,
    key_row,
    pad_list,
    products_of,
)
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i32,
)
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    hsum,
    load_f,
    splat_f,
    store_f,
    vexp,
    vmin,
    zero_f,
)
from tamis.jit_kernels.cpu.select.hip_means import rating

row_work = njit(meter_work)
ZERO = np.float32(0)
# relative to the log-sum-exp; with more than e^60 the retained mass is zero anyway
MOST_LOGIT = np.float32(60)
MOST = 1e30  # of a sum of scores: beyond it probabilities are uniform


@njit
def mixed(x):
    """A 64-bit hash of x (splitmix64's finaliser)."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ (x >> 31 & 0x1FFFFFFFF)


@njit
def uniform(key, i):
    """The i-th random number of a key, 0 <= u < 1, a multiple of 2^-53."""
    return (mixed(key + (i + 1) * -7046029254386353131) >> 11 & 0x1FFFFFFFFFFFFF) * 2.0**-53


@njit(error_model="numpy")
def count_left(left, row, unit, n):
    """Count the positions of each of n units that no block of a row of the Selection contains."""
    begin, end, blocks, block = row
    for first in range(0, n, unit):
        store_i32(left + 4 * (first // unit), min(unit, n - first))
    for s in range(begin, end):
        j = load_i32(blocks + 4 * s) * block
        stop = min(j + block, n)
        while j < stop:
            at, some = left + 4 * (j // unit), min(stop, (j // unit + 1) * unit) - j
            store_i32(at, load_i32(at) - some)
            j += some


@njit(error_model="numpy")
def sum_left(left, scores, n_unit):
    """The number of omitted positions, and the sum of their scores."""
    n, total = 0, 0.0
    for u in range(n_unit):
        some = load_i32(left + 4 * u)
        n += some
        total += some * np.float64(load_f32(scores + 4 * u))
    return n, total


@njit(error_model="numpy")
def left_out(row, cursor, first, i):
    """The i-th position from `first` on that the row lacks, and the cursor after it.

    cursor: a block that ends after `first`, or the row's end.
    """
    _, end, blocks, block = row
    j = first
    while True:
        while cursor < end and (load_i32(blocks + 4 * cursor) + 1) * block <= j:
            cursor += 1
        start = load_i32(blocks + 4 * cursor) * block if cursor < end else j + i + 1
        free = max(0, start - j)
        if i < free:
            return j + i
        i -= free
        j = start + block


@njit(error_model="numpy")
def draw(row, units, sizes, key, out):
    """Draw positions of a row. sizes: positions, their unit, samples, equal share."""
    left, scores = units
    n, unit, n_sample, even = sizes
    to, factors = out
    n_unit = (n + unit - 1) // unit
    begin, end, blocks, block = row
    n_left, total = sum_left(left, scores, n_unit)
    share = even if 0.0 < total < MOST else 1.0
    per = (1.0 - share) / total if share < 1.0 else 0.0
    count, cursor, below = 0, begin, 0.0
    exact = n_left <= n_sample
    for u in range(n_unit):
        some = load_i32(left + 4 * u)
        if some == 0:
            continue
        while cursor < end and (load_i32(blocks + 4 * cursor) + 1) * block <= u * unit:
            cursor += 1
        if exact:
            for i in range(some):
                store_i32(to + 4 * count, left_out(row, cursor, u * unit, i))
                store_f32(factors + 4 * count, np.float32(1))
                count += 1
            continue
        chance = share / n_left + per * load_f32(scores + 4 * u)
        above = below + chance * some
        while count < n_sample:
            point = (count + uniform(key, count)) / n_sample
            if point >= above:
                break
            i = min(some - 1, max(0, int((point - below) / chance)))
            store_i32(to + 4 * count, left_out(row, cursor, u * unit, i))
            store_f32(factors + 4 * count, np.float32(1.0 / (n_sample * chance)))
            count += 1
        below = above
    last = load_i32(to + 4 * (count - 1)) if count > 0 else 0
    for i in range(count, n_sample):
        store_i32(to + 4 * i, last)
        store_f32(factors + 4 * i, ZERO)


def meter_sample(head_dim: int, group: int) -> Any:
    """Kernel of METER_SAMPLE: threads stride over rows."""
    shorten, rate = rating(head_dim, group)

    @njit(error_model="numpy")
    def score(a, r, n_whole, scores, work):
        """Compute the scores of the first n_whole units."""
        n_parent = (n_whole + SIBLINGS - 1) // SIBLINGS
        capacity = (a.room + TILE - 1) // TILE * TILE
        parents, ids = work, work + 4 * (a.room // 4 + LIST_PAD)
        found, tile = ids + 4 * capacity, ids + 8 * capacity
        extents = tile + 2 * TILE_ROW * group
        factors = extents + 2 * TILE_ROW
        offsets = factors + 8 * group
        bytes_, h = offsets + 4 * group, r * group // a.heads_per_kv
        for g in range(group):
            store_f32(offsets + 4 * g, load_f32(a.lse + 4 * (group * r + g)))
        at = ids, found, tile, extents, bytes_, factors, offsets
        shorten(at, (a.q + 4 * head_dim * group * r, 1, 0), a.scale)
        for i in range(n_parent):
            store_i32(parents + 4 * i, i)
        pad_list(parents, n_parent)
        own = a.means + head_dim * a.room * h, a.extents + 8 * a.room * h
        rate(at, own, parents, n_whole, group)
        for u in range(n_whole):
            store_f32(scores + 4 * u, load_f32(found + 4 * u))

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        n, n_whole = pos + 1, (pos + 1) // a.unit
        for r in range(tid, a.n_row, n_thread):
            left, scores = a.left + 4 * a.n_unit * r, a.scores + 4 * a.n_unit * r
            begin, end = load_i32(a.chosen + 4 * r), load_i32(a.chosen + 4 * r + 4)
            row = begin, end, a.blocks, a.block
            count_left(left, row, a.unit, n)
            if n_whole > 0:
                score(a, r, n_whole, scores, a.work + 4 * row_work(head_dim, group, a.room) * r)
            if n_whole * a.unit < n:
                store_f32(scores + 4 * n_whole, ZERO)
            key = mixed(mixed(mixed(a.seed) + a.layer * 65536 + r) + pos)
            sizes = n, a.unit, a.n_sample, np.float64(a.even)
            out = a.indices + 4 * a.n_sample * r, a.factors + 4 * a.n_sample * r
            draw(row, (left, scores), sizes, key, out)

    return kernel


@njit(error_model="numpy")
def by_score(order, units, scores, n):
    """List n samples by the falling score of their units; equal ones keep their order."""
    for i in range(n):
        x, at = load_f32(scores + 4 * load_i32(units + 4 * i)), i
        while at > 0:
            before = load_i32(order + 4 * (at - 1))
            if load_f32(scores + 4 * load_i32(units + 4 * before)) >= x:
                break
            store_i32(order + 4 * at, before)
            at -= 1
        store_i32(order + 4 * at, i)


@njit(error_model="numpy")
def widened(left, scores, n_unit, bar):
    """The number of omitted positions, and of those in units whose score reaches the threshold."""
    n_left, n_more = 0, 0
    for u in range(n_unit):
        some = load_i32(left + 4 * u)
        n_left += some
        n_more += some if load_f32(scores + 4 * u) >= bar else 0
    return n_left, n_more


def meter_weigh(head_dim: int, group: int, q_block: int, type_k: str) -> Any:
    """Kernel of METER_WEIGH: threads stride over rows."""
    assert q_block == 1
    products, fields = products_of(head_dim, group, type_k), 4 * len(METER)

    @njit(error_model="numpy")
    def list_keys(a, r, rows, units):
        """List the rows of the samples' keys, and their units."""
        h, first = r * group // a.heads_per_kv, a.indices + 4 * a.n_sample * r
        for i in range(a.n_sample):
            j = load_i32(first + 4 * i)
            store_i32(units + 4 * i, j // a.unit)
            store_i32(rows + 4 * i, key_row(a.k_table, a.n_head_kv, h, j))
        pad_list(rows, a.n_sample)

    @njit(error_model="numpy")
    def weigh(a, r, rows, tile, weights):
        """Compute the weights of a row's samples and their sum, and each head's report.

        Returns the least mass.
        """
        size = 4 * (a.n_sample + 1)
        for j in range(0, a.n_sample, TILE):
            count = min(TILE, a.n_sample - j)
            products(tile, a.q + 4 * head_dim * group * r, rows + 4 * j, a.k_pages, count)
            for g in range(group):
                lse, to = splat_f(load_f32(a.lse + 4 * (group * r + g))), weights + size * g + 4 * j
                for i in range(0, count, LANES):
                    x = load_f(tile + TILE_ROW * g + 4 * i) * splat_f(a.scale) - lse
                    factors = load_f(a.factors + 4 * (a.n_sample * r + j + i))
                    store_f(to + 4 * i, vexp(vmin(x, splat_f(MOST_LOGIT))) * factors)
        lowest = np.float32(1)
        for g in range(group):
            own, total = a.report + fields * (group * r + g), zero_f()
            for i in range(0, 4 * a.n_sample, 4 * LANES):
                total += load_f(weights + size * g + i)
            store_f32(weights + size * g + 4 * a.n_sample, hsum(total))
            mass = np.float32(1) / (np.float32(1) + hsum(total))
            store_f32(own + 4 * METER.mass, mass)
            store_f32(own + 4 * METER.held, mass)
            store_f32(own + 4 * METER.needed, np.float32(WITHIN))
            lowest = min(lowest, mass)
        return lowest

    @njit(error_model="numpy")
    def outside(a, weights, g, units, scores, bar):
        """The weight of a head's samples in units below the threshold."""
        rest = 0.0
        for i in range(a.n_sample):
            if load_f32(scores + 4 * load_i32(units + 4 * i)) < bar:
                rest += load_f32(weights + 4 * ((a.n_sample + 1) * g + i))
        return rest

    @njit(error_model="numpy")
    def bar_of(a, r, weights, units, scores):
        """The largest score of a sample's unit with which every head retains enough; 0: none."""
        order, size = a.order + 4 * a.n_sample * r, a.n_sample + 1
        by_score(order, units, scores, a.n_sample)
        taken = 0
        for g in range(group):
            total = load_f32(weights + 4 * (size * g + a.n_sample))
            rest, i = total, 0
            while i < a.n_sample and (i < taken or rest > (1.0 - a.least) * (1.0 + total)):
                rest -= load_f32(weights + 4 * (size * g + load_i32(order + 4 * i)))
                i += 1
            taken = i
        last = load_i32(units + 4 * load_i32(order + 4 * max(0, taken - 1)))
        return load_f32(scores + 4 * last)

    def kernel(tid, n_thread, a):
        n = load_i64(a.step + STEP.pos) + 1
        for r in range(tid, a.n_row, n_thread):
            weights = a.weights + 4 * (a.n_sample + 1) * group * r
            units = a.units + 4 * a.n_sample * r
            rows, tile = a.rows + 4 * (a.n_sample + LIST_PAD) * r, a.tile + TILE_ROW * group * r
            list_keys(a, r, rows, units)
            lowest = weigh(a, r, rows, tile, weights)
            store_i32(a.needs + 4 * r, WITHIN)
            if lowest >= a.least:
                continue
            left, scores = a.left + 4 * a.n_unit * r, a.scores + 4 * a.n_unit * r
            n_unit = (n + a.unit - 1) // a.unit
            bar = bar_of(a, r, weights, units, scores)
            n_left, n_more = widened(left, scores, n_unit, bar)
            if bar <= ZERO or 2 * (n - n_left + n_more) > n:
                store_i32(a.needs + 4 * r, ALL)
                continue
            store_i32(a.needs + 4 * r, WIDER)
            store_f32(a.bars + 4 * r, bar)
            for g in range(group):
                own = a.report + fields * (group * r + g)
                total = load_f32(weights + 4 * ((a.n_sample + 1) * g + a.n_sample))
                rest = outside(a, weights, g, units, scores, bar)
                store_f32(own + 4 * METER.held, np.float32(1.0 - rest / (1.0 + total)))
                store_f32(own + 4 * METER.needed, np.float32(WIDER))

    return kernel


@njit(error_model="numpy")
def write_wider(out, row, units, bar, sizes):
    """Write a row's blocks of `grain`, and units that reach the threshold, ascending.

    Returns how many.
    """
    begin, end, blocks, block = row
    left, scores = units
    n, unit, grain = sizes
    count, cursor = 0, begin
    for u in range((n + unit - 1) // unit):
        whole = load_i32(left + 4 * u) > 0 and load_f32(scores + 4 * u) >= bar
        j, stop = u * unit, min(n, (u + 1) * unit)
        while j < stop:
            while cursor < end and (load_i32(blocks + 4 * cursor) + 1) * block <= j:
                cursor += 1
            if not whole:
                if cursor >= end:
                    break
                j = max(j, load_i32(blocks + 4 * cursor) * block)
                if j >= stop:
                    break
            store_i32(out + 4 * count, j // grain)
            count += 1
            j += grain
    return count


def meter_widen() -> Any:
    """Kernel of METER_WIDEN: one thread writes at most some ten thousand integers."""

    def kernel(tid, n_thread, a):
        if tid != 0:
            return
        n, count = load_i64(a.step + STEP.pos) + 1, 0
        store_i32(a.indptr, 0)
        for r in range(a.n_row):
            if load_i32(a.needs + 4 * r) == WIDER:
                begin, end = load_i32(a.chosen + 4 * r), load_i32(a.chosen + 4 * r + 4)
                row = begin, end, a.blocks, a.block
                units = a.left + 4 * a.n_unit * r, a.scores + 4 * a.n_unit * r
                bar, sizes = load_f32(a.bars + 4 * r), (n, a.unit, a.grain)
                count += write_wider(a.indices + 4 * count, row, units, bar, sizes)
            store_i32(a.indptr + 4 * (r + 1), count)
        store_i32(a.whole, 0)
        rows, n_whole = a.n_row // a.n_head_kv, 0
        for h in range(a.n_head_kv):
            some = False
            for r in range(rows * h, rows * (h + 1)):
                some = some or load_i32(a.needs + 4 * r) == ALL
            n_whole += a.n_all if some else 0
            store_i32(a.whole + 4 * (h + 1), n_whole)

    return kernel


def meter_take(head_dim: int) -> Any:
    """Kernel of METER_TAKE: threads stride over heads."""
    size, fields = 4 * head_dim, 4 * len(METER)

    def kernel(tid, n_thread, a):
        for head in range(tid, a.n_head, n_thread):
            r, h = head * a.n_row // a.n_head, head * a.n_head_kv // a.n_head
            source, lse = a.wider, a.wider_lse
            if load_i32(a.whole + 4 * h) < load_i32(a.whole + 4 * h + 4):
                source, lse = a.dense, a.dense_lse
                own = a.report + fields * head
                store_f32(own + 4 * METER.held, np.float32(1))
                store_f32(own + 4 * METER.needed, np.float32(ALL))
            elif load_i32(a.needs + 4 * r) != WIDER:
                continue
            for d in range(0, size, 4 * LANES):
                store_f(a.out + size * head + d, load_f(source + size * head + d))
            store_f32(a.lse + 4 * head, load_f32(lse + 4 * head))

    return kernel
