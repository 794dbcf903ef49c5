"""ROPE_APPEND, ATTEND and ATTEND_MERGE against NumPy float64, between unmapped pages.

Pages lie in shuffled slots, K and V in different ones; what no position fills is NaN, so a
kernel that reads beyond the sequence shows it.
"""

import numpy as np
import pytest
from attention_cases import (
    F16,
    HEADS,
    TYPES,
    Case,
    Heads,
    attention,
    check_attend,
    check_score_mod,
    kept_as,
    new_case,
    normal,
    page_table,
    unwritten,
)
from guarded import in_child, runs, step_of
from oracle import RopeParams, rms_norm, rope

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE, kv_type

SHAPES = [  # head_dim, neox, n_head, n_head_kv, n_half
    (16, 0, 6, 3, 8), (16, 1, 6, 3, 8), (80, 1, 2, 1, 40), (80, 0, 3, 3, 13), (64, 1, 4, 2, 16),
]  # fmt: skip
# A row of q8_0 or of q4_0 is one or several vectors, or one and a half, at every level.
HEADS_Q8 = [
    Heads(head_dim=32, group=3, q_block=1, n_row=2, heads_per_kv=3),
    Heads(head_dim=64, group=7, q_block=1, n_row=2, heads_per_kv=7),
    Heads(head_dim=96, group=1, q_block=1, n_row=4, heads_per_kv=2),
    Heads(head_dim=256, group=4, q_block=1, n_row=1, heads_per_kv=4),
    Heads(head_dim=64, group=3, q_block=16, n_row=2, heads_per_kv=3),
]
# K and V of different types: at one token of one of these heads, and at several.
AT_Q8 = [(at, types) for at in range(len(HEADS_Q8)) for types in TYPES[1 if at in (0, 4) else 3 :]]
KINDS_Q8 = [(HEADS_Q8[at], types) for at, types in AT_Q8]
SHAPE_Q8 = (64, 1, 6, 3, 32)
SCORE_MOD = [(HEADS[0], F16), (HEADS[2], F16), (HEADS_Q8[4], ("q8_0", "q4_0"))]
KERNELS = [
    *{(ops.ROPE_APPEND, (*shape[:2], *F16)) for shape in SHAPES},
    *((ops.ROPE_APPEND, (*SHAPE_Q8[:2], *types)) for types in TYPES),
    *{(ops.ATTEND, (h.head_dim, h.group, h.q_block, *F16)) for h in HEADS},
    *((ops.ATTEND, (h.head_dim, h.group, h.q_block, *t)) for h, t in KINDS_Q8),
    *((ops.ATTEND_SCORE_MOD, (h.head_dim, h.group, h.q_block, *t)) for h, t in SCORE_MOD),
    *{(ops.ATTEND_MERGE, (h.head_dim, 16)) for h in (*HEADS, *HEADS_Q8)},
    (ops.ATTEND_SINK, ()),
]


