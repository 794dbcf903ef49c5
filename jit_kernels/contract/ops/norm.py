"""Normalisation."""

from tamis.jit_kernels.contract.op import Address, op


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * w; with the constant add, y += that.

    add serves a norm that closes a residual branch.
    """

    step: Address
    x: Address  # f32 [n_tok, rows_per_tok, n], from row step.row on
    w: Address  # f32 [n]
    y: Address  # f32 [n_tok, rows_per_tok, n]
    n: int
    rows_per_tok: int
    eps: float


RMS_NORM = op("linear.norm", RmsNorm, "add")
