"""Ops of `hip`."""

from tamis.jit_kernels.contract.op import READS_ALL, Ranges, Reads, op
from tamis.jit_kernels.contract.ops.select.common import LIST_PAD, TILE


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


SIBLINGS = 4  # chunks that HIP_SEARCH splits one into

# HiP (Lee et al. 2024, arXiv 2406.09827), Alg. 1 for one query token. Searched are the whole blocks
# of `block` positions after the first n_sink blocks and before the last n_local positions. mask
# int32 [n_row, 1 + n_chunk]: how many blocks were chosen, and these, ascending. A block's score is
# the largest q . k over its keys 0, stride, 2 * stride, .. and over a row's group of query heads.
# tree: scratch, int32 [n_row, 8, n_chunk].
HIP_ESTIMATE = op(
    "select.hip",
    "hip_estimate",
    "head_dim group",
    "step q k_pages k_table mask tree n_row heads_per_kv n_head_kv n_chunk block stride n_sink"
    " n_local",
    reads=READS_ALL,
)

# A search over kept means: of blocks of `block` positions, of four blocks, of 16 and so on up to
# level `top`; level l starts at row level_start = 4 / 3 (room - (room >> 2 l)). Only of what is
# whole. A mean is head_dim bytes u from 0 to 127 and two floats: element i is low + width * u[i].
# Four neighbours lie together: means uint8 [n_head_kv, n_mean / 4, head_dim / 4, 4, 4], four bytes
# of each in turn; extents f32 [n_head_kv, n_mean / 4, 2, 4]: their widths and lows. room: a
# multiple of 4^(top + 1), at least the blocks of the context. filled int64 [n_head_kv]: blocks that
# are in the means; those from pos on are made anew. sums: scratch, f32 [n_head_kv, head_dim].
HIP_MEANS = op(
    "select.hip_means",
    "hip_means",
    "head_dim type_k",
    "step k_pages k_table means extents filled sums n_head_kv room top block",
    reads=Reads("hip_means", _new_blocks, found="filled", block="block", x="top"),
)

# mask int32 [n_mask, n_row, 1 + n_chunk] as above, one for mask_block queries. Searched are whole
# blocks before the last n_local positions of the mask's first query. Chunks of a level are its
# means; the first level that has at most 4 n_chunk is scored whole. A round keeps the n_chunk
# chunks with the best scores and goes on with their four children; at level 0 blocks before n_sink
# are passed over. A score is the sum over the row's heads and every q_stride-th query of 2^x, in
# straight lines between whole x, x = (q . mean * scale - log(sum exp(q . k * scale))) / log 2, the
# sum over the first n_sink blocks and the positions from the end of the search to the mask's first
# query; the heads' elements are rounded to 127ths of their largest. work: scratch, f32 [n_mask *
# n_row, hip_work(head_dim, group, queries of a mask, n_chunk, n_near)]; n_near: most positions
# of that sum.
HIP_SEARCH = op(
    "select.hip_means",
    "hip_search",
    "head_dim group type_k",
    "step q k_pages k_table means extents mask work n_row heads_per_kv n_head_kv room top n_chunk"
    " block n_sink n_local mask_block q_stride n_near scale_f",
    reads=Reads("hip_search", _ends, block="block", x="n_sink", y="n_local"),
)

# The Selection of the first n_sink blocks, the mask's blocks with n_near neighbours on both sides,
# and the blocks from the last n_local positions of the mask's first query on. mask_block: queries
# a mask serves, a multiple of q_block, those that a row stands for.
HIP_SELECT = op(
    "select.hip",
    "hip_select",
    "",
    "step mask indptr indices n_row n_chunk block n_sink n_local n_near mask_block q_block",
)


def hip_room(n_block: int, n_chunk: int) -> tuple[int, int]:
    """Blocks that HIP_MEANS has room for, at least n_block, and its last level."""
    top = 0
    while n_block >> 2 * top > SIBLINGS * n_chunk:
        top += 1
    whole = SIBLINGS ** (top + 1)
    return -(-n_block // whole) * whole, top


def hip_work(head_dim: int, group: int, n_query: int, n_chunk: int, n_near: int) -> int:
    """Floats of scratch that HIP_SEARCH needs a row: lists, scores, products, bytes of heads."""
    lists = n_chunk + 1 + n_near + 2 * LIST_PAD + 2 * SIBLINGS * (n_chunk + TILE)
    return lists + 2 * TILE + group * (n_query + 1) * (TILE + head_dim) + 3 * group * n_query
