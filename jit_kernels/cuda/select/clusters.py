"""Ops that split clusters into zones, and estimate attention to clusters by their means."""

import math

from numba import cuda, float32, int32

from tamis.jit_kernels.contract.ops.select.clusters import NO_WEIGHT
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, LOWEST
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading_one, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_before,
    lane,
    most_of,
    sync_block,
    thread,
    total_of,
    warp,
)
from tamis.jit_kernels.cuda.lang.intrinsic import address, device, int64, load_i32, quotient
from tamis.jit_kernels.cuda.lang.ptx import exp2, or_i64

NONE = 0x7F800000  # more than the bits of any share


def cluster_values(head_dim: int, type_k: str, type_v: str) -> list[Launch]:
    """Kernel of CLUSTER_VALUES: warps stride over clusters, lanes over elements."""
    size, read = row_bytes(type_v, head_dim), reading_one(type_v, head_dim)

    def kernel(tid, n_thread, a):
        first = quotient(max(0, a.extent[0] - a.n_sink), a.per_cluster)
        begin, end = first * a.n_head_kv, a.extent[2] * a.n_head_kv
        for item in range(begin + tid * WARPS + warp(), end, n_thread * WARPS):
            h, c = item % a.n_head_kv, item // a.n_head_kv
            low, high = a.starts[h, c], a.starts[h, c + 1]
            for d in range(lane(), head_dim, WARP):
                total = float32(0)
                for s in range(low, high):
                    row = key_row(a.v_table, a.n_head_kv, h, a.order[h, s])
                    total += read(a.v_pages + size * row, d)
                a.values[h, c, d] = total / float32(max(1, high - low))

    return [Launch(kernel, blocks=2)]


@device
def counted(a, h, c):
    """By what a cluster's exponential is multiplied."""
    members = a.starts[h, c + 1] - a.starts[h, c]
    return float32(members if a.by_share == 1 else min(1, members))


@device
def part_of(a, head, c, top):
    """The exponential of a head's score of a cluster."""
    x = float32(a.scores[head, c] * a.scale) - top
    return exp2(float32(x * float32(LOG2_E)))


