"""HIP_ESTIMATE, HIP_MEANS, HIP_SEARCH and HIP_SELECT against NumPy, between unmapped pages."""

from itertools import pairwise

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from test_kernels_attention import normal, page_table, paged
from test_kernels_select import rows_of

from tamis.jit_kernels import ops

SHAPES = [(16, 1), (64, 2)]  # head_dim, group
KERNELS = [
    *((ops.HIP_ESTIMATE, shape) for shape in SHAPES),
    *((ops.HIP_SEARCH, shape) for shape in SHAPES),
    *((ops.HIP_MEANS, shape[:1]) for shape in SHAPES),
    (ops.HIP_SELECT, ()),
]


def search(score, low, high, n_chunk):
    """Alg. 1 over blocks low .. high - 1, as the paper writes it, with inclusive ends."""
    n = high - low
    if n <= n_chunk:
        return list(range(low, high))

    def nearest(x):
        return int(np.floor(x + 0.5))

    ends = [low + nearest(j * n / n_chunk) for j in range(n_chunk + 1)]
    chunks = [(f, e - 1) for f, e in pairwise(ends)]
    while any(f < last for f, last in chunks):
        branches = []
        for f, last in chunks:
            m = nearest((f + last) / 2)
            branches += [(f, m - 1), (m, last)] if m > f else [(f, last)]
        scores = np.array([score((f + last) // 2) for f, last in branches])
        best = np.argsort(-scores, kind="stable")[:n_chunk]
        chunks = [branches[i] for i in sorted(best)]
    return [f for f, _ in chunks]


def check_search(q, k, *, group, heads_per_kv, block, stride, n_sink, n_local, n_chunk):
    n_kv, n_head_kv, head_dim = k.shape
    n_row = q.shape[1] // group
    expected = np.full((n_row, 1 + n_chunk), -7, np.int32)
    high = max(n_sink, (n_kv - n_local) // block)
    for r in range(n_row):
        heads = q[0, r * group : (r + 1) * group].astype(float)
        dots = (heads @ k[:, r * group // heads_per_kv].astype(float).T).max(axis=0)

        def score(b, dots=dots):
            return dots[b * block : (b + 1) * block : stride].max()

        found = search(score, n_sink, high, n_chunk)
        expected[r, 0], expected[r, 1 : 1 + len(found)] = len(found), found
    table = page_table(np.random.default_rng(3), n_kv, -(-n_kv // 64) + 1)
    for found in runs(
        ops.HIP_ESTIMATE, (head_dim, group),
        out={
            "mask": np.full((n_row, 1 + n_chunk), -7, np.int32),
            "tree": np.full((n_row, 8, n_chunk), -7, np.int32),
        },
        step=step_of(1, n_kv - 1), q=q, k_pages=paged(k, table), k_table=table, n_row=n_row,
        heads_per_kv=heads_per_kv, n_head_kv=n_head_kv, n_chunk=n_chunk, block=block,
        stride=stride, n_sink=n_sink, n_local=n_local,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["mask"], expected)


@pytest.mark.parametrize(("block", "stride"), [(1, 1), (2, 1), (7, 3), (16, 16)])
@pytest.mark.parametrize(("n_sink", "n_local", "n_chunk"), [(0, 1, 1), (1, 20, 5), (2, 33, 24)])
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
@pytest.mark.parametrize("n_kv", [1, 40, 333])
@in_child
def test_the_search_is_algorithm_1(head_dim, group, n_kv, n_sink, n_local, n_chunk, block, stride):
    rng = np.random.default_rng((head_dim, n_kv, block, n_chunk))
    k = normal(rng, n_kv, 2, head_dim).astype(np.float16)
    q = normal(rng, 1, 6 * group, head_dim)
    check_search(
        q, k, group=group, heads_per_kv=3 * group, block=block, stride=stride, n_sink=n_sink,
        n_local=n_local, n_chunk=n_chunk,
    )  # fmt: skip


@in_child
def test_equal_scores_keep_the_lower_blocks():
    q, k = np.ones((1, 2, 16), np.float32), np.ones((100, 2, 16), np.float16)
    check_search(
        q, k, group=1, heads_per_kv=1, block=2, stride=1, n_sink=1, n_local=5, n_chunk=6
    )  # fmt: skip


# --- the search over means -----------------------------------------------------------------------


def level_starts(n_unit):
    """First rows of the levels of the means of n_unit units."""
    return [2 * n_unit - 2 * (n_unit >> level) for level in range(n_unit.bit_length())]


def means_of(k, unit, n_unit, before):
    """before f16 [n_head_kv, 2 * n_unit, head_dim] with the means of what is whole in k."""
    means, held = before.copy(), len(k) // unit
    for level, start in enumerate(level_starts(n_unit)):
        for c in range(held >> level):
            keys = k[c * unit << level : (c + 1) * unit << level].astype(float)
            means[:, start + c] = keys.mean(axis=0)
    return means


@pytest.mark.parametrize(
    ("n_tok", "pos", "filled"), [(1, 0, 0), (1, 150, 0), (1, 150, 7), (70, 81, 10), (9, 40, 99)]
)
@pytest.mark.parametrize("unit", [4, 20])
@pytest.mark.parametrize("head_dim", [16, 64])
@in_child
def test_means_are_those_of_whole_chunks(head_dim, unit, n_tok, pos, filled):
    """`filled` units are there already, but not those that the new keys belong to."""
    rng = np.random.default_rng((head_dim, unit, pos))
    k = normal(rng, pos + n_tok, 3, head_dim).astype(np.float16)
    n_unit = len(k) // unit + 2
    table = page_table(rng, len(k), 4)
    valid = means_of(k[: min(filled, pos // unit) * unit], unit, n_unit, normal(
        rng, 3, 2 * n_unit, head_dim).astype(np.float16))  # fmt: skip
    expected = means_of(k, unit, n_unit, valid)
    for found in runs(
        ops.HIP_MEANS, (head_dim,), out={"means": valid, "filled": np.full(3, filled)},
        step=step_of(n_tok, pos), k_pages=paged(k, table), k_table=table, n_head_kv=3,
        n_unit=n_unit, unit=unit,
    ):  # fmt: skip
        # Each level rounds to float16 once more.
        np.testing.assert_allclose(found["means"], expected, rtol=0, atol=4e-3)
        assert (found["filled"] == len(k) // unit).all()


def search_means(chunk_score, block_score, searched, n_chunk, n_sink):
    """Blocks that the search keeps: chunk_score(level, i), block_score(b)."""

    def best(items, score):
        kept = sorted(items, key=lambda i: -score(i))[:n_chunk]
        return sorted(kept) if len(items) > n_chunk else items

    level = 0
    while searched >> level > 2 * n_chunk:
        level += 1
    chunks = best(list(range(searched >> level)), lambda i: chunk_score(level, i))
    while level:
        level -= 1
        chunks = [child for i in chunks for child in (2 * i, 2 * i + 1)]
        if (searched >> level) % 2:
            chunks.append((searched >> level) - 1)
        chunks = best(chunks, lambda i, level=level: chunk_score(level, i))
    blocks = [b for u in chunks for b in range(4 * u, 4 * u + 4) if b >= n_sink]
    return best(blocks, block_score)


@pytest.mark.parametrize(("block", "stride"), [(1, 1), (2, 1), (5, 2)])
@pytest.mark.parametrize(("n_sink", "n_local", "n_chunk"), [(0, 1, 1), (1, 20, 5), (2, 33, 24)])
@pytest.mark.parametrize(("n_tok", "pos", "mask_block"), [(1, 0, 1), (1, 332, 1), (37, 200, 16)])
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
@in_child
def test_the_search_keeps_the_best_chunks_of_each_level(
    head_dim, group, n_tok, pos, mask_block, n_sink, n_local, n_chunk, block, stride
):
    rng = np.random.default_rng((head_dim, pos, block, n_chunk))
    n_kv, n_row, q_stride, unit = pos + n_tok, 4, min(5, mask_block), 4 * block
    k = normal(rng, n_kv, 2, head_dim).astype(np.float16)
    q = normal(rng, n_tok, n_row * group, head_dim)
    n_unit, n_mask = n_kv // unit + 1, -(-n_tok // mask_block)
    starts = level_starts(n_unit)
    means = means_of(k, unit, n_unit, np.full((2, 2 * n_unit, head_dim), np.nan, np.float16))
    masks = np.full((n_mask * n_row, 1 + n_chunk), -7, np.int32)
    expected = masks.copy()
    for item, row in enumerate(expected):
        first, r = item // n_row * mask_block, item % n_row
        h = r // 2
        heads = q[first : min(n_tok, first + mask_block) : q_stride, r * group : (r + 1) * group]
        heads = 0.3 * heads.reshape(-1, head_dim).astype(float)
        searched = max(0, pos + first + 1 - n_local) // unit
        low = searched * unit
        near = [*range(min(n_sink * block, low)), *range(low, pos + first + 1)]
        offsets = np.log(np.exp(heads @ k[near, h].astype(float).T).sum(axis=1))

        def score(rows, heads=heads, offsets=offsets):
            return (heads @ rows.astype(float).T - offsets[:, None]).max()

        found = search_means(
            lambda level, i, h=h: score(means[h, starts[level] + i][None]),
            lambda b, h=h: score(k[b * block : (b + 1) * block : stride, h]),
            searched, n_chunk, n_sink,
        )  # fmt: skip
        row[0], row[1 : 1 + len(found)] = len(found), found
    capacity = ops.hip_capacity(n_chunk, block, stride, n_sink * block + n_local + unit)
    work = ops.hip_work(group, capacity, -(-mask_block // q_stride))
    table = page_table(rng, n_kv, 6)
    for found in runs(
        ops.HIP_SEARCH, (head_dim, group),
        out={"mask": masks, "work": np.full((n_mask * n_row, work), np.nan, np.float32)},
        step=step_of(n_tok, pos), q=q, k_pages=paged(k, table), k_table=table, means=means,
        n_row=n_row, heads_per_kv=2 * group, n_head_kv=2, n_unit=n_unit, n_chunk=n_chunk,
        block=block, stride=stride, n_sink=n_sink, n_local=n_local, mask_block=mask_block,
        q_stride=q_stride, capacity=capacity, scale_f=0.3,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["mask"], expected)


# --- the Selection -------------------------------------------------------------------------------


@pytest.mark.parametrize("pos", [0, 5, 40, 47, 48, 90])
@pytest.mark.parametrize(("n_sink", "n_local"), [(0, 1), (3, 7)])
@pytest.mark.parametrize("n_near", [0, 1, 30])
@in_child
def test_the_selection_joins_sinks_mask_and_window(pos, n_sink, n_local, n_near):
    block, n_chunk = 2, 4
    chosen = [[4, 5, 9], [3, 4, 5, 9], [], [20]]
    mask = np.full((len(chosen), 1 + n_chunk), 99, np.int32)
    expected = []
    high, end = max(0, pos + 1 - n_local) // block, pos // block + 1
    for row, blocks in zip(mask, chosen, strict=True):
        row[: 1 + len(blocks)] = len(blocks), *blocks
        near = {i for b in blocks for i in range(max(0, b - n_near), b + n_near + 1) if i < high}
        expected.append(sorted({*range(min(n_sink, high)), *near, *range(high, end)}))
    for found in runs(
        ops.HIP_SELECT,
        out={
            "indptr": np.full(len(chosen) + 1, -7, np.int32),
            "indices": np.full(sum(map(len, expected)), -7, np.int32),
        },
        step=step_of(1, pos), mask=mask, n_row=len(chosen), n_chunk=n_chunk, block=block,
        n_sink=n_sink, n_local=n_local, n_near=n_near, align=block, mask_block=1, q_block=1,
    ):  # fmt: skip
        assert rows_of(found) == expected


@pytest.mark.parametrize(("n_tok", "pos"), [(1, 3), (37, 0), (37, 90), (8, 95)])
@in_child
def test_a_mask_serves_the_rows_of_its_queries(n_tok, pos):
    """8 queries a row, 16 a mask; the window starts at a multiple of 4 before the mask's first."""
    block, n_chunk, n_row, n_sink, n_local = 2, 2, 2, 1, 7
    n_mask = -(-n_tok // 16)
    mask = np.array([[2, 3 + i % 2, 9 + i // 2] for i in range(n_mask * n_row)], np.int32)
    expected = []
    for first in range(0, n_tok, 8):
        high = max(0, pos + first // 16 * 16 + 1 - n_local) // 4 * 2
        end = (pos + min(n_tok, first + 8) + 1) // 2
        for r in range(n_row):
            chosen = mask[first // 16 * n_row + r, 1:].tolist()
            kept = {*range(min(n_sink, high)), *(b for b in chosen if b < high), *range(high, end)}
            expected.append(sorted(kept))
    for found in runs(
        ops.HIP_SELECT,
        out={
            "indptr": np.full(len(expected) + 1, -7, np.int32),
            "indices": np.full(sum(map(len, expected)), -7, np.int32),
        },
        step=step_of(n_tok, pos), mask=mask, n_row=n_row, n_chunk=n_chunk, block=block,
        n_sink=n_sink, n_local=n_local, n_near=0, align=4, mask_block=16, q_block=8,
    ):  # fmt: skip
        assert rows_of(found) == expected
