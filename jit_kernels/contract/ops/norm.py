"""Normalisation."""

from tamis.jit_kernels.contract.op import Address, InOut, Out, op


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * w; with the constant add, y += that.

    add is for a norm at the end of a residual branch.
    """

    step: Address
    x: Address  # f32, rows_per_tok rows of n per token, from token step.row on
    w: Address  # f32 [n]
    y: InOut[Address]  # f32, likewise, from token 0 on
    n: int
    rows_per_tok: int  # one after another
    x_stride: int  # elements from one token's rows to the next one's
    y_stride: int
    eps: float


RMS_NORM = op("linear.norm", RmsNorm, "add")


class LayerNorm:
    """y = (x - mean(x)) / sqrt(variance(x) + eps) * w + bias (Ba et al. 2016, arXiv 1607.06450)."""

    step: Address
    x: Address  # f32 [n_tok, rows_per_tok, n], from row step.row on
    w: Address  # f32 [n], or [rows_per_tok, n], or 0: all 1
    bias: Address  # f32 [n], or 0
    y: Out[Address]  # f32 [n_tok, rows_per_tok, n], may be x where step.row is 0
    n: int
    rows_per_tok: int
    w_step: int  # elements from one row's weights to the next's
    eps: float


LAYER_NORM = op("linear.norm", LayerNorm)
