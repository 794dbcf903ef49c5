"""Encoding of weights in quantized types, for files that are made here."""

from tamis.jit_kernels.contract.arrays import F32, U8
from tamis.jit_kernels.contract.op import Address, Out, op

# The types that ENCODE writes.
ENCODED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip
ENCODE_LANES = 16  # blocks that are encoded in parallel, at most
# Bytes of a thread: values, weights and levels of such blocks, and numbers of their parts.
ENCODE_SCRATCH = 4 * ENCODE_LANES * (3 * 256 + 6 * 16)


class Encode:
    """Rows of float32 in a ggml type, as llama.cpp's reference encodes them, bit for bit.

    weighted: 1 where errors count by `importance`, which llama.cpp calls an importance matrix: the
    mean square of what each column is multiplied with.
    """

    x: F32["n_row", "n"]
    importance: F32["n"] | None
    rows: Out[U8["n_row", "n_byte"]]
    scratch: Out[Address]  # n_thread * ENCODE_SCRATCH bytes


ENCODE = op("linear.encode", Encode, "type weighted")
