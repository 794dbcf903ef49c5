"""Token embeddings: rows of the table, decoded and scaled."""

from typing import Any

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32
from tamis.jit_kernels.cpu.linear.dequant import decode_of, row_bytes_of


def embed(type: str) -> Any:
    """Kernel of EMBED: each thread decodes whole rows."""
    decode, row_bytes = decode_of(type), row_bytes_of(type)

    def kernel(tid, n_thread, step, ids, table, y, n, scale_f):
        size = row_bytes(n)
        for t in range(tid, load_i64(step + STEP.n_tok), n_thread):
            row = y + 4 * n * t
            decode(table + size * load_i32(ids + 4 * t), n, row)
            for i in range(n):
                store_f32(row + 4 * i, load_f32(row + 4 * i) * scale_f)

    return kernel
