"""Ops of early token freezing: rows that a layer leaves as they are."""

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.kv.kv_rows import copying, key_row, row_bytes
from tamis.jit_kernels.cuda.lang.grid import THREADS, WARPS, Launch, thread, warp
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32


def copy_rows() -> list[Launch]:
    """Kernel of COPY_ROWS."""

    def kernel(tid, n_thread, rows, source, target, n):
        first, end = load_i64(rows) * n, load_i64(rows + 8) * n
        for i in range(first + tid * THREADS + thread(), end, n_thread * THREADS):
            store_f32(target + 4 * i, load_f32(source + 4 * i))

    return [Launch(kernel, blocks=4)]


def copy_kv(head_dim: int, type_k: str, type_v: str) -> list[Launch]:
    """Kernel of COPY_KV: warps take heads of positions in turn."""
    k_bytes, v_bytes = row_bytes(type_k, head_dim), row_bytes(type_v, head_dim)
    copy_k, copy_v = copying(type_k, head_dim), copying(type_v, head_dim)

    def kernel(
        tid, n_thread, step, rows, k_from, v_from, k_from_table, v_from_table, k_to, v_to,
        k_to_table, v_to_table, n_head_kv,
    ):  # fmt: skip
        first = load_i64(step + STEP.pos) + load_i64(rows)
        n = (load_i64(rows + 8) - load_i64(rows)) * n_head_kv
        for item in range(tid * WARPS + warp(), n, n_thread * WARPS):
            j, h = first + item // n_head_kv, item % n_head_kv
            k, v = key_row(k_from_table, n_head_kv, h, j), key_row(v_from_table, n_head_kv, h, j)
            to_k, to_v = key_row(k_to_table, n_head_kv, h, j), key_row(v_to_table, n_head_kv, h, j)
            copy_k(k_from + k_bytes * k, k_to + k_bytes * to_k)
            copy_v(v_from + v_bytes * v, v_to + v_bytes * to_v)

    return [Launch(kernel, blocks=4)]
