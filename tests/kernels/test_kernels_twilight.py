"""TWILIGHT_WEIGH and TWILIGHT_PRUNE against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.select.twilight import kept, threshold

N_HEAD_KV, N_CTX, N_ROW = 2, 448, 4
SHAPES = [(64, 3, "f16"), (32, 1, "q8_0"), (80, 2, "f16")]  # head_dim, heads of a row, type
KERNELS = [
    *((ops.TWILIGHT_WEIGH, shape) for shape in SHAPES),
    *((ops.TWILIGHT_PRUNE, (group,)) for group in (1, 2, 3)),
]


def listed(rng, pos, block):
    """Blocks of each row, some after pos; and the positions up to pos that they list."""
    n_block = -(-N_CTX // block)
    rows = [np.flatnonzero(rng.random(n_block) < share) for share in (0.3, 0.8, 1, 0.1)]
    rows = [row if len(row) else np.zeros(1, int) for row in rows]
    at = [(block * row[:, None] + np.arange(block)).reshape(-1) for row in rows]
    n_tile = -(-n_block * block // ops.TILE)
    return rows, [each[each <= pos] for each in at], n_tile


def given(rows, block, pos):
    return {
        "step": step_of(1, pos),
        "indptr": np.cumsum([0, *map(len, rows)]).astype(np.int32),
        "indices": np.concatenate(rows).astype(np.int32),
        "block": block,
    }


@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize("pos", [90, 431])
@pytest.mark.parametrize(("head_dim", "group", "type_k"), SHAPES)
@pytest.mark.on_threads
@in_child
def test_a_chosen_position_is_weighed_for_each_head(head_dim, group, type_k, pos, block):
    rng = np.random.default_rng((head_dim, pos, block))
    rows, at, n_tile = listed(rng, pos, block)
    keys = kept_as(normal(rng, N_CTX, N_HEAD_KV, head_dim), type_k)
    table, q = page_table(rng, N_CTX, N_CTX // 64), normal(rng, 1, N_ROW * group, head_dim)
    for found in runs(
        ops.TWILIGHT_WEIGH, (head_dim, group, type_k),
        out={
            "rows": np.full((N_ROW, n_tile, ops.TILE + ops.LIST_PAD), -7, np.int32),
            "logits": np.full((N_ROW, n_tile, group, ops.TILE), np.nan, np.float32),
        },
        q=q, k_pages=paged(keys, table), k_table=table, n_row=N_ROW, heads_per_kv=2 * group,
        n_head_kv=N_HEAD_KV, window=0, stride=1, **given(rows, block, pos),
    ):  # fmt: skip
        for r in range(N_ROW):
            logits = found["logits"][r].swapaxes(0, 1).reshape(group, -1)[:, : len(at[r])]
            heads = q[0, r * group : (r + 1) * group].astype(float)
            expected = heads @ numbers(keys)[at[r], r // 2].T
            np.testing.assert_allclose(logits, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize(("pos", "group"), [(90, 1), (431, 3), (20, 2)])
@pytest.mark.parametrize("share", [0.2, 0.9, 1.0])
@pytest.mark.on_threads
@in_child
def test_each_head_keeps_the_fewest_that_reach_its_share(share, pos, group, block, weighted):
    rng = np.random.default_rng((pos, block, group))
    rows, at, n_tile = listed(rng, pos, block)
    logits = normal(rng, N_ROW, n_tile, group, ops.TILE) * 4
    flat = logits.swapaxes(1, 2).reshape(N_ROW, group, -1).astype(float)
    log_weight = normal(rng, sum(map(len, rows)))
    starts = np.cumsum([0, *map(len, rows)])
    for found in runs(
        ops.TWILIGHT_PRUNE, (group,),
        out={
            "logits": logits,
            "sets": np.full((N_ROW, N_CTX), -7, np.int32),
            "weights": np.full((N_ROW, N_CTX), -7, np.float32),
            "counts": np.full(N_ROW, -7, np.int32),
        },
        share=share, scale=0.3, **given(rows, block, pos),
        **({"log_weight": log_weight} if weighted else {}),
        absent=() if weighted else ("log_weight",),
    ):  # fmt: skip
        for r, positions in enumerate(at):
            own = 0.3 * flat[r, :, : len(positions)]
            more = np.repeat(log_weight[starts[r] : starts[r + 1]], block)[: len(positions)]
            expected = kept(own + more if weighted else own, share)
            n = found["counts"][r]
            np.testing.assert_array_equal(found["sets"][r, :n], positions[expected])
            assert (found["sets"][r, n:] == -7).all()
            if weighted:
                np.testing.assert_array_equal(found["weights"][r, :n], more[expected])


@pytest.mark.parametrize("p", [0.3, 0.8, 0.95])
def test_the_threshold_keeps_the_fewest_of_the_heaviest(p):
    rng = np.random.default_rng(4)
    for sharpness in (0.2, 1, 5):
        weights = np.exp(sharpness * rng.standard_normal(1000))
        weights /= weights.max()
        n = np.count_nonzero(weights >= threshold(weights, p))
        heaviest = np.sort(weights)[::-1].cumsum() / weights.sum()
        assert n == np.searchsorted(heaviest, p) + 1
