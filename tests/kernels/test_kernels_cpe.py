"""SELECT_PACK and the ops of the method `cpe` against its algorithm, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal
from guarded import in_child, runs, step_of
from selection_cases import DROP, LOWEST, best, maxima_of, middle, rows_of

from tamis.jit_kernels.contract import ops
from tamis.select.cpe import CPE, cosines, dilated, shared

SHAPES = [(16, 4, 1), (64, 3, 3)]  # head_dim, heads, group
KERNELS = [
    (ops.SELECT_PACK, ()), (ops.SELECT_PSAW, ()), (ops.CIS_SETS, ()),
    *((ops.CIS_GATE, s) for s in SHAPES),
]  # fmt: skip


@pytest.mark.on_threads
@in_child
def test_sets_are_packed_one_after_the_other():
    sets = np.arange(12, dtype=np.int32).reshape(4, 3)
    counts = np.array([2, 0, 3, 1], np.int32)
    indptr, indices = np.full(5, -7, np.int32), np.full(6, -7, np.int32)
    for found in runs(
        ops.SELECT_PACK, out={"indptr": indptr, "indices": indices}, sets=sets, counts=counts,
        n_row=4, capacity=3,
    ):  # fmt: skip
        assert rows_of(found) == [[0, 1], [], [6, 7, 8], [9]]


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_sink", "n_local"), [(0, 1), (4, 20), (300, 1)])
@pytest.mark.parametrize("drop", [0, DROP, 1288490189])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize(("n_tok", "pos", "q_block"), [(1, 0, 1), (1, 99, 1), (37, 100, 16)])
@in_child
def test_a_layer_sees_sinks_and_its_part_of_the_past(
    n_tok, pos, q_block, block, drop, n_sink, n_local
):
    expected = []
    for first in range(0, n_tok, q_block):
        queries = range(pos + first, pos + min(n_tok, first + q_block))
        low = middle(queries[0], 0, n_local, drop)[0]
        kept = {j // block for j in range(queries[-1] + 1) if j < n_sink or j >= low}
        # Sinks of the future are not there for a row's first queries; ATTEND is causal.
        expected += [sorted(kept)] * 2
    out = {
        "indptr": np.full(len(expected) + 1, -7, np.int32),
        "indices": np.full(sum(map(len, expected)), -7, np.int32),
    }
    for found in runs(
        ops.SELECT_PSAW, out=out, step=step_of(n_tok, pos), n_row=2, q_block=q_block, block=block,
        n_sink=n_sink, n_local=n_local, drop=drop,
    ):  # fmt: skip
        assert rows_of(found) == expected


# --- the gate ------------------------------------------------------------------------------------


def gate(q, refs, meta, pos, *, n_block, n_mid, n_top):
    """One row before its decision: cosines with this block's references, None for everything."""
    following, begin, n_ref, n_retrieval, n_step = meta.tolist()
    if n_mid <= n_top:
        return None, [-1, begin, n_ref, n_retrieval, n_step + 1]
    if following != pos or pos - begin >= n_block:
        begin, n_ref = pos, 0
    return cosines(q, refs[:n_ref]), [pos + 1, begin, n_ref, n_retrieval, n_step + 1]


def asks(q, refs, meta):
    """What retrieving adds to a row."""
    refs[meta[2]] = q
    meta[2:4] = meta[2] + 1, meta[3] + 1


@pytest.mark.on_threads
@pytest.mark.parametrize(("head_dim", "heads", "group"), SHAPES)
@pytest.mark.parametrize(("n_top", "join"), [(10, 0), (10, 0.97), (10, 1), (400, 1)])
@in_child
def test_the_most_recent_like_query_of_the_block_shares_its_set(
    head_dim, heads, group, n_top, join
):
    rng = np.random.default_rng((head_dim, n_top))
    n_row, n_block, pos = 8, 5, 200
    base = normal(rng, n_row, 1, group, head_dim)
    refs = base + 0.3 * normal(rng, n_row, n_block, group, head_dim)
    q = (base[:, 0] + 0.1 * normal(rng, n_row, group, head_dim)).reshape(1, -1, head_dim)
    refs[4] = -refs[4]  # unlike
    refs[5, :, -1] *= -1  # one head of the row is unlike
    refs[1, 0] = 1.01 * q.reshape(n_row, group, head_dim)[1]  # the same direction
    meta = np.array(
        [[pos, 197, 3, 7, 9], [pos, 199, 1, 0, 0], [pos, 195, 5, 1, 5], [50, 198, 2, 1, 1],
         [pos, 197, 3, 2, 2], [pos, 198, 2, 2, 2], [-1, 0, 0, 0, 0], [pos, 196, 4, 0, 0]], np.int64
    )  # fmt: skip
    of_row, expected = q.reshape(n_row, group, head_dim).astype(float), refs.copy()
    gates = [
        gate(of_row[r], refs[r], meta[r], pos, n_block=n_block, n_mid=189, n_top=n_top)
        for r in range(n_row)
    ]
    similar, metas = zip(*gates, strict=True)
    n_head_kv, of_kv = n_row * group // heads, q.reshape(-1, heads, head_dim)
    if n_top == 10:
        rows_per_kv = heads // group
        of_heads = [list(similar[r : r + rows_per_kv]) for r in range(0, n_row, rows_per_kv)]
        alone, chosen = (
            np.concatenate([shared(CPE(tau=0.8, join=bar), cosines) for cosines in of_heads])
            for bar in (0, join)
        )
        assert alone.tolist() == [2, 0, -1, -1, -1, -1, -1, 3]
        if join == 0.97 and heads > group:
            assert (chosen != alone).any()
            assert (chosen != -1).any()
    else:
        chosen = np.full(n_row, -2)
    retrieve = np.repeat(chosen == -1, group).reshape(n_head_kv, heads)
    for r in np.flatnonzero(chosen == -1):
        asks(q.reshape(n_row, group, head_dim)[r], expected[r], metas[r])
    out = {
        "refs": refs, "meta": meta, "chosen": np.full(n_row, -7, np.int32),
        "asking": np.zeros((n_head_kv, heads, head_dim), np.float32),
        "n_asking": np.full(n_head_kv, -7, np.int32),
    }  # fmt: skip
    for found in runs(
        ops.CIS_GATE, (head_dim, heads, group), out=out, step=step_of(1, pos), q=q,
        n_head_kv=n_head_kv, n_block=n_block, n_sink=4, n_local=8, n_top=n_top, drop=0, tau=0.8,
        join=join,
    ):  # fmt: skip
        assert found["chosen"].tolist() == chosen.tolist()
        np.testing.assert_array_equal(found["refs"], expected)
        assert found["meta"].tolist() == [*metas]
        assert found["n_asking"].tolist() == retrieve.sum(axis=1).tolist()
        for h in range(n_head_kv):
            asking = found["asking"][h, : retrieve[h].sum()]
            np.testing.assert_array_equal(asking, of_kv[h][retrieve[h]])


