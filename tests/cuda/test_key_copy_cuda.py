"""A GPU's copy of keys in 4 and 8 bits against NumPy: what is copied, scores by it, candidates.

The same tests run the kernels' logic thread by thread without a GPU.
"""

import importlib
from contextlib import contextmanager

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import on_gpu, runs, step_of
from on_threads import OnThreads, as_python
from selection_cases import DROP, LOWEST, best, maxima_of, middle

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops.select.key_copy import BAR_PARTS
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import KVView
from tamis.select.base import Recording, SelectorShape
from tamis.select.notation import parse_method

pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
FILES = ("lang.grid", "lang.radix_topk", "kv.kv_rows", "select.common", "select.key_copy")
MODULES = [importlib.import_module(f"tamis.jit_kernels.cuda.{file}") for file in FILES]
STEPS = {4: 7, 8: 127}
# head_dim, heads, group, type of keys, bits: of one head, of several passes, a part of a word.
SHAPES = [
    (128, 4, 1, "f16", 4), (16, 1, 1, "f16", 4), (80, 6, 6, "f16", 4), (64, 7, 7, "q8_0", 4),
    (64, 14, 1, "f16", 4), (32, 20, 20, "f16", 4), (96, 3, 3, "q4_0", 4), (256, 2, 2, "f16", 4),
    (128, 4, 4, "f16", 8), (80, 6, 6, "f16", 8), (64, 7, 1, "q8_0", 8), (32, 12, 12, "f16", 8),
]  # fmt: skip
# position, first positions, last ones, part that is not seen, positions that are copied
PLACES = [
    (0, 0, 1, 0, 0), (70, 0, 1, 0, 0), (70, 4, 1, 0, 33), (600, 70, 500, 0, 0),
    (800, 4, 30, DROP, 0), (800, 4, 30, DROP, 770), (1300, 4, 30, 0, 1270),
]  # fmt: skip


@contextmanager
def on_threads():
    with as_python(*MODULES), on_gpu(OnThreads(3)):
        yield


@contextmanager
def device(gpu):
    with on_gpu(gpu), np.errstate(all="ignore"):
        yield


def eights(codes, bits):
    """Codes int [..., n] of bytes."""
    if bits == 8:
        return codes.view(np.int8).astype(int)
    words = codes.reshape(*codes.shape[:-1], -1, 4)
    halves = np.stack([words & 15, words >> 4], axis=-2)
    return halves.reshape(*codes.shape[:-1], -1).astype(int) - 8


def check_copied(found, before, keys, new, head_dim, bits):
    """The new positions are within half a step, and others are as they were."""
    codes = eights(found["codes"], bits)
    for h in range(len(keys)):
        at, steps = slice(*new), found["steps"][h].astype(float)
        scale = found["spread"][h].astype(float)
        left = (keys[h, at] - found["centre"][h]) / scale
        size = np.abs(left).max(axis=1, initial=0) / STEPS[bits]
        np.testing.assert_allclose(steps[at], size, rtol=2**-10, atol=1e-7)
        error = np.abs(codes[h, at, :head_dim] * steps[at, None] - left)
        # Half a step, and the rounding of the step to float16.
        assert (error <= (0.5 + STEPS[bits] * 2**-10) * steps[at, None] + 1e-6).all()
        assert (codes[h, at, head_dim:] == 0).all()
        for rest in (slice(0, new[0]), slice(new[1], None)):
            np.testing.assert_array_equal(found["codes"][h, rest], before["codes"][h, rest])
            np.testing.assert_array_equal(found["steps"][h, rest], before["steps"][h, rest])


