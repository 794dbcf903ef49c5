"""Ops of `quest`: Tang et al. 2024, arXiv 2406.10774."""

from tamis.jit_kernels.contract.arrays import F16, F32, I64
from tamis.jit_kernels.contract.op import Address, InOut, Out, Ranges, Reads, Step, op


def _new_pages(low: int, _high: int, page: int, _x: int, _y: int, _n: int, pos: int) -> Ranges:
    return min(low, pos) // page * page, pos + 1, 0, 0


class QuestBounds:
    """Bounds of the pages from `filled` to pos, recomputed, and the queries' two parts."""

    step: Step
    q: F32["n_tok", "n_head", "head_dim"]  # the first token's
    k_pages: Address
    k_table: Address
    # Largest and smallest elements of the keys of each page (of keys of other types than f16, the
    # nearest float16).
    bounds: InOut[F16["n_head_kv", "n_page", 2, "head_dim"]]
    filled: I64[1]  # number of first positions that are in the bounds already
    parts: Out[F32["n_head", 2, "head_dim"]]  # the larger of q and 0, the smaller of q and 0
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

    step: Step
    parts: F32["n_head_kv * heads", 2, "head_dim"]  # as QUEST_BOUNDS left them
    bounds: F16["n_head_kv", "n_page", 2, "head_dim"]
    filled: Out[I64[1]]
    scores: Out[F32["n_head_kv * heads", "n_page"]]
    page: int


QUEST_SCORE = op("select.quest", QuestScore, "head_dim heads group")
