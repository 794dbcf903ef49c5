"""Ops of `lfps` (Yao and Wang 2025), for rows of `group` query heads of the `heads` of a KV head.

Positions are sinks (the first n_sink), the last n_local, and the middle between them, which the
tables are over. Entries of both tables are divided by a common scale, so that decay costs nothing.
"""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import READS_SELECTION, Address, InOut, Out, Ranges, Reads, op

LFPS_NEAR = 6  # keys of w_local (Eq. 5)


class _LfpsMeta(NamedTuple):
    """Byte offsets of the state of a row in LFPS: int64s."""

    next: int  # position that continues the tables; any other one rebuilds them
    bypassed: int  # 1 if the last step bypassed the row
    n_bypass: int  # counted, never reset by a kernel
    n_step: int
    n_scanned: int  # keys read, over all steps
    n_seen: int  # keys that dense attention would have read


LFPS_META = _LfpsMeta(0, 8, 16, 24, 32, 40)


class _LfpsStats(NamedTuple):
    """Byte offsets of the numbers of a row's tables: float64s."""

    scale: int  # a score is its table's entry times scale
    ver: int  # four power sums of the vertical table's entries
    sla: int  # and of the slash table's


LFPS_STATS = _LfpsStats(0, 8, 40)
LFPS_STATS_SIZE = 9


def _unless_all_follow(
    low: int, high: int, _block: int, _x: int, _y: int, n_tok: int, pos: int
) -> Ranges:
    return 0, 0 if low == pos and high == pos else pos + n_tok, 0, 0


class LfpsKeep:
    """Store the last queries, each at its position % n_past."""

    step: Address
    q: Address  # f32 [n_tok, n_head, head_dim]
    past: Out[Address]  # f32 [n_past, n_head, head_dim]
    past_pos: Out[Address]  # int64 [n_past]: their positions
    n_head: int
    n_past: int


LFPS_KEEP = op("select.lfps", LfpsKeep, "head_dim")


class LfpsStart:
    """Make the tables from the weights of the last n_past queries (Eq. 4).

    From this query if none is stored; only for KV heads whose first row's meta.next is not this
    position. A row's weights are the mean of its heads'.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    v_pages: Address
    k_table: Address
    v_table: Address
    past: Address  # as LFPS_KEEP left it
    past_pos: Address
    ver: Address  # f32 [n_row, capacity], by position
    # f32 [n_row, capacity], by distance to the query: d is at entry capacity - 65 - d, so that
    # nothing is ever shifted, and neighbours are adjacent in both tables.
    sla: Address
    # int64 [n_row, 2, 2, capacity / 64 + 1]: two bitmaps per table: the entries above the threshold
    # (Eq. 8) and those above the mean, when they were last updated.
    bits: Address
    stats: Address  # f64 [n_row, LFPS_STATS_SIZE], see LFPS_STATS
    spread: Address  # f64 [n_head]: sigma_h^2 / |q_h|^2 of the last prompt query
    meta: Address  # int64 [n_row, 6], see LFPS_META
    means: Address  # f32 [n_head_kv, 2, head_dim]: of the middle's K and V at this step
    scores: Address  # f32 [n_head, capacity], scratch
    n_head_kv: int
    capacity: int  # a multiple of 64, at least n_ctx + 64
    n_past: int
    n_sink: int
    n_local: int
    a: float  # the paper's a
    decay: float
    scale: float


LFPS_START = op(
    "select.lfps",
    LfpsStart,
    "head_dim heads group",
    reads=Reads(
        "lfps_start",
        _unless_all_follow,
        found="meta",
        first=LFPS_META.next // 8,
        every=len(LFPS_META),
    ),
)


class LfpsPropose:
    """The keys that a row's query may read, before it is known.

    They are sinks, the candidates of Eq. 7-9, ascending, and the LFPS_NEAR last keys; none if there
    is no middle. First it renews one of `period` parts of the bitmaps.
    """

    step: Address
    ver: Address  # as for LFPS_START, up to stats
    sla: Address
    bits: Address
    stats: Address
    sets: Address  # int32 [n_row, capacity]: positions
    counts: Address  # int32 [n_row]
    n_row: int
    capacity: int
    n_sink: int
    n_local: int
    period: int
    a: float


LFPS_PROPOSE = op("select.lfps", LfpsPropose)


class LfpsSets:
    """Sinks, last n_local and the best budget * (pos + 1) of the candidates (Eq. 5-6).

    The best are those with the largest mean of the heads' weights; the tables learn from them (Eq.
    10). A row whose heads' sparsity all exceeds epsilon gets no candidates and meta.bypassed 1, and
    its tables are not changed.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    ver: Address  # as for LFPS_START, up to scores
    sla: Address
    bits: Address
    stats: Address
    spread: Address
    meta: Address
    means: Address
    scores: Address
    indptr: Address  # the sets of LFPS_PROPOSE as a Selection of n_row rows
    indices: Address
    places: Address  # int32, as many as indices: the positions in k_table of these keys
    order: Address  # int32 [n_row, 2, capacity], scratch
    sets: Address  # int32 [n_row, set_capacity]
    counts: Address  # int32 [n_row]
    n_head_kv: int
    n_row: int
    capacity: int
    set_capacity: int
    n_sink: int
    n_local: int
    bypass: int  # 0: no row is bypassed
    a: float
    budget: float
    epsilon: float
    decay: float
    scale: float


LFPS_SETS = op("select.lfps", LfpsSets, "head_dim heads group", reads=READS_SELECTION)


class LfpsBypass:
    """Outputs of bypassed rows, merged with the mean value, which has the weight w_global (Eq.

    5).
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    spread: Address  # as for LFPS_START
    meta: Address
    means: Address
    lse: Address  # f32 [n_head]: of what was attended, see ATTEND
    out: InOut[Address]  # f32 [n_head, head_dim]
    n_head_kv: int
    bypass: int  # 2: replaced by the mean value
    scale: float


LFPS_BYPASS = op("select.lfps", LfpsBypass, "head_dim heads group")
