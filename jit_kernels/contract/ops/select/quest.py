"""Ops of `quest`: Tang et al. 2024, arXiv 2406.10774."""

from tamis.jit_kernels.contract.op import Address, Ranges, Reads, op


def _new_pages(low: int, _high: int, page: int, _x: int, _y: int, _n: int, pos: int) -> Ranges:
    return min(low, pos) // page * page, pos + 1, 0, 0


class QuestBounds:
    """Bounds of the pages from `filled` to pos, made anew, and the queries' two parts."""

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    # f16 [n_head_kv, n_page, 2, head_dim]: largest and smallest elements of the keys of each page
    # (of keys of other types, the nearest float16).
    bounds: Address
    filled: Address  # int64: so many first positions are in the bounds already; stays
    parts: Address  # f32 [n_head, 2, head_dim]: the larger of q and 0, the smaller of q and 0
    n_head: int
    n_head_kv: int
    n_page: int
    page: int  # positions of a page


QUEST_BOUNDS = op(
    "select.quest",
    QuestBounds,
    "head_dim type_k",
    reads=Reads("quest_bounds", _new_pages, found="filled", block="page"),
)


class QuestScore:
    """The upper bound of q . k over each page up to pos's. Sets filled to pos + 1.

    A group's first head gets the maximum over the group. heads: of a KV head.
    """

    step: Address
    parts: Address  # as QUEST_BOUNDS left them, the next two too
    bounds: Address
    filled: Address
    scores: Address  # f32 [n_head, n_page]
    n_head_kv: int
    n_page: int
    page: int


QUEST_SCORE = op("select.quest", QuestScore, "head_dim heads group")