def cluster_zones(group: int) -> list[Launch]:
    """Kernel of CLUSTER_ZONES: blocks stride over KV heads."""

    @device
    def find_top(a, h, g, n, parts):
        """Find the largest score of a head, and what its exponentials are multiplied by."""
        head, top, total = group * h + g, float32(LOWEST), float32(0)
        for c in range(thread(), n, THREADS):
            top = max(top, float32(a.scores[head, c] * a.scale))
        top = most_of(top, parts)
        for c in range(thread(), n, THREADS):
            total += part_of(a, head, c, top) * counted(a, h, c)
        total = total_of(total, parts)
        if thread() == 0:
            a.tops[head, 0] = top
            above = total > float32(0)
            a.tops[head, 1] = float32(1) / (float32(group) * total) if above else float32(0)

    @device
    def write_shares(a, h, n, parts):
        """Write the shares of the clusters, and return their sum, or the number of clusters."""
        total = float32(0)
        for c in range(thread(), n, THREADS):
            share = float32(0)
            for g in range(group):
                head = group * h + g
                share += part_of(a, head, c, a.tops[head, 0]) * a.tops[head, 1]
            share = float32(share * counted(a, h, c))
            a.shares[h, c] = share
            total += share
        total = total_of(total, parts)
        return total if a.by_share == 1 else float32(n)

    @device
    def bar_of(a, h, n, need, parts):
        """The largest bits of a share with which the clusters reach `need`."""
        shares, low, high = address(a.shares[h]), 1, NONE
        while low + 1 < high:
            middle, found = (low + high) // 2, float32(0)
            for c in range(thread(), n, THREADS):
                if load_i32(shares + 4 * c) >= middle:
                    found += a.shares[h, c] if a.by_share == 1 else float32(1)
            if total_of(found, parts) >= need:
                low = middle
            else:
                high = middle
        return low

    @device
    def mark(a, h, n, bar, parts):
        """Mark the positions of the clusters that are read, and count them."""
        shares, marks, mine = address(a.shares[h]), address(a.marks[h]), 0
        for word in range(thread(), a.n_word, THREADS):
            a.marks[h, word] = 0
        sync_block()
        for c in range(thread(), n, THREADS):
            if load_i32(shares + 4 * c) >= bar:
                for s in range(a.starts[h, c], a.starts[h, c + 1]):
                    j = a.order[h, s]
                    or_i64(marks + 8 * (j // 64), int64(1) << int64(j % 64))
                mine += a.starts[h, c + 1] - a.starts[h, c]
        total = block_before(int32(mine), parts)[1]
        if thread() == 0:
            a.count[h] = total

    def kernel(tid, n_thread, a):
        sums, parts = cuda.shared.array(WARPS, float32), cuda.shared.array(WARPS, int32)
        n = a.extent[2]
        for h in range(tid, a.n_head_kv, n_thread):
            for g in range(group):
                find_top(a, h, g, n, sums)
            sync_block()
            total = write_shares(a, h, n, sums)
            sync_block()
            exact, both = NONE, NONE
            if a.exact > 0.0:
                exact = bar_of(a, h, n, float32(a.exact) * total, sums)
            if a.both > 0.0:
                both = bar_of(a, h, n, float32(a.both) * total, sums)
            if thread() == 0:
                a.bars[h, 0], a.bars[h, 1] = exact, both
            mark(a, h, n, exact, parts)

    return [Launch(kernel)]


def cluster_estimate(head_dim: int, group: int) -> list[Launch]:
    """Kernel of CLUSTER_ESTIMATE: blocks stride over heads, their threads over elements."""

    @device
    def logit(a, h, head, c):
        """The logit of an estimated cluster; LOWEST of another one."""
        bits = load_i32(address(a.shares[h]) + 4 * c)
        if bits < a.bars[h, 1] or bits >= a.bars[h, 0]:
            return float32(LOWEST)
        members = float32(a.starts[h, c + 1] - a.starts[h, c])
        return float32(a.scores[head, c] * a.scale + math.log(members))

    def kernel(tid, n_thread, a):
        sums, weights = cuda.shared.array(WARPS, float32), cuda.shared.array(THREADS, float32)
        n = a.extent[2]
        for head in range(tid, a.n_head, n_thread):
            h, top, total = quotient(head, group), float32(LOWEST), float32(0)
            for c in range(thread(), n, THREADS):
                top = max(top, logit(a, h, head, c))
            top = most_of(top, sums)
            first, second = float32(0), float32(0)  # elements thread() and thread() + THREADS
            for begin in range(0, n, THREADS):
                c = begin + thread()
                x = logit(a, h, head, c) if c < n else float32(LOWEST)
                some = x > float32(LOWEST)
                weight = exp2(float32((x - top) * float32(LOG2_E))) if some else float32(0)
                sync_block()  # the span before may still be read
                weights[thread()] = weight
                total += weight
                sync_block()
                for i in range(min(THREADS, n - begin)):
                    if weights[i] > float32(0):
                        if thread() < head_dim:
                            first += weights[i] * a.values[h, begin + i, thread()]
                        if thread() + THREADS < head_dim:
                            second += weights[i] * a.values[h, begin + i, thread() + THREADS]
            total = total_of(total, sums)
            part = float32(1) / total if total > float32(0) else float32(0)
            if thread() < head_dim:
                a.out[0, head, thread()] = first * part
            if thread() + THREADS < head_dim:
                a.out[0, head, thread() + THREADS] = second * part
            if thread() == 0:
                above = total > float32(0)
                a.lse[0, head] = top + math.log(total) if above else float32(NO_WEIGHT)

    return [Launch(kernel)]
