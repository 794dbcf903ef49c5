"""MOE_ROUTE, MOE_MATMUL, MOE_BIAS and MOE_SUM against NumPy float64, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from matmul_cases import in_strips, rounding, weights
from oracle import softmax
from recurrent_oracle import softplus

from tamis.jit_kernels.contract import ops

TYPES = ["F32", "Q8_0", "Q4_K"]
# Of each kind of tiles and of blocks: whole numbers with and without minima, of 16 and of 32.
IN_STRIPS = [
    *(ops.strip_type(t) for t in ("Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "MXFP4")),
    *(ops.strip_type(t, exact=True) for t in ("Q4_K", "MXFP4")),
]
SCORES = ["softmax", "sigmoid", "softplus", "chosen"]
KERNELS = [
    *((ops.MOE_ROUTE, (score,)) for score in SCORES),
    (ops.MOE_BIAS, ()),
    (ops.MOE_GROUPS, ()),
    (ops.MOE_SUM, ()),
    *((ops.MOE_MATMUL, (t,)) for t in (*TYPES, "F16", "Q4_0", *IN_STRIPS)),
    *((ops.REPACK, (t,)) for t in sorted({ops.STRIP_TYPES[t] for t in IN_STRIPS})),
]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def unwritten(*shape, dtype=np.float32):
    return np.full(shape, np.nan if dtype == np.float32 else -7, dtype)


def best(keys, n):
    """The numbers of the n largest of each row, ties to the lower one."""
    return np.argsort(-keys, axis=-1, kind="stable")[:, :n]


def scored(logits, score):
    """The scores of all experts, float64."""
    x = logits.astype(np.float64)
    if score == "softmax":
        return softmax(x)
    return {"sigmoid": 1 / (1 + np.exp(-x)), "softplus": np.sqrt(softplus(x)), "chosen": x}[score]


def route(logits, score, n_used, *, norm=0, scale=1.0, bias=None, groups=(1, 1)):
    """Ids and weights of the n_used best experts."""
    scores = scored(logits, score)
    keys = logits if bias is None and groups[0] == 1 else scores + (0 if bias is None else bias)
    by_group = keys.reshape(len(keys), groups[0], -1)
    sums = np.sort(by_group, axis=-1)[:, :, -2:].sum(axis=-1)
    kept = np.zeros(sums.shape, bool)
    np.put_along_axis(kept, best(sums, groups[1]), True, axis=-1)
    ids = best(np.where(kept[:, :, None], by_group, -np.inf).reshape(keys.shape), n_used)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if score == "chosen":
        weights = softmax(weights)
    if norm:
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), ops.LEAST_SUM)
    return ids, weights * scale


def check_route(logits, n_used, score="softmax", **how):
    n_tok, n_expert = logits.shape
    ids, weights = route(logits, score, n_used, **how)
    bias, (n_group, n_group_used) = how.get("bias"), how.get("groups", (1, 1))
    has_keys = bias is not None or n_group > 1
    there = {"bias": bias is not None, "keys": has_keys, "tokens": False, "table": False}
    absent = [name for name, given in there.items() if not given]
    out = {"ids": unwritten(n_tok, n_used, dtype=np.int32), "weights": unwritten(n_tok, n_used)}
    out |= {"keys": unwritten(n_tok, n_expert)} if has_keys else {}
    for found in runs(
        ops.MOE_ROUTE, (score,), out=out,
        absent=absent, step=step_of(n_tok, 5), logits=logits, n_expert=n_expert, n_used=n_used,
        n_group=n_group, n_group_used=n_group_used, norm=how.get("norm", 0),
        scale=how.get("scale", 1.0), **({} if bias is None else {"bias": bias}),
    ):  # fmt: skip
        np.testing.assert_array_equal(found["ids"], ids)
        # Exponentials of differences below about 10, rounded to float32, and their sum.
        np.testing.assert_allclose(found["weights"], weights, rtol=3e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize(
    ("n_tok", "n_expert", "n_used"), [(1, 1, 1), (1, 8, 2), (7, 128, 8), (3, 5, 5)]
)
@in_child
def test_routing(n_tok, n_expert, n_used, norm):
    rng = np.random.default_rng((n_tok, n_expert))
    check_route(2 * normal(rng, n_tok, n_expert) + 30, n_used, norm=norm)


@pytest.mark.on_threads
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("score", SCORES)
@in_child
def test_scores_a_bias_and_a_scale(score, with_bias):
    rng = np.random.default_rng(with_bias)
    bias = normal(rng, 48) if with_bias else None
    check_route(2 * normal(rng, 5, 48), 6, score, bias=bias, norm=1, scale=2.5)


@pytest.mark.on_threads
@pytest.mark.parametrize("score", SCORES)
@in_child
def test_experts_that_a_table_has_for_a_token(score):
    rng = np.random.default_rng(4)
    n_tok, n_expert, n_used, n_vocab = 5, 48, 6, 9
    table = np.array([rng.permutation(n_expert)[:n_used] for _ in range(n_vocab)], np.int32)
    tokens, logits = rng.integers(0, n_vocab, n_tok).astype(np.int32), normal(rng, n_tok, n_expert)
    ids = table[tokens]
    weights = np.take_along_axis(scored(logits, score), ids, axis=-1)
    weights = softmax(weights) if score == "chosen" else weights / weights.sum(-1, keepdims=True)
    out = {"ids": unwritten(n_tok, n_used, dtype=np.int32), "weights": unwritten(n_tok, n_used)}
    for found in runs(
        ops.MOE_ROUTE, (score,), out=out, absent=["bias", "keys"], step=step_of(n_tok, 5),
        logits=logits, tokens=tokens, table=table, n_expert=n_expert, n_used=n_used, n_group=1,
        n_group_used=1, norm=1, scale=2.5,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["ids"], ids)
        np.testing.assert_allclose(found["weights"], 2.5 * weights, rtol=3e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_expert", "groups"), [(6, (2, 1)), (64, (8, 3)), (96, (32, 31))])
@in_child
def test_experts_of_the_best_groups(n_expert, groups):
    rng = np.random.default_rng(n_expert)
    logits = 2 * normal(rng, 5, n_expert)
    check_route(logits, 3, "sigmoid", groups=groups, bias=normal(rng, n_expert), norm=1)
    check_route(logits, 3, "softmax", groups=groups)


@pytest.mark.on_threads
@in_child
def test_of_equal_groups_the_first_are_taken():
    logits = np.tile(np.array([[1, 2, 0, 1]], np.float32), (2, 4))
    check_route(logits, 5, "sigmoid", groups=(4, 2))


@pytest.mark.on_threads
@in_child
def test_weights_that_are_nearly_0_are_not_made_to_sum_to_1():
    check_route(np.full((2, 4), -20, np.float32), 2, "sigmoid", norm=1)


@pytest.mark.on_threads
@pytest.mark.parametrize("norm", [0, 1])
@in_child
def test_equal_experts_are_taken_from_the_lowest(norm):
    rng = np.random.default_rng(norm)
    check_route(rng.integers(-1, 2, (5, 16)).astype(np.float32), 7, norm=norm)


@pytest.mark.on_threads
@in_child
def test_routing_of_large_logits_does_not_overflow():
    check_route(np.array([[500.0, 490.0, -500.0, 495.0]], np.float32), 2, norm=1)
    check_route(np.array([[500.0, 490.0, -500.0, 495.0]], np.float32), 2, "chosen")


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_used", "n"), [(1, 1, 1), (3, 2, 33), (5, 4, 16)])
@in_child
def test_the_biases_of_the_chosen_experts_are_added(n_tok, n_used, n):
    rng = np.random.default_rng((n_tok, n))
    bias, y = normal(rng, 6, n), normal(rng, n_tok, n_used, n)
    ids = np.array([rng.permutation(6)[:n_used] for _ in range(n_tok)], np.int32)
    for found in runs(
        ops.MOE_BIAS, out={"y": y}, step=step_of(n_tok), bias=bias, ids=ids, n=n, n_used=n_used
    ):
        np.testing.assert_array_equal(found["y"], y + bias[ids])


@pytest.mark.parametrize("x_per_slot", [0, 1])
@pytest.mark.parametrize(
    ("n_tok", "n_used", "n_out"), [(1, 1, 1), (1, 3, 8), (5, 2, 7), (2, 4, 13), (4, 6, 300)]
)
@pytest.mark.parametrize("type_", TYPES)
@in_child
def test_moe_matmul(type_, n_tok, n_used, n_out, x_per_slot):
    rng = np.random.default_rng((n_tok, n_out, x_per_slot))
    ids = np.array([rng.permutation(6)[:n_used] for _ in range(n_tok)], np.int32)
    check_matmul(type_, ids, 6, n_out, 256, x_per_slot)


@pytest.mark.parametrize("x_per_slot", [0, 1])
@pytest.mark.parametrize("type_", ["F16", "Q4_0"])
@in_child
def test_rows_of_experts_end_anywhere(type_, x_per_slot):
    # Under and over a slice and a part of a row, one and many tokens.
    rng = np.random.default_rng(x_per_slot)
    for n_tok, n_in in ((1, 32), (3, 1056), (9, 32), (7, 1056)):
        ids = np.array([rng.permutation(4)[:3] for _ in range(n_tok)], np.int32)
        check_matmul(type_, ids, 4, 5, n_in, x_per_slot)


@pytest.mark.parametrize("x_per_slot", [0, 1])
@in_child
def test_some_experts_get_many_rows_and_most_none(x_per_slot):
    # Of 2100 experts one has 300 tokens, two tiles and a part on a GPU; one the last of a tile.
    rng = np.random.default_rng(x_per_slot)
    ids = np.full((300, 2), 2099, np.int32)
    ids[:, 1] = rng.choice([0, 1, 255, 256, 1023, 1024, 2047], 300)
    ids[:128, 1] = 700
    check_matmul("Q8_0", ids, 2100, 3, 32, x_per_slot)


# Tokens, experts of a token, output rows: each way that rows are multiplied, under and over a part.
ROUTED = [(1, 3, 48), (5, 2, 16), (16, 4, 80), (17, 1, 32), (37, 3, 144), (150, 2, 16)]


@pytest.mark.parametrize("x_per_slot", [0, 1])
@pytest.mark.parametrize("type_", ["Q4_K", "F16"])
@in_child
def test_rows_of_many_tokens_are_grouped_by_expert(type_, x_per_slot):
    for n_tok, n_used, n_out in ROUTED:
        ids = uneven(np.random.default_rng((n_tok, n_out)), n_tok, n_used)
        check_matmul(type_, ids, 9, n_out - 3, 256, x_per_slot)


@pytest.mark.cpu_only
@pytest.mark.parametrize("x_per_slot", [0, 1])
@pytest.mark.parametrize("type_", IN_STRIPS)
@in_child
def test_so_are_those_of_experts_in_strips(type_, x_per_slot):
    for n_tok, n_used, n_out in ROUTED:
        ids = uneven(np.random.default_rng((n_tok, n_out)), n_tok, n_used)
        check_matmul(type_, ids, 9, n_out, 512 if n_tok == 37 else 256, x_per_slot)


@pytest.mark.cpu_only
@in_child
def test_sums_do_not_depend_on_which_rows_share_an_expert():
    # Rows of a tile share what is left out of it: a row alone with its expert has the same sums.
    rng = np.random.default_rng(3)
    data, _ = weights("Q4_K", rng, 4 * 32, 256)
    strips, x = in_strips("Q4_K", data, 4 * 32, 256), normal(rng, 40, 256)
    x[:, 17] *= 60
    together, apart = np.full((40, 1), 2, np.int32), np.full((40, 1), 1, np.int32)
    apart[11] = 2
    same, alone = (
        next(moe_products("Q4_Kx16", strips, ids, 4, 32, x, 0))[11] for ids in (together, apart)
    )
    np.testing.assert_array_equal(same, alone)


def uneven(rng, n_tok, n_used):
    """Experts of each token, of 9: the first has all tokens, the last none."""
    ids = np.array([rng.permutation(7)[:n_used] + 1 for _ in range(n_tok)], np.int32)
    ids[:, -1] = 0
    return ids


def check_matmul(type_, ids, n_expert, n_out, n_in, x_per_slot):
    """One MOE_MATMUL in every place; ids: the experts of each token."""
    n_tok, n_used = ids.shape
    rng = np.random.default_rng((n_tok, n_out, n_in, x_per_slot))
    ggml_type = ops.STRIP_TYPES.get(type_, type_)
    data, decoded = weights(ggml_type, rng, n_expert * n_out, n_in)
    if ggml_type != type_:
        data = in_strips(ggml_type, data, n_expert * n_out, n_in)
    w = decoded.reshape(n_expert, n_out, n_in)
    x = normal(rng, n_tok, n_used if x_per_slot else 1, n_in)
    rows = np.broadcast_to(x, (n_tok, n_used, n_in))
    expected = np.einsum("tui,tuoi->tuo", rows.astype(np.float64), w[ids])
    bound = np.array(
        [
            [rounding(rows[t, s : s + 1], w[ids[t, s]], type_, n_tok)[0] for s in range(n_used)]
            for t in range(n_tok)
        ]
    )
    for y in moe_products(type_, data, ids, n_expert, n_out, x, x_per_slot):
        assert (np.abs(y - expected) <= bound).all()


def moe_products(type_, data, ids, n_expert, n_out, x, x_per_slot):
    """The results of MOE_MATMUL in every place, f32 [n_tok, n_used, n_out]."""
    (n_tok, n_used), n_in = ids.shape, x.shape[-1]
    for found in runs(
        ops.MOE_MATMUL, (type_,), out={"y": unwritten(n_tok, n_used, n_out)},
        scratch=ops.expert_scratch(n_in, ids.size, n_expert), step=step_of(n_tok, 3), x=x, w=data,
        ids=ids, n_in=n_in, n_out=n_out, n_used=n_used, n_expert=n_expert, x_per_slot=x_per_slot,
    ):  # fmt: skip
        yield found["y"]


@pytest.mark.on_threads
@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize(("n_tok", "n_used", "n"), [(1, 1, 1), (1, 8, 33), (5, 2, 16)])
@in_child
def test_moe_sum(n_tok, n_used, n, add):
    rng = np.random.default_rng((n_tok, n))
    before, x = normal(rng, n_tok, n), normal(rng, n_tok, n_used, n)
    weights = normal(rng, n_tok, n_used)
    expected = add * before + np.einsum("tu,tun->tn", weights.astype(np.float64), x)
    for found in runs(
        ops.MOE_SUM, out={"y": before if add else unwritten(n_tok, n)}, step=step_of(n_tok), x=x,
        weights=weights, n=n, n_used=n_used, add=add,
    ):  # fmt: skip
        # At most nine float32 additions of values below about 10.
        np.testing.assert_allclose(found["y"], expected, rtol=0, atol=5e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_expert", "n_used", "n_each"), [(1, 4, 2, 2), (3, 12, 3, 4)])
@in_child
def test_groups_of_the_chosen_experts_have_the_weights_at_their_numbers(
    n_tok, n_expert, n_used, n_each
):
    rng = np.random.default_rng((n_tok, n_expert))
    logits = normal(rng, n_tok, n_expert)
    ids = np.argsort(-logits, axis=1)[:, : n_used + 1].astype(np.int32)
    groups = ids[:, :n_used] // n_each
    weights = np.take_along_axis(softmax(logits.astype(np.float64)), groups, axis=1)
    weights /= weights.sum(axis=1, keepdims=True)
    out = {"groups": unwritten(n_tok, n_used, dtype=np.int32), "weights": unwritten(n_tok, n_used)}
    for found in runs(
        ops.MOE_GROUPS, out=out, step=step_of(n_tok), logits=logits, ids=ids, n_expert=n_expert,
        n_chosen=n_used + 1, n_used=n_used, n_each=n_each,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["groups"], groups)
        np.testing.assert_allclose(found["weights"], weights, rtol=3e-6)
