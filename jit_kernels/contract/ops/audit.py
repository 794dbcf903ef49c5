"""A decode step's attention checked against dense attention."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import READS_ALL, op


class _AuditFields(NamedTuple):
    """Entries of a head's audit, float64 each."""

    n_seen: int  # positions that dense attention reads
    n_kept: int  # of these, the Selection's
    mass: int  # share of dense attention's weights that they hold
    best_mass: int  # share that as many of the largest weights hold
    recall: int  # share of those largest that are kept
    error: int  # |out - dense|, Euclidean
    norm: int  # |dense|
    entropy: int  # of dense attention's weights, in nats
    kept_entropy: int  # of the kept ones, scaled to sum to 1
    max_k: int  # the longest key, the longest value; 0 but for the first query head of a KV head
    max_v: int


AUDIT = _AuditFields(*range(11))

# One query token's attention checked against dense attention over every position that the layer's
# window allows: report f64 [n_head, len(AUDIT)]. given f32 [n_head, head_dim] is the method's
# output; the Selection and the pages are as for ATTEND; a log-weight changes what the kept weights
# are in kept_entropy only. Logits and weights are float32 as in ATTEND, their sums float64. Recall
# counts equal logits in the Selection's favour. capacity: a multiple of 16, above pos. work:
# scratch, f64 [n_thread (n_head, where that is less), audit_work(capacity, head_dim)].
AUDIT_HEADS = op(
    "select.audit",
    "audit_heads",
    "head_dim type_k type_v",
    "step q k_pages v_pages k_table v_table indptr indices log_weight block n_row heads_per_kv"
    " n_head window capacity given report work scale_f",
    reads=READS_ALL,
)


def audit_work(capacity: int, head_dim: int) -> int:
    """Float64s of scratch that AUDIT_HEADS needs a thread: two sums, a row, three a position."""
    return head_dim + (2 * head_dim + 3 * capacity + 1) // 2
