"""Ops of `delta`: Willette et al. 2025, arXiv 2505.11254, see select/delta.py."""

from tamis.jit_kernels.contract.arrays import F32, I64
from tamis.jit_kernels.contract.op import InOut, Out, Step, op


class DeltaRows:
    """The rows of a chunk that are also attended densely, as step records."""

    step: Step
    apart: Out[Step]  # rows gamma apart, counted from the prompt's first row
    last: Out[Step]  # the prompt's last gamma rows, which the former exclude
    gamma: int


DELTA_ROWS = op("common.select.delta", DeltaRows)


class DeltaAdd:
    """Row i of the prompt becomes out_i + (dense_g - out_g), g = floor(i / gamma) * gamma (Eq. 7).

    It becomes dense_g itself if i is g; the rows of `last` become last_out.
    """

    step: Step
    apart: Step  # as DELTA_ROWS left them
    last: Step
    apart_out: F32["*", "n_head", "head_dim"]  # dense rows of apart
    last_out: F32["*", "n_head", "head_dim"]  # dense rows of last
    delta: InOut[F32["n_head", "head_dim"]]  # the last difference, for the next chunk
    delta_pos: InOut[I64["n_head"]]  # the position of its row
    out: InOut[F32["n_tok", "n_head", "head_dim"]]
    gamma: int
    recompute: int  # 1: the rows between are not changed (Eq. 5)


DELTA_ADD = op("select.delta", DeltaAdd, "head_dim")