# --- retrieval -----------------------------------------------------------------------------------


def check_sets(scores, pos, *, counts, dilation, drop=0):
    """Rows: everything, shared, and all others retrieved. counts: sinks, local, top."""
    n_row, capacity = scores.shape
    (n_sink, n_local, n_top), (n_best, radius) = counts, dilation
    low, high = middle(pos, n_sink, n_local, drop)
    size = n_sink + n_local + n_top + 2 * radius * n_best
    chosen = np.array([-2, 1] + [-1] * (n_row - 2), np.int32)
    if high - low > n_top:
        chosen[0] = -1
    else:
        chosen[:] = -2
    meta = np.zeros((n_row, 5), np.int64)
    meta[:, 2] = 2
    ref_sets = np.zeros((n_row, 3, size), np.int32)
    shared = sorted({0, max(0, low - 1), low, low + 2, high - 1, high, pos, pos + 1})[:size]
    ref_sets[1, 1, : len(shared)] = shared
    ref_counts = np.full((n_row, 3), len(shared), np.int32)
    sinks, local = list(range(min(n_sink, pos + 1))), list(range(high, pos + 1))
    expected, kept = [], {}
    for r in range(n_row):
        tops = list(range(low, high))
        if chosen[r] == 1:
            tops = sorted({j for j in shared if low <= j < high})
        elif chosen[r] == -1:
            tops = best(scores[r, low:high], 0, 0, n_top)
            tops = [low + j for j in tops]
            best_first = low + np.argsort(-scores[r, low:high], kind="stable")[:n_top]
            wide = dilated(CPE(k=3 * n_best or 1, r=radius), best_first)
            kept[r] = [j for j in wide.tolist() if low <= j < capacity]
        expected.append(sinks + tops + local)
    # Rows that retrieve are scored one after the other, from their KV head's first row on.
    group, rows_per_kv = 2, 2
    scored = np.zeros((n_row * group, capacity), np.float32)
    for h in range(0, n_row, rows_per_kv):
        asking = [r for r in range(h, min(n_row, h + rows_per_kv)) if chosen[r] == -1]
        scored[h * group : (h + len(asking)) * group : group] = scores[asking]
    scored[:, low // 64 * 64 : low] = LOWEST
    scored[:, high : -(-high // 64) * 64] = LOWEST
    out = {
        "scores": scored, "order": np.zeros((n_row, capacity), np.int32), "ref_sets": ref_sets,
        "ref_counts": ref_counts, "sets": np.zeros((n_row, size), np.int32),
        "counts": np.zeros(n_row, np.int32),
    }  # fmt: skip
    for found in runs(
        ops.CIS_SETS, out=out, step=step_of(1, pos), chosen=chosen, meta=meta,
        maxima=maxima_of(scored, low, high), n_row=n_row, rows_per_kv=rows_per_kv, group=group,
        n_block=3,
        capacity=capacity, set_capacity=size, n_sink=n_sink, n_local=n_local, n_top=n_top,
        n_best=n_best, radius=radius, drop=drop, absent=("found", "exact", "n_found"),
    ):  # fmt: skip
        for r in range(n_row):
            assert found["sets"][r, : found["counts"][r]].tolist() == expected[r]
            if r in kept:
                n = found["ref_counts"][r, 1]
                assert found["ref_sets"][r, 1, :n].tolist() == kept[r]


@pytest.mark.parametrize("dilation", [(0, 1), (5, 1), (5, 3), (16, 2)])
@pytest.mark.parametrize("drop", [0, DROP])
@pytest.mark.parametrize("counts", [(4, 8, 16), (0, 1, 16), (4, 8, 300), (16, 20, 100)])
@in_child
def test_retrieval_is_a_sort_and_sharing_clips(counts, drop, dilation):
    rng = np.random.default_rng((*counts, *dilation))
    scores = normal(rng, 4, 512)
    check_sets(scores, 500, counts=counts, dilation=dilation, drop=drop)
    check_sets(np.round(scores), 500, counts=counts, dilation=dilation, drop=drop)  # ties
    check_sets(np.full((4, 256), -1.5, np.float32), 60, counts=counts, dilation=dilation, drop=drop)
