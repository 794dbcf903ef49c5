"""Ops of early token freezing: rows that a layer leaves as they are."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.kv.kv_rows import row_at, rows_of_type
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, load_f, store_f


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


def copy_kv(head_dim: int, type_k: str, type_v: str) -> Any:
    """Kernel of COPY_KV: threads take positions in turn."""
    copy_k, copy_v = (rows_of_type(type, head_dim).copy for type in (type_k, type_v))

    def kernel(
        tid, n_thread, step, rows, k_from, v_from, k_from_table, v_from_table, k_to, v_to,
        k_to_table, v_to_table, n_head_kv,
    ):  # fmt: skip
        pos = load_i64(step + STEP.pos)
        for j in range(pos + load_i64(rows) + tid, pos + load_i64(rows + 8), n_thread):
            for h in range(n_head_kv):
                k_row, v_row = (
                    row_at(k_from_table, n_head_kv, h, j),
                    row_at(v_from_table, n_head_kv, h, j),
                )
                copy_k(k_from, k_row, k_to, row_at(k_to_table, n_head_kv, h, j))
                copy_v(v_from, v_row, v_to, row_at(v_to_table, n_head_kv, h, j))

    return kernel
