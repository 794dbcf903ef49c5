"""The rates that bound all kernels: memory read in order, and multiply-adds in registers."""

from typing import Any

from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, hsum, load_f, splat_f, zero_f

UNIT = 8 * LANES  # float32s of a round of reads: eight sums, so that no addition waits for one


def read_rate() -> Any:
    """Kernel of READ_RATE: each thread sums a range of whole units."""

    def kernel(tid, n_thread, a):
        n_unit, size = a.n // UNIT, 4 * LANES
        first, last = n_unit * tid // n_thread, n_unit * (tid + 1) // n_thread
        b, c, d, e = zero_f(), zero_f(), zero_f(), zero_f()
        f, g, h, i = zero_f(), zero_f(), zero_f(), zero_f()
        for unit in range(first, last):
            at = a.x + 4 * UNIT * unit
            b, c = b + load_f(at), c + load_f(at + size)
            d, e = d + load_f(at + 2 * size), e + load_f(at + 3 * size)
            f, g = f + load_f(at + 4 * size), g + load_f(at + 5 * size)
            h, i = h + load_f(at + 6 * size), i + load_f(at + 7 * size)
        store_f32(a.y + 4 * tid, hsum(((b + c) + (d + e)) + ((f + g) + (h + i))))

    return kernel


def fma_rate() -> Any:
    """Kernel of FMA_RATE: ten chains, more than any CPU's latency times its units."""

    def kernel(tid, n_thread, a):
        half, start = splat_f(0.5), splat_f(load_f32(a.y + 4 * tid))
        b, c, d, e, f = start, start + half, start - half, start * half, half - start
        g, h, i, j, k = c + half, d + half, e + half, f + half, c + c
        for _ in range(a.n // (10 * LANES)):
            b, c, d = fma(b, half, half), fma(c, half, half), fma(d, half, half)
            e, f, g = fma(e, half, half), fma(f, half, half), fma(g, half, half)
            h, i, j = fma(h, half, half), fma(i, half, half), fma(j, half, half)
            k = fma(k, half, half)
        total = hsum(((b + c) + (d + e)) + ((f + g) + (h + i)) + (j + k))
        store_f32(a.y + 4 * tid, total / (10 * LANES))

    return kernel
