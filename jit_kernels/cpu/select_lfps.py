"""Ops of the method `lfps`: score tables over positions and distances, and what they predict.

A score is entry * scale. The power sums of the entries are kept as entries change, so that mean and
kurtosis cost nothing; blocks of 64 entries with a bound tell which ones may exceed a threshold.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.cpu.intrinsic import (
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    store_f32,
    store_f64,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.select import key_at, ordered, threshold
from tamis.jit_kernels.cpu.tile import add_scaled_half, dot_float, dot_half
from tamis.jit_kernels.ops import LFPS_META, LFPS_STATS, LFPS_STATS_SIZE, STEP

META, STATS = 8 * len(LFPS_META), 8 * LFPS_STATS_SIZE
RUN = 64  # entries that a bound holds for, and bits of a word
N_NEAR = 6  # keys of w_local (Eq. 5)
NEVER = np.float32(3e38)  # a threshold that no entry exceeds
ZERO = np.float32(0)
SMALLEST_SCALE = 1e-15  # below it, entries are multiplied out: once in about 700 steps


@njit
def _add_power_sums(sums, x, sign):
    """Add the first four powers of one entry to the sums, or take them away."""
    x = np.float64(x)
    store_f64(sums, load_f64(sums) + sign * x)
    store_f64(sums + 8, load_f64(sums + 8) + sign * x * x)
    store_f64(sums + 16, load_f64(sums + 16) + sign * x * x * x)
    store_f64(sums + 24, load_f64(sums + 24) + sign * x * x * x * x)


@njit
def _mean_and_bar(sums, n, a):
    """Mean of the n entries of a table, and the threshold a * mean / kurtosis (Eq. 8)."""
    s1, s2, s3, s4 = (
        load_f64(sums), load_f64(sums + 8), load_f64(sums + 16), load_f64(sums + 24),
    )  # fmt: skip
    mean = s1 / n
    second = s2 - n * mean * mean
    fourth = s4 - 4 * mean * s3 + 6 * mean * mean * s2 - 3 * n * mean * mean * mean * mean
    # All entries alike (or too alike to tell): there is no pattern to follow.
    if not second > 1e-12 * s2 or not fourth > 0.0:
        return np.float32(mean), NEVER
    return np.float32(mean), np.float32(a * mean * second * second / fourth)


@njit
def _rescale(table, bounds, sums, first, last, factor):
    """Multiply entries by `factor`; make bounds and power sums of first .. last - 1 anew."""
    for i in range(4):
        store_f64(sums + 8 * i, 0.0)
    for run in range(first // RUN, (last + RUN - 1) // RUN):
        bound = -NEVER
        for i in range(max(first, run * RUN), min(last, (run + 1) * RUN)):
            x = load_f32(table + 4 * i) * factor
            store_f32(table + 4 * i, x)
            bound = max(bound, x)
            _add_power_sums(sums, x, 1.0)
        store_f32(bounds + 4 * run, bound)


@njit
def _enter(table, bounds, i):
    """A new entry: zero, which changes no power sum."""
    store_f32(table + 4 * i, ZERO)
    old = load_f32(bounds + 4 * (i // RUN)) if i % RUN != 0 else ZERO
    store_f32(bounds + 4 * (i // RUN), max(old, ZERO))


@njit
def _learn(table, bounds, sums, i, gain):
    """Add `gain` to an entry."""
    old = load_f32(table + 4 * i)
    new = old + gain
    store_f32(table + 4 * i, new)
    _add_power_sums(sums, old, -1.0)
    _add_power_sums(sums, new, 1.0)
    at = bounds + 4 * (i // RUN)
    store_f32(at, max(load_f32(at), new))


@njit
def _set_bit(bits, i):
    """Set bit i of a bitmap of 64-bit words."""
    at = bits + 8 * (i // RUN)
    store_i64(at, load_i64(at) | (1 << (i % RUN)))


@njit
def _norm(x, n):
    """Squared length of f32 x [n]."""
    return np.float64(dot_float(x, x, n))


def lfps_keep(head_dim: int) -> Any:
    """Kernel of LFPS_KEEP: threads share the tokens."""

    def kernel(tid, n_thread, step, q, past, past_pos, n_head, n_past):
        n_tok, pos = load_i64(step + STEP.n_tok), load_i64(step + STEP.pos)
        n = n_head * head_dim
        for t in range(max(0, n_tok - n_past) + tid, n_tok, n_thread):
            slot = (pos + t) % n_past
            for i in range(n):
                store_f32(past + 4 * (n * slot + i), load_f32(q + 4 * (n * t + i)))
            store_i64(past_pos + 8 * slot, pos + t)

    return kernel


def lfps_start(head_dim: int) -> Any:
    """Kernel of LFPS_START: threads take heads in turn."""
    size = 4 * head_dim

    @njit
    def weigh(query, k_pages, k_table, n_head_kv, h, low, high, scores, scale):
        """Softmax numerators of a query over low .. high - 1: their sum, variance of the logits."""
        top, total, mean, square = -NEVER, np.float64(0), np.float64(0), np.float64(0)
        for j in range(low, high):
            key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
            logit = dot_half(query, key, head_dim) * scale
            store_f32(scores + 4 * j, logit)
            top = max(top, logit)
            mean += np.float64(logit)
        mean /= high - low
        for j in range(low, high):
            logit = load_f32(scores + 4 * j)
            square += (np.float64(logit) - mean) ** 2
            weight = np.exp(logit - top)
            store_f32(scores + 4 * j, weight)
            total += np.float64(weight)
        return total, square / (high - low)

    @njit
    def average(pages, table, n_head_kv, h, low, high, out):
        """Mean of the rows low .. high - 1."""
        for i in range(head_dim):
            store_f32(out + 4 * i, ZERO)
        share = np.float32(1.0 / (high - low))
        for j in range(low, high):
            row = key_at(pages, table, n_head_kv, h, j, head_dim)
            add_scaled_half(out, share, row, head_dim)

    def kernel(
        tid, n_thread, step, q, k_pages, v_pages, k_table, v_table, past, past_pos, ver, sla,
        bounds, stats, meta, means, scores, n_head, heads_per_kv, n_head_kv, capacity, n_past,
        n_sink, n_local, decay_f, scale_f,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        low, high = n_sink, pos + 1 - n_local
        for head in range(tid, n_head, n_thread):
            if high <= low or load_i64(meta + META * head + LFPS_META.next) == pos:
                continue
            h = head // heads_per_kv
            by_pos, by_dist = ver + 4 * capacity * head, sla + 4 * capacity * head
            own, row = stats + STATS * head, scores + 4 * capacity * head
            for j in range(low, high):
                store_f32(by_pos + 4 * j, ZERO)
                store_f32(by_dist + 4 * (pos - j), ZERO)
            n_row = 0
            while n_row < n_past and pos - n_row - n_local > low:
                p = pos - 1 - n_row
                if load_i64(past_pos + 8 * (p % n_past)) != p:
                    break
                n_row += 1
            for i in range(max(1, n_row)):
                # Where no query is kept (a loaded session), this one is better than none.
                p = pos - 1 - i if n_row > 0 else pos
                query = q + size * head
                if n_row > 0:
                    query = past + size * (n_head * (p % n_past) + head)
                last = p + 1 - n_local
                total, variance = weigh(
                    query, k_pages, k_table, n_head_kv, h, low, last, row, scale_f
                )
                if i == 0:
                    norm = _norm(query, head_dim)
                    store_f64(own + LFPS_STATS.spread, variance / norm if norm > 0.0 else 0.0)
                for j in range(low, last):
                    weight = np.float32(load_f32(row + 4 * j) / total)
                    at = by_dist + 4 * (p - j)
                    store_f32(by_pos + 4 * j, load_f32(by_pos + 4 * j) + weight)
                    store_f32(at, load_f32(at) + weight)
            store_f64(own + LFPS_STATS.scale, 1.0)
            factor = np.float32(1.0 / (2.0 * max(1, n_row) * (1.0 - decay_f)))
            runs = capacity // RUN
            _rescale(by_pos, bounds + 4 * runs * head, own + LFPS_STATS.ver, low, high, factor)
            _rescale(
                by_dist, bounds + 4 * runs * (n_head + head), own + LFPS_STATS.sla, n_local,
                pos - low + 1, factor,
            )  # fmt: skip
            mean = means + 2 * size * head
            average(k_pages, k_table, n_head_kv, h, low, high, mean)
            average(v_pages, v_table, n_head_kv, h, low, high, mean + size)

    return kernel


@njit
def _gather(table, bounds, first, last, bar, bits, pos):
    """Set the bits of entries first .. last - 1 above `bar`: bit pos - i, or i where pos is 0.

    Bounds of the blocks that are looked at become exact.
    """
    for run in range(first // RUN, (last + RUN - 1) // RUN):
        if not load_f32(bounds + 4 * run) > bar:
            continue
        bound = -NEVER
        for i in range(max(first, run * RUN), min(last, (run + 1) * RUN)):
            x = load_f32(table + 4 * i)
            bound = max(bound, x)
            if x > bar:
                _set_bit(bits, pos - i if pos > 0 else i)
        store_f32(bounds + 4 * run, bound)


@njit
def _expand(bits, out, low, high, pos, ver, sla, mean_ver, mean_sla):
    """Eq. 9: set in `out` the neighbours i - 1 .. i + 2 of bits with a score above a mean."""
    for run in range(low // RUN, (high + RUN - 1) // RUN):
        word = load_i64(bits + 8 * run)
        if word == 0:
            continue
        for bit in range(RUN):
            if (word >> bit) & 1:
                i = run * RUN + bit
                for j in range(max(low, i - 1), min(high, i + 3)):
                    above = load_f32(ver + 4 * j) > mean_ver
                    if above or load_f32(sla + 4 * (pos - j)) > mean_sla:
                        _set_bit(out, j)


@njit
def _keep_best(scores, order, count, limit):
    """Move the best `limit` of the scores and their positions to the front, in order; count."""
    if count <= limit:
        return count
    bar = threshold(scores, 0, count, limit)
    ties = limit
    for i in range(count):
        ties -= ordered(load_f32(scores + 4 * i)) > bar
    n = 0
    for i in range(count):
        score, position = load_f32(scores + 4 * i), load_i32(order + 4 * i)
        at = ordered(score)
        if at > bar or (at == bar and ties > 0):
            store_f32(scores + 4 * n, score)
            store_i32(order + 4 * n, position)
            n += 1
        if at == bar:
            ties -= 1
    return n


@njit
def _update(ver, sla, bounds_ver, bounds_sla, stats, scores, order, count, pos, decay):
    """Eq. 10: decay both tables and add w - 1 / (2 count) on the chosen positions."""
    scale = load_f64(stats + LFPS_STATS.scale) * decay
    store_f64(stats + LFPS_STATS.scale, scale)
    top, total = -NEVER, np.float64(0)
    for i in range(count):
        top = max(top, load_f32(scores + 4 * i))
    for i in range(count):
        total += np.float64(np.exp(load_f32(scores + 4 * i) - top))
    for i in range(count):
        weight = np.float64(np.exp(load_f32(scores + 4 * i) - top)) / total
        gain = np.float32((weight - 0.5 / count) / scale)
        j = load_i32(order + 4 * i)
        _learn(ver, bounds_ver, stats + LFPS_STATS.ver, j, gain)
        _learn(sla, bounds_sla, stats + LFPS_STATS.sla, pos - j, gain)


def _global_logit(head_dim: int) -> Any:
    """log(w_global) of Eq. 5: what all keys weigh if their logits are normally distributed."""

    @njit
    def global_logit(query, mean_key, spread, n_kv, scale):
        norm = _norm(query, head_dim)
        centre = np.float64(dot_float(query, mean_key, head_dim)) * scale
        return centre + norm * spread / 2 + math.log(np.float64(n_kv))

    return global_logit


def _is_sparse(head_dim: int) -> Any:
    """Whether the sinks weigh more than epsilon of sinks, nearest keys and all others (Eq. 6)."""

    @njit
    def is_sparse(query, k_pages, k_table, n_head_kv, h, n_kv, n_sink, w_global, epsilon, scale):
        # All weights are relative to exp(w_global): only the two sums can overflow, to infinity.
        sinks, near = np.float64(0), np.float64(0)
        for j in range(n_sink):
            key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
            sinks += np.exp(np.float64(dot_half(query, key, head_dim) * scale) - w_global)
        for j in range(max(n_sink, n_kv - N_NEAR), n_kv):
            key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
            near += np.exp(np.float64(dot_half(query, key, head_dim) * scale) - w_global)
        return sinks > epsilon * (sinks + 1.0 + near)

    return is_sparse


def lfps_sets(head_dim: int) -> Any:
    """Kernel of LFPS_SETS: threads take heads in turn."""
    global_logit, is_sparse = _global_logit(head_dim), _is_sparse(head_dim)

    @njit
    def score(query, k_pages, k_table, n_head_kv, h, bits, low, high, scores, order, scale):
        """The exact logits of the positions whose bits are set, ascending; how many."""
        count = 0
        for run in range(low // RUN, (high + RUN - 1) // RUN):
            word = load_i64(bits + 8 * run)
            if word == 0:
                continue
            for bit in range(RUN):
                if (word >> bit) & 1:
                    j = run * RUN + bit
                    key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
                    store_f32(scores + 4 * count, dot_half(query, key, head_dim) * scale)
                    store_i32(order + 4 * count, j)
                    count += 1
        return count

    @njit
    def add(at, n):
        store_i64(at, load_i64(at) + n)

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, ver, sla, bounds, stats, meta, means, scores,
        order, bits, sets, counts, n_head, heads_per_kv, n_head_kv, capacity, set_capacity, n_sink,
        n_local, bypass, a_f, budget_f, epsilon_f, decay_f, scale_f,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        n_kv, low = pos + 1, n_sink
        high, n_run = max(low, n_kv - n_local), capacity // RUN
        limit = max(1, int(np.float64(budget_f) * n_kv))
        for head in range(tid, n_head, n_thread):
            h, query = head // heads_per_kv, q + 4 * head_dim * head
            own, out, n = meta + META * head, sets + 4 * set_capacity * head, 0
            add(own + LFPS_META.n_step, 1)
            add(own + LFPS_META.n_seen, n_kv)
            for j in range(min(n_sink, n_kv)):
                store_i32(out + 4 * n, j)
                n += 1
            sparse = False
            if high > low:
                by_pos, by_dist = ver + 4 * capacity * head, sla + 4 * capacity * head
                bounds_ver, state = bounds + 4 * n_run * head, stats + STATS * head
                bounds_sla = bounds + 4 * n_run * (n_head + head)
                row, found = scores + 4 * capacity * head, order + 4 * capacity * head
                if load_i64(own + LFPS_META.next) == pos:
                    _enter(by_pos, bounds_ver, high - 1)
                    _enter(by_dist, bounds_sla, pos - low)
                store_i64(own + LFPS_META.next, n_kv)
                if bypass != 0:
                    spread = load_f64(state + LFPS_STATS.spread)
                    mean_key = means + 8 * head_dim * head
                    w_global = global_logit(query, mean_key, spread, n_kv, scale_f)
                    sparse = is_sparse(
                        query, k_pages, k_table, n_head_kv, h, n_kv, n_sink, w_global,
                        np.float64(epsilon_f), scale_f,
                    )  # fmt: skip
                    add(own + LFPS_META.n_bypass, sparse)
                    add(own + LFPS_META.n_scanned, n_sink + N_NEAR)
                if not sparse:
                    n_mid, chosen = high - low, bits + 16 * n_run * head
                    expanded = chosen + 8 * n_run
                    for run in range(2 * n_run):
                        store_i64(chosen + 8 * run, 0)
                    mean_ver, bar = _mean_and_bar(state + LFPS_STATS.ver, n_mid, np.float64(a_f))
                    _gather(by_pos, bounds_ver, low, high, bar, chosen, 0)
                    mean_sla, bar = _mean_and_bar(state + LFPS_STATS.sla, n_mid, np.float64(a_f))
                    _gather(by_dist, bounds_sla, n_local, pos - low + 1, bar, chosen, pos)
                    _expand(chosen, expanded, low, high, pos, by_pos, by_dist, mean_ver, mean_sla)
                    count = score(
                        query, k_pages, k_table, n_head_kv, h, expanded, low, high, row, found,
                        scale_f,
                    )  # fmt: skip
                    add(own + LFPS_META.n_scanned, count)
                    count = _keep_best(row, found, count, limit)
                    for i in range(count):
                        store_i32(out + 4 * n, load_i32(found + 4 * i))
                        n += 1
                    _update(
                        by_pos, by_dist, bounds_ver, bounds_sla, state, row, found, count, pos,
                        np.float64(decay_f),
                    )  # fmt: skip
                    scale = load_f64(state + LFPS_STATS.scale)
                    if scale < SMALLEST_SCALE:
                        factor = np.float32(scale)
                        _rescale(by_pos, bounds_ver, state + LFPS_STATS.ver, low, high, factor)
                        _rescale(
                            by_dist, bounds_sla, state + LFPS_STATS.sla, n_local, pos - low + 1,
                            factor,
                        )  # fmt: skip
                        store_f64(state + LFPS_STATS.scale, 1.0)
            store_i64(own + LFPS_META.bypassed, sparse)
            for j in range(high, n_kv):
                store_i32(out + 4 * n, j)
                n += 1
            store_i32(counts + 4 * head, n)

    return kernel


def lfps_bypass(head_dim: int) -> Any:
    """Kernel of LFPS_BYPASS: threads take heads in turn."""
    global_logit = _global_logit(head_dim)

    def kernel(
        tid, n_thread, step, q, k_pages, k_table, stats, meta, means, sets, counts, scores, out,
        n_head, heads_per_kv, n_head_kv, set_capacity, bypass, scale_f,
    ):  # fmt: skip
        n_kv = load_i64(step + STEP.pos) + 1
        for head in range(tid, n_head, n_thread):
            if load_i64(meta + META * head + LFPS_META.bypassed) == 0:
                continue
            h, query, at = head // heads_per_kv, q + 4 * head_dim * head, out + 4 * head_dim * head
            mean_key = means + 8 * head_dim * head
            mean_value = mean_key + 4 * head_dim
            share = np.float32(1)  # of the mean value
            if bypass != 2:
                spread = load_f64(stats + STATS * head + LFPS_STATS.spread)
                w_global = global_logit(query, mean_key, spread, n_kv, scale_f)
                total = np.float64(0)
                for i in range(load_i32(counts + 4 * head)):
                    j = load_i32(sets + 4 * (set_capacity * head + i))
                    key = key_at(k_pages, k_table, n_head_kv, h, j, head_dim)
                    total += np.exp(np.float64(dot_half(query, key, head_dim) * scale_f) - w_global)
                share = np.float32(1.0 / (1.0 + total))
            for i in range(head_dim):
                kept = load_f32(at + 4 * i)
                store_f32(at + 4 * i, kept + share * (load_f32(mean_value + 4 * i) - kept))

    return kernel
