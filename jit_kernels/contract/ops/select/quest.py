"""Ops of `quest`."""

from tamis.jit_kernels.contract.op import Ranges, Reads, op


def _new_pages(low: int, _high: int, page: int, _x: int, _y: int, _n: int, pos: int) -> Ranges:
    return min(low, pos) // page * page, pos + 1, 0, 0


# Quest (Tang et al. 2024, arXiv 2406.10774). bounds f16 [n_head_kv, n_page, 2, head_dim]: largest
# and smallest elements of the keys of each page of `page` positions (of keys of other types, the
# nearest float16). filled int64: that many first
# positions are in the bounds already; pages from there to pos are made anew, filled stays. parts
# f32 [n_head, 2, head_dim]: the larger of q and 0, the smaller of q and 0.
QUEST_BOUNDS = op(
    "select.quest",
    "quest_bounds",
    "head_dim type_k",
    "step q k_pages k_table bounds filled parts n_head n_head_kv n_page page",
    reads=Reads("quest_bounds", _new_pages, found="filled", block="page"),
)

# scores f32 [n_head, n_page]: the upper bound of q . k over each page up to pos's; a group's first
# head gets the maximum over the group. heads: of a KV head. Sets filled to pos + 1.
QUEST_SCORE = op(
    "select.quest",
    "quest_score",
    "head_dim heads group",
    "step parts bounds filled scores n_head_kv n_page page",
)
