"""Ops of `vertical_slash`: MInference, Jiang et al. 2024, arXiv 2407.02490."""

from tamis.jit_kernels.contract.op import READS_ALL, Address, op
from tamis.jit_kernels.contract.ops.select.common import LIST_PAD, TILE


class SlashLines:
    """The best columns and diagonals by the attention weights of the call's last n_last queries.

    Weights are summed over the group's heads. The first n_sink columns and the last n_local entries
    of slash become 3e38.
    """

    step: Address
    q: Address  # f32 [n_tok, n_head, head_dim]
    k_pages: Address
    k_table: Address
    vertical: Address  # f32 [n_row, capacity]: sums by position
    # f32 [n_row, capacity]: by distance; entry i is distance n - 1 - i of n positions held
    slash: Address
    columns: Address  # int32 [n_row, 1 + n_vertical]: their number, and the positions, ascending
    diagonals: Address  # int32 [n_row, 1 + n_slash], likewise
    work: Address  # f32 [n_row, slash_work(group, capacity, n_last)], scratch
    n_row: int
    n_last: int
    n_vertical: int
    n_slash: int
    n_sink: int
    n_local: int
    capacity: int  # a multiple of TILE
    scale: float


SLASH_LINES = op("select.vertical_slash", SlashLines, "head_dim group", reads=READS_ALL)


class SlashSelect:
    """The Selection of positions on a column, or on a diagonal for one of a row's queries.

    Neighbouring queries' diagonals are merged.
    """

    step: Address
    columns: Address  # as SLASH_LINES left them
    diagonals: Address
    indptr: Address
    indices: Address
    n_row: int
    n_vertical: int
    n_slash: int
    q_block: int


SLASH_SELECT = op("select.vertical_slash", SlashSelect)


def slash_work(group: int, capacity: int, n_last: int) -> int:
    """Floats of scratch that SLASH_LINES needs per row.

    On the CPU a list, scores of a query, a tile; on a GPU two floats per query, head and span of
    256.
    """
    of_scores = (group + 1) * capacity + LIST_PAD + group * TILE
    return max(of_scores, 2 * n_last * group * ((capacity + 255) // 256 + 1))
