"""Early token freezing: copies the rows and the K and V of tokens that a layer skips."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.kv.kv_rows import row_at, rows_of_type
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cpu.lang.simd import LANES, load_f, store_f


def copy_rows() -> Any:
    """Kernel of COPY_ROWS: threads stride over rows."""

    def kernel(tid, n_thread, a):
        whole = a.n // LANES * LANES
        for t in range(load_i64(a.rows) + tid, load_i64(a.rows + 8), n_thread):
            from_, to = a.source + 4 * a.n * t, a.target + 4 * a.n * t
            for i in range(0, whole, LANES):
                store_f(to + 4 * i, load_f(from_ + 4 * i))
            for i in range(whole, a.n):
                store_f32(to + 4 * i, load_f32(from_ + 4 * i))

    return kernel


def copy_kv(head_dim: int, type_k: str, type_v: str) -> Any:
    """Kernel of COPY_KV: threads stride over positions."""
    copy_k, copy_v = (rows_of_type(type, head_dim).copy for type in (type_k, type_v))

    def kernel(tid, n_thread, a):
        pos = load_i64(a.step + STEP.pos)
        for j in range(pos + load_i64(a.rows) + tid, pos + load_i64(a.rows + 8), n_thread):
            for h in range(a.n_head_kv):
                k_row = row_at(a.k_from_table, a.n_head_kv, h, j)
                v_row = row_at(a.v_from_table, a.n_head_kv, h, j)
                copy_k(a.k_from, k_row, a.k_to, row_at(a.k_to_table, a.n_head_kv, h, j))
                copy_v(a.v_from, v_row, a.v_to, row_at(a.v_to_table, a.n_head_kv, h, j))

    return kernel
