"""Ops of early token freezing: rows that a layer leaves as they are."""

from typing import Any

from tamis.jit_kernels.cpu.intrinsic import load_f32, load_i32, load_i64, store_f32
from tamis.jit_kernels.cpu.simd import LANES, load_f, load_half, store_f, store_half
from tamis.jit_kernels.ops import STEP
from tamis.jit_kernels.types import PAGE


def copy_rows() -> Any:
    """Kernel of COPY_ROWS: threads take rows in turn."""

    def kernel(tid, n_thread, rows, source, target, n):
        whole = n // LANES * LANES
        for t in range(load_i64(rows) + tid, load_i64(rows + 8), n_thread):
            from_, to = source + 4 * n * t, target + 4 * n * t
            for i in range(0, whole, LANES):
                store_f(to + 4 * i, load_f(from_ + 4 * i))
            for i in range(whole, n):
                store_f32(to + 4 * i, load_f32(from_ + 4 * i))

    return kernel


def copy_kv(head_dim: int) -> Any:
    """Kernel of COPY_KV: threads take positions in turn."""
    size = 2 * head_dim

    def kernel(
        tid, n_thread, step, rows, k_from, v_from, k_from_table, v_from_table, k_to, v_to,
        k_to_table, v_to_table, n_head_kv,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        for j in range(pos + load_i64(rows) + tid, pos + load_i64(rows + 8), n_thread):
            for from_, from_table, to, to_table in (
                (k_from, k_from_table, k_to, k_to_table),
                (v_from, v_from_table, v_to, v_to_table),
            ):
                at, line = 4 * (j // PAGE), j % PAGE
                for h in range(n_head_kv):
                    a = from_ + size * ((load_i32(from_table + at) * n_head_kv + h) * PAGE + line)
                    b = to + size * ((load_i32(to_table + at) * n_head_kv + h) * PAGE + line)
                    for d in range(0, size, 2 * LANES):
                        store_half(b + d, load_half(a + d))

    return kernel
