"""Early token freezing: copies the rows and the K and V of tokens that a layer skips."""

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.kv.kv_rows import copying, key_row, row_bytes
from tamis.jit_kernels.cuda.lang.grid import THREADS, WARPS, Launch, thread, warp
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32


def copy_rows() -> list[Launch]:
    """Kernel of COPY_ROWS."""

    def kernel(tid, n_thread, a):
        first, end = load_i64(a.rows) * a.n, load_i64(a.rows + 8) * a.n
        for i in range(first + tid * THREADS + thread(), end, n_thread * THREADS):
            store_f32(a.target + 4 * i, load_f32(a.source + 4 * i))

    return [Launch(kernel, blocks=4)]


def copy_kv(head_dim: int, type_k: str, type_v: str) -> list[Launch]:
    """Kernel of COPY_KV: warps stride over heads of positions."""
    k_bytes, v_bytes = row_bytes(type_k, head_dim), row_bytes(type_v, head_dim)
    copy_k, copy_v = copying(type_k, head_dim), copying(type_v, head_dim)

    def kernel(tid, n_thread, a):
        first = load_i64(a.step + STEP.pos) + load_i64(a.rows)
        n = (load_i64(a.rows + 8) - load_i64(a.rows)) * a.n_head_kv
        for item in range(tid * WARPS + warp(), n, n_thread * WARPS):
            j, h = first + item // a.n_head_kv, item % a.n_head_kv
            k = key_row(a.k_from_table, a.n_head_kv, h, j)
            v = key_row(a.v_from_table, a.n_head_kv, h, j)
            to_k = key_row(a.k_to_table, a.n_head_kv, h, j)
            to_v = key_row(a.v_to_table, a.n_head_kv, h, j)
            copy_k(a.k_from + k_bytes * k, a.k_to + k_bytes * to_k)
            copy_v(a.v_from + v_bytes * v, a.v_to + v_bytes * to_v)

    return [Launch(kernel, blocks=4)]
