"""Twilight's ops: weights of chosen positions, and the fewest of them that reach a share."""

from numba import cuda, float32, int32, uint8, uint32

from tamis.jit_kernels.contract.op import POS
from tamis.jit_kernels.contract.ops import TILE
from tamis.jit_kernels.contract.ops.select.twilight import ROUNDS
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, LOWEST
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARPS,
    Launch,
    block_before,
    most_of,
    sync_block,
    thread,
    total_of,
)
from tamis.jit_kernels.cuda.lang.intrinsic import address, device, load_f32, load_i32, quotient
from tamis.jit_kernels.cuda.lang.ptx import exp2, load_shared, shared_address


@device
def entry(a, r, i):
    """The number of the Selection's entry that holds the i-th position of a row."""
    return load_i32(a.indptr + 4 * r) + quotient(i, a.block)


@device
def position(a, r, i):
    """The i-th position of a row."""
    within = i - quotient(i, a.block) * a.block
    return load_i32(a.indices + 4 * entry(a, r, i)) * a.block + within


@device
def seen(a, r):
    """How many positions of a row are not after the query's."""
    n = (load_i32(a.indptr + 4 * r + 4) - load_i32(a.indptr + 4 * r)) * a.block
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if position(a, r, middle) <= a.step[POS]:
            low = middle + 1
        else:
            high = middle
    return low


def twilight_weigh(head_dim: int, group: int, type_k: str) -> list[Launch]:
    """Kernel of TWILIGHT_WEIGH: blocks stride over spans of each row's positions."""
    size = row_bytes(type_k, head_dim)

    @device
    def key_at(keys, i):
        a, r, n = keys
        if i >= n:
            return 0
        h = quotient(r * group, a.heads_per_kv)
        return a.k_pages + size * key_row(a.k_table, a.n_head_kv, h, position(a, r, i))

    stage = staging(head_dim, group, key_at, type_k)

    def kernel(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        n_span = quotient(a.n_tile * TILE + SPAN - 1, SPAN)
        for item in range(tid, n_span * a.n_row, n_thread):
            r, start = item % a.n_row, quotient(item, a.n_row) * SPAN
            n = seen(a, r)
            if start >= n:
                continue
            stage(shared, address(a.q[0, r * group]), group, (a, r, n), start)
            i = start + thread()
            if i < n:
                for g in range(group):
                    x = load_shared(uint32(shared + ROW * g + 4 * thread()))
                    a.logits[r, i // TILE, g, i % TILE] = x
            sync_block()  # before the next span's products overwrite what is read here

    return [Launch(kernel, blocks=2 if head_dim <= 128 else 1, shared=ROW * group)]


def twilight_prune(group: int) -> list[Launch]:
    """Kernel of TWILIGHT_PRUNE: blocks stride over rows."""

    @device
    def weigh(a, r, g, n, parts):
        """Make weights of a head's n logits, the largest one 1, and return their sum."""
        top, total = float32(LOWEST), float32(0)
        for i in range(thread(), n, THREADS):
            x = a.logits[r, i // TILE, g, i % TILE] * float32(a.scale)
            if a.log_weight != 0:
                x += load_f32(a.log_weight + 4 * entry(a, r, i))
            a.logits[r, i // TILE, g, i % TILE] = x
            top = max(top, x)
        top = most_of(top, parts)
        for i in range(thread(), n, THREADS):
            x = a.logits[r, i // TILE, g, i % TILE] - top
            weight = exp2(float32(x * float32(LOG2_E)))
            a.logits[r, i // TILE, g, i % TILE] = weight
            total += weight
        return total_of(total, parts)

    @device
    def bar_of(a, r, g, n, parts):
        """A head's threshold."""
        need = float32(a.share) * weigh(a, r, g, n, parts)
        low, high = float32(0), float32(1)
        for _ in range(ROUNDS if a.share < 1.0 else 0):
            middle, total = float32(0.5) * (low + high), float32(0)
            for i in range(thread(), n, THREADS):
                x = a.logits[r, i // TILE, g, i % TILE]
                total += x if x >= middle else float32(0)
            if total_of(total, parts) >= need:
                low = middle
            else:
                high = middle
        return low

    def kernel(tid, n_thread, a):
        sums, parts = cuda.shared.array(WARPS, float32), cuda.shared.array(WARPS, int32)
        bars = cuda.shared.array(group, float32)
        for r in range(tid, a.n_row, n_thread):
            n, count = seen(a, r), 0
            for g in range(group):
                bar = bar_of(a, r, g, n, sums)
                if thread() == 0:
                    bars[g] = bar
            sync_block()
            for first in range(0, n, THREADS):
                i, needed = first + thread(), 0
                if i < n:
                    for g in range(group):
                        needed |= 1 if a.logits[r, i // TILE, g, i % TILE] >= bars[g] else 0
                before, total = block_before(int32(needed), parts)
                if needed == 1:
                    a.sets[r, count + before] = position(a, r, i)
                    if a.log_weight != 0:
                        a.weights[r, count + before] = load_f32(a.log_weight + 4 * entry(a, r, i))
                count += total
            if thread() == 0:
                a.counts[r] = count
            sync_block()  # before the next row's thresholds overwrite what is read here

    return [Launch(kernel)]
