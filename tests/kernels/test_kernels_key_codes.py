"""The int8 copy of keys and the scores by it against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import kept_as, normal, numbers, page_table, paged
from guarded import in_child, runs, step_of
from selection_cases import DROP, LOWEST, maxima_of, middle

from tamis.jit_kernels.contract import ops
from tamis.platform import processor

KINDS = [(16, "f16"), (80, "f16"), (64, "q8_0"), (96, "q4_0")]  # head_dim, type of keys
# head_dim, heads, group: of one head, more than the registers hold, and those that count by threes.
SHAPES = [(16, 1, 1), (80, 6, 3), (64, 7, 1), (64, 7, 7), (128, 40, 40)]
RESCORED = [(16, 1, 1, "f16"), (64, 7, 7, "q8_0"), (80, 6, 3, "f16"), (64, 7, 1, "f16")]
KERNELS = [
    *((op, kind) for op in (ops.KEY_CENTRE, ops.KEY_CODES) for kind in KINDS),
    *((ops.SCORE_CODES, shape) for shape in SHAPES),
    *((ops.RESCORE_KEYS, shape) for shape in RESCORED),
    (ops.MASS_BRACKET, (64,)),
]
OFFSET = 0 if processor.MACHINE == "aarch64" else 128  # what is added to a key's signed codes
Q_SIZES = (127, 64)  # steps of a query's largest element, with VNNI and without


def as_numbers(codes, steps):
    """Keys less their centre, [n_head_kv, capacity, head_dim], of interleaved codes."""
    n_head_kv, n_block, n_four, _, _ = codes.shape
    rows = codes.transpose(0, 1, 3, 2, 4).reshape(n_head_kv, n_block * 16, 4 * n_four)
    signed = (rows - np.uint8(OFFSET)).view(np.int8)
    return signed.astype(float) * steps[:, :, None]


def interleaved(signed):
    """Codes of int8 [n_head_kv, capacity, head_dim]."""
    n_head_kv, capacity, head_dim = signed.shape
    rows = signed.view(np.uint8) + np.uint8(OFFSET)
    cut = rows.reshape(n_head_kv, capacity // 16, 16, head_dim // 4, 4)
    return np.ascontiguousarray(cut.transpose(0, 1, 3, 2, 4))


@pytest.mark.cpu_only
@pytest.mark.parametrize(("pos", "filled"), [(0, 0), (40, 0), (300, 0), (300, 1)])
@pytest.mark.parametrize(("head_dim", "type_k"), KINDS)
@in_child
def test_the_centre_is_the_mean_of_keys_equally_far_apart(head_dim, type_k, pos, filled):
    rng = np.random.default_rng((head_dim, pos))
    k = kept_as(normal(rng, pos + 1, 2, head_dim), type_k)
    table = page_table(rng, pos + 1, 7)
    n = min(pos + 1, 64)
    before = normal(rng, 2, head_dim)
    expected = numbers(k)[[i * (pos + 1) // n for i in range(n)]].mean(axis=0)
    for found in runs(
        ops.KEY_CENTRE, (head_dim, type_k), out={"centre": before}, step=step_of(1, pos),
        k_pages=paged(k, table), k_table=table, filled=np.full(2, filled), n_head_kv=2,
    ):  # fmt: skip
        # Float32 sums of 64 numbers of about 1.
        want = before if filled else expected
        np.testing.assert_allclose(found["centre"], want, rtol=0, atol=1e-5)


@pytest.mark.cpu_only
@pytest.mark.parametrize(("pos", "filled"), [(0, 0), (15, 0), (150, 0), (150, 97), (64, 151)])
@pytest.mark.parametrize(("head_dim", "type_k"), KINDS)
@in_child
def test_a_key_is_within_half_a_step_and_others_stay(head_dim, type_k, pos, filled):
    rng = np.random.default_rng((head_dim, pos))
    n_head, capacity = 6, 256
    k = kept_as(normal(rng, pos + 1, 2, head_dim), type_k)
    table = page_table(rng, pos + 1, 4)
    q, centre = normal(rng, n_head, head_dim), normal(rng, 2, head_dim)
    k_left = numbers(k).swapaxes(0, 1) - centre.astype(float)[:, None]
    before = rng.integers(1, 255, (2, capacity // 16, head_dim // 4, 16, 4)).astype(np.uint8)
    unset = normal(rng, 2, capacity)
    out = {
        "codes": before, "steps": unset, "q_codes": np.zeros(q.shape, np.int8),
        "q_sums": np.zeros(n_head, np.int32), "q_steps": np.zeros(n_head, np.float32),
        "q_centre": np.zeros(n_head, np.float32),
        "line": np.zeros((ops.CODE_WORKERS, head_dim), np.float32),
    }  # fmt: skip
    for found in runs(
        ops.KEY_CODES, (head_dim, type_k), out=out, step=step_of(1, pos), q=q, centre=centre,
        k_pages=paged(k, table), k_table=table, filled=np.full(2, filled), n_head=n_head,
        n_head_kv=2, capacity=capacity,
    ):  # fmt: skip
        first, steps = min(filled, pos), found["steps"]
        new = slice(first, pos + 1)
        size = np.abs(k_left[:, new]).max(axis=2)
        np.testing.assert_allclose(steps[:, new], size / 127, rtol=1e-6)
        error = np.abs(as_numbers(found["codes"], steps)[:, new] - k_left[:, new]).max(axis=2)
        # Half a step, and float32 where a number lies between two codes.
        assert (error <= 0.5001 * steps[:, new]).all()
        one = np.ones_like(unset)
        now, then = as_numbers(found["codes"], one), as_numbers(before, one)
        for rest in (slice(0, first), slice(pos + 1, None)):
            np.testing.assert_array_equal(steps[:, rest], unset[:, rest])
            np.testing.assert_array_equal(now[:, rest], then[:, rest])
        by_step = found["q_codes"].astype(float) * found["q_steps"][:, None]
        assert (np.abs(by_step - q).max(axis=1) <= 0.5001 * found["q_steps"]).all()
        n_step = np.abs(q).max(axis=1) / found["q_steps"]
        assert any(np.allclose(n_step, size) for size in Q_SIZES)
        np.testing.assert_array_equal(found["q_sums"], found["q_codes"].sum(axis=1, dtype=int))
        products = np.einsum("hd,hd->h", q.astype(float), np.repeat(centre, 3, axis=0))
        np.testing.assert_allclose(found["q_centre"], products, rtol=0, atol=1e-4)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("pos", "n_sink", "n_local", "drop"),
    [(0, 0, 1, 0), (3, 4, 1, 0), (70, 0, 1, 0), (600, 70, 500, 0), (800, 4, 30, DROP)],
)
@pytest.mark.parametrize(("head_dim", "heads", "group"), SHAPES)
@pytest.mark.parametrize("n_asking", [None, 1, 5])
@in_child
def test_scores_are_products_of_codes(head_dim, heads, group, pos, n_sink, n_local, drop, n_asking):
    rng = np.random.default_rng((head_dim, pos, heads))
    capacity = (pos + 256) // 256 * 256
    low, high = middle(pos, n_sink, n_local, drop)
    # The largest codes there are: without VNNI two products fit 16 bits.
    keys = rng.choice([-127, 0, 127], (2, capacity, head_dim)).astype(np.int8)
    q_codes = rng.choice([-64, 1, 64], (2, heads, head_dim)).astype(np.int8)
    steps, (q_steps, q_centre) = normal(rng, 2, capacity), normal(rng, 2, 2, heads)
    exact = np.einsum("hgd,hjd->hgj", q_codes.astype(float), keys.astype(float))
    exact = exact * steps[:, None] * q_steps[:, :, None] + q_centre[:, :, None]
    n = heads if n_asking is None else min(heads, n_asking * group)
    counts = {} if n_asking is None else {"counts": np.array([n, 0], np.int32)}
    before = normal(rng, 2, heads, capacity)
    unset = np.full((2, heads, capacity // 16), 7, np.float32)
    pages = slice(low // 64 * 64, -(-high // 64) * 64 if high > low else low // 64 * 64)
    spans = slice(low // 256 * 16, -(-high // 256) * 16 if high > low else low // 256 * 16)
    for found in runs(
        ops.SCORE_CODES, (head_dim, heads, group),
        out={"scores": before, "maxima": unset, "filled": np.full(2, -1)}, step=step_of(1, pos),
        q_codes=q_codes, q_sums=q_codes.sum(axis=2, dtype=np.int32), q_steps=q_steps,
        q_centre=q_centre, codes=interleaved(keys), steps=steps, n_head_kv=2, capacity=capacity,
        n_sink=n_sink, n_local=n_local, drop=drop, **counts, absent=() if counts else ("counts",),
    ):  # fmt: skip
        assert found["filled"].tolist() == [pos] * 2
        for h in range(1 if counts else 2):
            for row in range(0, n, group):
                scores, want = found["scores"][h, row], exact[h, row : row + group].max(axis=0)
                # Whole numbers up to 128 * 127 * 64 are exact; three float32 factors are not.
                np.testing.assert_allclose(scores[low:high], want[low:high], rtol=1e-6, atol=0.3)
                outside = [*scores[pages.start : low], *scores[max(low, high) : pages.stop]]
                assert high <= low or all(x == LOWEST for x in outside)
                tops = maxima_of(scores[None], low, max(low, high))[0, spans]
                np.testing.assert_array_equal(found["maxima"][h, row, spans], tops)
        if counts:
            np.testing.assert_array_equal(found["scores"][1], before[1])


@pytest.mark.cpu_only
@pytest.mark.parametrize("n_top", [0, 1, 40, 100, 500])
@pytest.mark.parametrize(
    ("pos", "n_sink", "n_local", "drop"), [(3, 4, 1, 0), (600, 4, 20, 0), (800, 4, 30, DROP)]
)
@pytest.mark.parametrize(("head_dim", "heads", "group", "type_k"), RESCORED)
@in_child
def test_scores_near_the_bar_become_exact(
    head_dim, heads, group, type_k, pos, n_sink, n_local, drop, n_top
):
    rng = np.random.default_rng((head_dim, pos, heads, n_top))
    capacity, rows = (pos + 256) // 256 * 256, heads // group
    low, high = middle(pos, n_sink, n_local, drop)
    q = normal(rng, 2, heads, head_dim)
    k = kept_as(normal(rng, pos + 1, 2, head_dim), type_k)
    table = page_table(rng, pos + 1, 14)
    by_head = np.einsum("hgd,jhd->hgj", q.astype(float), numbers(k))
    exact = by_head.reshape(2, rows, group, -1).max(axis=2)
    before = normal(rng, 2, heads, capacity)
    before[:, ::group, : pos + 1] = exact + 0.1 * normal(rng, *exact.shape)
    n_extra = max(-(-n_top // 4), 64)
    before[:, :, low // 64 * 64 : low] = before[:, :, high : -(-high // 64) * 64] = LOWEST
    unset = maxima_of(before.reshape(-1, capacity), low, max(low, high)).reshape(2, heads, -1)
    out = {
        "scores": before, "maxima": unset,
        "work": np.zeros((2 * rows, ops.rescore_work(capacity, group)), np.int32),
    }  # fmt: skip
    for found in runs(
        ops.RESCORE_KEYS, (head_dim, heads, group, type_k), out=out, step=step_of(1, pos), q=q,
        k_pages=paged(k, table), k_table=table, n_head_kv=2, capacity=capacity, n_sink=n_sink,
        n_local=n_local, drop=drop, n_top=n_top, absent=("counts",),
    ):  # fmt: skip
        for h in range(2):
            for r in range(rows):
                coarse, now = before[h, r * group], found["scores"][h, r * group]
                order = low + np.argsort(-coarse[low:high], kind="stable")
                again = order[max(0, n_top - n_extra) : n_top + n_extra]
                if high - low <= n_top or n_top == 0:
                    again = again[:0]
                # Float32 sums of at most 128 products.
                np.testing.assert_allclose(now[again], exact[h, r, again], rtol=0, atol=1e-4)
                rest = np.setdiff1d(np.arange(capacity), again)
                np.testing.assert_array_equal(now[rest], coarse[rest])
                if high > low:
                    tops = maxima_of(now[None], low, high)
                    np.testing.assert_array_equal(found["maxima"][h, r * group], tops[0])


@pytest.mark.cpu_only
@pytest.mark.parametrize("n_row", [2, 6])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("pos", [0, 17, 250])
@in_child
def test_the_mass_that_is_left_out_lies_in_the_bracket(pos, block, n_row):
    rng = np.random.default_rng((pos, block, n_row))
    n_head, head_dim, capacity, scale = 6, 64, 256, 0.25
    k, q = normal(rng, 2, pos + 1, head_dim), normal(rng, n_head, head_dim)
    centre = normal(rng, 2, head_dim)
    steps = np.full((2, capacity), np.nan, np.float32)
    rows = np.full((2, capacity, head_dim), 127, np.int8)
    left = k - centre[:, None]
    steps[:, : pos + 1] = np.abs(left).max(axis=2) / 127
    rows[:, : pos + 1] = np.rint(left / steps[:, : pos + 1, None])
    kept = [np.flatnonzero(rng.random(pos // block + 1) < 0.4) for _ in range(n_row)]
    indptr = np.cumsum([0, *map(len, kept)]).astype(np.int32)
    for found in runs(
        ops.MASS_BRACKET, (head_dim,),
        out={"found": np.zeros((n_head, 2)), "work": np.zeros((n_head, 2 * capacity), np.float32)},
        step=step_of(1, pos), q=q, codes=interleaved(rows), steps=steps, centre=centre,
        indptr=indptr, indices=np.concatenate(kept).astype(np.int32), block=block, n_row=n_row,
        heads_per_kv=3, n_head=n_head, capacity=capacity, scale=scale,
    ):  # fmt: skip
        for head in range(n_head):
            h, blocks = head // 3, kept[head * n_row // n_head]
            is_kept = np.isin(np.arange(pos + 1) // block, blocks)
            query = q[head].astype(float)
            coded = as_numbers(interleaved(rows), steps)[h, : pos + 1] + centre[h]
            error = scale * np.abs(query).sum() * steps[h, : pos + 1] / 2
            low, high = np.exp(scale * coded @ query - error), np.exp(scale * coded @ query + error)
            least = low[~is_kept].sum() / (low[~is_kept].sum() + high[is_kept].sum())
            most = high[~is_kept].sum() / (high[~is_kept].sum() + low[is_kept].sum())
            np.testing.assert_allclose(found["found"][head], [least, most], rtol=1e-4, atol=1e-6)
            weights = np.exp(scale * k[h].astype(float) @ query)
            exact = weights[~is_kept].sum() / weights.sum()
            assert least - 1e-6 <= exact <= most + 1e-6
