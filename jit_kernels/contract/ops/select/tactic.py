"""Ops of `tactic`: Zhu et al. 2025, arXiv 2502.12216.

Clustered are the positions n_sink .. end - 1 of each KV head, `segment` positions at a time (the
last segment may be shorter), each segment into per_cluster times fewer clusters. The clusters of
consecutive segments follow each other.
"""

from tamis.jit_kernels.contract.op import (
    READS_ALL,
    READS_SELECTION,
    Address,
    Ranges,
    Reads,
    op,
)

TACTIC_WORKERS = 64  # most threads that TACTIC_ASSIGN uses
TACTIC_SAMPLES = 256  # most positions that TACTIC_BUDGET samples


class TacticSeed:
    """Initialise the segments' centroids with keys drawn without replacement (4.2)."""

    k_pages: Address
    k_table: Address
    extent: Address  # int64 [3]: first position whose segment is clustered, end, clusters
    centroids: Address  # f32 [n_head_kv, n_slot, head_dim], while iterating
    means: Address  # f16 [n_head_kv, n_slot, head_dim]: centroids, for queries
    norms: Address  # f32 [n_head_kv, n_slot]: minus half the centroids' squared lengths
    moving: Address  # int64 [n_head_kv, n_segment]: 0 once an iteration has changed no centroid
    n_head_kv: int
    n_slot: int  # most clusters
    n_segment: int
    segment: int
    per_cluster: int
    n_sink: int
    seed: int


TACTIC_SEED = op("select.tactic", TacticSeed, "head_dim", reads=READS_ALL)


class TacticAssign:
    """The nearest centroid of each position's segment; of equally near ones the lowest."""

    k_pages: Address
    k_table: Address
    extent: Address
    centroids: Address
    norms: Address
    moving: Address
    labels: Address  # int32 [n_head_kv, capacity]
    panels: Address  # f32 [TACTIC_WORKERS, (head_dim + 3) * 32], scratch
    n_head_kv: int
    n_slot: int
    n_segment: int
    segment: int
    per_cluster: int
    capacity: int
    n_sink: int


TACTIC_ASSIGN = op("select.tactic", TacticAssign, "head_dim", reads=READS_ALL)


class TacticMean:
    """starts and order by labels; centroids that have members become their means."""

    k_pages: Address
    k_table: Address
    extent: Address
    centroids: Address
    means: Address
    norms: Address
    moving: Address
    labels: Address
    # int32 [n_head_kv, n_slot + 1]: cluster i holds order[starts[i]: starts[i + 1]]
    starts: Address
    order: Address  # int32 [n_head_kv, capacity]: positions by cluster, ascending in each
    cursor: Address  # int32 as norms, scratch
    n_head_kv: int
    n_slot: int
    n_segment: int
    segment: int
    per_cluster: int
    capacity: int
    n_sink: int


TACTIC_MEAN = op("select.tactic", TacticMean, "head_dim", reads=READS_ALL)


class TacticScore:
    """q . centroid, for one query token."""

    q: Address  # f32 [n_head, head_dim]
    extent: Address
    means: Address
    scores: Address  # f32 [n_head, n_slot]
    n_head_kv: int
    n_slot: int  # a multiple of 16


TACTIC_SCORE = op("select.tactic", TacticScore, "head_dim group")


class TacticRank:
    """The clusters' order per head, and the positions whose keys TACTIC_BUDGET weights.

    They include the first ones in that order: first_share of the positions and at least 20. With
    n_sample 0: two windows of the order, around 10 % and 60 %. With n_sample up to TACTIC_SAMPLES:
    the first ones are whole clusters, and as many later positions are drawn by their clusters'
    estimated weights. If unclustered positions count, these as well. None if share is 1.
    """

    step: Address
    extent: Address
    scores: Address
    starts: Address
    order: Address
    # int32 [n_head, n_slot]: clusters by falling score, equal within 1/65535 of range
    rank: Address
    work: Address  # f32 [n_head, tactic_work(capacity, n_slot)], scratch that TACTIC_BUDGET reads
    sets: Address  # int32 [n_head, set_capacity]
    counts: Address  # int32 [n_head]
    n_head: int
    heads_per_kv: int
    n_slot: int
    capacity: int
    set_capacity: int
    n_sink: int
    counted: int  # 1: the weight of unclustered positions counts towards the share
    n_sample: int
    share: float
    first_share: float
    scale: float


TACTIC_RANK = op("select.tactic", TacticRank)


