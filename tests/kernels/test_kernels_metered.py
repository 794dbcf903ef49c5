"""METER_SAMPLE, METER_WEIGH, METER_WIDEN and METER_TAKE against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, runs, step_of
from selection_cases import rows_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import METER
from tamis.select.metered import drawn, dropped, needed, reads_all

N_HEAD_KV, N_CTX, UNIT, N_SAMPLE = 2, 448, 16, 32
ROOM, _ = ops.hip_room(N_CTX // UNIT, N_CTX // UNIT)
SHAPES = [(64, 3, "f16"), (32, 1, "q8_0")]  # head_dim, query heads of a row, type of keys
KERNELS = [
    *((ops.METER_SAMPLE, shape[:2]) for shape in SHAPES),
    *((ops.METER_WEIGH, (*shape[:2], 1, shape[2])) for shape in SHAPES),
    (ops.METER_WIDEN, ()),
    *((ops.METER_TAKE, (head_dim,)) for head_dim, _, _ in SHAPES),
]
MASK = (1 << 64) - 1


def selection(rng, n_row, block, n, keep):
    """Rows of blocks, `keep` of them and the last one: indptr, indices, bool [n_row, n]."""
    n_block = -(-n // block)
    rows = [
        sorted({n_block - 1, *rng.permutation(n_block)[: int(keep * n_block)].tolist()})
        for _ in range(n_row)
    ]
    kept = np.zeros((n_row, n_block * block), bool)
    for r, row in enumerate(rows):
        for b in row:
            kept[r, b * block : (b + 1) * block] = True
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return indptr, np.concatenate(rows).astype(np.int32), kept[:, :n]


def mixed(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def uniform(key, i):
    return (mixed(key + (i + 1) * 0x9E3779B97F4A7C15 & MASK) >> 11) * 2.0**-53


def uniforms(key):
    return np.array([uniform(key, i) for i in range(N_SAMPLE)])


def counted(left_out):
    """Positions left out of each unit."""
    n_row, n = left_out.shape
    padded = np.zeros((n_row, N_CTX), np.int32)
    padded[:, :n] = left_out
    return padded.reshape(n_row, -1, UNIT).sum(axis=2).astype(np.int32)


@pytest.mark.parametrize(("pos", "keep"), [(0, 1), (40, 0.3), (400, 0.05), (431, 0.5), (431, 1)])
@pytest.mark.parametrize("block", [1, 2, 64])
@pytest.mark.parametrize(("head_dim", "group"), [shape[:2] for shape in SHAPES])
@pytest.mark.on_threads
@in_child
def test_samples_are_drawn_by_the_scores_of_units(head_dim, group, block, pos, keep):
    rng = np.random.default_rng((head_dim, block, pos))
    n_row, n = 2 * N_HEAD_KV, pos + 1
    indptr, indices, kept = selection(rng, n_row, block, n, keep)
    q = normal(rng, n_row * group, head_dim)
    lse = normal(rng, n_row * group)
    means = rng.integers(0, 128, (N_HEAD_KV, ROOM // 4, head_dim // 4, 4, 4)).astype(np.uint8)
    extents = np.zeros((N_HEAD_KV, ROOM // 4, 2, 4), np.float32)
    extents[:, :, 0], extents[:, :, 1] = 2 / 127, -1
    values = means.swapaxes(2, 3).reshape(N_HEAD_KV, ROOM, head_dim) * (2 / 127) - 1
    left, n_unit, scale = counted(~kept), N_CTX // UNIT, head_dim**-0.5
    work = np.full((n_row, ops.meter_work(head_dim, group, ROOM)), np.nan, np.float32)
    for found in runs(
        ops.METER_SAMPLE, (head_dim, group),
        out={
            "left": np.full((n_row, n_unit), -7, np.int32),
            "scores": np.full((n_row, n_unit), np.nan, np.float32),
            "indices": np.full((n_row, N_SAMPLE), -7, np.int32),
            "factors": np.full((n_row, N_SAMPLE), np.nan, np.float32),
            "work": work,
        },
        step=step_of(1, pos), q=q, lse=lse, chosen=indptr, blocks=indices, means=means,
        extents=extents, n_row=n_row, heads_per_kv=2 * group, n_head_kv=N_HEAD_KV, block=block,
        room=ROOM, unit=UNIT, n_unit=n_unit, n_sample=N_SAMPLE, layer=5, seed=9, even=0.3,
        scale=scale,
    ):  # fmt: skip
        some = -(-n // UNIT)
        np.testing.assert_array_equal(found["left"][:, :some], left[:, :some])
        for r in range(n_row):
            heads = q[r * group : (r + 1) * group].astype(float)
            logits = heads @ values[r // 2, : n // UNIT].T * scale
            own = np.exp(logits - lse[r * group : (r + 1) * group, None]).sum(axis=0)
            scores = found["scores"][r, :some]
            # Straight lines in 2^x err by at most 6.2 %, queries in bytes by a few more.
            np.testing.assert_allclose(scores[: n // UNIT], own, rtol=0.12)
            assert n % UNIT == 0 or scores[-1] == 0
            key = mixed(mixed(mixed(9) + 5 * 65536 + r & MASK) + pos & MASK)
            at, factors = drawn(~kept[r], scores, UNIT, uniforms(key))
            np.testing.assert_array_equal(found["indices"][r], at)
            np.testing.assert_allclose(found["factors"][r], factors, rtol=1e-5)


@pytest.mark.parametrize("least", [0, 0.5, 0.8, 1])
@pytest.mark.parametrize(("pos", "keep"), [(40, 0.3), (400, 0.05), (431, 0.2)])
@pytest.mark.parametrize(("head_dim", "group", "type_k"), SHAPES)
@pytest.mark.on_threads
@in_child
def test_a_row_needs_what_its_samples_say(head_dim, group, type_k, pos, keep, least):
    rng = np.random.default_rng((head_dim, pos))
    n_row, n, n_unit, scale = 2 * N_HEAD_KV, pos + 1, N_CTX // UNIT, head_dim**-0.5
    _, _, kept = selection(rng, n_row, 2, n, keep)
    left = counted(~kept)
    scores = np.exp(normal(rng, n_row, n_unit)).astype(np.float32)
    rows = kept_as(normal(rng, n, N_HEAD_KV, head_dim), type_k)
    table = page_table(rng, n, N_CTX // 64)
    q = normal(rng, n_row * group, head_dim)
    lse = (6 - 4 * least + normal(rng, n_row * group)).astype(np.float32)
    samples = [drawn(~kept[r], scores[r], UNIT, uniforms(77 + r)) for r in range(n_row)]
    indices = np.array([at for at, _ in samples], np.int32)
    factors = np.array([f for _, f in samples], np.float32)
    expected = []
    for r in range(n_row):
        heads = slice(r * group, (r + 1) * group)
        k = numbers(rows)[:, r // 2]
        logits = q[heads].astype(float) @ k[indices[r]].T * scale
        w = dropped(logits, factors[r], lse[heads])
        units, some = indices[r] // UNIT, -(-n // UNIT)
        bar, level = needed(least, w, scores[r], units), ops.WITHIN
        if bar is not None:
            level = (ops.WIDER, ops.ALL)[reads_all(bar, scores[r, :some], left[r, :some], n)]
        held = 1 - w[:, scores[r, units] < (bar or 0)].sum(axis=1) / (1 + w.sum(axis=1))
        expected.append((1 / (1 + w.sum(axis=1)), level, bar, held))
    for found in runs(
        ops.METER_WEIGH, (head_dim, group, 1, type_k),
        out={
            "weights": np.full((n_row, group, N_SAMPLE + 1), np.nan, np.float32),
            "rows": np.full((n_row, N_SAMPLE + ops.LIST_PAD), -7, np.int32),
            "tile": np.full((n_row, group, ops.TILE), np.nan, np.float32),
            "units": np.full((n_row, N_SAMPLE), -7, np.int32),
            "order": np.full((n_row, N_SAMPLE), -7, np.int32),
            "needs": np.full(n_row, -7, np.int32),
            "bars": np.full(n_row, np.nan, np.float32),
            "report": np.full((n_row * group, len(METER)), np.nan, np.float32),
        },
        step=step_of(1, pos), q=q, lse=lse, k_pages=paged(rows, table), k_table=table,
        indptr=np.arange(n_row + 1, dtype=np.int32) * N_SAMPLE, indices=indices, factors=factors,
        left=left, scores=scores, n_row=n_row, heads_per_kv=2 * group, n_head_kv=N_HEAD_KV, block=1,
        window=0, stride=1, unit=UNIT, n_unit=n_unit, n_sample=N_SAMPLE, least=least, scale=scale,
    ):  # fmt: skip
        report = found["report"].reshape(n_row, group, -1)
        for r, (mass, level, bar, held) in enumerate(expected):
            np.testing.assert_allclose(report[r, :, METER.mass], mass, rtol=1e-4)
            assert found["needs"][r] == level
            if level == ops.WIDER:
                assert found["bars"][r] == np.float32(bar)
                np.testing.assert_allclose(report[r, :, METER.held], held, rtol=1e-4)
                assert (held >= least - 1e-6).all()


@pytest.mark.parametrize("block", [1, 2, 64])
@pytest.mark.on_threads
@in_child
def test_rows_read_their_blocks_and_units_that_reach_the_bar(block):
    rng, pos, n_row = np.random.default_rng(block), 420, 4
    n, n_unit, grain = pos + 1, N_CTX // UNIT, min(block, UNIT)
    indptr, indices, kept = selection(rng, n_row, block, n, 0.1)
    left, n_all = counted(~kept), N_CTX // 64
    scores = np.exp(normal(rng, n_row, n_unit)).astype(np.float32)
    bars = np.quantile(scores, 0.8, axis=1).astype(np.float32)
    needs = np.array([ops.WIDER, ops.WITHIN, ops.ALL, ops.WIDER], np.int32)
    expected = []
    for r in range(n_row):
        more = np.repeat((scores[r] >= bars[r]) & (left[r] > 0), UNIT)[:n]
        places = np.flatnonzero(kept[r] | more) if needs[r] == ops.WIDER else np.arange(0)
        expected.append(sorted(set((places // grain).tolist())))
    for found in runs(
        ops.METER_WIDEN,
        out={
            "indptr": np.full(n_row + 1, -7, np.int32),
            "indices": np.full(n_row * N_CTX // grain, -7, np.int32),
            "whole": np.full(N_HEAD_KV + 1, -7, np.int32),
        },
        step=step_of(1, pos), chosen=indptr, blocks=indices, left=left, scores=scores, needs=needs,
        bars=bars, n_row=n_row, n_head_kv=N_HEAD_KV, block=block, grain=grain, unit=UNIT,
        n_unit=n_unit, n_all=n_all,
    ):  # fmt: skip
        assert rows_of(found) == expected
        assert found["whole"].tolist() == [0, 0, n_all]


@pytest.mark.parametrize("head_dim", [shape[0] for shape in SHAPES])
@pytest.mark.on_threads
@in_child
def test_heads_take_what_was_read_again_for_them(head_dim):
    rng, n_head = np.random.default_rng(1), 8
    needs, whole = np.array([1, 0, 2, 1], np.int32), np.array([0, 0, 7], np.int32)
    out, wider, dense = (normal(rng, n_head, head_dim) for _ in range(3))
    lses = [normal(rng, n_head) for _ in range(3)]
    source = [1, 1, 0, 0, 2, 2, 2, 2]  # of the second KV head one row needs all
    for found in runs(
        ops.METER_TAKE, (head_dim,),
        out={"out": out, "lse": lses[0], "report": np.zeros((n_head, len(METER)), np.float32)},
        needs=needs, whole=whole, wider=wider, wider_lse=lses[1], dense=dense, dense_lse=lses[2],
        n_row=4, n_head=n_head, n_head_kv=2,
    ):  # fmt: skip
        for head, i in enumerate(source):
            np.testing.assert_array_equal(found["out"][head], (out, wider, dense)[i][head])
            assert found["lse"][head] == lses[i][head]
            assert tuple(found["report"][head]) == ((0, 1, 2) if i == 2 else (0, 0, 0))
