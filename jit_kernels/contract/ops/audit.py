"""A decode step's attention checked against dense attention."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import READS_ALL, Address, Out, op


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


class AuditHeads:
    """One query token's attention checked against dense attention over all positions it may see.

    A log-weight changes what the retained weights are in kept_entropy only. Logits and weights are
    float32 as in ATTEND, their sums float64. Recall counts equal logits in the Selection's favour.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address  # these and the Selection as for ATTEND
    v_pages: Address
    k_table: Address
    v_table: Address
    indptr: Address
    indices: Address
    log_weight: Address
    block: int
    n_row: int
    heads_per_kv: int
    n_head: int
    window: int
    capacity: int  # a multiple of 16, above pos
    given: Address  # f32 [n_head, head_dim]: the method's output
    report: Out[Address]  # f64 [n_head, len(AUDIT)]
    work: Out[Address]  # scratch, f64 [min(n_thread, n_head), audit_work(capacity, head_dim)]
    scale: float


AUDIT_HEADS = op("select.audit", AuditHeads, "head_dim type_k type_v", reads=READS_ALL)


def audit_work(capacity: int, head_dim: int) -> int:
    """Float64s of scratch that AUDIT_HEADS needs a thread: two sums, a row, three a position."""
    return head_dim + (2 * head_dim + 3 * capacity + 1) // 2
