"""RMS_NORM, ROPE_TABLE and GATE against NumPy float64, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from oracle import gelu_tanh, rms_norm, silu

from tamis.jit_kernels.contract import ops

KERNELS = [
    (ops.RMS_NORM, (0,)), (ops.RMS_NORM, (1,)), (ops.ROPE_TABLE, ()),
    (ops.GATE, ("silu",)), (ops.GATE, ("gelu",)),
]  # fmt: skip


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.on_threads
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize(("n_tok", "rows_per_tok", "n"), [(1, 1, 1), (3, 1, 7), (2, 5, 64)])
@pytest.mark.parametrize("add", [0, 1])
@in_child
def test_rms_norm(add, n_tok, rows_per_tok, n, row):
    rng = np.random.default_rng((add, n_tok, n, row))
    x, w = normal(rng, row + n_tok, rows_per_tok, n), normal(rng, n)
    before = normal(rng, n_tok, rows_per_tok, n)
    expected = add * before.astype(np.float64) + rms_norm(x[row:].astype(np.float64), w, 1e-3)
    for found in runs(
        ops.RMS_NORM, (add,), out={"y": before}, step=step_of(n_tok, 9, row), x=x, w=w, n=n,
        rows_per_tok=rows_per_tok, eps=1e-3,
    ):  # fmt: skip
        # A float32 sum of at most 64 squares, a root, a division and two products.
        np.testing.assert_allclose(found["y"], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos", "n_half"), [(1, 0, 1), (5, 100, 3), (3, 131_071, 32)])
@in_child
def test_rope_table(n_tok, pos, n_half):
    inv_freq = 10000.0 ** -(np.arange(n_half) / n_half)
    angles = (pos + np.arange(n_tok))[:, None] * inv_freq
    unwritten = np.full((n_tok, n_half), np.nan, np.float32)
    for found in runs(
        ops.ROPE_TABLE, out={"cos": unwritten, "sin": unwritten}, step=step_of(n_tok, pos),
        inv_freq=inv_freq, n_half=n_half, scale=1.25,
    ):  # fmt: skip
        # Angles are float64; the cosine is rounded to float32 before the product, and after it.
        np.testing.assert_allclose(found["cos"], 1.25 * np.cos(angles), rtol=0, atol=3e-7)
        np.testing.assert_allclose(found["sin"], 1.25 * np.sin(angles), rtol=0, atol=3e-7)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n"), [(1, 1), (1, 17), (5, 33)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@in_child
def test_gate(activation, n_tok, n):
    rng = np.random.default_rng((n_tok, n))
    gate, up = 3 * normal(rng, n_tok, n), normal(rng, n_tok, n)
    function = {"silu": silu, "gelu": gelu_tanh}[activation]
    expected = function(gate.astype(np.float64)) * up
    unwritten = np.full((n_tok, n), np.nan, np.float32)
    for found in runs(
        ops.GATE, (activation,), out={"y": unwritten}, step=step_of(n_tok), gate=gate, up=up, n=n
    ):
        # gelu's 1 + tanh(u) cancels at negative u: a step of 1, that is of |gate * up|.
        bound = 3e-6 * np.abs(expected) + 3e-7 * np.abs(gate * up)
        assert (np.abs(found["y"] - expected) <= bound).all()


@pytest.mark.on_threads
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@in_child
def test_gate_of_large_inputs_saturates(activation):
    gate = np.array([-1e30, -1e4, -100, -88.8, -20, 20, 88.8, 100, 1e4, 1e30], np.float32)
    up = np.linspace(0.5, 2, len(gate)).astype(np.float32)
    unwritten = np.full(len(gate), np.nan, np.float32)
    for found in runs(
        ops.GATE, (activation,), out={"y": unwritten}, step=step_of(1), gate=gate, up=up,
        n=len(gate),
    ):  # fmt: skip
        # Below -20 the factor is under 3e-9 of the input; above 20 it is 1.
        expected = np.where(gate > 0, gate.astype(np.float64) * up, 0)
        np.testing.assert_allclose(found["y"], expected, rtol=1e-6, atol=1e-7)
