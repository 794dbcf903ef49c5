"""Random quantized weights, packed rows and the error that a product may have."""

import numpy as np
from guarded import is_on_gpu, runs, step_of

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.cuda.lang import scratch
from tamis.tools.random_model import random_tensor


def weights(type_, rng, n_out, n_in):
    """Random rows in their encoding, and what the NumPy decoder makes of them in float64."""
    data = np.ascontiguousarray(random_tensor(rng, (n_out, n_in), GGMLType[type_])).view(np.uint8)
    decoded = dequantize(data.reshape(-1), GGMLType[type_], (n_in, n_out))
    return data.reshape(-1), decoded.astype(np.float64)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def rounding(x, decoded, type_, n_row):
    """The largest error that a right product may have, element by element; n_row: rows of the call.

    Float32 sums err by a few units of 1e-7 of the sum of magnitudes. For few rows, quantised
    weights meet activations of 15 bits: half a step of each block of 32. For many, both may be
    whole numbers: half a step of each 32 elements, of 14 bits, or of 8 where weights are exact. On
    a GPU, they are float16.
    """
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(decoded).T + 10)
    few = scratch.FEW_ROWS if is_on_gpu() else ops.FEW_ROWS
    if is_on_gpu() and n_row > few:
        return bound + 2**-10 * np.abs(x).astype(np.float64) @ np.abs(decoded).T
    if n_row > few and ops.packed_form(type_) == "bytes":
        return bound + 0.5001 * step_size(x, 127) @ np.abs(decoded).T
    if n_row > few and ops.packed_form(type_) == "quantised":
        x_step, w_step = step_size(x), step_size(decoded)
        return bound + 0.5001 * (x_step @ (np.abs(decoded) + w_step).T + np.abs(x) @ w_step.T)
    if n_row <= few and type_ not in ("F32", "F16", "BF16"):
        blocks = np.abs(x.astype(np.float64)).reshape(len(x), -1, 32)
        step = np.repeat(blocks.max(-1) / (127 * 128), 32, axis=1)
        bound += 0.5001 * step @ np.abs(decoded).T
    return bound


def step_size(rows, most=8191):
    """The step of whole numbers up to `most` for each 32 elements of each row."""
    n = rows.shape[1]
    padded = np.pad(np.abs(rows.astype(np.float64)), ((0, 0), (0, -n % 32)))
    steps = padded.reshape(len(rows), -1, 32).max(-1) / most
    return np.repeat(steps, 32, axis=1)[:, :n]


def packed(x, type_, source="rows", other=None, row=0, exact_rows=0):
    """The rows as PACK_ROWS leaves them for weights of a type."""
    n_tok, n = len(x) - row, x.shape[1]
    unwritten = np.full(ops.packed_bytes(n_tok, n), 0xA5, np.uint8)
    found = [
        made["packed"].copy()
        for made in runs(
            ops.PACK_ROWS, (ops.packed_form(type_), source), out={"packed": unwritten},
            scratch=ops.matmul_scratch(n), x=x, other=other, n=n, eps=1e-3,
            step=step_of(n_tok, 0, row, exact_rows=exact_rows),
        )
    ]  # fmt: skip
    for again in found[1:]:
        np.testing.assert_array_equal(again, found[0])
    return found[0]


def in_strips(type_, data, n_out, n_in):
    """The rows as REPACK leaves them."""
    unwritten = np.full(ops.strip_bytes(type_, n_out, n_in), 0xA5, np.uint8)
    found = [
        made["strips"].copy()
        for made in runs(
            ops.REPACK, (type_,), out={"strips": unwritten}, w=data, n_in=n_in, n_out=n_out
        )
    ]
    for again in found[1:]:
        np.testing.assert_array_equal(again, found[0])
    return found[0]


def check_product(type_, data, decoded, x, *, with_bias=0, add=0):
    """One MATMUL in every place; y's rows lie three elements apart."""
    n_tok, (n_out, n_in) = len(x), decoded.shape
    rng = np.random.default_rng((n_tok, n_out))
    bias, y_stride = normal(rng, n_out), n_out + 3
    before = normal(rng, n_tok, y_stride)
    # The last row ends with its last product.
    flat = before.reshape(-1)[: (n_tok - 1) * y_stride + n_out]
    expected = x.astype(np.float64) @ decoded.T + with_bias * bias + add * before[:, :n_out]
    bound = rounding(x, decoded, type_, n_tok)
    for found in runs(
        ops.MATMUL, (type_,), out={"y": flat}, scratch=ops.matmul_scratch(n_in),
        step=step_of(n_tok, 11), packed=packed(x, type_), w=data,
        bias=bias if with_bias else None, n_in=n_in, n_out=n_out, y_stride=y_stride, add=add,
    ):  # fmt: skip
        y = np.concatenate([found["y"], before[-1, n_out:]]).reshape(n_tok, y_stride)
        assert (np.abs(y[:, :n_out] - expected) <= bound).all()
        np.testing.assert_array_equal(y[:, n_out:], before[:, n_out:])
