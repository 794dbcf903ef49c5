"""AUDIT_HEADS against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import F16, TYPES, kept_as, normal, numbers, page_table, paged
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import AUDIT

HEAD_DIMS = [16, 64, 80]
KERNELS = [
    *((ops.AUDIT_HEADS, (n, *F16)) for n in HEAD_DIMS),
    *((ops.AUDIT_HEADS, (64, *types)) for types in TYPES[1:]),
]
SCALE = 0.3


def audited(q, k, v, given, kept, factor):
    """The report of one head: q, given [head_dim], k, v [n_kv, head_dim], kept bool [n_kv]."""
    s = SCALE * (k.astype(float) @ q.astype(float))
    w = np.exp(s - s.max())
    w /= w.sum()
    dense, size = w @ v.astype(float), kept.sum()
    best = np.argsort(-s, kind="stable")[:size]
    attended = (w * factor)[kept] / (w * factor)[kept].sum() if size else np.ones(1)
    report = np.zeros(len(AUDIT))
    report[AUDIT.n_seen], report[AUDIT.n_kept] = len(s), size
    report[AUDIT.mass], report[AUDIT.best_mass] = w[kept].sum(), w[best].sum()
    report[AUDIT.recall] = kept[best].mean() if size else 0
    report[AUDIT.error] = np.linalg.norm(given - dense)
    report[AUDIT.norm] = np.linalg.norm(dense)
    report[AUDIT.entropy] = -(w * np.log(w)).sum()
    report[AUDIT.kept_entropy] = -(attended * np.log(attended)).sum()
    report[AUDIT.max_k] = np.linalg.norm(k.astype(float), axis=1).max()
    report[AUDIT.max_v] = np.linalg.norm(v.astype(float), axis=1).max()
    return report


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("pos", "block"), [(0, 1), (62, 1), (150, 1), (150, 16)])
@pytest.mark.parametrize("rows_per_kv", [1, 3])
@pytest.mark.parametrize(
    ("head_dim", "types"), [*((n, F16) for n in HEAD_DIMS), *((64, t) for t in TYPES[1:])], ids=str
)
@in_child
def test_a_report_is_what_numpy_finds(head_dim, types, rows_per_kv, pos, block, window, weighted):
    rng = np.random.default_rng((head_dim, pos, block, window, rows_per_kv))
    n_kv, n_head_kv, heads_per_kv = pos + 1, 2, 3
    n_head, n_row = n_head_kv * heads_per_kv, n_head_kv * rows_per_kv
    q, given = normal(rng, n_head, head_dim), normal(rng, n_head, head_dim)
    held = [kept_as(normal(rng, n_kv, n_head_kv, head_dim), type) for type in types]
    k, v = map(numbers, held)
    tables = page_table(rng, n_kv, 4), page_table(rng, n_kv, 4)
    n_block = pos // block + 1
    # The first row keeps nothing, the second one all.
    shares = [0.0, 1.0, *[0.4] * n_row]
    rows = [np.flatnonzero(rng.random(n_block) < shares[r]) for r in range(n_row)]
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    log_weight = normal(rng, int(indptr[-1]))
    low, expected = max(0, pos - window + 1) if window else 0, []
    for head in range(n_head):
        r, h = head // (n_head // n_row), head // heads_per_kv
        at = (rows[r][:, None] * block + np.arange(block)).ravel()
        kept, factor = np.zeros(n_block * block, bool), np.ones(n_block * block)
        kept[at] = True
        if weighted:
            factor[at] = np.repeat(np.exp(log_weight[indptr[r] : indptr[r + 1]]), block)
        each = audited(
            q[head], k[low:, h], v[low:, h], given[head], kept[low:n_kv], factor[low:n_kv]
        )
        if head % heads_per_kv:
            each[[AUDIT.max_k, AUDIT.max_v]] = 0
        expected.append(each)
    capacity = (n_kv + 15) // 16 * 16
    work = np.full((n_head, ops.audit_work(capacity, head_dim)), np.nan)
    report = np.full((n_head, len(AUDIT)), np.nan)
    for found in runs(
        ops.AUDIT_HEADS, (head_dim, *types), out={"report": report, "work": work},
        step=step_of(1, pos), q=q,
        k_pages=paged(held[0], tables[0]), v_pages=paged(held[1], tables[1]),
        k_table=tables[0], v_table=tables[1], indptr=indptr,
        indices=np.concatenate(rows).astype(np.int32), block=block, n_row=n_row,
        heads_per_kv=heads_per_kv, n_head=n_head, window=window, capacity=capacity,
        given=given,
        scale=SCALE, **({"log_weight": log_weight} if weighted else {}),
        absent=[] if weighted else ["log_weight"],
    ):  # fmt: skip
        # Logits of up to 10 are float32 sums of 80 products; their weights err by as much.
        np.testing.assert_allclose(found["report"], expected, rtol=0, atol=2e-5)
