"""Ops of `tail` that only write a few numbers for each row, unit or head."""

import math
from typing import Any

from tamis.jit_kernels.contract.op import POS
from tamis.jit_kernels.contract.ops.select.tail import READ_ALL

MOST = 1e30  # of a sum of scores: beyond it chances are equal
# Of random numbers: a hash whose products stay below 2^63, in Python as in kernels.
START, FACTOR, WORD = 0x9E3779B9, 0x45D9F3B, 0xFFFFFFFF
ROWS, LAST = 65536, 4096  # more than a layer has rows, and a row units


def tail_plan() -> Any:
    """Kernel of TAIL_PLAN: a worker takes a row."""

    def kernel(worker, n_worker, a):
        n_unit = (a.step[POS] + a.unit) // a.unit
        for r in range(worker, a.n_row, n_worker):
            need, n_left, total = a.needs[r], 0, 0.0
            for u in range(n_unit):
                n_left += a.left[r, u]
                total += a.left[r, u] * a.scores[r, u]
            even = a.even if 0.0 < total < MOST else 1.0
            each = 1.0 if need == READ_ALL else need * even / max(1, n_left)
            per = 0.0 if need == READ_ALL or even == 1.0 else need * (1.0 - even) / total
            a.rates[r, 0], a.rates[r, 1] = each, per
            x = START
            for word in (a.seed, a.layer * ROWS + r, a.step[POS], LAST):
                x = (x + word) & WORD
                x = (x ^ x >> 16) * FACTOR & WORD
                x = (x ^ x >> 16) * FACTOR & WORD
            run, before, count = (x ^ x >> 16) * 2.0**-32, 0, 0
            for u in range(n_unit):
                a.starts[r, u] = count
                some, chance = a.left[r, u], min(1.0, each + per * a.scores[r, u])
                if chance >= 1.0:
                    count += some
                    continue
                run += chance * some
                count += min(some, int(run) - before)
                before = int(run)
            for u in range(n_unit, a.n_unit + 1):
                a.starts[r, u] = count

    return kernel


def tail_draw() -> Any:
    """Kernel of TAIL_DRAW: a worker takes a unit of a row."""

    def kernel(worker, n_worker, a):
        n_unit = (a.step[POS] + a.unit) // a.unit
        for item in range(worker, a.n_row * n_unit, n_worker):
            r, u = item // n_unit, item % n_unit
            to = 0
            for before in range(r):
                to += a.starts[before, n_unit]
            if u == 0:
                a.indptr[r + 1] = to + a.starts[r, n_unit]
                if r == 0:
                    a.indptr[0] = 0
            n, some = a.starts[r, u + 1] - a.starts[r, u], a.left[r, u]
            if n == 0:
                continue
            to += a.starts[r, u]
            chance = min(1.0, a.rates[r, 0] + a.rates[r, 1] * a.scores[r, u])
            x = START
            for word in (a.seed, a.layer * ROWS + r, a.step[POS], u):
                x = (x + word) & WORD
                x = (x ^ x >> 16) * FACTOR & WORD
                x = (x ^ x >> 16) * FACTOR & WORD
            start = (x ^ x >> 16) * 2.0**-32
            # The first block that ends after the unit's first position.
            s, end = a.chosen[r], a.chosen[r + 1]
            high = end
            while s < high:
                middle = (s + high) // 2
                if (a.blocks[middle] + 1) * a.block > u * a.unit:
                    high = middle
                else:
                    s = middle + 1
            j, passed = u * a.unit, 0  # of the positions left out
            for i in range(n):
                nth = min(some - 1, int((i + start) * some / n))
                while s < end:
                    first = a.blocks[s] * a.block
                    free = max(0, first - j)
                    if passed + free > nth:
                        break
                    passed += free
                    j = max(j, first + a.block)
                    s += 1
                a.indices[to + i] = j + nth - passed
                a.log_weight[to + i] = -math.log(chance)

    return kernel


def tail_merge() -> Any:
    """Kernel of TAIL_MERGE: a worker takes a head."""

    def kernel(worker, n_worker, a):
        for h in range(worker, a.n_head, n_worker):
            kept, sampled = a.kept_lse[0, h], a.sampled_lse[0, h]
            top = max(kept, sampled)
            w_kept, w_sampled = math.exp(kept - top), math.exp(sampled - top)
            total = w_kept + w_sampled
            for d in range(a.head_dim):
                x = w_kept * a.kept[0, h, d] + w_sampled * a.sampled[0, h, d]
                a.out[0, h, d] = x / total
            a.lse[0, h] = top + math.log(total)

    return kernel
