"""The ops that score keys, choose and unite sets against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, is_on_gpu, runs, step_of
from selection_cases import DROP, LOWEST, best, maxima_of, middle, rows_of

from tamis.jit_kernels.contract import ops

SCORED = [  # head_dim, heads, group, type of keys
    (16, 1, 1, "f16"), (80, 6, 3, "f16"), (64, 7, 1, "f16"), (64, 7, 7, "q8_0"), (96, 4, 2, "q4_0"),
    (128, 2, 2, "q8_0"), (64, 7, 7, "f16"),
]  # fmt: skip
KERNELS = [
    (ops.SELECT_WINDOW, ()), (ops.SELECT_TOP_K, ()), (ops.SELECT_BEST, ()), (ops.SELECT_UNION, ()),
    (ops.SELECT_PACK, ()), (ops.SELECT_JOIN, ()),
    *((ops.SCORE_KEYS, s) for s in SCORED),
]  # fmt: skip


# --- windows -------------------------------------------------------------------------------------


def window_rows(n_tok, pos, n_row, *, q_block, block, n_sink, n_recent):
    """Blocks that hold a sink or a recent position of some query, by trying every position."""
    rows = []
    for first in range(0, n_tok, q_block):
        queries = range(pos + first, pos + min(n_tok, first + q_block))
        kept = {
            j // block
            for p in queries
            for j in range(p + 1)
            if j < n_sink or n_recent == 0 or j > p - n_recent
        }
        # Whole blocks between a row's first and last query are all recent.
        rows += [sorted(kept)] * n_row
    return rows


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 0), (4, 1), (0, 20), (17, 33), (64, 1000)])
@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize(
    ("n_tok", "pos", "q_block"), [(1, 0, 1), (1, 100, 1), (5, 98, 1), (37, 0, 16), (37, 100, 16)]
)
@in_child
def test_window(n_tok, pos, q_block, block, n_sink, n_recent):
    n_row = 2
    fixed = {"q_block": q_block, "block": block, "n_sink": n_sink, "n_recent": n_recent}
    expected = window_rows(n_tok, pos, n_row, **fixed)
    # The buffers end where the Selection does.
    indptr = np.full(len(expected) + 1, -7, np.int32)
    indices = np.full(sum(map(len, expected)), -7, np.int32)
    for found in runs(
        ops.SELECT_WINDOW, out={"indptr": indptr, "indices": indices}, step=step_of(n_tok, pos),
        n_row=n_row, **fixed,
    ):  # fmt: skip
        assert rows_of(found) == expected


# --- the best k ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pos", "n_sink", "n_local", "drop"),
    [(0, 0, 1, 0), (3, 4, 1, 0), (70, 0, 1, 0), (600, 4, 20, 0), (600, 70, 500, 0),
     (800, 4, 30, DROP)],
)  # fmt: skip
@pytest.mark.parametrize(("head_dim", "heads", "group", "type_k"), SCORED)
@pytest.mark.parametrize("partly", [False, True])
@in_child
def test_scores_of_the_middle(head_dim, heads, group, type_k, pos, n_sink, n_local, drop, partly):
    rng = np.random.default_rng((head_dim, pos, heads))
    n_head_kv, capacity = 2, (pos + 256) // 256 * 256
    low, high = middle(pos, n_sink, n_local, drop)
    q = normal(rng, n_head_kv, heads, head_dim)
    k = kept_as(normal(rng, pos + 1, n_head_kv, head_dim), type_k)
    scales = k if type_k == "f16" else k["d"]
    scales[:low] = scales[high:] = np.nan
    table = page_table(rng, pos + 1, 14)
    asking = [group, 0][:: -1 if n_sink == 4 else 1]  # by the first KV head, or by the second
    counts = np.array(asking, np.int32) if partly else np.full(2, heads, np.int32)
    by_head = np.einsum("hgd,jhd->hgj", q.astype(float), numbers(k))
    before = normal(rng, n_head_kv, heads, capacity)
    unset = np.full((n_head_kv, heads, capacity // 16), 7, np.float32)
    pages = slice(low // 64 * 64, -(-high // 64) * 64 if high > low else low // 64 * 64)
    spans = slice(low // 256 * 16, -(-high // 256) * 16 if high > low else low // 256 * 16)
    for found in runs(
        ops.SCORE_KEYS, (head_dim, heads, group, type_k), out={"scores": before, "maxima": unset},
        step=step_of(1, pos), q=q, k_pages=paged(k, table), k_table=table, n_head_kv=n_head_kv,
        capacity=capacity, n_sink=n_sink, n_local=n_local, drop=drop,
        **({"counts": counts} if partly else {}), absent=() if partly else ("counts",),
    ):  # fmt: skip
        for h in range(n_head_kv):
            for row in range(0, counts[h], group):
                scores = found["scores"][h, row]
                expected = by_head[h, row : row + group, low:high].max(axis=0)
                # Float32 sums of at most 128 products; on a GPU, of float16 that was rounded.
                halves = is_on_gpu() and type_k != "f16"
                bound = 2**-12 * head_dim if halves else 1e-4
                np.testing.assert_allclose(scores[low:high], expected, rtol=0, atol=bound)
                outside = [*scores[pages.start : low], *scores[max(low, high) : pages.stop]]
                assert high <= low or all(x == LOWEST for x in outside)
                want = maxima_of(scores[None], low, max(low, high))[0, spans]
                np.testing.assert_array_equal(found["maxima"][h, row, spans], want)
        np.testing.assert_array_equal(
            found["scores"][:, :, : pages.start], before[:, :, : pages.start]
        )
        np.testing.assert_array_equal(
            found["scores"][:, :, pages.stop :], before[:, :, pages.stop :]
        )
        for h in np.flatnonzero(counts == 0):
            np.testing.assert_array_equal(found["scores"][h], before[h])


@pytest.mark.on_threads
@pytest.mark.parametrize("counts", [(4, 8, 16), (0, 1, 1), (3, 20, 0), (70, 9, 40), (4, 8, 5000)])
@pytest.mark.parametrize(("pos", "group"), [(0, 1), (2, 1), (90, 2), (1000, 1), (1000, 3)])
@in_child
def test_the_best_of_the_middle_are_kept(counts, pos, group):
    rng = np.random.default_rng((pos, *counts))
    n_sink, n_local, n_top = counts
    low, high = middle(pos, n_sink, n_local)
    capacity, n_row = (pos + 256) // 256 * 256, 3
    for scores in (
        normal(rng, n_row * group, capacity),
        rng.integers(-2, 3, (3 * group, capacity)),
    ):
        scores = scores.astype(np.float32)
        expected = [best(row[: pos + 1], n_sink, n_local, n_top) for row in scores[::group]]
        scores[:, low // 64 * 64 : low] = LOWEST
        scores[:, high : -(-high // 64) * 64] = LOWEST
        size = max(map(len, expected))
        out = {
            "scores": scores, "order": np.zeros((n_row, capacity), np.int32),
            "sets": np.zeros((n_row, size), np.int32), "counts": np.zeros(n_row, np.int32),
        }  # fmt: skip
        for found in runs(
            ops.SELECT_BEST, out=out, step=step_of(1, pos), maxima=maxima_of(scores, low, high),
            n_row=n_row, group=group, capacity=capacity, set_capacity=size, n_sink=n_sink,
            n_local=n_local, n_top=n_top, absent=("found", "exact", "n_found"),
        ):  # fmt: skip
            for r in range(n_row):
                assert found["sets"][r, : found["counts"][r]].tolist() == expected[r]


@pytest.mark.on_threads
@in_child
def test_sets_of_a_kv_heads_rows_are_united():
    sets = np.array([[0, 5, 64, 9], [5, 63, 99, 100], [1, 2, 3, 4], [7, 8, 9, 9]], np.int32)
    counts = np.array([3, 4, 0, 2], np.int32)
    out = {
        "bits": np.full((2, 2), -1, np.int64), "joined": np.zeros((2, 6), np.int32),
        "n_joined": np.full(2, -7, np.int32),
    }  # fmt: skip
    for found in runs(
        ops.SELECT_UNION, out=out, step=step_of(1, 100), sets=sets, counts=counts, rows_per_kv=2,
        n_head_kv=2, capacity=4, joined_capacity=6, n_word=2,
    ):  # fmt: skip
        assert found["n_joined"].tolist() == [6, 2]
        assert found["joined"].tolist() == [[0, 5, 63, 64, 99, 100], [7, 8, 0, 0, 0, 0]]


@pytest.mark.on_threads
@in_child
def test_sets_become_a_selection():
    sets = np.array([[0, 5, 64, 9], [5, 63, 99, 100], [1, 2, 3, 4], [7, 8, 9, 9]], np.int32)
    counts = np.array([3, 4, 0, 2], np.int32)
    out = {"indptr": np.full(5, -7, np.int32), "indices": np.full(9, -7, np.int32)}
    for found in runs(
        ops.SELECT_PACK, out=out, sets=sets, counts=counts, n_row=4, capacity=4
    ):  # fmt: skip
        assert rows_of(found) == [[0, 5, 64], [5, 63, 99, 100], [], [7, 8]]


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_row", "other_n_row"), [(2, 2), (6, 3), (4, 1)])
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize(
    ("n_tok", "pos", "q_block"), [(1, 0, 1), (1, 100, 1), (21, 0, 8), (21, 400, 16)]
)
@in_child
def test_joined_rows_have_what_either_has(n_tok, pos, q_block, block, n_row, other_n_row):
    rng = np.random.default_rng((n_tok, pos, block, n_row))
    n_block = -(-n_tok // q_block)
    ends = [pos + min(n_tok, (b + 1) * q_block) for b in range(n_block)]

    def drawn(n, unit):
        """Rows of up to 40 numbers, n a block of queries, some of them empty; as CSR."""
        rows = []
        for end in np.repeat(ends, n):
            most = -(-int(end) // unit)
            rows.append(np.sort(rng.permutation(most)[: rng.integers(0, 41)]).astype(np.int32))
        indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        return rows, indptr, np.concatenate([*rows, [0]]).astype(np.int32)

    blocks, block_indptr, block_indices = drawn(n_row, block)
    others, other_indptr, other_indices = drawn(other_n_row, 1)
    expected = []
    for r, row in enumerate(blocks):
        b, h = divmod(r, n_row)
        kept = {i * block + j for i in row.tolist() for j in range(block)}
        kept |= set(others[b * other_n_row + h * other_n_row // n_row].tolist())
        expected.append(sorted(j for j in kept if j < ends[b]))
    for found in runs(
        ops.SELECT_JOIN,
        out={
            "indptr": np.full(len(expected) + 1, -7, np.int32),
            "indices": np.full(sum(map(len, expected)), -7, np.int32),
        },
        step=step_of(n_tok, pos), block_indptr=block_indptr, block_indices=block_indices,
        other_indptr=other_indptr, other_indices=other_indices, n_row=n_row,
        other_n_row=other_n_row, block=block, q_block=q_block,
    ):  # fmt: skip
        assert rows_of(found) == expected


def check_top_k(scores, n_kv, counts):
    """`counts`: sinks, recent and top. Only the first n_kv of each row's scores are there."""
    expected = [best(row[:n_kv], *counts) for row in scores]
    n_sink, n_recent, n_top = counts
    indptr = np.full(len(scores) + 1, -7, np.int32)
    indices = np.full(sum(map(len, expected)), -7, np.int32)
    for found in runs(
        ops.SELECT_TOP_K, out={"indptr": indptr, "indices": indices}, step=step_of(1, n_kv - 1),
        scores=scores, n_row=len(scores), capacity=scores.shape[1], block=1, n_sink=n_sink,
        n_recent=n_recent, n_top=n_top,
    ):  # fmt: skip
        assert rows_of(found) == expected


