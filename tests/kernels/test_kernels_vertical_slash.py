"""SLASH_LINES and SLASH_SELECT against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal, page_table, paged
from guarded import in_child, runs, step_of
from selection_cases import rows_of

from tamis.jit_kernels.contract import ops
from tamis.select.vertical_slash import VerticalSlash, lines

SHAPES = [(16, 1), (64, 2), (80, 7)]  # head_dim, group
KERNELS = [*((ops.SLASH_LINES, shape) for shape in SHAPES), (ops.SLASH_SELECT, ())]


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (5, 150), (40, 0), (40, 100), (40, 700)])
@pytest.mark.parametrize(("n_vertical", "n_slash"), [(9, 12), (1, 1), (500, 60)])
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
@in_child
def test_lines_are_those_of_the_last_queries_weights(
    head_dim, group, n_vertical, n_slash, n_tok, pos
):
    rng = np.random.default_rng((head_dim, pos, n_slash))
    n, n_row, n_last = pos + n_tok, 2, 16
    n_sink, n_local = min(3, n_vertical), min(4, n_slash)
    k = normal(rng, n, n_row, head_dim).astype(np.float16)
    q = normal(rng, n_tok, n_row * group, head_dim)
    capacity = -(-n // ops.TILE) * ops.TILE
    columns = np.full((n_row, 1 + n_vertical), -7, np.int32)
    diagonals = np.full((n_row, 1 + n_slash), -7, np.int32)
    weights, wanted = np.zeros((2, n_row, n)), (columns.copy(), diagonals.copy())
    for h in range(n_row):
        last = range(max(0, n_tok - n_last), n_tok)
        shares = np.zeros((len(last), n))
        for row, t in zip(shares, last, strict=True):
            seen = pos + t + 1
            scores = 0.3 * (q[t, h * group : (h + 1) * group] @ k[:seen, h].astype(float).T)
            share = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            row[:seen] = share.sum(axis=0)
            weights[0, h, :seen] += row[:seen]
            weights[1, h, n - seen :] += row[:seen]
        p = VerticalSlash(n_vertical=n_vertical, n_slash=n_slash, sink=n_sink, local=n_local)
        for i, kept in enumerate(lines(p, shares)):
            wanted[i][h, 0], wanted[i][h, 1 : 1 + len(kept)] = len(kept), kept
        weights[0, h, :n_sink] = weights[1, h, max(0, n - n_local) :] = 3e38
    table = page_table(rng, n, -(-n // 64) + 1)
    empty = np.full((n_row, capacity), np.nan, np.float32)
    work = np.full((n_row, ops.slash_work(group, capacity, n_last)), np.nan, np.float32)
    for found in runs(
        ops.SLASH_LINES, (head_dim, group),
        out={
            "vertical": empty, "slash": empty, "columns": columns, "diagonals": diagonals,
            "work": work,
        },
        step=step_of(n_tok, pos), q=q, k_pages=paged(k, table), k_table=table, n_row=n_row,
        n_last=n_last, n_vertical=n_vertical, n_slash=n_slash, n_sink=n_sink, n_local=n_local,
        capacity=capacity, scale=0.3,
    ):  # fmt: skip
        # Sums of up to 112 float32 weights.
        np.testing.assert_allclose(found["vertical"][:, :n], weights[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["slash"][:, :n], weights[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found["columns"], wanted[0])
        np.testing.assert_array_equal(found["diagonals"], wanted[1])


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (21, 0), (21, 40)])
@pytest.mark.parametrize("n_column", [0, 1, 9])
@pytest.mark.parametrize("n_diagonal", [1, 2, 9])
@in_child
def test_rows_join_columns_and_bands_of_diagonals(n_tok, pos, n_column, n_diagonal):
    rng = np.random.default_rng((n_tok, pos, n_column, n_diagonal))
    n, n_row, q_block = pos + n_tok, 3, 8
    columns, diagonals = np.zeros((2, n_row, 1 + 9), np.int32)
    for h in range(n_row):
        for kept, count in ((columns[h], n_column), (diagonals[h], n_diagonal)):
            chosen = np.sort(rng.choice(n, min(n, count), replace=False))
            kept[0], kept[1 : 1 + len(chosen)] = len(chosen), chosen
        diagonals[h, diagonals[h, 0]] = n - 1  # distance 0 is always there
    expected = []
    for first in range(0, n_tok, q_block):
        queries = range(pos + first, pos + min(n_tok, first + q_block))
        for h in range(n_row):
            kept = {j for j in columns[h, 1 : 1 + columns[h, 0]].tolist() if j <= queries[-1]}
            for i in diagonals[h, 1 : 1 + diagonals[h, 0]].tolist():
                kept |= {p - (n - 1 - i) for p in queries if p >= n - 1 - i}
            expected.append(sorted(kept))
    for found in runs(
        ops.SLASH_SELECT,
        out={
            "indptr": np.full(len(expected) + 1, -7, np.int32),
            "indices": np.full(sum(map(len, expected)), -7, np.int32),
        },
        step=step_of(n_tok, pos), columns=columns, diagonals=diagonals, n_row=n_row,
        n_vertical=9, n_slash=9, q_block=q_block,
    ):  # fmt: skip
        assert rows_of(found) == expected
