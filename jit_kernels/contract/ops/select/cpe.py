"""Ops of `cpe`: PSAW and CIS."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import op


class _CisMeta(NamedTuple):
    """Byte offsets of what CIS remembers of a row: int64s."""

    next: int  # position that continues the block; any other one starts a new block
    begin: int  # position of the block's first step
    n_ref: int  # references of this block
    n_retrieval: int  # counted, never reset by a kernel
    n_step: int


CIS_META = _CisMeta(0, 8, 16, 24, 32)

# The method `cpe` (PrHS paper). drop / 2^32 is the part of the past that a layer does not see:
# a query at t sees sinks and positions from P(t) = floor(drop * t / 2^32) on (Eq. 15), never less
# than its last n_local. The middle is what it sees between the sinks and those last n_local.
# A Selection of whole blocks: what the queries of a row's block see.
SELECT_PSAW = op(
    "select.cpe",
    "select_psaw",
    "",
    "step indptr indices n_row q_block block n_sink n_local drop",
)

# chosen int32 [n_row]: -2 where the middle holds at most n_top positions; the most recent of the
# block's references with a cosine above tau for every head of the row (Eq. 12); else -1, and the
# row's queries become a reference. Where a KV head has a row with -1, its other rows get it too
# unless some reference's cosines are above join. refs f32 [n_row, n_block, group, head_dim]; meta
# int64 [n_row, 5], see CIS_META; a block ends after n_block steps. asking f32 [n_head_kv, heads,
# head_dim]: the queries of a KV head's rows that retrieve, one after the other, and n_asking int32
# [n_head_kv] their number: what SCORE_KEYS reads. No other row reads a key.
CIS_GATE = op(
    "select.cpe",
    "cis_gate",
    "head_dim heads group",
    "step q refs meta chosen asking n_asking n_head_kv n_block n_sink n_local n_top drop tau_f"
    " join_f",
)

# sets int32 [n_row, set_capacity], counts int32 [n_row]: sinks, last n_local and, of the middle:
# all (chosen -2), the n_top best scores (-1), or what is left of the chosen reference's set.
# scores and maxima are SCORE_KEYS's, rows in the order of the rows that retrieve, and used up.
# A retrieved set goes, dilated (Eq. 13: the n_best best joined by radius neighbours on both sides,
# also those after pos), to ref_sets int32 [n_row, n_block, set_capacity] and ref_counts int32
# [n_row, n_block]; order int32 [n_row, capacity] is scratch. Positions are below 2^29.
CIS_SETS = op(
    "select.cpe",
    "cis_sets",
    "",
    "step chosen meta scores maxima order ref_sets ref_counts sets counts n_row rows_per_kv group"
    " n_block capacity set_capacity n_sink n_local n_top n_best radius drop",
)
