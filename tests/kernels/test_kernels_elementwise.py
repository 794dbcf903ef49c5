"""Norms, positions and activations against NumPy float64, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from oracle import ACTIVATIONS, gelu_tanh, layer_norm, rms_norm, silu

from tamis.jit_kernels.contract import ops

KERNELS = [
    (ops.RMS_NORM, (0,)), (ops.RMS_NORM, (1,)), (ops.ROPE_TABLE, ()),
    (ops.GATE, ("silu",)), (ops.GATE, ("gelu",)), (ops.LAYER_NORM, ()), (ops.ADD_POSITIONS, ()),
    (ops.PLACE_HEADS, ()),
    (ops.SCALE_BY_POSITION, ()),
    *((ops.MAP_ROWS, (name, add)) for name in ops.ACTIVATIONS for add in (0, 1)),
    *((ops.ROPE_HEADS, (16, neox, order)) for neox in (0, 1) for order in ("norm", "rope")),
    *((ops.GATE_CLAMPED, (form,)) for form in ("gpt_oss", "before", "after")),
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
        rows_per_tok=rows_per_tok, x_stride=rows_per_tok * n, y_stride=rows_per_tok * n, eps=1e-3,
    ):  # fmt: skip
        # A float32 sum of at most 64 squares, a root, a division and two products.
        np.testing.assert_allclose(found["y"], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.on_threads
@in_child
def test_rms_norm_of_a_part_of_each_row():
    rng = np.random.default_rng(4)
    x, w, before = normal(rng, 4, 9), normal(rng, 3), normal(rng, 3, 8)
    expected = before.copy()
    part = x[1:, :6].reshape(3, 2, 3).astype(np.float64)
    expected[:, :6] = rms_norm(part, w, 1e-3).reshape(3, 6)
    for found in runs(
        ops.RMS_NORM, (0,), out={"y": before}, step=step_of(3, 9, 1), x=x, w=w, n=3,
        rows_per_tok=2, x_stride=9, y_stride=8, eps=1e-3,
    ):  # fmt: skip
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


@pytest.mark.on_threads
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize(("n_tok", "rows_per_tok", "n"), [(1, 1, 1), (3, 1, 7), (2, 5, 64)])
@pytest.mark.parametrize("given", ["", "w", "w bias", "w_each"])
@in_child
def test_layer_norm(given, n_tok, rows_per_tok, n, row):
    rng = np.random.default_rng((n_tok, n, row))
    x, w = normal(rng, row + n_tok, rows_per_tok, n) + 3, normal(rng, rows_per_tok, n)
    each, bias = given == "w_each", normal(rng, n)
    fields = ({"w": w if each else w[:1]} if given else {}) | (
        {"bias": bias} if "b" in given else {}
    )
    weights = fields.get("w", np.ones(1))
    expected = layer_norm(x[row:].astype(np.float64), weights, fields.get("bias", 0.0), 1e-3)
    for found in runs(
        ops.LAYER_NORM, out={"y": np.full((n_tok, rows_per_tok, n), np.nan, np.float32)},
        absent=tuple({"w", "bias"} - fields.keys()), step=step_of(n_tok, 9, row), x=x, n=n,
        rows_per_tok=rows_per_tok, w_step=n if each else 0, eps=1e-3, **fields,
    ):  # fmt: skip
        # A mean near 3 of float32 leaves 2e-7 in each difference.
        np.testing.assert_allclose(found["y"], expected, rtol=3e-6, atol=3e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n"), [(1, 1), (1, 17), (3, 33)])
@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@in_child
def test_rows_are_mapped(activation, add, n_tok, n):
    rng = np.random.default_rng((n_tok, n))
    x, before = 3 * normal(rng, n_tok, n), normal(rng, n_tok, n)
    function = ACTIVATIONS[activation]
    expected = -2.5 * function(0.75 * x.astype(np.float64)) + add * before
    for found in runs(
        ops.MAP_ROWS, (activation, add), out={"y": before}, step=step_of(n_tok), x=x, n=n,
        inner=0.75, outer=-2.5,
    ):  # fmt: skip
        # Sums of numbers up to |x|: erf and tanh are right to 2e-7 of 1, relu2 is a product.
        bound = 2e-6 * np.abs(expected) + 1e-6 * (1 + np.abs(x) + np.abs(before))
        assert (np.abs(found["y"] - expected) <= bound).all()


@pytest.mark.on_threads
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@in_child
def test_activations_of_large_inputs_are_finite(activation):
    x = np.array([-1e15, -1e4, -88.8, -20, 0, 20, 88.8, 1e4, 1e15], np.float32)
    for found in runs(
        ops.MAP_ROWS, (activation, 0), out={"y": np.full(len(x), np.nan, np.float32)},
        step=step_of(1), x=x, n=len(x), inner=1.0, outer=1.0,
    ):  # fmt: skip
        with np.errstate(over="ignore"):
            expected = ACTIVATIONS[activation](x.astype(np.float64))
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize(
    ("n_tok", "n_head", "n_half"), [(1, 1, 8), (3, 2, 8), (2, 3, 3), (2, 2, 0)]
)
@pytest.mark.parametrize("norm", ["", "one", "each"])
@pytest.mark.parametrize("order", ["norm", "rope"])
@pytest.mark.parametrize("neox", [0, 1])
@in_child
def test_heads_are_normed_and_turned_in_this_order(neox, order, norm, n_tok, n_head, n_half):
    rng = np.random.default_rng((n_tok, n_head, n_half))
    x, w = normal(rng, n_tok, n_head, 16), normal(rng, n_head if norm == "each" else 1, 16)
    angles = normal(rng, n_tok, max(n_half, 1))
    expected = x.astype(np.float64)
    for part in (order, "rope" if order == "norm" else "norm"):
        if part == "norm" and norm:
            expected = rms_norm(expected, w, 1e-3)
        elif part == "rope" and n_half:
            expected = rotated(expected, angles.astype(np.float64), neox)
    for found in runs(
        ops.ROPE_HEADS, (16, neox, order), out={"x": x}, absent=() if norm else ("norm",),
        step=step_of(n_tok), cos=np.cos(angles), sin=np.sin(angles), n_head=n_head,
        norm_step=16 if norm == "each" else 0, n_half=n_half, eps=1e-3,
        **({"norm": w} if norm else {}),
    ):  # fmt: skip
        np.testing.assert_allclose(found["x"], expected, rtol=3e-6, atol=3e-6)


def rotated(x, angles, neox):
    """Heads x [n_tok, n_head, head_dim] with the first pairs rotated by angles [n_tok, n_half]."""
    n = angles.shape[1]
    first = np.arange(n) if neox else 2 * np.arange(n)
    other, out = first + (n if neox else 1), x.copy()
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out[..., first] = x[..., first] * cos - x[..., other] * sin
    out[..., other] = x[..., first] * sin + x[..., other] * cos
    return out


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos", "n"), [(1, 0, 1), (1, 4, 17), (3, 2, 33)])
@pytest.mark.parametrize("one", [False, True])
@in_child
def test_learned_positions_are_added(one, n_tok, pos, n):
    rng = np.random.default_rng((n_tok, pos, n))
    x, table = normal(rng, n_tok, n), normal(rng, pos + n_tok, n)
    table = table[:1] if one else table
    for found in runs(
        ops.ADD_POSITIONS, out={"x": x}, step=step_of(n_tok, pos), table=table, n=n,
        stride=0 if one else n,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["x"], x + table[0 if one else pos :])


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n"), [(1, 1), (1, 17), (5, 33)])
@pytest.mark.parametrize("form", ["gpt_oss", "before", "after"])
@in_child
def test_gates_with_a_limit(form, n_tok, n):
    rng, limit = np.random.default_rng((n_tok, n)), 1.25
    gate, up = 3 * normal(rng, n_tok, n), 3 * normal(rng, n_tok, n)
    g, u = gate.astype(np.float64), np.clip(up.astype(np.float64), -limit, limit)
    low = np.minimum(g, limit)
    expected = {
        "gpt_oss": low / (1 + np.exp(-1.702 * low)) * (u + 1),
        "before": silu(low) * u,
        "after": np.minimum(silu(g), limit) * u,
    }[form]
    for found in runs(
        ops.GATE_CLAMPED, (form,), out={"y": np.full((n_tok, n), np.nan, np.float32)},
        step=step_of(n_tok), gate=gate, up=up, n=n, limit=limit,
    ):  # fmt: skip
        np.testing.assert_allclose(found["y"], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "x_dim", "y_dim"), [(1, 1, 1), (3, 16, 40), (2, 40, 16)])
@in_child
def test_heads_are_placed_and_filled_up(n_tok, x_dim, y_dim):
    rng = np.random.default_rng((n_tok, x_dim, y_dim))
    source = np.array([2, -1, 0, 0, 1], np.int32)
    x, expected = normal(rng, n_tok, 3, x_dim), np.zeros((n_tok, 5, y_dim))
    n = min(x_dim, y_dim)
    for h, j in enumerate(source):
        if j >= 0:
            expected[:, h, :n] = x[:, j, :n]
    for found in runs(
        ops.PLACE_HEADS, out={"y": np.full(expected.shape, np.nan, np.float32)},
        step=step_of(n_tok), x=x, source=source, n_x=3, n_y=5, x_dim=x_dim, y_dim=y_dim,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["y"], expected)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos", "offset"), [(1, 0, 0.0), (3, 6, 1.0), (2, 99_999, 0.0)])
@in_child
def test_queries_grow_with_their_position(n_tok, pos, offset):
    x = normal(np.random.default_rng(pos), n_tok, 5)
    steps = np.floor((pos + np.arange(n_tok) + offset) / 8)
    for found in runs(
        ops.SCALE_BY_POSITION, out={"x": x}, step=step_of(n_tok, pos), n=5, length=8, scale=0.25,
        offset=offset,
    ):  # fmt: skip
        expected = x * (1 + 0.25 * np.log(1 + steps))[:, None]
        np.testing.assert_allclose(found["x"], expected, rtol=1e-6)
