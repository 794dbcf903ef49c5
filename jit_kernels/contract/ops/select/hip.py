"""Ops of `hip`: Lee et al. 2024, arXiv 2406.09827.

The search covers the whole blocks of `block` positions after the first n_sink blocks and before the
last n_local positions of a mask's first query.
"""

from tamis.jit_kernels.contract.op import READS_ALL, Address, Ranges, Reads, op
from tamis.jit_kernels.contract.ops.select.common import LIST_PAD, TILE

SIBLINGS = 4  # chunks that HIP_SEARCH splits one into


class HipEstimate:
    """Alg. 1 for masks of mask_block queries.

    A block's score is the largest q . k over its keys 0, stride, 2 * stride, .. , over every
    q_stride-th query of the mask and over a row's group of query heads.
    """

    step: Address
    q: Address  # f32 [n_tok, n_head, head_dim]
    k_pages: Address
    k_table: Address
    # int32 [n_mask, n_row, 1 + n_chunk]: the number of chosen blocks, and these, ascending
    mask: Address
    tree: Address  # int32 [n_mask, n_row, 8, n_chunk], scratch
    n_row: int
    heads_per_kv: int
    n_head_kv: int
    n_chunk: int
    block: int
    stride: int
    n_sink: int  # blocks
    n_local: int  # positions
    mask_block: int
    q_stride: int


HIP_ESTIMATE = op("select.hip", HipEstimate, "head_dim group", reads=READS_ALL)


def _new_blocks(
    low: int, _high: int, block: int, top: int, _y: int, n_tok: int, pos: int
) -> Ranges:
    end = pos + n_tok
    first = min(low, pos // block)
    return (first >> 2 * top) * (block << 2 * top), 0 if first == end // block else end, 0, 0


def _ends(
    _low: int, _high: int, block: int, n_sink: int, n_local: int, n_tok: int, pos: int
) -> Ranges:
    end = pos + n_tok
    return 0, min(n_sink * block, end), max(0, pos + 1 - n_local) // block * block, end


class HipMeans:
    """Mean keys of whole blocks, of four blocks, of 16 and so on up to level `top`.

    Level l starts at row level_start = 4 / 3 (room - (room >> 2 l)). A mean is head_dim bytes u
    from 0 to 127 and two floats: element i is low + width * u[i].
    """

    step: Address
    k_pages: Address
    k_table: Address
    # uint8 [n_head_kv, n_mean / 4, head_dim / 4, 4, 4]: four neighbouring means are interleaved by
    # four bytes.
    means: Address
    extents: Address  # f32 [n_head_kv, n_mean / 4, 2, 4]: the neighbours' widths and lows
    # int64 [n_head_kv]: blocks that are in the means; those from pos on are recomputed
    filled: Address
    sums: Address  # f32 [n_head_kv, head_dim], scratch
    n_head_kv: int
    room: int  # a multiple of 4^(top + 1), at least the blocks of the context
    top: int
    block: int


HIP_MEANS = op(
    "select.hip_means",
    HipMeans,
    "head_dim type_k",
    reads=Reads("hip_means", _new_blocks, found="filled", block="block", x="top"),
)


class HipSearch:
    """The n_chunk best blocks by their means, for masks of mask_block queries.

    Chunks of a level are its means; the first level that has at most n_flat is scored whole. A
    round keeps the n_chunk chunks with the best scores and continues with their four children; at
    level 0 blocks before n_sink are skipped. A score is the sum over the row's heads and every
    q_stride-th query of 2^x, linear between whole x, x = (q . mean * scale - log(sum exp(q . k *
    scale))) / log 2, the sum over the first n_sink blocks and the positions from the end of the
    search to the mask's first query; the heads' elements are rounded to 127ths of their largest.
    """

    step: Address
    q: Address  # f32 [n_tok, n_head, head_dim]
    k_pages: Address
    k_table: Address
    means: Address  # as HIP_MEANS left them
    extents: Address
    mask: Address  # int32 [n_mask, n_row, 1 + n_chunk], as for HIP_ESTIMATE
    # f32 [n_mask * n_row, hip_work(head_dim, group, queries of a mask, n_flat, n_near)], scratch
    work: Address
    n_row: int
    heads_per_kv: int
    n_head_kv: int
    room: int
    top: int
    n_chunk: int
    n_flat: int  # at least 4 n_chunk
    block: int
    n_sink: int  # blocks
    n_local: int  # positions
    mask_block: int
    q_stride: int
    n_near: int  # most positions of the sum over keys
    scale: float


HIP_SEARCH = op(
    "select.hip_means",
    HipSearch,
    "head_dim group type_k",
    reads=Reads("hip_search", _ends, block="block", x="n_sink", y="n_local"),
)


class HipSelect:
    """The Selection of sinks, the mask's blocks with n_near neighbours on both sides, and the rest.

    The rest is the blocks from the last n_local positions of the mask's first query on.
    """

    step: Address
    mask: Address
    indptr: Address
    indices: Address
    n_row: int
    n_chunk: int
    block: int
    n_sink: int  # blocks
    n_local: int  # positions
    n_near: int  # blocks
    mask_block: int  # queries that a mask serves, a multiple of q_block
    q_block: int  # queries that a row stands for


HIP_SELECT = op("select.hip", HipSelect)


def hip_room(n_block: int, n_chunk: int) -> tuple[int, int]:
    """The number of blocks that HIP_MEANS has room for, at least n_block, and its last level."""
    top = 0
    while n_block >> 2 * top > SIBLINGS * n_chunk:
        top += 1
    whole = SIBLINGS ** (top + 1)
    return -(-n_block // whole) * whole, top


def hip_work(head_dim: int, group: int, n_query: int, n_flat: int, n_near: int) -> int:
    """Floats of scratch that HIP_SEARCH needs per row: lists, scores, products, bytes of heads."""
    lists = n_flat // SIBLINGS + 1 + n_near + 2 * LIST_PAD + 2 * (n_flat + SIBLINGS * TILE)
    return lists + 2 * TILE + group * (n_query + 1) * (TILE + head_dim) + 3 * group * n_query