class TacticBudget:
    """The number of positions that make up the share of all weight, per head.

    The positions listed by TACTIC_RANK are weighted. Without samples, as in Alg. 1, the others
    follow a curve through the windows; with samples, these estimate the clusters after the first
    ones, times 1 + margin, and whole clusters are kept.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    extent: Address
    indptr: Address  # the sets of TACTIC_RANK as a Selection of n_row rows
    indices: Address
    places: Address  # int32, as many as indices: the positions in k_table that have these keys
    keep: Address  # int32 [n_head]: number of positions in the clusters' order
    work: Address
    n_row: int  # heads
    heads_per_kv: int
    n_head_kv: int
    n_slot: int
    capacity: int
    n_sink: int
    counted: int
    n_sample: int
    share: float
    first_share: float
    margin: float
    scale: float


TACTIC_BUDGET = op("select.tactic", TacticBudget, "head_dim", reads=READS_SELECTION)


def _outside(low: int, _h: int, _b: int, n_sink: int, counted: int, n_tok: int, pos: int) -> Ranges:
    return 0, counted * n_sink, low, counted * (pos + n_tok)


class TacticJointRank:
    """TACTIC_RANK for all heads of a KV head in one order.

    Clusters are sorted by the falling sum over the heads of exp(scaled score) / their total;
    n_sample positions after the first ones are drawn in proportion to that sum. Unclustered
    positions are weighted here.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    extent: Address
    scores: Address  # become weights
    starts: Address
    order: Address
    sizes: Address  # f32 [n_head_kv, n_slot]: the clusters'
    density: Address  # f32 [n_head_kv, n_slot], scratch
    rank: Address  # int32 [n_head_kv, n_slot]
    # f32 [n_head_kv, tactic_joint_work(group, capacity, n_slot)], scratch that TACTIC_JOINT reads
    work: Address
    sets: Address  # int32 [n_head_kv, set_capacity]
    counts: Address  # int32 [n_head_kv]
    n_head_kv: int
    n_slot: int
    capacity: int
    set_capacity: int
    n_sink: int
    counted: int
    n_sample: int  # at least 1
    share: float
    first_share: float
    scale: float


TACTIC_JOINT_RANK = op(
    "select.tactic_joint",
    TacticJointRank,
    "head_dim group",
    reads=Reads(
        "tactic_outside", _outside, found="extent", first=1, every=3, x="n_sink", y="counted"
    ),
)


class TacticJoint:
    """The number of positions with which n_reach heads of a KV head reach the share.

    See TACTIC_BUDGET.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    extent: Address
    scores: Address  # as TACTIC_JOINT_RANK left them
    sizes: Address  # used up
    rank: Address
    indptr: Address  # the sets of TACTIC_JOINT_RANK as a Selection of n_row rows
    indices: Address
    places: Address  # int32, as many as indices: the positions in k_table that have these keys
    keep: Address  # int32 [n_head_kv]
    work: Address
    n_row: int  # KV heads
    n_head_kv: int
    n_slot: int
    capacity: int
    n_sink: int
    n_sample: int
    n_reach: int
    share: float
    first_share: float
    margin: float
    scale: float


TACTIC_JOINT = op("select.tactic_joint", TacticJoint, "head_dim group", reads=READS_SELECTION)


class TacticMark:
    """The positions that a head of the row's group keeps, as bits."""

    extent: Address
    labels: Address  # int32 [n_head_kv, capacity]: the cluster of a position; a GPU marks by it
    starts: Address
    order: Address
    rank: Address
    keep: Address
    ends: Address  # int32 [n_row * group, n_end]: the end of each cluster in order; for GPUs
    marks: Address  # int64 [n_row, capacity / 64]: a bit a position, the lowest first
    count: Address  # int32 [n_row]: number of set bits
    n_row: int
    heads_per_kv: int
    n_slot: int
    n_end: int
    capacity: int
    n_sink: int


TACTIC_MARK = op("select.tactic", TacticMark, "group")


class TacticSelect:
    """The Selection of the marked positions and of all unclustered ones."""

    step: Address
    extent: Address
    marks: Address
    count: Address
    indptr: Address
    indices: Address
    n_row: int
    capacity: int
    n_sink: int


TACTIC_SELECT = op("select.tactic", TacticSelect)


def tactic_half_window(n: int) -> int:
    """Half the length of TACTIC_BUDGET's window, which is 1 % of n positions, from 32 to 128."""
    return min(max(16, n // 200), 64)


def tactic_list(capacity: int) -> int:
    """The most positions that TACTIC_BUDGET weights, with padding.

    They are all, or two windows of 1 %, or samples.
    """
    return capacity + capacity // 50 + 64 + TACTIC_SAMPLES + 32


def tactic_work(capacity: int, n_slot: int) -> int:
    """Floats of scratch that TACTIC_BUDGET needs per head, for clusters, counts and lists."""
    return 4 * (n_slot + 16) + 512 + TACTIC_SAMPLES + 2 * tactic_list(capacity)


def tactic_joint_work(group: int, capacity: int, n_slot: int) -> int:
    """Floats of scratch that TACTIC_JOINT needs per KV head."""
    return 4 * (n_slot + 16 + group) + 512 + TACTIC_SAMPLES + (group + 1) * tactic_list(capacity)
