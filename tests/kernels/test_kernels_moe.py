"""MOE_ROUTE, MOE_MATMUL and MOE_SUM against NumPy float64, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, is_on_gpu, runs, step_of
from matmul_cases import rounding, weights
from oracle import softmax

from tamis.jit_kernels.contract import ops

TYPES = ["F32", "Q8_0", "Q4_K"]
KERNELS = [
    (ops.MOE_ROUTE, ()),
    (ops.MOE_SUM, ()),
    *((ops.MOE_MATMUL, (t,)) for t in (*TYPES, "F16", "Q4_0")),
]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def unwritten(*shape, dtype=np.float32):
    return np.full(shape, np.nan if dtype == np.float32 else -7, dtype)


def route(logits, n_used, norm):
    """Ids and weights of the n_used most probable experts, ties to the lower one."""
    probabilities = softmax(logits.astype(np.float64))
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(probabilities, ids, axis=-1)
    return ids, weights / weights.sum(axis=-1, keepdims=True) if norm else weights


def check_route(logits, n_used, norm):
    n_tok, n_expert = logits.shape
    ids, weights = route(logits, n_used, norm)
    for found in runs(
        ops.MOE_ROUTE,
        out={"ids": unwritten(n_tok, n_used, dtype=np.int32), "weights": unwritten(n_tok, n_used)},
        step=step_of(n_tok, 5), logits=logits, n_expert=n_expert, n_used=n_used, norm=norm,
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
    check_route(2 * normal(rng, n_tok, n_expert) + 30, n_used, norm)


@pytest.mark.on_threads
@pytest.mark.parametrize("norm", [0, 1])
@in_child
def test_equal_experts_are_taken_from_the_lowest(norm):
    rng = np.random.default_rng(norm)
    check_route(rng.integers(-1, 2, (5, 16)).astype(np.float32), 7, norm)


@pytest.mark.on_threads
@in_child
def test_routing_of_large_logits_does_not_overflow():
    check_route(np.array([[500.0, 490.0, -500.0, 495.0]], np.float32), 2, 1)


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


def check_matmul(type_, ids, n_expert, n_out, n_in, x_per_slot):
    """One MOE_MATMUL in every place; ids: the experts of each token."""
    n_tok, n_used = ids.shape
    rng = np.random.default_rng((n_tok, n_out, n_in, x_per_slot))
    data, decoded = weights(type_, rng, n_expert * n_out, n_in)
    w = decoded.reshape(n_expert, n_out, n_in)
    x = normal(rng, n_tok, n_used if x_per_slot else 1, n_in)
    rows = np.broadcast_to(x, (n_tok, n_used, n_in))
    expected = np.einsum("tui,tuoi->tuo", rows.astype(np.float64), w[ids])
    n_row = n_tok if is_on_gpu() else 1  # CPUs multiply each as few
    bound = np.array(
        [
            [rounding(rows[t, s : s + 1], w[ids[t, s]], type_, n_row)[0] for s in range(n_used)]
            for t in range(n_tok)
        ]
    )
    for found in runs(
        ops.MOE_MATMUL, (type_,), out={"y": unwritten(n_tok, n_used, n_out)},
        scratch=ops.matmul_scratch(n_in), step=step_of(n_tok, 3), x=x, w=data, ids=ids, n_in=n_in,
        n_out=n_out, n_used=n_used, n_expert=n_expert, x_per_slot=x_per_slot,
    ):  # fmt: skip
        assert (np.abs(found["y"] - expected) <= bound).all()


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n_used", "n"), [(1, 1, 1), (1, 8, 33), (5, 2, 16)])
@in_child
def test_moe_sum_adds_to_y(n_tok, n_used, n):
    rng = np.random.default_rng((n_tok, n))
    before, x = normal(rng, n_tok, n), normal(rng, n_tok, n_used, n)
    weights = normal(rng, n_tok, n_used)
    expected = before + np.einsum("tu,tun->tn", weights.astype(np.float64), x)
    for found in runs(
        ops.MOE_SUM, out={"y": before}, step=step_of(n_tok), x=x, weights=weights, n=n,
        n_used=n_used,
    ):  # fmt: skip
        # At most nine float32 additions of values below about 10.
        np.testing.assert_allclose(found["y"], expected, rtol=0, atol=5e-6)
