"""MagicPIG's ops against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal, page_table, paged
from guarded import in_child, runs, step_of
from lsh_tables import N_HEAD_KV, N_SINK, tables_of
from selection_cases import middle

from tamis.jit_kernels.contract import ops
from tamis.select.magicpig import codes

SHAPES = [(16, 2, 3, 5), (64, 7, 10, 9)]  # head_dim, heads, bits of a code, tables
KERNELS = [
    *((ops.LSH_CENTRE, (head_dim,)) for head_dim, *_ in SHAPES),
    *((ops.LSH_CODES, (d, -(-b * t // 32) * 32, b, t)) for d, _, b, t in SHAPES),
    *((ops.LSH_QUERY, (d, heads, -(-b * t // 32) * 32, b, t)) for d, heads, b, t in SHAPES),
    *((ops.LSH_TABLES, (b, t)) for _, _, b, t in SHAPES),
    *((ops.LSH_SAMPLE, (d, b, t)) for d, _, b, t in SHAPES),
]


def coded(rows, planes, n_bit, n_table):
    """Codes [.., n_table] of rows, and which of them no rounding can change."""
    rows, planes = rows.astype(float), planes.astype(float)
    products = (rows @ planes[:, : n_bit * n_table]).reshape(*rows.shape[:-1], n_table, n_bit)
    return codes(rows, planes, n_bit, n_table), (np.abs(products) > 1e-3).all(axis=-1)


@pytest.mark.parametrize("pos", [0, 12, 13, 200])
@pytest.mark.parametrize("head_dim", [16, 64])
@in_child
def test_keys_are_centred(head_dim, pos):
    rng = np.random.default_rng((head_dim, pos))
    n_local, capacity = 9, 256
    k = (normal(rng, pos + 1, N_HEAD_KV, head_dim) + 2).astype(np.float16)
    low, high = middle(pos, N_SINK, n_local)
    indexed = k[low:high].astype(float)
    centre = indexed.mean(axis=0) if high > low else np.zeros((N_HEAD_KV, head_dim))
    table = page_table(rng, pos + 1, 4)
    for found in runs(
        ops.LSH_CENTRE, (head_dim,),
        out={
            "centre": np.full((N_HEAD_KV, head_dim), np.nan, np.float32),
            "norms": np.full((N_HEAD_KV, capacity), 7, np.float32), "begin": np.zeros(1, np.int64),
        },
        step=step_of(1, pos), k_pages=paged(k, table), k_table=table, n_head_kv=N_HEAD_KV,
        capacity=capacity, n_sink=N_SINK, n_local=n_local,
    ):  # fmt: skip
        assert found["begin"] == [high]
        np.testing.assert_allclose(found["centre"], centre, rtol=1e-5, atol=1e-5)
        norms = np.linalg.norm(indexed - centre, axis=2).T
        np.testing.assert_allclose(found["norms"][:, low:high], norms, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", [4, 5, 12, 100])
@pytest.mark.parametrize(("head_dim", "heads", "n_bit", "n_table"), SHAPES)
@in_child
def test_codes_are_signs_of_products(head_dim, heads, n_bit, n_table, end):
    rng = np.random.default_rng((head_dim, end))
    n_plane, capacity = -(-n_bit * n_table // 32) * 32, 128
    k = normal(rng, max(end, 1), N_HEAD_KV, head_dim).astype(np.float16)
    centre = normal(rng, N_HEAD_KV, head_dim)
    planes = normal(rng, head_dim, n_plane).astype(np.float16)
    q = normal(rng, N_HEAD_KV, heads, head_dim)
    table = page_table(rng, len(k), 3)
    size = ops.lsh_work(max(ops.LSH_ROWS, heads), n_plane, head_dim)
    work = np.full((3, size), np.nan, np.float32)
    expected, sure = coded(k[N_SINK:].transpose(1, 0, 2) - centre[:, None], planes, n_bit, n_table)
    before = np.full((N_HEAD_KV, n_table, capacity), 7777, np.uint16)
    for found in runs(
        ops.LSH_CODES, (head_dim, n_plane, n_bit, n_table), out={"codes": before, "work": work},
        k_pages=paged(k, table), k_table=table, centre=centre, planes=planes,
        begin=np.array([end]), n_head_kv=N_HEAD_KV, capacity=capacity, n_sink=N_SINK,
        work_size=size,
    ):  # fmt: skip
        codes = found["codes"][:, :, N_SINK:end].transpose(0, 2, 1)
        assert ((codes == expected) | ~sure).all()
        assert (found["codes"][:, :, end:] == 7777).all()
    expected, sure = coded(q, planes, n_bit, n_table)
    empty = np.zeros((N_HEAD_KV, heads, n_table), np.uint16)
    for found in runs(
        ops.LSH_QUERY, (head_dim, heads, n_plane, n_bit, n_table),
        out={"codes": empty, "work": work}, q=q, planes=planes, n_head_kv=N_HEAD_KV, work_size=size,
    ):  # fmt: skip
        assert ((found["codes"] == expected) | ~sure).all()


@pytest.mark.parametrize("end", [4, 5, 100])
@pytest.mark.parametrize(("head_dim", "heads", "n_bit", "n_table"), SHAPES)
@in_child
def test_tables_list_positions_by_code(head_dim, heads, n_bit, n_table, end):
    rng = np.random.default_rng((n_bit, end))
    codes = rng.integers(0, 1 << n_bit, (N_HEAD_KV, n_table, 100)).astype(np.uint16)
    starts, order = tables_of(codes, n_bit, end)
    for found in runs(
        ops.LSH_TABLES, (n_bit, n_table),
        out={"starts": np.full_like(starts, -7), "order": np.full_like(order, -7)}, codes=codes,
        begin=np.array([end]), n_head_kv=N_HEAD_KV, capacity=100, n_sink=N_SINK,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["starts"], starts)
        np.testing.assert_array_equal(found["order"], order)


@pytest.mark.parametrize(("pos", "end"), [(2, 4), (20, 4), (150, 140), (191, 100)])
@pytest.mark.parametrize(("head_dim", "heads", "n_bit", "n_table"), SHAPES)
@in_child
def test_samples_are_what_collides_twice_with_their_weights(
    head_dim, heads, n_bit, n_table, pos, end
):
    rng = np.random.default_rng((head_dim, pos))
    capacity, n_head = 192, N_HEAD_KV * heads
    k = normal(rng, pos + 1, N_HEAD_KV, head_dim).astype(np.float16)
    q, centre = normal(rng, n_head, head_dim), normal(rng, N_HEAD_KV, head_dim)
    norms = np.zeros((N_HEAD_KV, capacity), np.float32)
    centred = k.astype(float) - centre
    norms[:, : pos + 1] = np.linalg.norm(centred, axis=2).T
    codes = rng.integers(0, 6, (N_HEAD_KV, n_table, capacity)).astype(np.uint16)
    asked = rng.integers(0, 6, (n_head, n_table)).astype(np.uint16)
    starts, order = tables_of(codes, n_bit, end)
    bias = np.linspace(3, -1, 9).astype(np.float32)
    table = page_table(rng, pos + 1, 4)
    for found in runs(
        ops.LSH_SAMPLE, (head_dim, n_bit, n_table),
        out={
            "sets": np.full((n_head, capacity), -7, np.int32),
            "log_weight": np.full((n_head, capacity), np.nan, np.float32),
            "counts": np.full(n_head, -7, np.int32),
            "bits": np.full((n_head, 2, capacity // 64 + 1), -1, np.int64),
        },
        step=step_of(1, pos), q=q, k_pages=paged(k, table), k_table=table, centre=centre,
        norms=norms, begin=np.array([end]), codes=asked, starts=starts, order=order, bias=bias,
        n_head=n_head, heads_per_kv=heads, n_head_kv=N_HEAD_KV, capacity=capacity,
        set_capacity=capacity, n_bias=len(bias), n_sink=N_SINK,
    ):  # fmt: skip
        for head in range(n_head):
            h, n = head // heads, found["counts"][head]
            hits = (codes[h, :, N_SINK:end] == asked[head][:, None]).sum(axis=0)
            sampled = (N_SINK + np.flatnonzero(hits >= 2)).tolist()
            ends = [*range(min(N_SINK, pos + 1))], [*range(end, pos + 1)]
            assert found["sets"][head, :n].tolist() == [*ends[0], *sampled, *ends[1]]
            inner = centred[sampled, h] @ q[head].astype(float)
            cosine = inner / np.linalg.norm(q[head]) / norms[h, sampled]
            log_weight = np.interp(cosine, np.linspace(-1, 1, len(bias)), bias)
            expected = [*np.zeros(len(ends[0])), *log_weight, *np.zeros(len(ends[1]))]
            # The products q . k and q . centre are rounded apart.
            np.testing.assert_allclose(found["log_weight"][head, :n], expected, rtol=0, atol=1e-4)
