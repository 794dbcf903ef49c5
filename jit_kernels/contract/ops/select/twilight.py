"""Ops of `twilight`: Lin et al. 2025, arXiv 2502.02770. All are for one query token.

The i-th position of a row is number i of its Selection's blocks, one after another; logits are in
tiles of TILE positions.
"""

from tamis.jit_kernels.contract.arrays import F32, I32
from tamis.jit_kernels.contract.op import READS_SELECTION, Address, InOut, Out, Step, op

ROUNDS = 24  # of the search for a threshold, which is a share of the largest weight


class TwilightWeigh:
    """q . k of each position of a Selection, for the heads of its row.

    Tiles that begin after the query's position are left as they are; so is what comes after it.
    """

    step: Step
    q: F32["*", "n_head", "head_dim"]
    k_pages: Address
    k_table: Address
    indptr: Address  # the Selection, see types.Selection
    indices: Address
    rows: Out[I32["n_row", "n_tile", 96]]  # scratch: TILE and LIST_PAD
    logits: Out[F32["n_row", "n_tile", "group", 64]]  # TILE
    n_row: int
    heads_per_kv: int
    n_head_kv: int
    block: int
    window: int  # 0
    stride: int  # 1


TWILIGHT_WEIGH = op(
    "select.twilight", TwilightWeigh, "head_dim group type_k", reads=READS_SELECTION
)


class TwilightPrune:
    """The positions of a row of which any head needs to reach `share` of its weight.

    A head takes those that weigh at least a threshold, the largest one with which they weigh
    `share` of the row's; it is found by halving the range from 0 to the largest weight ROUNDS
    times. A share of 1 takes all.
    """

    step: Step
    indptr: Address  # the Selection
    indices: Address
    log_weight: Address  # f32, added to a block's logits, or 0
    logits: InOut[F32["n_row", "n_tile", "group", 64]]  # become weights
    sets: Out[I32["n_row", "capacity"]]  # ascending
    weights: Out[F32["n_row", "capacity"]]  # the log weights of sets, where there are any
    counts: Out[I32["n_row"]]
    block: int
    share: float
    scale: float


TWILIGHT_PRUNE = op("select.twilight", TwilightPrune, "group")
