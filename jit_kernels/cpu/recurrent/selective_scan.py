"""The selective scan of Mamba: a few state numbers per channel."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    broadcast_f,
    fma,
    lane,
    load_f,
    splat_f,
    store_f,
    vexp,
)
from tamis.jit_kernels.cpu.recurrent.channels import channels


def selective_scan(n_state: int) -> Any:
    """Kernel of SELECTIVE_SCAN: threads share the channels, one a lane."""

    def kernel(tid, n_thread, a):
        n_tok = load_i64(a.step + STEP.n_tok)
        first, whole, last = channels(tid, n_thread, a.n)
        for i in range(4 * first, 4 * whole, 4 * LANES):
            for t in range(n_tok):
                row, mixed = 4 * a.n * t + i, 4 * a.bc_stride * t
                value, rate = load_f(a.x + row), load_f(a.dt + row)
                total, drive = load_f(a.d + i) * value, rate * value
                for s in range(n_state):
                    at = a.state + 4 * a.n * s + i
                    kept = vexp(rate * load_f(a.a + 4 * a.n * s + i)) * load_f(at)
                    new = fma(drive, broadcast_f(a.b + mixed + 4 * s), kept)
                    store_f(at, new)
                    total = fma(new, broadcast_f(a.c + mixed + 4 * s), total)
                store_f(a.y + row, total)
        for i in range(4 * whole, 4 * last, 4):
            for t in range(n_tok):
                row, mixed = 4 * a.n * t + i, 4 * a.bc_stride * t
                one, pace = load_f32(a.x + row), load_f32(a.dt + row)
                out = load_f32(a.d + i) * one
                for s in range(n_state):
                    at = a.state + 4 * a.n * s + i
                    kept_one = lane(vexp(splat_f(pace * load_f32(a.a + 4 * a.n * s + i))), 0)
                    entry = load_f32(at) * kept_one + pace * one * load_f32(a.b + mixed + 4 * s)
                    store_f32(at, entry)
                    out += entry * load_f32(a.c + mixed + 4 * s)
                store_f32(a.y + row, out)

    return kernel
