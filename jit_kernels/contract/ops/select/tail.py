"""Ops of `tail`: which positions that a method left out are sampled, and what they add.

The first samples are METER_SAMPLE's, weighed by METER_WEIGH. A unit is a run of `unit` neighbouring
positions, `left` of which no block of a row of the method's Selection contains. All ops are for
decode steps: one query token.
"""

from tamis.jit_kernels.contract.arrays import F32, I32
from tamis.jit_kernels.contract.op import READS_SELECTION, Address, InOut, Out, Step, op

READ_ALL = -1  # samples of a row that reads every position it left out
OUTPUT, PARTS, DENOMINATOR = range(3)  # what the error is bounded of: see TailSize


class TailSize:
    """How many positions each row samples, so that each head's error stays within epsilon.

    n = n_sample first samples weigh w_i (see METER_WEIGH); S = sum w_i, y_i = n w_i / (1 + S), and
    t, a, B are the means of y_i, y_i v_i and y_i^2 v_i. o = kept / (1 + S) + a estimates the
    output. The variance of one sample's contribution, with Bessel's correction n / (n - 1), is
      OUTPUT: mean y^2 |v - o|^2 - |a - t o|^2, of the error of the output, relative to |o|^2;
      PARTS: the larger of mean y^2 |v|^2 - |a|^2, of the numerator, relative to |o|^2, and
      DENOMINATOR: mean y^2 - t^2, relative to 1.
    A head asks for z^2 variance / epsilon^2 samples, a row for the most of its heads, at least n;
    READ_ALL if that is more than `most` of the positions left out, or if these are at most n.
    """

    step: Step
    k_pages: Address  # not read: what fetches pages treats K and V alike
    v_pages: Address
    k_table: Address
    v_table: Address
    indptr: Address  # int32 [n_row + 1], multiples of n_sample
    indices: Address  # int32 [n_row, n_sample], as METER_SAMPLE left them
    weights: F32["n_row", "group", "n_sample + 1"]  # as METER_WEIGH left them; the last is the sum
    left: I32["n_row", "n_unit"]
    kept: F32["*", "n_head", "head_dim"]  # the output of the method's Selection
    work: Out[F32["n_row", "(2 * group + 1) * head_dim + 2 * group"]]  # scratch
    needs: Out[I32["n_row"]]  # samples, or READ_ALL
    report: InOut[F32["n_head", 3]]  # see METER: heads of READ_ALL rows hold everything
    n_row: int
    n_sample: int
    heads_per_kv: int
    n_head_kv: int
    block: int  # 1: samples are single positions
    window: int  # 0
    stride: int  # 1
    unit: int
    bounded: int  # OUTPUT, PARTS or DENOMINATOR
    epsilon: float
    z: float  # quantile of the normal distribution
    most: float


TAIL_SIZE = op("attention.tail", TailSize, "head_dim group type_k type_v", reads=READS_SELECTION)


class TailPlan:
    """How many samples each unit of a row gets: systematic sampling by the chances of positions.

    A position's chance is min(1, needs (even / n_left + (1 - even) score / total)), total being the
    sum over the positions left out of their units' scores; a unit gets as many samples as whole
    numbers lie in its part of the running sum of chances, which begins at a random number.
    """

    step: Step
    needs: I32["n_row"]
    left: I32["n_row", "n_unit"]
    scores: F32["n_row", "n_unit"]
    rates: Out[F32["n_row", 2]]  # a chance is min(1, rates[0] + rates[1] * score)
    starts: Out[I32["n_row", "n_unit + 1"]]  # samples of the row before each unit, and all
    unit: int
    layer: int
    seed: int
    even: float


TAIL_PLAN = op("common.select.tail", TailPlan)


class TailDraw:
    """The Selection of the samples; an index weighs 1 / its chance.

    Samples of a unit are apart by equal distances among the positions left out, from a random one
    on. They are ascending and unique.
    """

    step: Step
    chosen: I32["n_row + 1"]  # the method's Selection
    blocks: I32["*"]
    needs: I32["n_row"]
    left: I32["n_row", "n_unit"]
    scores: F32["n_row", "n_unit"]
    rates: F32["n_row", 2]
    starts: I32["n_row", "n_unit + 1"]
    indptr: Out[I32["n_row + 1"]]
    indices: Out[I32["*"]]
    log_weight: Out[F32["*"]]
    block: int  # positions of a block of the method's Selection
    unit: int
    layer: int
    seed: int


TAIL_DRAW = op("common.select.tail", TailDraw)


class TailMerge:
    """out and lse become those of one softmax over the kept positions and the samples."""

    kept: F32["*", "n_head", "head_dim"]  # may be out
    kept_lse: F32["*", "n_head"]  # may be lse
    sampled: F32["*", "n_head", "head_dim"]
    sampled_lse: F32["*", "n_head"]
    out: InOut[F32["*", "n_head", "head_dim"]]
    lse: InOut[F32["*", "n_head"]]


TAIL_MERGE = op("common.select.tail", TailMerge)
