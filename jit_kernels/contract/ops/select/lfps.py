"""Ops of `lfps`."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import READS_ALL, Ranges, Reads, op


class _LfpsMeta(NamedTuple):
    """Byte offsets of what LFPS remembers of a row: int64s."""

    next: int  # position that continues the tables; for any other one they are made anew
    bypassed: int  # 1 where the last step bypassed the row
    n_bypass: int  # counted, never reset by a kernel
    n_step: int
    n_scanned: int  # keys read, over all steps
    n_seen: int  # keys that dense attention would have read


LFPS_META = _LfpsMeta(0, 8, 16, 24, 32, 40)


def _unless_all_follow(
    low: int, high: int, _block: int, _x: int, _y: int, n_tok: int, pos: int
) -> Ranges:
    return 0, 0 if low == pos and high == pos else pos + n_tok, 0, 0


class _LfpsStats(NamedTuple):
    """Byte offsets of the numbers of a row's tables: float64s."""

    scale: int  # a score is its table's entry times scale
    ver: int  # four power sums of the vertical table's entries
    sla: int  # and of the slash table's


LFPS_STATS = _LfpsStats(0, 8, 40)
LFPS_STATS_SIZE = 9

# The method `lfps` (Yao and Wang 2025), for rows of `group` query heads of the `heads` that share a
# KV head. Positions are sinks (the first n_sink), the last n_local, and the middle between them,
# which the tables are over: ver f32 [n_row, capacity] by position, sla f32 [n_row, capacity] by
# distance to the query, distance d at entry capacity - 65 - d (so that nothing is ever shifted, and
# neighbours are neighbours in both), both divided by a common scale (so that decay costs nothing).
# capacity: a multiple of 64, at least n_ctx + 64. bits int64 [n_row, 2, 2, capacity / 64 + 1]: of
# each table, which entries were above the threshold (Eq. 8) and which above the mean when they last
# changed or were looked at. stats f64 [n_row, 9], see LFPS_STATS; spread f64 [n_head]:
# sigma_h^2 / |q_h|^2 of the last prompt query; meta int64 [n_row, 6], see LFPS_META; means f32
# [n_head_kv, 2, head_dim]: of the middle's keys and values when the tables were made.
# Keep the last queries: q f32 [n_tok, n_head, head_dim] to past f32 [n_past, n_head, head_dim] at
# position % n_past, and the position to past_pos int64 [n_past].
LFPS_KEEP = op("select.lfps", "lfps_keep", "head_dim", "step q past past_pos n_head n_past")

# Make the tables from the weights of the last n_past queries (Eq. 4), or of this one where none is
# kept, for KV heads whose first row's meta.next is not this position. A row's weights are the mean
# of its heads'. scores f32 [n_head, capacity] is scratch.
LFPS_START = op(
    "select.lfps",
    "lfps_start",
    "head_dim heads group",
    "step q k_pages v_pages k_table v_table past past_pos ver sla bits stats spread meta means"
    " scores n_head_kv capacity n_past n_sink n_local a_f decay_f scale_f",
    reads=Reads(
        "lfps_start",
        _unless_all_follow,
        found="meta",
        first=LFPS_META.next // 8,
        every=len(LFPS_META),
    ),
)

# sets int32 [n_row, set_capacity], counts int32 [n_row]: sinks, last n_local and the best
# budget * (pos + 1) of the candidates (Eq. 5-9), by the mean of the heads' weights; the tables
# learn from them (Eq. 10). A row whose heads' sparsity all exceeds epsilon gets no candidates and
# meta.bypassed 1 (where bypass is not 0), and its tables stay. Each step makes one of `period`
# parts of the bitmaps anew. scores as above; order int32 [n_row, 2, capacity] is scratch.
LFPS_SETS = op(
    "select.lfps",
    "lfps_sets",
    "head_dim heads group",
    "step q k_pages k_table ver sla bits stats spread meta means scores order sets counts"
    " n_head_kv capacity set_capacity n_sink n_local bypass period a_f budget_f epsilon_f decay_f"
    " scale_f",
    reads=READS_ALL,
)

# Outputs f32 [n_head, head_dim] of bypassed rows' heads: joined with the mean value, which weighs
# w_global (Eq. 5); with bypass 2, replaced by it.
LFPS_BYPASS = op(
    "select.lfps",
    "lfps_bypass",
    "head_dim heads group",
    "step q k_pages k_table spread meta means sets counts out n_head_kv set_capacity bypass"
    " scale_f",
    reads=READS_ALL,
)
