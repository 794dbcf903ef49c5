"""Ops of recurrent layers against NumPy float64, between unmapped pages."""

import numpy as np
import pytest
import recurrent_oracle as oracle
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops

SMALL_SCANS = [("delta", "channel", 5, 19), ("add", "head", 8, 37), ("delta", "head", 15, 7)]
SCANS = [
    *SMALL_SCANS,
    # rule, decay, head_k, head_v: Gated DeltaNet, Kimi Delta Attention, Mamba-2, lightning
    # attention; before them, sizes that no vector divides.
    ("delta", "head", 128, 64),
    ("delta", "channel", 64, 64),
    ("add", "head", 64, 32),
    ("add", "channel", 32, 16),
]
N_STATE = [1, 16, 40]
HEADS = [32, 64]  # of RWKV-7
KERNELS = [
    (ops.BOUNDED_DECAY, ()), (ops.POOL_KEYS, ()), (ops.HASH_NGRAMS, ()),
    *((ops.SHORT_CONV, (activation,)) for activation in ("none", "silu")),
    *((ops.GATE_ROWS, (activation,)) for activation in ("none", "silu", "sigmoid")),
    (ops.DECAY, ()), (ops.L2_NORM, ()),
    *((ops.GATED_NORM, (order, a)) for order in ("norm", "gate") for a in ("silu", "sigmoid")),
    *((ops.SELECTIVE_SCAN, (n,)) for n in N_STATE),
    *((ops.LINEAR_SCAN, scan) for scan in SCANS),
    *((ops.WKV, (head,)) for head in HEADS),
]  # fmt: skip


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def unwritten(*shape):
    return np.full(shape, np.nan, np.float32)


def wide(*arrays):
    """The arrays in float64, as the oracle takes them."""
    return [array.astype(np.float64) for array in arrays]


# --- convolution ----------------------------------------------------------------------------------


