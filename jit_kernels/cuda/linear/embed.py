"""Token embeddings: rows of the table, decoded and scaled."""

from typing import Any

from numba import float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import (
    affine8,
    device,
    load_i32,
    load_i64,
    store_f32,
    store_f32x8,
)
from tamis.jit_kernels.cuda.linear.dequant import (
    bytes_of,
    element_of,
    is_quantised,
    quants_of,
    row_bytes_of,
)


def _decoding(type: str) -> Any:
    """The function decode(row, n, out, scale) of a block's threads."""
    if is_quantised(type):
        quants, bytes_f32 = quants_of(type), bytes_of(type)

        @device
        def decode(row, n, out, scale):
            for i in range(16 * thread(), n, 16 * THREADS):
                q, d, m = quants(row, i)
                low = affine8(bytes_f32(q[0], q[1]), d, m)
                high = affine8(bytes_f32(q[2], q[3]), d, m)
                store_f32x8(out + 4 * i, affine8(low, scale, float32(0)))
                store_f32x8(out + 4 * i + 32, affine8(high, scale, float32(0)))

        return decode
    element = element_of(type)

    @device
    def decode_floats(row, n, out, scale):
        for i in range(thread(), n, THREADS):
            store_f32(out + 4 * i, element(row, i) * scale)

    return decode_floats


def embed(type: str) -> list[Launch]:
    """Kernel of EMBED: each block decodes whole rows."""
    decode, row_bytes = _decoding(type), row_bytes_of(type)

    def kernel(tid, n_thread, a):
        for t in range(tid, load_i64(a.step + STEP.n_tok) * a.n_id, n_thread):
            row = a.table + row_bytes(a.n) * load_i32(a.ids + 4 * t)
            decode(row, a.n, a.y + 4 * a.n * t, a.scale)

    return [Launch(kernel)]
