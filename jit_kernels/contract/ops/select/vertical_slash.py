"""Ops of `vertical_slash`."""

from tamis.jit_kernels.contract.op import READS_ALL, op
from tamis.jit_kernels.contract.ops.select.common import LIST_PAD, TILE

# Vertical-slash (MInference: Jiang et al. 2024, arXiv 2407.02490). vertical, slash f32 [n_row,
# capacity]: attention weights of the call's last n_last queries, summed over the group's heads by
# position, and by distance: entry i is the distance n - 1 - i, n positions being held. The first
# n_sink columns and the last n_local entries of slash become 3e38. columns int32 [n_row,
# 1 + n_vertical], diagonals int32 [n_row, 1 + n_slash]: how many of the best are kept, and these,
# ascending. work: scratch, f32 [n_row, slash_work(group, capacity)]; capacity: a multiple of TILE.
SLASH_LINES = op(
    "select.vertical_slash",
    "slash_lines",
    "head_dim group",
    "step q k_pages k_table vertical slash columns diagonals work n_row n_last n_vertical n_slash"
    " n_sink n_local capacity scale_f",
    reads=READS_ALL,
)

# The Selection of single positions that lie on a column, or for one of a row's queries on a
# diagonal; neighbouring queries' diagonals join.
SLASH_SELECT = op(
    "select.vertical_slash",
    "slash_select",
    "",
    "step columns diagonals indptr indices n_row n_vertical n_slash q_block",
)


def slash_work(group: int, capacity: int) -> int:
    """Floats of scratch that SLASH_LINES needs a row: a list, scores, a tile."""
    return (group + 1) * capacity + LIST_PAD + group * TILE
