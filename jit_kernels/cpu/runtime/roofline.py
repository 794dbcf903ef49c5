"""The rates that bound all kernels: memory read in order, and multiply-adds in registers."""

from typing import Any

from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, fma, hsum, load_f, splat_f, zero_f

UNIT = 8 * LANES  # float32s of a round of reads: eight sums, so that no addition waits for one


def read_rate() -> Any:
    """Kernel of READ_RATE: each thread sums a range of whole units."""

    def kernel(tid, n_thread, x, y, n):
        n_unit, size = n // UNIT, 4 * LANES
        first, last = n_unit * tid // n_thread, n_unit * (tid + 1) // n_thread
        a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
        e, f, g, h = zero_f(), zero_f(), zero_f(), zero_f()
        for i in range(first, last):
            at = x + 4 * UNIT * i
            a, b = a + load_f(at), b + load_f(at + size)
            c, d = c + load_f(at + 2 * size), d + load_f(at + 3 * size)
            e, f = e + load_f(at + 4 * size), f + load_f(at + 5 * size)
            g, h = g + load_f(at + 6 * size), h + load_f(at + 7 * size)
        store_f32(y + 4 * tid, hsum(((a + b) + (c + d)) + ((e + f) + (g + h))))

    return kernel


def fma_rate() -> Any:
    """Kernel of FMA_RATE: ten chains, more than any CPU's latency times its units."""

    def kernel(tid, n_thread, y, n):
        half, start = splat_f(0.5), splat_f(load_f32(y + 4 * tid))
        a, b, c, d, e = start, start + half, start - half, start * half, half - start
        f, g, h, i, j = b + half, c + half, d + half, e + half, b + b
        for _ in range(n // (10 * LANES)):
            a, b, c = fma(a, half, half), fma(b, half, half), fma(c, half, half)
            d, e, f = fma(d, half, half), fma(e, half, half), fma(f, half, half)
            g, h, i = fma(g, half, half), fma(h, half, half), fma(i, half, half)
            j = fma(j, half, half)
        total = hsum(((a + b) + (c + d)) + ((e + f) + (g + h)) + (i + j))
        store_f32(y + 4 * tid, total / (10 * LANES))

    return kernel
