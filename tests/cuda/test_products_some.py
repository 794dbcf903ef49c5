"""Products of 5 to 64 rows on tensor cores, thread by thread in Python, against NumPy float64."""

import importlib

import numpy as np
import pytest
from matmul_cases import normal, weights
from on_threads import as_python, run_block
from oracle import gelu_tanh, rms_norm, silu

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.cuda.lang.scratch import (
    COUNTERS,
    DEPTH,
    STAGED_ROWS,
    some_scratch,
    staged_room,
)
from tamis.jit_kernels.cuda.lang.target import TARGETS, current, use

pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
FILES = (
    "linear.activation", "linear.dequant", "lang.grid", "linear.gemm", "linear.matmul_few",
    "linear.matmul_some", "linear.matmul", "linear.gemv_epilogue", "linear.pack",
    "linear.matmul_staged", "lang.readers",
)  # fmt: skip
MODULES = [importlib.import_module(f"tamis.jit_kernels.cuda.{file}") for file in FILES]
N_BLOCK = 2


def halved(x):
    """Rows as PACK_ROWS leaves them: float16, up to a multiple of DEPTH elements."""
    found = np.zeros((len(x), -(-x.shape[1] // DEPTH) * DEPTH), np.float16)
    found[:, : x.shape[1]] = x
    return found


@pytest.fixture(autouse=True, params=["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
def target(request):
    """Both kinds of GPUs have tiles of their own sizes."""
    before = current()
    use(TARGETS[request.param])
    yield
    use(before)


def run(op, constants, fields, n_block=N_BLOCK):
    """Run an op's kernel for some rows over these arrays and numbers, the last block first."""
    scratch = np.full(COUNTERS + some_scratch(n_block), 0xA5, np.uint8)
    scratch[:COUNTERS] = 0
    arrays = [scratch, *(value for value in fields.values() if isinstance(value, np.ndarray))]
    record = op.values(
        **{
            name: value.ctypes.data if isinstance(value, np.ndarray) else value
            for name, value in (dict.fromkeys(op.fields, 0) | fields).items()
        }
        | ({"scratch": scratch.ctypes.data + COUNTERS} if "scratch" in op.fields else {})
    )
    with as_python(*MODULES):
        module = importlib.import_module(f"tamis.jit_kernels.cuda.{op.file}")
        named = dict(zip(op.constants, constants, strict=True))
        (launch,) = (one for one in getattr(module, op.name)(**named) if one.rows == "some")
        for tid in reversed(range(n_block)):

            def body(tid=tid):
                handed = launch.start(tid, n_block, record)
                launch.kernel(tid, n_block, record, *([handed] if launch.hands_on else []))

            run_block(body, launch.threads, arrays)
    assert not scratch[:COUNTERS].any()


def bound(x, decoded):
    """Rows and weights are rounded to float16: by at most 2^-11 of each."""
    return 2**-10 * np.abs(x).astype(np.float64) @ np.abs(decoded).T + 1e-4


@pytest.mark.parametrize(
    ("type_", "n_in", "n_out", "n_tok", "n_block"),
    # Less than a chunk; one of a tile; a tile that three blocks have parts of; tiles that end in
    # the middle of a block's share, with rows beyond the last; two passes over the weights.
    [
        ("Q8_0", 96, 40, 5, 2),
        pytest.param("Q4_K", 256, 24, 9, 2, marks=pytest.mark.slow),
        pytest.param("Q6_K", 768, 16, 17, 4, marks=pytest.mark.slow),
        pytest.param("Q5_0", 544, 300, 6, 2, marks=pytest.mark.slow),
        pytest.param("Q4_K", 512, 8, 64, 1, marks=pytest.mark.slow),
    ],
)
def test_products_are_those_of_float16(type_, n_in, n_out, n_tok, n_block):
    rng = np.random.default_rng(n_tok)
    data, decoded = weights(type_, rng, n_out, n_in)
    x, bias, y = normal(rng, n_tok, n_in), normal(rng, n_out), normal(rng, n_tok, n_out + 3)
    before = y.copy()
    run(
        ops.MATMUL, (type_,),
        {"step": np.array([n_tok, 0, 0, 0, 0]), "packed": halved(x), "w": data, "bias": bias,
         "y": y, "n_in": n_in, "n_out": n_out, "y_stride": n_out + 3, "add": 1},
        n_block,
    )  # fmt: skip
    expected = before[:, :n_out] + x.astype(np.float64) @ decoded.T + bias
    assert (np.abs(y[:, :n_out] - expected) <= bound(x, decoded)).all()
    np.testing.assert_array_equal(y[:, n_out:], before[:, n_out:])


def test_products_of_three_matrices_are_one_launch():
    rng, n_in, widths, n_tok = np.random.default_rng(3), 64, (48, 16, 32), 7
    x, step = normal(rng, n_tok, n_in), np.array([n_tok, 0, 0, 0, 0])
    fields = {"step": step, "packed": halved(x), "n_in": n_in}
    made = []
    for end, n in zip(("", "2", "3"), widths, strict=True):
        data, decoded = weights("Q8_0", rng, n, n_in)
        y, bias = np.full((n_tok, n), np.nan, np.float32), normal(rng, n)
        fields |= {f"w{end}": data, f"bias{end}": bias, f"y{end}": y, f"n{end}": n}
        made.append((decoded, bias, y))
    run(ops.PRODUCTS, ("Q8_0",), fields)
    for decoded, bias, y in made:
        expected = x.astype(np.float64) @ decoded.T + bias
        assert (np.abs(y - expected) <= bound(x, decoded)).all()


def test_a_gate_and_what_it_is_for_are_packed():
    rng, n_in, n, n_tok = np.random.default_rng(4), 96, 64, 18
    x, step = normal(rng, n_tok, n_in) / 8, np.array([n_tok, 0, 0, 0, 0])
    (gate, one), (up, other) = (weights("Q8_0", rng, n, n_in) for _ in range(2))
    to = np.full((n_tok, n), np.nan, np.float16)
    run(
        ops.PRODUCT_GATE, ("Q8_0", "silu"),
        {"step": step, "packed": halved(x), "n_in": n_in, "w": gate, "w2": up, "n": n, "to": to},
    )  # fmt: skip
    left, right = x.astype(np.float64) @ one.T, x.astype(np.float64) @ other.T
    most = bound(x, one) * (np.abs(right) + 1) * 1.1 + bound(x, other) * np.abs(left)
    assert (np.abs(to - silu(left) * right) <= most + 2**-11 * np.abs(left * right)).all()


def staged(op, constants, n_row, fields):
    """Run a staged op; n_row: of all of its matrices."""
    kind, source, n_in = GGMLType[constants[0]], constants[-1], fields["n_in"]
    n_byte = n_in // kind.block_size * kind.type_size
    n_group = 2 if op is ops.STAGED_GATE else 1
    n_tile = n_group * -(-n_row // (STAGED_ROWS * n_group * N_BLOCK))
    room = staged_room(n_byte, n_in, n_tile, packed=source == "packed")
    run(op, constants, fields | {"n_shared": room})


@pytest.mark.parametrize(
    ("type_", "source", "n_in", "widths", "n_tok"),
    # Units that lanes have half of; fewer tiles than blocks; a tile of one block, three of another;
    # more units than warps that share them; two passes.
    [
        ("Q8_0", "norm", 96, (48, 16, 32), 5),
        ("Q4_K", "rows", 256, (16,), 9),
        ("Q5_0", "packed", 1280, (16,), 5),
        ("Q6_K", "norm", 256, (16, 16), 18),
        ("IQ4_NL", "packed", 64, (96, 64, 16), 16),
    ],
)
def test_staged_products_read_rows_as_they_are(type_, source, n_in, widths, n_tok):
    rng = np.random.default_rng(n_tok)
    x, weight = 3 * normal(rng, n_tok, n_in), normal(rng, n_in)
    rows = rms_norm(x.astype(np.float64), weight, 1e-5) if source == "norm" else x
    fields = {"step": np.array([n_tok, 0, 0, 0, 0]), "n_in": n_in, "eps": 1e-5, "add": 1}
    fields |= {"x": halved(x) if source == "packed" else x}
    fields |= {"other": weight} if source == "norm" else {}
    made = []
    for end, n in zip(("", "2", "3"), widths, strict=False):
        data, decoded = weights(type_, rng, n, n_in)
        y, bias = normal(rng, n_tok, n), normal(rng, n)
        made.append((decoded, bias, y, y.copy()))
        fields |= {f"w{end}": data, f"bias{end}": bias, f"y{end}": y, f"n{end}": n}
    staged(ops.STAGED_PRODUCTS, (type_, source), sum(widths), fields)
    for decoded, bias, y, before in made:
        expected = before + rows @ decoded.T + bias
        assert (np.abs(y - expected) <= bound(rows, decoded)).all()


@pytest.mark.parametrize(
    ("type_", "activation", "source", "n_in", "n", "n_tok"),
    [("Q8_0", "silu", "norm", 96, 64, 18), ("Q4_1", "gelu", "packed", 160, 96, 6)],
)
def test_a_staged_gate_is_packed(type_, activation, source, n_in, n, n_tok):
    rng = np.random.default_rng(4)
    x, weight = normal(rng, n_tok, n_in) / 8, normal(rng, n_in) / 8
    rows = rms_norm(x.astype(np.float64), weight, 1e-5) if source == "norm" else x
    (gate, one), (up, other) = (weights(type_, rng, n, n_in) for _ in range(2))
    to = np.full((n_tok, n), np.nan, np.float16)
    fields = {"step": np.array([n_tok, 0, 0, 0, 0]), "n_in": n_in, "eps": 1e-5}
    fields |= {"x": halved(x) if source == "packed" else x, "w": gate, "w2": up, "n": n, "to": to}
    fields |= {"other": weight} if source == "norm" else {}
    staged(ops.STAGED_GATE, (type_, activation, source), 2 * n, fields)
    left, right = rows.astype(np.float64) @ one.T, rows.astype(np.float64) @ other.T
    most = bound(rows, one) * (np.abs(right) + 1) * 1.1 + bound(rows, other) * np.abs(left)
    expected = {"silu": silu, "gelu": gelu_tanh}[activation](left) * right
    assert (np.abs(to - expected) <= most + 2**-11 * np.abs(expected)).all()