# --- appending -----------------------------------------------------------------------------------


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (1, 63), (37, 40), (100, 64)])
@pytest.mark.parametrize(
    ("shape", "types"), [*((s, F16) for s in SHAPES), *((SHAPE_Q8, t) for t in TYPES)], ids=str
)
@in_child
def test_heads_get_norm_rope_and_append(shape, types, n_tok, pos, normed):
    head_dim, neox, n_head, n_head_kv, n_half = shape
    rng = np.random.default_rng((*shape, n_tok, pos))
    q, (k, v) = normal(rng, n_tok, n_head, head_dim), normal(rng, 2, n_tok, n_head_kv, head_dim)
    tables = page_table(rng, pos + n_tok, 4), page_table(rng, pos + n_tok, 4)
    pages = [kept_as(normal(rng, 4, n_head_kv, PAGE, head_dim), type) for type in types]
    norms = {"q_norm": normal(rng, head_dim), "k_norm": normal(rng, head_dim)} if normed else {}
    where, kind = pos + np.arange(n_tok), RopeParams(2 * n_half, neox=bool(neox))
    angles = where[:, None] * 10000.0 ** (-np.arange(n_half) / n_half)

    def ready(x, name):
        x = x.astype(np.float64)
        return rope(rms_norm(x, norms[name], 1e-3) if normed else x, where, kind)

    new_q, new_k = ready(q, "q_norm"), ready(k, "k_norm")
    for found in runs(
        ops.ROPE_APPEND, (head_dim, neox, *types), out={"q": q, "k": k, "k_pages": pages[0],
        "v_pages": pages[1]}, step=step_of(n_tok, pos), v=v, cos=np.cos(angles).astype("f4"),
        sin=np.sin(angles).astype("f4"), k_table=tables[0], v_table=tables[1], n_head=n_head,
        n_head_kv=n_head_kv, n_half=n_half, eps=1e-3, **norms,
        absent=[] if normed else ["q_norm", "k_norm"],
    ):  # fmt: skip
        # Two products and a sum of values below 10, with rounded factors.
        np.testing.assert_allclose(found["q"], new_q, rtol=0, atol=6e-6)
        np.testing.assert_allclose(found["k"], new_k, rtol=0, atol=6e-6)
        for kept, before, rows, table in zip(
            (found["k_pages"], found["v_pages"]), pages, (found["k"], v), tables, strict=True
        ):
            expected = before.copy()
            for t in range(n_tok):
                page, line = divmod(pos + t, PAGE)
                expected[table[page], :, line] = kept_as(rows[t], kv_type(kept))
            # Rounding is NumPy's, and ggml's: the same bits, and no other.
            np.testing.assert_array_equal(kept, expected)


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (1, 100), (37, 0), (37, 100)])
@pytest.mark.parametrize("at", range(len(HEADS)), ids=map(str, HEADS))
@in_child
def test_attention_to_a_selection(at, n_tok, pos, block):
    # Which options go together differs from case to case; over all of them every pair occurs.
    turn = at + block % 7 + n_tok + pos // 100
    case = new_case(
        HEADS[at], n_tok, pos, block, window=(0, 21, 70)[turn % 3], weighted=turn % 2 == 0,
        row=(0, 2)[turn // 3 % 2], stride=(1, 3)[turn // 3 % 2],
    )  # fmt: skip
    check_attend(case, with_lse=turn // 2 % 2 == 0)


@pytest.mark.parametrize(
    ("n_tok", "pos", "block"), [(1, 0, 1), (1, 100, 1), (1, 170, 64), (37, 70, 16)]
)
@pytest.mark.parametrize(("at", "types"), AT_Q8, ids=str)
@in_child
def test_attention_over_each_kv_type(at, n_tok, pos, block, types):
    if n_tok > 1 and HEADS_Q8[at].q_block == 1:
        n_tok = 3
    case = new_case(
        HEADS_Q8[at], n_tok, pos, block, window=(0, 70)[at % 2], weighted=at % 2 == 0, types=types
    )
    check_attend(case, with_lse=True)


@pytest.mark.parametrize("mod", ["cap", "slopes", "ahead", "all"])
@pytest.mark.parametrize(
    ("n_tok", "pos", "window"), [(1, 90, 0), (1, 70, 21), (21, 0, 0), (37, 70, 30)]
)
@pytest.mark.parametrize("at", range(len(SCORE_MOD)))
@in_child
def test_attention_with_modified_scores(at, n_tok, pos, window, mod):
    heads, types = SCORE_MOD[at]
    case = new_case(heads, n_tok, pos, 16, window=window, weighted=at != 1, types=types)
    mods = {
        "cap": {"cap": 1.5},
        "slopes": {"slopes": 2.0 ** -np.arange(1, heads.n_head + 1)},
        "ahead": {"ahead": 7},
    }
    every = {name: value for each in mods.values() for name, value in each.items()}
    check_score_mod(Case(**(vars(case) | (every if mod == "all" else mods[mod]))))


@in_child
def test_a_selection_of_nothing_gives_zero():
    case = new_case(HEADS[1], 1, 100, 16, window=0, weighted=False)
    nothing = Case(**(vars(case) | {"chosen": [np.zeros(0, int)] * len(case.chosen)}))
    check_attend(nothing, with_lse=True)


@in_child
def test_large_scores_do_not_overflow():
    case = new_case(HEADS[0], 1, 100, 16, window=0, weighted=False)
    loud = Case(**(vars(case) | {"q": case.q * 1000}))
    out, _ = attention(loud)
    scratch = ops.attend_scratch(1, 16)
    for found in runs(
        ops.ATTEND, (16, 1, 1, *F16), out={"out": unwritten(*out.shape)}, scratch=scratch,
        n_split=1, absent=["partial", "lse"], **loud.fields(),
    ):  # fmt: skip
        # Scores near 3000 carry float32 steps of 2e-4, and weights err by as much.
        np.testing.assert_allclose(found["out"], out, rtol=0, atol=5e-3)


# --- sinks ---------------------------------------------------------------------------------------


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_head", "head_dim"), [(1, 1, 1), (3, 5, 16)])
@in_child
def test_a_sink_takes_its_share_of_the_weight(n_tok, n_head, head_dim):
    rng = np.random.default_rng(n_head)
    scores = 3 * rng.standard_normal((n_tok, n_head, 7))
    values = rng.standard_normal((n_tok, n_head, 7, head_dim))
    sinks = (3 * rng.standard_normal(n_head)).astype(np.float32)
    sinks[-1] = 200  # nothing is left of its head
    sums = np.exp(scores).sum(axis=-1)
    out = np.einsum("thk,thkd->thd", np.exp(scores), values)
    expected = out / (sums + np.exp(sinks.astype(np.float64)))[:, :, None]
    before = (out / sums[:, :, None]).astype(np.float32)
    for found in runs(
        ops.ATTEND_SINK, out={"out": before}, step=step_of(n_tok), sinks=sinks,
        lse=np.log(sums).astype(np.float32), n_head=n_head, head_dim=head_dim, n_part=1,
    ):  # fmt: skip
        np.testing.assert_allclose(found["out"], expected, rtol=3e-6, atol=1e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_head", "head_dim"), [(1, 1, 1), (3, 5, 16)])
@in_child
def test_parts_that_were_attended_apart_are_joined_with_their_sink(n_tok, n_head, head_dim):
    rng = np.random.default_rng(n_head)
    scores = 3 * rng.standard_normal((n_tok, n_head, 7))
    values = rng.standard_normal((n_tok, n_head, 7, head_dim))
    sinks = (3 * rng.standard_normal(n_head)).astype(np.float32)
    weights = np.exp(scores)
    total = weights.sum(axis=-1) + np.exp(sinks.astype(np.float64))
    expected = np.einsum("thk,thkd->thd", weights, values) / total[:, :, None]
    parts = slice(0, 3), slice(3, 7), slice(0, 0)  # the last one has no keys
    before = np.zeros((n_tok, 3, n_head, head_dim), np.float32)
    lse = np.full((n_tok, 3, n_head), -3e38, np.float32)
    for i, part in enumerate(parts[:2]):
        sums = weights[:, :, part].sum(axis=-1)
        before[:, i] = np.einsum("thk,thkd->thd", weights[:, :, part], values[:, :, part])
        before[:, i] /= sums[:, :, None]
        lse[:, i] = np.log(sums)
    for found in runs(
        ops.ATTEND_SINK, out={"out": before}, step=step_of(n_tok), sinks=sinks, lse=lse,
        n_head=n_head, head_dim=head_dim, n_part=3,
    ):  # fmt: skip
        np.testing.assert_allclose(found["out"][:, 0], expected, rtol=5e-6, atol=2e-6)
        np.testing.assert_array_equal(found["out"][:, 1:], before[:, 1:])
