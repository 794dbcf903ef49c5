"""Ops of methods that read the best clusters, and estimate others by their centroid and mean value.

Clusters are TACTIC_MEAN's; scores are TACTIC_SCORE's. RetroInfer: Chen et al. 2025, arXiv
2505.02922; Double-P: Ni et al. 2026, arXiv 2602.05191.
"""

from tamis.jit_kernels.contract.arrays import F16, F32, I32, I64
from tamis.jit_kernels.contract.op import READS_ALL, Address, InOut, Out, op

NO_WEIGHT = -2e29  # the log-sum-exp of nothing


class ClusterValues:
    """The mean values of the clusters that the last clustering made; 0 of empty ones."""

    k_pages: Address  # not read: what fetches pages treats K and V alike
    v_pages: Address
    k_table: Address
    v_table: Address
    extent: I64[3]  # see TACTIC_SEED
    starts: I32["n_head_kv", "n_slot + 1"]  # see TACTIC_MEAN
    order: I32["n_head_kv", "capacity"]
    values: InOut[F16["n_head_kv", "n_slot", "head_dim"]]
    per_cluster: int
    n_sink: int


CLUSTER_VALUES = op("select.clusters", ClusterValues, "head_dim type_k type_v", reads=READS_ALL)


class ClusterZones:
    """The clusters of each KV head that are read, as marks, and those that are estimated.

    A cluster's share is the mean over the heads of its part of a softmax over the clusters' scores:
    with by_share 0 a part is exp(score), with 1 it is size * exp(score). A zone is the fewest
    clusters, the best first, of which there are `exact`, or `both`, of all clusters; with by_share
    1, whose shares sum to that. Equal shares go together. Empty clusters, and those whose share is
    0 in float32, are in no zone.
    """

    extent: I64[3]
    scores: InOut[F32["n_head_kv * group", "n_slot"]]  # those after the last cluster are masked
    starts: I32["n_head_kv", "n_slot + 1"]
    order: I32["n_head_kv", "n_word * 64"]
    tops: Out[F32["n_head_kv * group", 2]]  # scratch: of a head
    shares: Out[F32["n_head_kv", "n_slot"]]
    bars: Out[I32["n_head_kv", 2]]  # the least bits of a share that is read, that is in any zone
    marks: Out[I64["n_head_kv", "n_word"]]  # see TACTIC_MARK
    count: Out[I32["n_head_kv"]]
    by_share: int
    exact: float
    both: float
    scale: float


CLUSTER_ZONES = op("select.clusters", ClusterZones, "group")


class ClusterEstimate:
    """Attention to the estimated clusters: size * exp(score) weighs the mean of their values."""

    extent: I64[3]
    scores: F32["n_head_kv * group", "n_slot"]
    starts: I32["n_head_kv", "n_slot + 1"]
    shares: F32["n_head_kv", "n_slot"]  # as CLUSTER_ZONES left them
    bars: I32["n_head_kv", 2]
    values: F16["n_head_kv", "n_slot", "head_dim"]
    out: Out[F32["*", "n_head", "head_dim"]]
    lse: Out[F32["*", "n_head"]]
    scale: float


CLUSTER_ESTIMATE = op("select.clusters", ClusterEstimate, "head_dim group")