@pytest.mark.on_threads
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(("n_tok", "n", "n_tap"), [(1, 3, 4), (2, 33, 4), (5, 64, 3), (4, 17, 1)])
@in_child
def test_a_convolution_resumes_from_its_state(n_tok, n, n_tap, activation, with_bias):
    rng = np.random.default_rng((n_tok, n, n_tap))
    x, w, bias = normal(rng, n_tok, n + 5), normal(rng, n_tap, n), normal(rng, n)
    state = normal(rng, n_tap - 1, n)
    expected, after = oracle.short_conv(*wide(x[:, :n], w, bias * with_bias, state), activation)
    rows = unwritten(n_tok, n + 2)
    for found in runs(
        ops.SHORT_CONV, (activation,), out={"y": rows, "state": state},
        absent=() if with_bias else ("bias",), step=step_of(n_tok), x=x, w=w,
        **({"bias": bias} if with_bias else {}), n=n, n_tap=n_tap, x_stride=n + 5, y_stride=n + 2,
    ):  # fmt: skip
        np.testing.assert_allclose(found["y"][:, :n], expected, rtol=3e-6, atol=3e-6)
        assert np.isnan(found["y"][:, n:]).all()
        np.testing.assert_array_equal(found["state"], after.astype(np.float32))


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 7), (2, 3), (7, 0), (5, 21)])
@pytest.mark.parametrize(("n", "n_row", "n_half", "every"), [(3, 4, 1, 4), (33, 8, 2, 4)])
@in_child
def test_keys_of_neighbours_are_pooled_by_their_gates(n_tok, pos, n, n_row, n_half, every):
    rng = np.random.default_rng((n_tok, pos, n))
    rows, w = normal(rng, pos + n_tok, 2, n_half, n), normal(rng, n_row, n)
    state = np.zeros((n_row - 1, 2, n_half, n), np.float32)
    for p in range(pos):
        state[p % (n_row - 1)] = rows[p]
    after = state.copy()
    for p in range(pos, pos + n_tok):
        after[p % (n_row - 1)] = rows[p]
    expected = np.zeros((n_tok, n))
    for t in range(n_tok):
        if (pos + t + 1) % every == 0:
            at = [(p, j) for j in range(n_row) if (p := pos + t + 1 - n_row + j) >= 0]
            of = [(*wide(*rows[p, :, j // (n_row // n_half)]), w[j]) for p, j in at]
            gates = np.exp([gate + added for _, gate, added in of])
            expected[t] = (gates * [key for key, _, _ in of]).sum(axis=0) / gates.sum(axis=0)
    for found in runs(
        ops.POOL_KEYS, out={"y": unwritten(n_tok, n), "state": state}, step=step_of(n_tok, pos),
        x=rows[pos:], w=w, n=n, n_row=n_row, n_half=n_half, every=every,
    ):  # fmt: skip
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found["state"], after)


@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (1, 5), (7, 0), (4, 3)])
@pytest.mark.parametrize(("n_gram", "n_each"), [(2, 1), (3, 2), (5, 3)])
@in_child
def test_rows_are_hashes_of_the_last_tokens_since_the_end_of_a_text(n_tok, pos, n_gram, n_each):
    rng, eos = np.random.default_rng((n_tok, pos, n_gram)), 2
    tokens = rng.integers(0, 6, pos + n_tok).tolist()  # one in six ends a text
    factors = rng.integers(1, 1 << 63, n_gram, np.uint64)
    n_row = (n_gram - 1) * n_each
    sizes, first = rng.integers(50, 99, n_row), rng.integers(0, 1000, n_row)
    rows = np.zeros((n_tok, n_row), np.int32)
    for t in range(n_tok):
        text = [tokens[pos + t]]
        for token in reversed(tokens[: pos + t]):
            if token == eos:
                break
            text.append(token)
        text += [eos] * n_gram
        for h in range(n_row):
            mix = 0
            for j in range(2 + h // n_each):
                mix ^= text[j] * int(factors[j]) % 2**64
            rows[t, h] = mix % int(sizes[h]) + first[h]
    before, after = (
        np.array([*(token + 1 for token in reversed(seen)), *[0] * n_gram], np.int32)[: n_gram - 1]
        for seen in (tokens[:pos], tokens)
    )
    for found in runs(
        ops.HASH_NGRAMS, out={"rows": np.full((n_tok, n_row), -7, np.int32), "state": before},
        step=step_of(n_tok, pos), ids=np.array(tokens[pos:], np.int32), factors=factors,
        sizes=sizes.astype(np.int64), first=first.astype(np.int64), n_gram=n_gram, n_each=n_each,
        eos=eos,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["rows"], rows)
        np.testing.assert_array_equal(found["state"], after)


# --- gates and norms ------------------------------------------------------------------------------


@pytest.mark.on_threads
@pytest.mark.parametrize("activation", ["none", "silu", "sigmoid"])
@pytest.mark.parametrize(("n_tok", "rows", "n"), [(1, 1, 1), (3, 2, 19), (2, 3, 32)])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("each", [0, 1])
@in_child
def test_rows_are_multiplied_by_a_gate(n_tok, rows, n, activation, alone, each):
    rng = np.random.default_rng((n_tok, rows, n))
    x, z = normal(rng, n_tok, rows, n + 1), 3 * normal(rng, n_tok, rows + 1, 2 * n)
    expected = oracle.ACTIVATIONS[activation](z[:, :rows, : n if each else 1].astype(np.float64))
    expected = np.broadcast_to(expected, (n_tok, rows, n))
    expected = expected if alone else x[:, :, :n] * expected
    for found in runs(
        ops.GATE_ROWS, (activation,), out={"y": unwritten(n_tok, rows * (n + 3) + 2)},
        absent=("x",) if alone else (), step=step_of(n_tok), **({} if alone else {"x": x}), z=z,
        n=n, rows_per_tok=rows, x_stride=rows * (n + 1), x_step=n + 1,
        z_stride=(rows + 1) * 2 * n, z_step=2 * n, z_each=each,
        y_stride=rows * (n + 3) + 2, y_step=n + 3,
    ):  # fmt: skip
        runs_of_y = found["y"][:, : rows * (n + 3)].reshape(n_tok, rows, n + 3)
        np.testing.assert_allclose(runs_of_y[:, :, :n], expected, rtol=3e-6, atol=1e-6)
        assert np.isnan(runs_of_y[:, :, n:]).all()
        assert np.isnan(found["y"][:, rows * (n + 3) :]).all()


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n", "run"), [(1, 1, 1), (3, 10, 5), (2, 24, 8)])
@in_child
def test_a_decay_with_a_bound_is_never_below_it(n_tok, n, run):
    rng = np.random.default_rng((n_tok, n))
    x, bias, a = 8 * normal(rng, n_tok, n), normal(rng, n), np.exp(normal(rng, n // run))
    x[0, 0], x[-1, -1] = 60, -60
    gates = oracle.sigmoid((x.astype(np.float64) + bias) * np.repeat(a, run).astype(np.float64))
    for found in runs(
        ops.BOUNDED_DECAY, out={"decay": unwritten(n_tok, n)}, step=step_of(n_tok), x=x, bias=bias,
        a=a, n=n, run=run, least=-5.0,
    ):  # fmt: skip
        np.testing.assert_allclose(found["decay"], np.exp(-5 * gates), rtol=1e-5)


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "rows", "n", "run"), [(1, 1, 1, 1), (3, 2, 5, 1), (2, 3, 8, 8)])
@pytest.mark.parametrize("absent", [(), ("dt",), ("decay",)])
@in_child
def test_a_decay_is_the_exponential_of_a_step_times_a_rate(n_tok, rows, n, run, absent):
    rng = np.random.default_rng((n_tok, rows, n))
    x, bias = 8 * normal(rng, n_tok, rows, 2 * n), normal(rng, rows * n)
    x[0, 0, 0], x[-1, -1, n - 1] = 60, -60
    a = -np.exp(normal(rng, rows * n // run))
    dt = oracle.softplus(x[:, :, :n].astype(np.float64).reshape(n_tok, -1) + bias)
    expected = {"dt": dt, "decay": np.exp(dt * np.repeat(a, run).astype(np.float64))}
    out = {name: unwritten(n_tok, rows * n) for name in expected if name not in absent}
    for found in runs(
        ops.DECAY, out=out, absent=absent, step=step_of(n_tok), x=x, bias=bias, a=a, n=n,
        rows_per_tok=rows, x_stride=rows * 2 * n, x_step=2 * n, run=run,
    ):  # fmt: skip
        for name in out:
            # exp of a float32 product of up to 100 is right to 100 of its roundings.
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-30)


@pytest.mark.on_threads
@pytest.mark.parametrize(
    ("n_tok", "rows", "n", "gap"), [(1, 1, 1, 0), (3, 2, 19, 4), (2, 4, 64, 1)]
)
@in_child
def test_queries_and_keys_get_length_one(n_tok, rows, n, gap):
    rng = np.random.default_rng((n_tok, rows, n))
    x = normal(rng, n_tok, rows * n + gap)
    heads = x[:, : rows * n].astype(np.float64).reshape(n_tok, rows, n)
    expected = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-3)
    for found in runs(
        ops.L2_NORM, out={"x": x}, step=step_of(n_tok), n=n, rows_per_tok=rows,
        stride=rows * n + gap, eps=1e-3,
    ):  # fmt: skip
        np.testing.assert_allclose(
            found["x"][:, : rows * n].reshape(heads.shape), expected, rtol=3e-6, atol=1e-7
        )
        np.testing.assert_array_equal(found["x"][:, rows * n :], x[:, rows * n :])


@pytest.mark.on_threads
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("order", ["norm", "gate"])
@pytest.mark.parametrize(("n_tok", "rows", "n"), [(1, 1, 1), (3, 2, 19), (2, 3, 64)])
@pytest.mark.parametrize("shared", [False, True])
@in_child
def test_a_norm_and_its_gate(n_tok, rows, n, order, activation, shared):
    rng = np.random.default_rng((n_tok, rows, n))
    x, z = normal(rng, n_tok, rows, n), 2 * normal(rng, n_tok, rows * n + 3)
    w = normal(rng, 1 if shared else rows, n)
    gates = z[:, : rows * n].astype(np.float64).reshape(x.shape)
    expected = oracle.gated_norm(x.astype(np.float64), gates, w, 1e-3, order, activation)
    for found in runs(
        ops.GATED_NORM, (order, activation), out={"y": unwritten(n_tok, rows, n)},
        step=step_of(n_tok), x=x, z=z, w=w, n=n, rows_per_tok=rows, z_stride=rows * n + 3,
        w_step=0 if shared else n, eps=1e-3,
    ):  # fmt: skip
        np.testing.assert_allclose(found["y"], expected, rtol=5e-6, atol=2e-6)


# --- scans ----------------------------------------------------------------------------------------


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "n"), [(1, 5), (4, 32), (9, 21)])
@pytest.mark.parametrize("n_state", N_STATE)
@in_child
def test_a_selective_scan_resumes_from_its_state(n_state, n_tok, n):
    rng = np.random.default_rng((n_state, n_tok, n))
    x, dt = normal(rng, n_tok, n), np.exp(normal(rng, n_tok, n))
    mixed, d = normal(rng, n_tok, 2 * n_state + 3), normal(rng, n)
    b, c = np.ascontiguousarray(mixed), np.ascontiguousarray(mixed[:, n_state:])
    a, state = -np.exp(normal(rng, n_state, n)), normal(rng, n_state, n)
    rows = wide(x, dt, b[:, :n_state], c[:, :n_state])
    expected, after = oracle.selective_scan(*rows, *wide(a, d, state))
    c_rows = np.zeros_like(mixed)
    c_rows[:, : n_state + 3] = c
    for found in runs(
        ops.SELECTIVE_SCAN, (n_state,), out={"y": unwritten(n_tok, n), "state": state},
        step=step_of(n_tok), x=x, dt=dt, b=b, c=c_rows, a=a, d=d, n=n, bc_stride=2 * n_state + 3,
    ):  # fmt: skip
        np.testing.assert_allclose(found["state"], after, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(found["y"], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.on_threads
@pytest.mark.parametrize("n_tok", [1, 5])
@pytest.mark.parametrize("head", HEADS)
@in_child
def test_a_scan_of_rwkv_resumes_from_its_state(head, n_tok):
    rng = np.random.default_rng((head, n_tok))
    n_head, shape = 3, (n_tok, 3, head)
    names = ("r", "k", "v", "a", "b")
    given = {name: normal(rng, *shape) / np.float32(head**0.5) for name in names}
    given |= {"w": rng.uniform(0.5, 1, shape).astype(np.float32), "u": normal(rng, n_head, head)}
    state = normal(rng, n_head, head, head)
    order = (given[name] for name in ("r", "w", "k", "v", "a", "b", "u"))
    y, bonus, after = oracle.wkv(*wide(*order, state))
    out = {"y": unwritten(*shape), "bonus": unwritten(*shape), "state": state}
    for found in runs(ops.WKV, (head,), out=out, step=step_of(n_tok), n_head=n_head, **given):
        np.testing.assert_allclose(found["state"], after, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(found["y"], y, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(found["bonus"], bonus, rtol=2e-5, atol=2e-6)


def scan_inputs(rng, decay, head_k, head_v, n_tok, n_head, n_head_k):
    """Rows q | k | v of n_tok tokens; decays, betas, skips and a state."""
    n_key = n_head_k * head_k
    rows = normal(rng, n_tok, 2 * n_key + n_head * head_v + 3)
    rows[:, : 2 * n_key] /= np.sqrt(head_k)
    per_head = head_k if decay == "channel" else 1
    return {
        "rows": rows,
        "decay": rng.uniform(0.5, 1, (n_tok, n_head, per_head)).astype(np.float32),
        "beta": rng.uniform(0, 1, (n_tok, n_head)).astype(np.float32),
        "skip": normal(rng, n_head),
        "state": normal(rng, n_head, head_k, head_v),
    }


def scan_expected(given, rule, head_k, head_v, n_head, n_head_k, tiled, scale):
    rows, n_tok, n_key = given["rows"].astype(np.float64), len(given["rows"]), n_head_k * head_k
    q, k = (rows[:, first : first + n_key].reshape(n_tok, n_head_k, head_k) for first in (0, n_key))
    heads = [h % n_head_k if tiled else h // (n_head // n_head_k) for h in range(n_head)]
    v = rows[:, 2 * n_key : 2 * n_key + n_head * head_v].reshape(n_tok, n_head, head_v)
    others = wide(*(given[name] for name in ("decay", "beta", "skip", "state")))
    return oracle.linear_scan(q[:, heads], k[:, heads], v, *others, rule, scale)


def scan_fields(given, head_k, head_v, n_head, n_head_k, tiled, first=0, n_tok=None):
    """The fields of LINEAR_SCAN for tokens `first` to first + n_tok."""
    some = slice(first, None if n_tok is None else first + n_tok)
    rows, decay = given["rows"][some], given["decay"][some]
    flat, n_key = np.ascontiguousarray(rows).reshape(-1), n_head_k * head_k
    return {
        "q": flat, "k": flat[n_key:], "v": flat[2 * n_key :], "decay": decay,
        "beta": given["beta"][some], "skip": given["skip"], "n_head": n_head,
        "n_head_k": n_head_k, "tiled": tiled, "stride": rows.shape[1], "qk_step": head_k,
        "v_step": head_v, "decay_stride": decay[0].size,
    }  # fmt: skip


def check_linear_scan(rule, decay, head_k, head_v, n_tok, n_head, n_head_k, tiled):
    rng = np.random.default_rng((head_k, head_v, n_tok))
    given = scan_inputs(rng, decay, head_k, head_v, n_tok, n_head, n_head_k)
    expected, after = scan_expected(given, rule, head_k, head_v, n_head, n_head_k, tiled, 0.5)
    for found in runs(
        ops.LINEAR_SCAN, (rule, decay, head_k, head_v), step=step_of(n_tok), scale=0.5,
        out={"y": unwritten(n_tok, n_head, head_v), "state": given["state"]},
        **scan_fields(given, head_k, head_v, n_head, n_head_k, tiled),
    ):  # fmt: skip
        np.testing.assert_allclose(found["state"], after, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(found["y"], expected, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("n_tok", "n_head", "n_head_k", "tiled"), [(1, 1, 1, 0), (5, 4, 2, 0), (3, 6, 3, 1)]
)
@pytest.mark.parametrize(("rule", "decay", "head_k", "head_v"), SCANS)
@in_child
def test_a_linear_scan_resumes_from_its_state(
    rule, decay, head_k, head_v, n_tok, n_head, n_head_k, tiled
):
    check_linear_scan(rule, decay, head_k, head_v, n_tok, n_head, n_head_k, tiled)


@pytest.mark.on_threads
@pytest.mark.parametrize("scan", SMALL_SCANS)
@in_child
def test_small_linear_scans_go_on_from_their_states(scan):
    check_linear_scan(*scan, 3, 2, 1, 1)


@pytest.mark.on_threads
@in_child
def test_a_linear_scan_without_beta_and_skip_has_ones_and_zeros_there():
    rng = np.random.default_rng(3)
    given = scan_inputs(rng, "head", 8, 37, 3, 2, 2)
    given["decay"][1:] = given["decay"][0]
    given["beta"][:], given["skip"][:] = 1, 0
    expected, after = scan_expected(given, "add", 8, 37, 2, 2, 0, 1.0)
    fields = scan_fields(given, 8, 37, 2, 2, 0) | {"decay_stride": 0, "decay": given["decay"][0]}
    del fields["beta"], fields["skip"]
    for found in runs(
        ops.LINEAR_SCAN, ("add", "head", 8, 37), step=step_of(3), scale=1.0,
        out={"y": unwritten(3, 2, 37), "state": given["state"]}, absent=("beta", "skip"), **fields,
    ):  # fmt: skip
        np.testing.assert_allclose(found["state"], after, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(found["y"], expected, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize(("rule", "decay", "head_k", "head_v"), SCANS[2:])
@in_child
def test_a_chunk_is_its_tokens_one_by_one(rule, decay, head_k, head_v):
    """To the bit: a token is computed the same way wherever it stands in a chunk."""
    n_tok, n_head = 7, 2
    rng = np.random.default_rng((head_k, head_v))
    given = scan_inputs(rng, decay, head_k, head_v, n_tok, n_head, n_head)
    shape = head_k, head_v, n_head, n_head, 0
    whole = list(
        runs(
            ops.LINEAR_SCAN, (rule, decay, head_k, head_v), step=step_of(n_tok), scale=0.5,
            out={"y": unwritten(n_tok, n_head, head_v), "state": given["state"]},
            **scan_fields(given, *shape),
        )
    )  # fmt: skip
    rows, state = [], given["state"]
    for t in range(n_tok):
        calls = runs(
            ops.LINEAR_SCAN, (rule, decay, head_k, head_v), step=step_of(1), scale=0.5,
            out={"y": unwritten(1, n_head, head_v), "state": state},
            **scan_fields(given, *shape, first=t, n_tok=1),
        )  # fmt: skip
        found = next(calls)
        rows.append(found["y"][0].copy())
        state = found["state"].copy()
    for found in whole:
        np.testing.assert_array_equal(found["y"], np.array(rows))
        np.testing.assert_array_equal(found["state"], state)
