"""Double Sparsity's ops against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal, page_table, paged
from guarded import in_child, runs, step_of
from selection_cases import LOWEST, maxima_of, middle

from tamis.jit_kernels.contract import ops
from tamis.select.double_sparsity import channels

SHAPES = [(16, 2, 1, 3), (64, 7, 7, 8), (80, 6, 3, 80)]  # head_dim, heads, group, n_label
KERNELS = [
    *((ops.LABEL_CHANNELS, (head_dim, heads)) for head_dim, heads, _, _ in SHAPES),
    *((ops.LABEL_KEYS, (head_dim,)) for head_dim, *_ in SHAPES),
    *((ops.LABEL_SCORE, (n_label, heads, group)) for _, heads, group, n_label in SHAPES),
]
N_HEAD_KV = 2


@pytest.mark.parametrize(("pos", "n_held"), [(0, 0), (70, 3), (70, 0)])
@pytest.mark.parametrize(("head_dim", "heads", "group", "n_label"), SHAPES)
@in_child
def test_channels_are_those_of_the_largest_products(head_dim, heads, group, n_label, pos, n_held):
    rng = np.random.default_rng((head_dim, pos, n_held))
    n_past, n_head = 3, N_HEAD_KV * heads
    # Far apart, so that float32 sums order as float64 ones do.
    size = 1.1 ** rng.permutation(head_dim).astype(np.float32)
    k = (normal(rng, pos + 1, N_HEAD_KV, head_dim) * size % 30).astype(np.float16)
    q = normal(rng, pos + 1, n_head, head_dim)
    past, past_pos = normal(rng, n_past, n_head, head_dim), np.full(n_past, -1, np.int64)
    for p in range(pos - n_held, pos):
        past[p % n_past], past_pos[p % n_past] = q[p], p
    queries = q[pos - n_held : pos] if n_held else q[pos:]
    expected = []
    for h in range(N_HEAD_KV):
        own = queries[:, h * heads : (h + 1) * heads].reshape(-1, head_dim).astype(float)
        expected.append(channels(own, k[:, h].astype(float), n_label).tolist())
    table = page_table(rng, pos + 1, 3)
    for found in runs(
        ops.LABEL_CHANNELS, (head_dim, heads),
        out={
            "channels": np.full((N_HEAD_KV, n_label), -7, np.int32),
            "work": np.full((N_HEAD_KV, head_dim), np.nan, np.float32),
        },
        step=step_of(1, pos), q=q[pos:], past=past, past_pos=past_pos, k_pages=paged(k, table),
        k_table=table, n_head_kv=N_HEAD_KV, n_label=n_label, n_past=n_past,
    ):  # fmt: skip
        assert found["channels"].tolist() == expected


@pytest.mark.parametrize(("pos", "fresh"), [(0, 1), (100, 1), (100, 0)])
@pytest.mark.parametrize(("head_dim", "heads", "group", "n_label"), SHAPES)
@in_child
def test_labels_are_the_keys_elements(head_dim, heads, group, n_label, pos, fresh):
    rng = np.random.default_rng((head_dim, pos))
    n_head, capacity = N_HEAD_KV * heads, 256
    k = normal(rng, pos + 1, N_HEAD_KV, head_dim).astype(np.float16)
    q = normal(rng, 1, n_head, head_dim)
    channels = np.stack([np.sort(rng.permutation(head_dim)[:n_label]) for _ in range(N_HEAD_KV)])
    before = normal(rng, N_HEAD_KV, n_label, capacity).astype(np.float16)
    expected, written = before.copy(), slice(0 if fresh else pos, pos + 1)
    for h in range(N_HEAD_KV):
        expected[h][:, written] = k[written, h][:, channels[h]].T
    table = page_table(rng, pos + 1, 3)
    for found in runs(
        ops.LABEL_KEYS, (head_dim,),
        out={"labels": before, "parts": np.full((n_head, n_label), np.nan, np.float32)},
        step=step_of(1, pos), q=q, k_pages=paged(k, table), k_table=table,
        channels=channels.astype(np.int32), n_head=n_head, n_head_kv=N_HEAD_KV, n_label=n_label,
        capacity=capacity, fresh=fresh,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["labels"], expected)
        for head in range(n_head):
            np.testing.assert_array_equal(found["parts"][head], q[0, head, channels[head // heads]])


@pytest.mark.parametrize(("pos", "n_sink", "n_local"), [(0, 0, 1), (70, 4, 9), (600, 70, 20)])
@pytest.mark.parametrize(("head_dim", "heads", "group", "n_label"), SHAPES)
@in_child
def test_scores_are_products_of_labels(head_dim, heads, group, n_label, pos, n_sink, n_local):
    rng = np.random.default_rng((head_dim, pos))
    n_head, capacity = N_HEAD_KV * heads, 768
    low, high = middle(pos, n_sink, n_local)
    labels = normal(rng, N_HEAD_KV, n_label, capacity).astype(np.float16)
    parts = normal(rng, n_head, n_label)
    products = np.einsum(
        "hgc,hcj->hgj", parts.reshape(N_HEAD_KV, heads, -1).astype(float), labels.astype(float)
    ).reshape(n_head, capacity)
    for found in runs(
        ops.LABEL_SCORE, (n_label, heads, group),
        out={
            "scores": normal(rng, n_head, capacity),
            "maxima": np.full((n_head, capacity // 16), 7, np.float32),
        },
        step=step_of(1, pos), parts=parts, labels=labels, n_head_kv=N_HEAD_KV, capacity=capacity,
        n_sink=n_sink, n_local=n_local,
    ):  # fmt: skip
        pages = slice(low // 64 * 64, -(-high // 64) * 64)
        spans = slice(low // 256, -(-high // 256))
        for row in range(0, n_head, group) if high > low else ():
            scores = found["scores"][row]
            expected = products[row : row + group, low:high].max(axis=0)
            np.testing.assert_allclose(scores[low:high], expected, rtol=0, atol=1e-4)
            outside = [*scores[pages.start : low], *scores[high : pages.stop]]
            assert (np.array(outside) == LOWEST).all()
            tops = maxima_of(scores[None], low, high).reshape(-1, 16)[spans]
            np.testing.assert_array_equal(found["maxima"][row].reshape(-1, 16)[spans], tops)
