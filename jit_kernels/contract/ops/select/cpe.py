"""Ops of `cpe` (PrHS paper): PSAW and CIS.

drop / 2^32 is the part of the past that a layer does not see: a query at t sees sinks and positions
from P(t) = floor(drop * t / 2^32) on (Eq. 15), never fewer than its last n_local. The middle is
what it sees between the sinks and those last n_local.
"""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import Address, op


class _CisMeta(NamedTuple):
    """Byte offsets of the state of a row in CIS: int64s."""

    next: int  # position that continues the block; any other one starts a new block
    begin: int  # position of the block's first step
    n_ref: int  # references of this block
    n_retrieval: int  # counted, never reset by a kernel
    n_step: int


CIS_META = _CisMeta(0, 8, 16, 24, 32)


class SelectPsaw:
    """A Selection of whole blocks: what the queries of a row's block see."""

    step: Address
    indptr: Address
    indices: Address
    n_row: int
    q_block: int
    block: int
    n_sink: int
    n_local: int
    drop: int


SELECT_PSAW = op("select.cpe", SelectPsaw)


class CisGate:
    """Which rows retrieve, and which take the set of a reference of their block.

    A reference serves a row whose heads all have a cosine above tau with it (Eq. 12), the most
    recent one first. If a KV head has a row with -1, its other rows get -1, too, unless some
    reference's cosines are above join. Only rows that retrieve read keys.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    refs: Address  # f32 [n_row, n_block, group, head_dim]
    meta: Address  # int64 [n_row, 5], see CIS_META
    # int32 [n_row]: -2 if the middle holds at most n_top positions; the number of the block's
    # reference; else -1, and the row's queries become a reference.
    chosen: Address
    asking: Address  # f32 [n_head_kv, heads, head_dim]: queries that retrieve, for SCORE_KEYS
    n_asking: Address  # int32 [n_head_kv]: their number
    n_head_kv: int
    n_block: int  # steps after which a block ends
    n_sink: int
    n_local: int
    n_top: int
    drop: int
    tau: float
    join: float


CIS_GATE = op("select.cpe", CisGate, "head_dim heads group")


class CisSets:
    """Sinks, last n_local and, of the middle: all, the n_top best scores, or a reference's set.

    A retrieved set is stored in ref_sets, dilated (Eq. 13: the n_best best are joined by radius
    neighbours on both sides, including those after pos). Positions are below 2^29.
    """

    step: Address
    chosen: Address  # as CIS_GATE left it: -2 all, -1 retrieved, else that set's budget
    meta: Address
    scores: Address  # SCORE_KEYS's, in the order of the rows that retrieve; overwritten like maxima
    maxima: Address
    order: Address  # int32 [n_row, capacity], scratch
    # what the best are chosen from, as COPY_CANDIDATES left it; 0: all scores
    found: Address
    exact: Address
    n_found: Address
    ref_sets: Address  # int32 [n_row, n_block, set_capacity]
    ref_counts: Address  # int32 [n_row, n_block]
    sets: Address  # int32 [n_row, set_capacity]
    counts: Address  # int32 [n_row]
    n_row: int
    rows_per_kv: int
    group: int
    n_block: int
    capacity: int
    set_capacity: int
    n_sink: int
    n_local: int
    n_top: int
    n_best: int
    radius: int
    drop: int


CIS_SETS = op("select.cpe", CisSets)
