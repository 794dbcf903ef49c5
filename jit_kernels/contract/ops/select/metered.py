"""Ops of `metered`: keys sampled from what a method left out, see select/metered.py.

A unit is a run of `unit` neighbouring positions. Left out are the positions up to pos that are in
no block of a row of the method's Selection. All ops are for decode steps: one query token.
"""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import READS_SELECTION, Address, InOut, op
from tamis.jit_kernels.contract.ops.select.common import LIST_PAD, TILE

MOST_UNITS = 1024  # of a context
WITHIN, WIDER, ALL = range(3)  # what a row finally reads: its selection, more units, every position


class _MeterFields(NamedTuple):
    """Entries of a head's report, float32 each."""

    mass: int  # estimated share of attention that the method's selection retains
    held: int  # of what was finally read
    needed: int  # WITHIN, WIDER or ALL


METER = _MeterFields(*range(3))


class MeterSample:
    """At most n_sample positions of each row, drawn from what it left out.

    A unit's score is the sum over the row's heads of exp(q . mean * scale - lse), as in HIP_SEARCH;
    0 for the last unit while it is incomplete. A position's probability is a mixture: with weight
    `even` uniform, otherwise its unit's score over the sum of all. Positions are drawn with
    replacement, one from each n-th of the sum of probabilities; the random numbers are a function
    of seed, pos, layer and row alone.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    lse: Address  # f32 [n_head], of what the rows read
    chosen: Address  # int32 [n_row + 1], the Selection's indptr
    blocks: Address  # int32, its indices
    means: Address  # as HIP_MEANS left them, one level of blocks of `unit`
    extents: Address
    left: Address  # int32 [n_row, n_unit]: positions of each unit that were left out
    scores: Address  # f32 [n_row, n_unit]
    indices: Address  # int32 [n_row, n_sample], ascending in a row
    # f32 [n_row, n_sample]: the positions that each drawn one represents, 1 / (n probability); 0:
    # none is drawn
    factors: Address
    work: Address  # f32 [n_row, meter_work(head_dim, group, room)], scratch
    n_row: int
    heads_per_kv: int
    n_head_kv: int
    block: int  # positions of a block of the Selection
    room: int  # rows of means a KV head
    unit: int
    n_unit: int  # at most MOST_UNITS
    n_sample: int  # a multiple of 16
    layer: int
    seed: int
    even: float
    scale: float


METER_SAMPLE = op("select.metered", MeterSample, "head_dim group")


class MeterWeigh:
    """Each head's estimated mass, and what its row must read for `least` of it.

    A sample weighs w = exp(q . k * scale - lse) * factor; D = the sum of w is an unbiased estimate
    of what was left out, in units of what was read; the mass is 1 / (1 + D). If it is below `least`
    for a head of a row, units are added from the best score on until the samples in the others
    weigh at most (1 - least) (1 + D) for every head: the row is WIDER, or ALL if it would read more
    than half of the positions.
    """

    step: Address
    q: Address
    lse: Address
    k_pages: Address
    k_table: Address
    indptr: Address  # int32 [n_row + 1], multiples of n_sample
    indices: Address  # as METER_SAMPLE left them, like the next three
    factors: Address
    left: Address
    scores: Address
    weights: Address  # f32 [n_row, group, n_sample + 1], scratch
    rows: Address  # int32 [n_row, n_sample + LIST_PAD], scratch
    tile: Address  # f32 [n_row, group, TILE], scratch
    units: Address  # int32 [n_row, n_sample], scratch
    order: Address  # int32 [n_row, n_sample], scratch
    needs: Address  # int32 [n_row]: WITHIN, WIDER or ALL
    bars: Address  # f32 [n_row]: the least score of a unit that a WIDER row adds
    report: Address  # f32 [n_head, len(METER)]
    n_row: int
    heads_per_kv: int
    n_head_kv: int
    block: int  # 1: the drawn positions are single ones
    window: int  # 0
    stride: int  # 1
    unit: int
    n_unit: int
    n_sample: int
    least: float
    scale: float


METER_WEIGH = op(
    "select.metered", MeterWeigh, "head_dim group q_block type_k", reads=READS_SELECTION
)


class MeterWiden:
    """Selections of what is read again: WIDER rows with their units, and KV heads with an ALL row.

    Rows and KV heads that read nothing again have no blocks.
    """

    step: Address
    chosen: Address  # the method's Selection
    blocks: Address
    left: Address
    scores: Address
    needs: Address
    bars: Address
    indptr: Address  # int32 [n_row + 1]
    indices: Address  # int32 [n_row * n_ctx / grain]
    whole: Address  # int32 [n_head_kv + 1]: the indptr of a Selection of n_all blocks or none
    n_row: int
    n_head_kv: int
    block: int
    grain: int  # positions of a block of the wider Selection, a divisor of block and unit
    unit: int
    n_unit: int
    n_all: int


METER_WIDEN = op("select.metered", MeterWiden)


class MeterTake:
    """Heads get the output, and the log-sum-exp, of what was read again for their row or KV head.

    Their report states how much that retains: ALL retains 1.
    """

    needs: Address
    whole: Address
    wider: Address  # f32 [n_head, head_dim]
    wider_lse: Address  # f32 [n_head]
    dense: Address
    dense_lse: Address
    out: InOut[Address]
    lse: InOut[Address]
    report: InOut[Address]
    n_row: int
    n_head: int
    n_head_kv: int


METER_TAKE = op("select.metered", MeterTake, "head_dim")


def meter_work(head_dim: int, group: int, room: int) -> int:
    """Floats of scratch that METER_SAMPLE needs per row: lists, products, bytes of heads."""
    lists = room // 4 + LIST_PAD + 2 * ((room + TILE - 1) // TILE * TILE)
    return lists + 2 * TILE + group * (2 * TILE + head_dim + 3)