COUNTS = [
    (0, 1, 0), (4, 8, 0), (0, 1, 1), (4, 8, 16), (3, 0, 5), (1, 2, 96), (1, 2, 97), (4, 8, 5000),
    (200, 1, 1), (0, 200, 0),
]  # fmt: skip


@pytest.mark.on_threads
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("n_kv", [1, 13, 100])
@in_child
def test_top_k_is_a_sort(n_kv, counts):
    rng = np.random.default_rng((n_kv, *counts))
    scores = normal(rng, 3, n_kv + 7)
    scores[:, n_kv:] = 1e9  # positions of the future
    check_top_k(scores, n_kv, counts)


@pytest.mark.on_threads
@pytest.mark.parametrize("counts", COUNTS)
@in_child
def test_ties_go_to_the_lower_position(counts):
    rng = np.random.default_rng(counts)
    check_top_k(rng.integers(-2, 3, (3, 100)).astype(np.float32), 100, counts)
    check_top_k(np.full((2, 100), -1.5, np.float32), 100, counts)


@pytest.mark.on_threads
@pytest.mark.parametrize("pos", [0, 15, 16, 99])
@in_child
def test_the_last_block_is_the_one_that_holds_pos(pos):
    scores = normal(np.random.default_rng(pos), 2, 100 // 16 + 1)
    n_block = pos // 16 + 1
    expected = [best(row[:n_block], 1, 1, 2) for row in scores]
    indptr = np.full(3, -7, np.int32)
    indices = np.full(sum(map(len, expected)), -7, np.int32)
    for found in runs(
        ops.SELECT_TOP_K, out={"indptr": indptr, "indices": indices}, step=step_of(1, pos),
        scores=scores, n_row=2, capacity=scores.shape[1], block=16, n_sink=1, n_recent=1, n_top=2,
    ):  # fmt: skip
        assert rows_of(found) == expected


@pytest.mark.on_threads
@in_child
def test_scores_of_every_size_are_ordered():
    rng = np.random.default_rng(5)
    sizes = np.float32(10) ** rng.uniform(-38, 38, (2, 100)).astype(np.float32)
    scores = np.where(rng.random((2, 100)) < 0.5, -sizes, sizes)
    scores[:, [7, 50]] = np.inf
    scores[:, [8, 51]] = -np.inf
    check_top_k(scores, 100, (2, 2, 30))
    check_top_k(scores, 100, (2, 2, 95))


@pytest.mark.on_threads
@in_child
def test_minus_zero_ties_with_zero():
    scores = np.array([[0.0, -0.0, 0.0, -0.0, -1.0, 0.0, 5.0]], np.float32)
    check_top_k(scores, 7, (0, 1, 2))
