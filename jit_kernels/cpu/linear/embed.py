"""Token embeddings: rows of the table, decoded and scaled."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32
from tamis.jit_kernels.cpu.linear.dequant import decode_of, row_bytes_of


def embed(type: str) -> Any:
    """Kernel of EMBED: each thread decodes whole rows."""
    decode, row_bytes = decode_of(type), row_bytes_of(type)

    def kernel(tid, n_thread, a):
        size = row_bytes(a.n)
        for t in range(tid, load_i64(a.step + STEP.n_tok) * a.n_id, n_thread):
            row = a.y + 4 * a.n * t
            decode(a.table + size * load_i32(a.ids + 4 * t), a.n, row)
            for i in range(a.n):
                store_f32(row + 4 * i, load_f32(row + 4 * i) * a.scale)

    return kernel
