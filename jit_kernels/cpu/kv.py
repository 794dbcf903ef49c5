"""Writing new keys and values to their pages."""

from typing import Any

from tamis.jit_kernels.cpu.intrinsic import load_f32, load_i32, load_i64, store_f16
from tamis.jit_kernels.ops import STEP
from tamis.jit_kernels.types import PAGE


def kv_append(head_dim: int) -> Any:
    """Kernel of KV_APPEND: each thread takes whole tokens."""

    def kernel(tid, n_thread, step, k, v, k_pages, v_pages, k_table, v_table, n_head_kv):
        pos = load_i64(step + STEP.pos)
        for t in range(tid, load_i64(step + STEP.n_tok), n_thread):
            page, line = (pos + t) // PAGE, (pos + t) % PAGE
            for h in range(n_head_kv):
                source = 4 * head_dim * (n_head_kv * t + h)
                k_row = (load_i32(k_table + 4 * page) * n_head_kv + h) * PAGE + line
                v_row = (load_i32(v_table + 4 * page) * n_head_kv + h) * PAGE + line
                for i in range(head_dim):
                    store_f16(k_pages + 2 * (head_dim * k_row + i), load_f32(k + source + 4 * i))
                    store_f16(v_pages + 2 * (head_dim * v_row + i), load_f32(v + source + 4 * i))

    return kernel
