"""Ops of `tactic`."""

from tamis.jit_kernels.contract.op import READS_ALL, op

TACTIC_WORKERS = 64  # threads that TACTIC_ASSIGN keeps busy at most
TACTIC_SAMPLES = 256  # most positions that TACTIC_BUDGET samples

# Tactic (Zhu et al. 2025, arXiv 2502.12216). Clustered are the positions n_sink .. end - 1 of each
# KV head, `segment` positions at a time (the last segment may be shorter), each segment into
# per_cluster times fewer clusters. extent int64 [3]: the first position whose segment is to be
# made, end, and the number of clusters; a segment's clusters follow the one before's. starts int32
# [n_head_kv, n_slot + 1] and order int32 [n_head_kv, capacity]: cluster i holds the positions
# order[starts[i]: starts[i + 1]], ascending. means f16 [n_head_kv, n_slot, head_dim]:
# centroids, for queries. While they are made: centroids f32 as means; norms f32
# [n_head_kv, n_slot]: minus half their squared lengths; moving int64 [n_head_kv, n_segment]: 0 once
# an iteration changed no centroid of a segment.
# Start the segments anew with keys that are drawn without replacement (4.2).
TACTIC_SEED = op(
    "select.tactic",
    "tactic_seed",
    "head_dim",
    "k_pages k_table extent centroids means norms moving n_head_kv n_slot n_segment segment"
    " per_cluster n_sink seed",
    reads=READS_ALL,
)

# labels int32 [n_head_kv, capacity]: the nearest centroid of the position's segment, the lowest of
# equally near ones. panels: scratch, f32 [TACTIC_WORKERS, (head_dim + 3) * 32].
TACTIC_ASSIGN = op(
    "select.tactic",
    "tactic_assign",
    "head_dim",
    "k_pages k_table extent centroids norms moving labels panels n_head_kv n_slot n_segment"
    " segment per_cluster capacity n_sink",
    reads=READS_ALL,
)

# starts and order by labels; centroids that have members become their means. cursor: scratch, int32
# as norms.
TACTIC_MEAN = op(
    "select.tactic",
    "tactic_mean",
    "head_dim",
    "k_pages k_table extent centroids means norms moving labels starts order cursor n_head_kv"
    " n_slot n_segment segment per_cluster capacity n_sink",
    reads=READS_ALL,
)

# scores f32 [n_head, n_slot]: q . centroid, for one query token; n_slot is a multiple of 16.
TACTIC_SCORE = op(
    "select.tactic",
    "tactic_score",
    "head_dim group",
    "q extent means scores n_head_kv n_slot",
)

# For one query token, a head at a time: rank int32 [n_head, n_slot], the clusters by falling score
# (scores within a 65535th of their range are equal), and keep int32 [n_head], how many of the
# positions in that order make up the share of all weight. The first ones, first_share of them and
# at least 20, are weighed. n_sample 0: as Alg. 1 has it, the others are a curve through the windows
# round 10 % and 60 %. n_sample up to TACTIC_SAMPLES: whole clusters, the weight of those after the
# first ones estimated from as many of their positions, times 1 + margin. counted: 1 counts the
# weight of the positions outside of the clusters towards the share. work: scratch, f32 [n_head,
# tactic_work(capacity, n_slot)].
TACTIC_BUDGET = op(
    "select.tactic",
    "tactic_budget",
    "head_dim",
    "step q k_pages k_table extent scores starts order rank keep work n_head heads_per_kv"
    " n_head_kv n_slot capacity n_sink counted n_sample share_f first_share_f margin_f scale_f",
    reads=READS_ALL,
)

# The same for all heads of a KV head, in one order: rank int32 [n_head_kv, n_slot], the clusters by
# falling sum over the heads of exp(scaled score) / their total, and keep int32 [n_head_kv], with
# how many of the positions n_reach of the heads reach the share. n_sample (at least 1) positions
# after the first ones, drawn in proportion to that sum. scores are used up. Scratch: sizes, density
# f32 [n_head_kv, n_slot], work f32 [n_head_kv, tactic_joint_work(group, capacity, n_slot)].
TACTIC_JOINT = op(
    "select.tactic_joint",
    "tactic_joint",
    "head_dim group",
    "step q k_pages k_table extent scores starts order sizes density rank keep work n_head_kv"
    " n_slot capacity n_sink counted n_sample n_reach share_f first_share_f margin_f scale_f",
    reads=READS_ALL,
)

# marks int64 [n_row, capacity / 64]: a bit a position, the lowest first, set where a head of the
# row's group keeps it; count int32 [n_row]: how many are.
TACTIC_MARK = op(
    "select.tactic",
    "tactic_mark",
    "group",
    "extent starts order rank keep marks count n_row heads_per_kv n_slot capacity",
)

# The Selection of the marked positions and of all outside of the clusters.
TACTIC_SELECT = op(
    "select.tactic",
    "tactic_select",
    "",
    "step extent marks count indptr indices n_row capacity n_sink",
)


def tactic_half_window(n: int) -> int:
    """Half of a window of TACTIC_BUDGET: the window is 1 % of n positions, from 32 to 128."""
    return min(max(16, n // 200), 64)


def tactic_list(capacity: int) -> int:
    """Most positions that TACTIC_BUDGET weighs: all, two windows of 1 % or samples, and padding."""
    return capacity + capacity // 50 + 64 + TACTIC_SAMPLES + 32


def tactic_work(capacity: int, n_slot: int) -> int:
    """Floats of scratch that TACTIC_BUDGET needs a head: of clusters, counts, samples and lists."""
    return 4 * (n_slot + 16) + 512 + TACTIC_SAMPLES + 2 * tactic_list(capacity)


def tactic_joint_work(group: int, capacity: int, n_slot: int) -> int:
    """Floats of scratch that TACTIC_JOINT needs a KV head."""
    return 4 * (n_slot + 16 + group) + 512 + TACTIC_SAMPLES + (group + 1) * tactic_list(capacity)
