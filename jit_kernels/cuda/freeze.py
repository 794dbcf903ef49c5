"""Ops of early token freezing: rows that a layer leaves as they are."""

from tamis.jit_kernels.cuda.grid import THREADS, WARP, WARPS, Launch, lane, thread, warp
from tamis.jit_kernels.cuda.intrinsic import load_f32, load_i64, store_f16, store_f32
from tamis.jit_kernels.cuda.readers import const_f16
from tamis.jit_kernels.cuda.select import key_row
from tamis.jit_kernels.ops import STEP


def copy_rows() -> list[Launch]:
    """Kernel of COPY_ROWS."""

    def kernel(tid, n_thread, rows, source, target, n):
        first, end = load_i64(rows) * n, load_i64(rows + 8) * n
        for i in range(first + tid * THREADS + thread(), end, n_thread * THREADS):
            store_f32(target + 4 * i, load_f32(source + 4 * i))

    return [Launch(kernel, blocks=4)]


def copy_kv(head_dim: int, type_k: str, type_v: str) -> list[Launch]:
    """Kernel of COPY_KV, of float16: warps take heads of positions in turn."""
    assert type_k == type_v == "f16"

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
            for d in range(2 * lane(), 2 * head_dim, 2 * WARP):
                store_f16(k_to + 2 * head_dim * to_k + d, const_f16(k_from + 2 * head_dim * k + d))
                store_f16(v_to + 2 * head_dim * to_v + d, const_f16(v_from + 2 * head_dim * v + d))

    return [Launch(kernel, blocks=4)]
