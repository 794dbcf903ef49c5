"""HIP_ESTIMATE, HIP_MEANS, HIP_SEARCH and HIP_SELECT against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, is_on_gpu, runs, step_of
from selection_cases import rows_of

from tamis.jit_kernels.contract import ops
from tamis.select.hip import search

SHAPES = [(16, 1), (64, 2)]  # head_dim, group
SEARCHES = [  # head_dim, group, type of keys
    (16, 1, "f16"), (64, 2, "f16"), (80, 9, "f16"), (64, 3, "q8_0"), (96, 1, "q4_0"),
]  # fmt: skip
MEANS = [(head_dim, type_k) for head_dim, _, type_k in SEARCHES]
KERNELS = [
    *((ops.HIP_ESTIMATE, shape) for shape in SHAPES),
    *((ops.HIP_SEARCH, shape) for shape in SEARCHES),
    *((ops.HIP_MEANS, kind) for kind in MEANS),
    (ops.HIP_SELECT, ()),
]


def check_search(
    q, k, *, group, heads_per_kv, block, stride, n_sink, n_local, n_chunk, mask_block=1, q_stride=1
):  # fmt: skip
    """The last len(q) of the positions in k are the queries."""
    (n_kv, n_head_kv, head_dim), n_tok = k.shape, len(q)
    n_row, n_mask, pos = q.shape[1] // group, -(-n_tok // mask_block), n_kv - n_tok
    masks = np.full((n_mask * n_row, 1 + n_chunk), -7, np.int32)
    expected = masks.copy()
    for item, row in enumerate(expected):
        first, r = item // n_row * mask_block, item % n_row
        high = max(n_sink, (pos + first + 1 - n_local) // block)
        heads = q[first : min(n_tok, first + mask_block) : q_stride, r * group : (r + 1) * group]
        heads = heads.reshape(-1, head_dim).astype(float)
        dots = (heads @ k[:, r * group // heads_per_kv].astype(float).T).max(axis=0)

        def score(b, dots=dots):
            return dots[b * block : (b + 1) * block : stride].max()

        found = search(score, n_sink, high, n_chunk)
        row[0], row[1 : 1 + len(found)] = len(found), found
    table = page_table(np.random.default_rng(3), n_kv, -(-n_kv // 64) + 1)
    for found in runs(
        ops.HIP_ESTIMATE, (head_dim, group),
        out={"mask": masks, "tree": np.full((n_mask * n_row, 8, n_chunk), -7, np.int32)},
        step=step_of(n_tok, pos), q=q, k_pages=paged(k, table), k_table=table, n_row=n_row,
        heads_per_kv=heads_per_kv, n_head_kv=n_head_kv, n_chunk=n_chunk, block=block,
        stride=stride, n_sink=n_sink, n_local=n_local, mask_block=mask_block, q_stride=q_stride,
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


@pytest.mark.parametrize(("block", "stride"), [(1, 1), (7, 3), (16, 16)])
@pytest.mark.parametrize(("n_sink", "n_local", "n_chunk"), [(0, 1, 1), (1, 20, 5), (2, 33, 24)])
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
@pytest.mark.parametrize(
    ("n_tok", "pos", "mask_block", "q_stride"),
    [(37, 0, 16, 5), (37, 296, 16, 1), (32, 301, 16, 16), (3, 330, 64, 8)],
)
@in_child
def test_a_mask_of_several_queries_is_algorithm_1_with_their_best_products(
    head_dim, group, n_tok, pos, mask_block, q_stride, n_sink, n_local, n_chunk, block, stride
):
    """Masks that are whole and one that is not, of all queries, every fifth and the first only."""
    rng = np.random.default_rng((head_dim, n_tok, pos, block, n_chunk))
    k = normal(rng, pos + n_tok, 2, head_dim).astype(np.float16)
    q = normal(rng, n_tok, 6 * group, head_dim)
    check_search(
        q, k, group=group, heads_per_kv=3 * group, block=block, stride=stride, n_sink=n_sink,
        n_local=n_local, n_chunk=n_chunk, mask_block=mask_block, q_stride=q_stride,
    )  # fmt: skip


@in_child
def test_equal_scores_keep_the_lower_blocks():
    q, k = np.ones((1, 2, 16), np.float32), np.ones((100, 2, 16), np.float16)
    check_search(
        q, k, group=1, heads_per_kv=1, block=2, stride=1, n_sink=1, n_local=5, n_chunk=6
    )  # fmt: skip


# --- the search over means -----------------------------------------------------------------------


def level_starts(room, top):
    """First rows of the levels of the means, and the number of rows."""
    return np.cumsum([0] + [room >> 2 * level for level in range(top + 1)]).tolist()


def empty_means(n_head_kv, head_dim, room, top):
    n_mean = level_starts(room, top)[-1]
    return (
        np.zeros((n_head_kv, n_mean // 4, head_dim // 4, 4, 4), np.uint8),
        np.zeros((n_head_kv, n_mean // 4, 2, 4), np.float32),
    )


def values_of(means, extents, head_dim):
    """What the bytes stand for: f64 [n_head_kv, n_mean, head_dim]."""
    width, low = extents.transpose(2, 0, 1, 3).reshape(2, len(means), -1, 1).astype(float)
    return low + width * means.swapaxes(2, 3).reshape(len(means), -1, head_dim)


def add_means(k, block, room, top, means, extents):
    """Write the means of what is whole in k."""
    held = len(k) // block
    for level, start in enumerate(level_starts(room, top)[:-1]):
        for c in range(held >> 2 * level):
            at = c * block << 2 * level, (c + 1) * block << 2 * level
            mean = k[at[0] : at[1]].astype(float).mean(axis=0)
            low = mean.min(axis=1, keepdims=True)
            width = (mean.max(axis=1, keepdims=True) - low) / 127
            steps = (mean - low) / np.where(width > 0, width, 1)
            steps = np.rint(steps).reshape(len(steps), -1, 4)
            means[:, (start + c) // 4, :, (start + c) % 4] = steps
            extents[:, (start + c) // 4, :, (start + c) % 4] = np.hstack([width, low])


@pytest.mark.parametrize(
    ("n_tok", "pos", "filled"), [(1, 0, 0), (1, 150, 0), (1, 150, 7), (70, 81, 10), (9, 40, 99)]
)
@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize(("head_dim", "type_k"), MEANS)
@in_child
def test_means_are_those_of_whole_chunks(head_dim, type_k, block, n_tok, pos, filled):
    """`filled` blocks are there already, but not those that the new keys belong to."""
    rng = np.random.default_rng((head_dim, block, pos))
    k = normal(rng, pos + n_tok, 3, head_dim)
    k[:5, 0] = 1.5  # a mean without an extent
    rows = kept_as(k, type_k)
    k = numbers(rows)
    room, top = ops.hip_room(len(k) // block + 2, 4)
    table = page_table(rng, len(k), 4)
    valid = empty_means(3, head_dim, room, top)
    add_means(k[: min(filled, pos // block) * block], block, room, top, *valid)
    expected = [x.copy() for x in valid]
    add_means(k, block, room, top, *expected)
    for found in runs(
        ops.HIP_MEANS, (head_dim, type_k),
        out={
            "means": valid[0], "extents": valid[1], "filled": np.full(3, filled),
            "sums": np.full((3, head_dim), np.nan, np.float32),
        },
        step=step_of(n_tok, pos), k_pages=paged(rows, table), k_table=table, n_head_kv=3, room=room,
        top=top, block=block,
    ):  # fmt: skip
        # A mean is at most half a step from what stands for it, or two values' roundings differ.
        want = values_of(*expected, head_dim)
        np.testing.assert_allclose(
            values_of(found["means"], found["extents"], head_dim), want, rtol=0, atol=0.06
        )
        np.testing.assert_allclose(found["extents"], expected[1], rtol=1e-5, atol=1e-6)
        off = np.abs(found["means"].astype(int) - expected[0])
        assert off.max() <= 1
        assert off.mean() < 0.002
        assert (found["filled"] == len(k) // block).all()


def weight(x):
    """2^x between whole numbers along straight lines."""
    x = np.clip(x, -120, 120)
    return np.exp2(np.floor(x)) * (1 + x - np.floor(x))


def search_means(score, searched, n_chunk, n_sink, n_flat):
    """Blocks that the search keeps: score(level, i)."""

    def best(items, level):
        kept = sorted(items, key=lambda i: -score(level, i))[:n_chunk]
        return sorted(kept) if len(items) > n_chunk else items

    level = 0
    while searched >> 2 * level > n_flat:
        level += 1
    chunks = list(range(searched >> 2 * level))
    while level:
        above = searched >> 2 * level
        chunks = best(chunks, level)
        level -= 1
        chunks = [4 * i + j for i in chunks for j in range(4)]
        chunks += range(4 * above, searched >> 2 * level)
    return best([b for b in chunks if b >= n_sink], 0)


@pytest.mark.parametrize("block", [1, 5])
@pytest.mark.parametrize(
    ("n_sink", "n_local", "n_chunk", "n_flat"),
    [(0, 1, 1, 4), (1, 20, 5, 20), (1, 20, 5, 90), (2, 33, 24, 96), (2, 33, 24, 999)],
)
@pytest.mark.parametrize(("n_tok", "pos", "mask_block"), [(1, 0, 1), (1, 332, 1), (37, 200, 16)])
@pytest.mark.parametrize(("head_dim", "group", "type_k"), SEARCHES)
@in_child
def test_the_search_keeps_the_best_chunks_of_each_level(
    head_dim, group, type_k, n_tok, pos, mask_block, n_sink, n_local, n_chunk, n_flat, block
):
    rng = np.random.default_rng((head_dim, pos, block, n_chunk))
    n_kv, n_row, q_stride, scale = pos + n_tok, 4, min(5, mask_block), 0.3
    rows = kept_as(normal(rng, n_kv, 2, head_dim), type_k)
    k, q = numbers(rows), normal(rng, n_tok, n_row * group, head_dim)
    (room, top), n_mask = ops.hip_room(n_kv // block + 1, n_chunk), -(-n_tok // mask_block)
    means, extents = empty_means(2, head_dim, room, top)
    add_means(k, block, room, top, means, extents)
    values, starts = values_of(means, extents, head_dim), level_starts(room, top)
    masks = np.full((n_mask * n_row, 1 + n_chunk), -7, np.int32)
    expected = masks.copy()
    for item, row in enumerate(expected):
        first, r = item // n_row * mask_block, item % n_row
        heads = q[first : min(n_tok, first + mask_block) : q_stride, r * group : (r + 1) * group]
        heads = heads.reshape(-1, head_dim).astype(float)
        searched = max(0, pos + first + 1 - n_local) // block
        low = searched * block
        near = [*range(min(n_sink * block, low)), *range(low, pos + first + 1)]
        offsets = np.log(np.exp(scale * heads @ k[near, r // 2].astype(float).T).sum(axis=1))
        sizes = np.abs(heads).max(axis=1, keepdims=True) / 127
        heads = scale * sizes * np.rint(heads / sizes)
        scores = heads @ values[r // 2].T - offsets[:, None]
        scores = weight(scores / np.log(2)).sum(axis=0)
        found = search_means(
            lambda level, i, scores=scores: scores[starts[level] + i],
            searched, n_chunk, n_sink, n_flat,
        )  # fmt: skip
        row[0], row[1 : 1 + len(found)] = len(found), found
    n_near = (n_sink + 1) * block + n_local
    work = ops.hip_work(head_dim, group, -(-mask_block // q_stride), n_flat, n_near)
    table = page_table(rng, n_kv, 6)
    for found in runs(
        ops.HIP_SEARCH, (head_dim, group, type_k),
        out={"mask": masks, "work": np.full((n_mask * n_row, work), np.nan, np.float32)},
        step=step_of(n_tok, pos), q=q, k_pages=paged(rows, table), k_table=table, means=means,
        extents=extents, n_row=n_row, heads_per_kv=2 * group, n_head_kv=2, room=room, top=top,
        n_chunk=n_chunk, n_flat=n_flat, block=block, n_sink=n_sink, n_local=n_local,
        mask_block=mask_block, q_stride=q_stride, n_near=n_near, scale=scale,
    ):  # fmt: skip
        # Keys that a GPU rounds weigh the heads by 1e-4 more or less: one close call may differ.
        others = np.flatnonzero((found["mask"] != expected).any(axis=1))
        assert len(others) <= int(is_on_gpu() and type_k != "f16")


@in_child
def test_equal_means_keep_the_lower_blocks():
    k, q = np.ones((100, 1, 16), np.float16), np.ones((1, 1, 16), np.float32)
    (room, top), table = ops.hip_room(100, 8), page_table(np.random.default_rng(0), 100, 3)
    means, extents = empty_means(1, 16, room, top)
    add_means(k, 1, room, top, means, extents)
    work = ops.hip_work(16, 1, 1, 32, 14)
    for found in runs(
        ops.HIP_SEARCH, (16, 1, "f16"),
        out={"mask": np.full((1, 9), -7, np.int32), "work": np.zeros((1, work), np.float32)},
        step=step_of(1, 99), q=q, k_pages=paged(k, table), k_table=table, means=means,
        extents=extents, n_row=1, heads_per_kv=1, n_head_kv=1, room=room, top=top, n_chunk=8,
        n_flat=32, block=1, n_sink=3, n_local=10, mask_block=1, q_stride=1, n_near=14, scale=1.0,
    ):  # fmt: skip
        assert found["mask"][0].tolist() == [8, *range(3, 11)]


# --- the Selection -------------------------------------------------------------------------------


@pytest.mark.on_threads
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
        n_sink=n_sink, n_local=n_local, n_near=n_near, mask_block=1, q_block=1,
    ):  # fmt: skip
        assert rows_of(found) == expected


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 3), (37, 0), (37, 90), (8, 95)])
@in_child
def test_a_mask_serves_the_rows_of_its_queries(n_tok, pos):
    """8 queries a row, 16 a mask; the window is that of the mask's first."""
    block, n_chunk, n_row, n_sink, n_local = 2, 2, 2, 1, 7
    n_mask = -(-n_tok // 16)
    mask = np.array([[2, 3 + i % 2, 9 + i // 2] for i in range(n_mask * n_row)], np.int32)
    expected = []
    for first in range(0, n_tok, 8):
        high = max(0, pos + first // 16 * 16 + 1 - n_local) // block
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
        n_sink=n_sink, n_local=n_local, n_near=0, mask_block=16, q_block=8,
    ):  # fmt: skip
        assert rows_of(found) == expected
