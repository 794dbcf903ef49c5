"""Comparison of a decode step's attention with dense attention."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import READS_ALL, Address, Out, op


class _AuditFields(NamedTuple):
    """Entries of a head's audit, float64 each."""

    n_seen: int  # positions that dense attention reads
    n_kept: int  # the number of these in the Selection
    mass: int  # the share of dense attention's weights that they hold
    best_mass: int  # the share that as many of the largest weights hold
    recall: int  # the share of those largest ones that is selected
    error: int  # |out - dense|, Euclidean
    norm: int  # |dense|
    entropy: int  # of dense attention's weights, in nats
    kept_entropy: int  # of the selected ones, scaled to sum to 1
    max_k: int  # the longest key and the longest value; 0 except for a KV head's first query head
    max_v: int


AUDIT = _AuditFields(*range(11))


class AuditHeads:
    """One query token's attention compared with dense attention over all positions it may see.

    A log-weight changes the retained weights in kept_entropy only. Logits and weights are float32
    as in ATTEND, their sums float64. Of equal logits, those in the Selection count first for
    recall.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address  # these and the Selection are as for ATTEND
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
    """Float64s of scratch that AUDIT_HEADS needs per thread.

    They are two sums, a row, and three for each position.
    """
    return head_dim + (2 * head_dim + 3 * capacity + 1) // 2
