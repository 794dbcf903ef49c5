"""HYPER_SORT and HYPER_SELECT against the method's algorithm, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from lsh_tables import N_SINK, tables_of
from selection_cases import rows_of

from tamis.jit_kernels.contract import ops
from tamis.select.bigbird import draw, draw_key
from tamis.select.hyperattention import HyperAttention, chosen, sort_keys

N_BIT, N_HEAD_KV, HEADS = 4, 2, 3
KERNELS = [(ops.HYPER_SORT, (N_BIT,)), (ops.HYPER_SELECT, (N_BIT,))]
CAPACITY, N_SAMPLE, SEED = 192, 20, 5


def samples_of(h, pos, end):
    key = draw_key(SEED, N_HEAD_KV, h, pos)
    return draw(min(N_SAMPLE, max(0, end - N_SINK)), range(N_SINK, end), key)


@pytest.mark.parametrize("end", [4, 5, 150])
@in_child
def test_neighbours_in_the_order_differ_by_one_bit(end):
    rng = np.random.default_rng(end)
    codes = rng.integers(0, 1 << N_BIT, (N_HEAD_KV, 1, CAPACITY)).astype(np.uint16)
    starts, order = tables_of(codes, N_BIT, end)
    for found in runs(
        ops.HYPER_SORT, (N_BIT,),
        out={
            "ranked": np.full((N_HEAD_KV, CAPACITY), -7, np.int32),
            "ranks": np.full((N_HEAD_KV, 1 << N_BIT), -7, np.int32),
            "samples": np.full((N_HEAD_KV, 1 + N_SAMPLE), -7, np.int32),
        },
        step=step_of(9, 170), begin=np.array([end]), starts=starts, order=order,
        n_head_kv=N_HEAD_KV, capacity=CAPACITY, n_sink=N_SINK, n_sample=N_SAMPLE, seed=SEED,
    ):  # fmt: skip
        for h in range(N_HEAD_KV):
            ranked, ranks = sort_keys(codes[h, 0], N_BIT, range(N_SINK, end))
            assert found["ranked"][h, : len(ranked)].tolist() == ranked
            np.testing.assert_array_equal(found["ranks"][h], ranks)
            n, *listed = found["samples"][h]
            assert listed[:n] == samples_of(h, 170, end)


@pytest.mark.parametrize(
    ("n_tok", "pos", "end"), [(1, 0, 4), (21, 2, 4), (21, 160, 5), (21, 160, 150)]
)
@pytest.mark.parametrize(("n_block", "size"), [(0, 8), (2, 8), (3, 32)])
@in_child
def test_rows_read_the_blocks_they_vote_for_and_weighted_samples(n_tok, pos, end, n_block, size):
    rng = np.random.default_rng((pos, end))
    codes = rng.integers(0, 1 << N_BIT, (N_HEAD_KV, CAPACITY))
    asked = rng.integers(0, 1 << N_BIT, (n_tok, N_HEAD_KV * HEADS)).astype(np.uint16)
    n, q_block, rows, weights, orders = max(0, end - N_SINK), 8, [], [], []
    p = HyperAttention(block=n_block * size, size=size, bits=N_BIT)
    ranked = np.zeros((N_HEAD_KV, CAPACITY), np.int32)
    samples = np.zeros((N_HEAD_KV, 1 + N_SAMPLE), np.int32)
    for h in range(N_HEAD_KV):
        orders.append(sort_keys(codes[h], N_BIT, range(N_SINK, end)))
        listed = samples_of(h, pos, end)
        ranked[h, :n] = orders[h].positions
        samples[h, 0], samples[h, 1 : 1 + len(listed)] = len(listed), listed
    for first in range(0, n_tok, q_block):
        newest = pos + min(n_tok, first + q_block) - 1
        for h in range(N_HEAD_KV):
            queries = asked[first : first + q_block, h * HEADS : (h + 1) * HEADS]
            read = chosen(p, orders[h], queries, samples_of(h, pos, end))
            sinks, chunk = range(min(N_SINK, newest + 1)), range(end, newest + 1)
            rows.append([*sinks, *read, *chunk])
            weights += [0] * len(sinks) + [*read.values()] + [0] * len(chunk)
    total = sum(map(len, rows))
    for found in runs(
        ops.HYPER_SELECT, (N_BIT,),
        out={
            "indptr": np.full(len(rows) + 1, -7, np.int32),
            "indices": np.full(total, -7, np.int32),
            "log_weight": np.full(total, np.nan, np.float32),
            "votes": np.full(CAPACITY // size + 1, -7, np.int32),
            "bits": np.full((2, CAPACITY // 64 + 1), -1, np.int64),
        },
        step=step_of(n_tok, pos), begin=np.array([end]), codes=asked, ranked=ranked,
        ranks=np.array([order.ranks for order in orders], np.int32), samples=samples,
        n_head_kv=N_HEAD_KV, heads_per_kv=HEADS, capacity=CAPACITY, q_block=q_block,
        n_sink=N_SINK, n_block=n_block, size=size, n_sample=N_SAMPLE,
    ):  # fmt: skip
        assert rows_of(found) == rows
        np.testing.assert_allclose(found["log_weight"], weights, rtol=1e-6)