def check_score(shape, place, n_asking=None):
    head_dim, heads, group, type_k, bits = shape
    pos, n_sink, n_local, drop, filled = place
    rng = np.random.default_rng((head_dim, pos, heads))
    n_kv, capacity = 2, (pos + 256) // 256 * 256
    low, high = middle(pos, n_sink, n_local, drop)
    k = kept_as(normal(rng, pos + 1, n_kv, head_dim) * rng.uniform(0.2, 5, head_dim), type_k)
    keys, table = numbers(k).swapaxes(0, 1).astype(float), page_table(rng, pos + 1, pos // 64 + 2)
    q = normal(rng, n_kv, heads, head_dim)
    spread = rng.uniform(0.5, 2, (n_kv, head_dim)).astype(np.float32)
    steps = rng.uniform(0.1, 0.5, (n_kv, capacity)).astype(np.float16)
    n_byte = ops.copy_bytes(head_dim, bits)
    out = {
        "centre": normal(rng, n_kv, head_dim), "spread": spread, "steps": steps,
        "codes": rng.integers(0, 256, (n_kv, capacity, n_byte), np.uint8),
        "scores": normal(rng, n_kv * heads, capacity),
        "maxima": np.full((n_kv * heads, capacity // 16), 7, np.float32),
        "n_found": np.full(n_kv * heads // group, 9, np.int32),
    }  # fmt: skip
    n = heads if n_asking is None else min(heads, n_asking * group)
    counts = {} if n_asking is None else {"counts": np.array([0, n], np.int32)}
    for found in runs(
        ops.SCORE_COPY, (head_dim, heads, group, type_k, bits), out=out, step=step_of(1, pos),
        q=q.reshape(-1, head_dim), k_pages=paged(k, table), k_table=table, n_sink=n_sink,
        filled=np.full(n_kv, filled), n_local=n_local, drop=drop, **counts,
        absent=() if counts else ("counts",),
    ):  # fmt: skip
        assert not found["n_found"].any()
        asking = range(n_kv) if n_asking is None else (1,)
        for h in asking:
            own = {name: array[h : h + 1] for name, array in found.items() if len(array) == n_kv}
            was = {name: array[h : h + 1] for name, array in out.items() if len(array) == n_kv}
            if high <= low:
                continue
            if filled == 0:
                m = min(high, ops.COPY_SAMPLE)
                some = keys[h, [i * high // m for i in range(m)]]
                least = 1e-3 * some.std(axis=0).mean()
                np.testing.assert_allclose(own["centre"][0], some.mean(axis=0), atol=1e-4)
                # Variances are differences of float32s.
                want = np.maximum(some.std(axis=0), least)
                np.testing.assert_allclose(own["spread"][0], want, rtol=1e-3, atol=1e-5)
            check_copied(own, was, keys[h : h + 1], (min(filled, high), high), head_dim, bits)
            check_scores(found, out, (h, n), q[h], (low, high), shape)


def check_scores(found, before, rows, q, limits, shape):
    (h, n), (low, high), (head_dim, heads, group, _, bits) = rows, limits, shape
    codes = eights(found["codes"][h], bits)[:, :head_dim]
    pages = slice(low // 64 * 64, -(-high // 64) * 64)
    spans = slice(low // 256 * 16, -(-high // 256) * 16)
    steps, scaled = found["steps"][h].astype(float), q * found["spread"][h]
    q_steps = np.abs(scaled).max(axis=1, keepdims=True) / 127
    products = np.rint(scaled / q_steps) @ codes.T * q_steps * steps
    exact = products + q.astype(float) @ found["centre"][h].astype(float)[:, None]
    for r in range(0, n, group):
        scores = found["scores"][heads * h + r]
        # An element of a query between two bytes may become either, and float32.
        bound = 2 * q_steps.max() * steps.max() * STEPS[bits] + 1e-4 * np.abs(exact).max()
        want = exact[r : r + group].max(axis=0)
        np.testing.assert_allclose(scores[low:high], want[low:high], rtol=0, atol=bound)
        assert (scores[pages.start : low] == LOWEST).all()
        assert (scores[high : pages.stop] == LOWEST).all()
        was = before["scores"][heads * h + r]
        np.testing.assert_array_equal(scores[: pages.start], was[: pages.start])
        np.testing.assert_array_equal(scores[pages.stop :], was[pages.stop :])
        tops = maxima_of(scores[None], low, high)[0, spans]
        np.testing.assert_array_equal(found["maxima"][heads * h + r, spans], tops)


def check_candidates(shape, place, n_top, n_asking=None, levels=0):
    head_dim, heads, group, type_k, _ = shape
    pos, n_sink, n_local, drop, filled = place
    rng = np.random.default_rng((head_dim, pos, heads, n_top))
    n_kv, capacity, rows = 2, (pos + 256) // 256 * 256, heads // group
    low, high = middle(pos, n_sink, n_local, drop)
    q = normal(rng, n_kv, heads, head_dim)
    k = kept_as(normal(rng, pos + 1, n_kv, head_dim), type_k)
    table = page_table(rng, pos + 1, pos // 64 + 2)
    by_head = np.einsum("hgd,jhd->hgj", q.astype(float), numbers(k).astype(float))
    exact = by_head.reshape(n_kv * rows, group, -1).max(axis=1)
    before = normal(rng, n_kv * heads, capacity)
    if levels:
        before = np.floor(levels * before).astype(np.float32)  # many are equal
    before[:, low // 64 * 64 : low] = before[:, high : -(-high // 64) * 64] = LOWEST
    maxima = maxima_of(before, low, max(low, high))
    out = {
        "filled": np.full(n_kv, filled), "scores": before,
        "found": np.full((n_kv * rows, capacity), -1, np.int32),
        "exact": np.full((n_kv * rows, capacity), np.nan, np.float32),
        "n_found": np.zeros(n_kv * rows, np.int32),
    }  # fmt: skip
    n = heads if n_asking is None else min(heads, n_asking * group)
    counts = {} if n_asking is None else {"counts": np.array([0, n], np.int32)}
    for found in runs(
        ops.COPY_CANDIDATES, (head_dim, heads, group, type_k), out=out, step=step_of(1, pos),
        q=q.reshape(-1, head_dim), k_pages=paged(k, table), k_table=table, maxima=maxima,
        n_top=n_top, n_sink=n_sink, n_local=n_local, drop=drop, **counts,
        absent=() if counts else ("counts",),
    ):  # fmt: skip
        for h in range(n_kv):
            asks = n_asking is None or h == 1
            assert found["filled"][h] == (max(filled, high) if asks and high > low else filled)
            for r in range(rows):
                row, scored = rows * h + r, heads * h + group * r
                tops = maxima[scored, low // 256 * 16 : -(-high // 256) * 16]
                tops = np.sort(tops[tops > LOWEST])[::-1].astype(float)
                bar, apart = -np.inf, 0.0
                if len(tops) >= ops.COPY_TIMES * n_top > 0:
                    bar, apart = tops[ops.COPY_TIMES * n_top - 1], (tops[0] - tops[-1]) / BAR_PARTS
                m = found["n_found"][row]
                order = np.argsort(found["found"][row, :m])
                want = found["found"][row, :m][order]
                given = before[scored, low:high]
                if not asks or group * r >= n or high - low <= n_top or n_top == 0:
                    assert m == 0
                else:
                    must = low + np.flatnonzero(given >= bar)
                    assert np.setdiff1d(must, want).size == 0
                    may = low + np.flatnonzero(given >= bar - 1.01 * apart - 1e-6)
                    assert np.setdiff1d(want, may).size == 0
                    assert len(np.unique(want)) == m
                # Float32 sums of at most 256 products.
                close = {"rtol": 0, "atol": 2e-4}
                own = found["exact"][row, :m][order]
                np.testing.assert_allclose(own, exact[row, want], **close)
                np.testing.assert_array_equal(found["scores"][scored, want], own)
                rest = np.setdiff1d(np.arange(capacity), want)
                np.testing.assert_array_equal(found["scores"][scored, rest], before[scored, rest])


def check_best_of_candidates(pos, counts, n_found):
    rng = np.random.default_rng((pos, *counts))
    n_sink, n_local, n_top = counts
    low, high = middle(pos, n_sink, n_local)
    capacity, n_row = (pos + 256) // 256 * 256, 3
    exact = rng.integers(-30, 30, (n_row, capacity)).astype(np.float32)
    listed, scores = (
        np.zeros((n_row, capacity), np.int32),
        np.full((n_row, capacity), 9, np.float32),
    )
    rows = np.full((n_row, pos + 1), -np.inf)
    for r in range(n_row):
        at = rng.choice(np.arange(low, high), n_found, replace=False)
        listed[r, :n_found], scores[r, :n_found] = at, exact[r, at]
        rows[r, at] = exact[r, at]
    expected = [best(row, *counts) for row in rows]
    out = {
        "scores": exact, "order": np.zeros((n_row, capacity), np.int32),
        "sets": np.zeros((n_row, len(expected[0])), np.int32), "counts": np.zeros(n_row, np.int32),
    }  # fmt: skip
    for found in runs(
        ops.SELECT_BEST, out=out, step=step_of(1, pos), maxima=maxima_of(exact, low, high),
        found=listed, exact=scores, n_found=np.full(n_row, n_found, np.int32), n_row=n_row, group=1,
        capacity=capacity, set_capacity=len(expected[0]), n_sink=n_sink, n_local=n_local,
        n_top=n_top,
    ):  # fmt: skip
        assert [found["sets"][r].tolist() for r in range(n_row)] == expected


@pytest.mark.parametrize("method", ["topk", "topk:rows=head", "cpe:phi=1"])
def test_queries_are_the_first_row_of_a_chunks_buffer(method):
    shape = SelectorShape(1, 4, 2, 32, 256, 512, (0,), on_gpu=True, key_copy=4)
    pages, table = np.zeros((4, 2, 64, 32), np.float16), np.zeros(4, np.int32)
    rec = Recording(Program(), np.zeros(ops.STEP_SIZE, np.int64), 1, 1)
    q = np.zeros((512, 4, 32), np.float32)
    parse_method(method).open(shape).select_decode(rec, 0, q, KVView(pages, pages, table, table))
    assert "score_copy" in [call.spec.op.name for call in rec.program.calls]


ASKING = [None, 1, 2]
TOPS = [(0, 0), (1, 0), (40, 0), (12, 3), (500, 0)]  # n_top, levels of scores
CHOSEN = [(300, (4, 8, 40), 81), (1000, (0, 1, 100), 900), (30000, (4, 64, 512), 20000)]


@pytest.mark.parametrize(
    ("shape", "place", "n_asking"),
    [
        (SHAPES[2], PLACES[2], None), (SHAPES[5], PLACES[4], None), (SHAPES[8], PLACES[1], 1),
        (SHAPES[6], PLACES[5], 1),
    ],
)  # fmt: skip
def test_scores_thread_by_thread(shape, place, n_asking):
    with on_threads():
        check_score(shape, place, n_asking)


@pytest.mark.parametrize(
    ("shape", "place", "top", "n_asking"),
    [(SHAPES[2], PLACES[2], (12, 3), None), (SHAPES[1], PLACES[4], (40, 0), 1)],
)
def test_candidates_thread_by_thread(shape, place, top, n_asking):
    with on_threads():
        check_candidates(shape, place, *(top[0], n_asking, top[1]))


def test_the_best_of_candidates_thread_by_thread():
    with on_threads():
        check_best_of_candidates(*CHOSEN[0])


@pytest.mark.gpu
@pytest.mark.parametrize("n_asking", ASKING)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores(gpu, shape, place, n_asking):
    with device(gpu):
        check_score(shape, place, n_asking)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_top", "levels"), TOPS)
@pytest.mark.parametrize("n_asking", ASKING)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:8], ids=str)
def test_candidates(gpu, shape, place, n_asking, n_top, levels):
    with device(gpu):
        check_candidates(shape, place, n_top, n_asking, levels)


@pytest.mark.gpu
@pytest.mark.parametrize(("pos", "counts", "n_found"), CHOSEN)
def test_the_best_of_candidates(gpu, pos, counts, n_found):
    with device(gpu):
        check_best_of_candidates(pos, counts, n_found)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_long_rows(gpu, bits):
    shape, place = (64, 4, 4, "f16", bits), (40000, 4, 64, 0, 0)
    with device(gpu):
        check_score(shape, place)
        check_candidates(shape, place, 512)
