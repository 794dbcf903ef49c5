"""Launches that have more than one op of a decode step, against NumPy float64.

On a GPU, and without one thread by thread in Python.
"""

import importlib

import numpy as np
import pytest
from attention_cases import Heads, attention, check, new_case
from guarded import on_gpu, runs, step_of
from matmul_cases import normal, packed, rounding, weights
from on_threads import OnThreads, as_python
from oracle import gelu_tanh, rms_norm, silu

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE
from tamis.jit_kernels.cuda.lang.scratch import CHUNK, WORKERS, bundle_of

pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
FILES = (
    "linear.activation",
    "linear.dequant",
    "lang.grid",
    "kv.kv_rows",
    "linear.matmul_few",
    "linear.matmul_some",
    "linear.pack",
    "linear.gemv_epilogue",
    "lang.readers",
)
EPS = 1e-3
QUANTISED = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
]  # fmt: skip


@pytest.fixture
def place(request):
    """Where ops run: on a GPU, or thread by thread in Python."""
    if request.param == "gpu":
        with on_gpu(request.getfixturevalue("gpu")), np.errstate(all="ignore"):
            yield
    else:
        modules = [importlib.import_module(f"tamis.jit_kernels.cuda.{file}") for file in FILES]
        with as_python(*modules), on_gpu(OnThreads(3)):
            yield


def everywhere(names, some, many):
    """The cases of a test: some of them in Python, all of them on a GPU."""
    cases = [pytest.param("threads", *case) for case in some]
    cases += [pytest.param("gpu", *case, marks=pytest.mark.gpu) for case in [*some, *many]]
    return pytest.mark.parametrize(f"place,{names}", cases, indirect=["place"])


def unit_of(n):
    """The unit matrix as Q8_0, and as what it is."""
    data, decoded = weights("Q8_0", np.random.default_rng(0), n, n)
    blocks = data.reshape(n, n // 32, 34).copy()
    blocks[...] = 0
    blocks[..., :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    i = np.arange(n)
    blocks[i, i // 32, 2 + i % 32] = 1
    decoded = dequantize(blocks.reshape(-1), GGMLType["Q8_0"], (n, n)).astype(np.float64)
    np.testing.assert_array_equal(decoded, np.eye(n))
    return blocks.reshape(-1)


def run(op, constants, out, **fields):
    """What the only run of an op writes. A GPU does not recover from rows that it cannot copy."""
    if op in (ops.PRODUCTS, ops.PRODUCT_NORM, ops.PRODUCT_GATE, ops.PRODUCT_ROPE_APPEND):
        kind, n = GGMLType[constants[0]], fields["n_in"]
        size = n // kind.block_size * kind.type_size
        assert (size if n > CHUNK * WORKERS else bundle_of(constants[0]) * size) % 16 == 0
    (found,) = runs(op, constants, out=out, **fields)
    return found


def products(type_, x, normed, matrices, befores, biases, add):
    """PRODUCTS of packed rows with up to three matrices."""
    row, n_tok, n_in = x
    fields = {"step": step_of(n_tok, 11), "packed": row, "normed": int(normed), "n_in": n_in}
    out = {}
    for i, end in enumerate(("", "2", "3")):
        there = i < len(matrices)
        fields[f"w{end}"] = matrices[i] if there else 0
        fields[f"bias{end}"] = biases[i] if there and biases else 0
        fields[f"n{end}"] = befores[i].shape[1] if there else 0
        if there:
            out[f"y{end}"] = befores[i]
        else:
            fields[f"y{end}"] = 0
    found = run(ops.PRODUCTS, (type_,), out, eps=EPS, add=add, **fields)
    return [found[f"y{end}"] for end in ("", "2", "3")[: len(matrices)]]


def as_rows(row, n_tok, n, normed=False):
    """The elements of packed rows: products with the unit matrix."""
    (found,) = products(
        "Q8_0", (row, n_tok, n), normed, [unit_of(n)], [np.full((n_tok, n), np.nan, np.float32)],
        None, 0,
    )  # fmt: skip
    return found


# Type, tokens, elements of a row, rows of up to three matrices, with biases, added to y.
SOME = [
    ("Q8_0", 2, 128, (48,), 1, 0),
    ("Q4_K", 1, 1280, (16, 32, 16), 0, 1),
    ("Q5_0", 1, 3072, (96, 16), 1, 1),
    ("Q4_K", 1, 17408, (16,), 0, 0),
]
MANY = [
    ("Q4_K", 4, 4096, (4096, 1024, 1024), 1, 1),
    ("Q4_K", 1, 4096, (4096, 1024, 1024), 1, 1),
    ("Q8_0", 1, 14336, (4096,), 0, 1),
    ("Q4_K", 3, 14336, (4096,), 1, 0),
    ("Q8_0", 1, 1024, (128256,), 0, 0),
    ("Q8_0", 2, 896, (32000,), 0, 0),
    *((type_, 1, n_in, (3072, 16), 1, 1) for type_ in QUANTISED for n_in in (1024, 3072, 5120)),
    *((type_, 2, n_in, (1024,), 0, 0) for type_ in QUANTISED for n_in in (8192, 20480)),
]


@everywhere("type_,n_tok,n_in,n_out,with_bias,add", SOME, MANY)
def test_products_with_up_to_three_matrices(place, type_, n_tok, n_in, n_out, with_bias, add):
    rng = np.random.default_rng((n_tok, n_in, n_out[0]))
    x = normal(rng, n_tok, n_in)
    matrices = [weights(type_, rng, n, n_in) for n in n_out]
    befores = [normal(rng, n_tok, n) for n in n_out]
    biases = [normal(rng, n) for n in n_out] if with_bias else None
    found = products(
        type_, (packed(x, type_), n_tok, n_in), False, [data for data, _ in matrices],
        befores, biases, add,
    )  # fmt: skip
    for i, (_, decoded) in enumerate(matrices):
        expected = x.astype(np.float64) @ decoded.T + add * befores[i]
        expected += biases[i] if biases else 0
        assert (np.abs(found[i] - expected) <= rounding(x, decoded, type_, n_tok)).all()


@everywhere(
    "type_,n_tok,n_in,n_out,add",
    [("Q8_0", 1, 256, 128, 1), ("Q4_K", 2, 2048, 128, 0)],
    [(type_, n_tok, 4096, 1536, 1) for type_ in QUANTISED for n_tok in (1, 4)]
    + [("Q4_K", 1, 14336, 4096, 1), ("Q8_0", 1, 28672, 1024, 1), ("Q5_0", 1, 896, 896, 0)],
)
def test_a_product_is_packed_for_its_norm(place, type_, n_tok, n_in, n_out, add):
    rng = np.random.default_rng((n_tok, n_in, n_out))
    x, (data, decoded) = normal(rng, n_tok, n_in), weights(type_, rng, n_out, n_in)
    before, bias, weight = 3 * normal(rng, n_tok, n_out), normal(rng, n_out), normal(rng, n_out)
    unwritten = np.full((n_tok, 3 * n_out), 0xA5, np.uint8)
    found = run(
        ops.PRODUCT_NORM, (type_,), {"y": before, "to": unwritten}, step=step_of(n_tok, 11),
        packed=packed(x, type_), normed=0, eps=0.0, n_in=n_in, w=data, bias=bias, n=n_out,
        add=add, weight=weight,
    )  # fmt: skip
    expected = x.astype(np.float64) @ decoded.T + bias + add * before
    bound = rounding(x, decoded, type_, n_tok)
    assert (np.abs(found["y"] - expected) <= bound).all()
    there = found["y"].astype(np.float64)
    norm, size = rms_norm(there, weight, EPS), np.sqrt((there * there).mean(-1) + EPS)
    steps = np.abs(there * weight / size[:, None]).reshape(n_tok, -1, 16).max(-1) / (127 * 128)
    bound = 0.5001 * np.repeat(steps, 16, axis=1) + 1e-5 * np.abs(norm) + 1e-6
    assert (np.abs(as_rows(found["to"], n_tok, n_out, normed=True) - norm) <= bound).all()


@everywhere(
    "type_,activation,n_tok,n_in,n",
    [("Q8_0", "silu", 2, 128, 128), ("Q4_K", "gelu", 1, 1280, 128)],
    [
        *((type_, "silu", 1, 4096, 1792) for type_ in QUANTISED), ("Q4_K", "silu", 1, 4096, 14336),
        ("Q4_K", "gelu", 4, 2048, 8192), ("Q5_0", "silu", 1, 896, 4864),
    ],
)  # fmt: skip
def test_a_gate_and_what_it_is_for_are_packed(place, type_, activation, n_tok, n_in, n):
    rng = np.random.default_rng((n_tok, n_in, n))
    x = normal(rng, n_tok, n_in) / np.float32(np.sqrt(n_in))
    gate, up = weights(type_, rng, n, n_in), weights(type_, rng, n, n_in)
    found = run(
        ops.PRODUCT_GATE, (type_, activation),
        {"to": np.full((n_tok, 3 * n), 0xA5, np.uint8)}, step=step_of(n_tok, 11),
        packed=packed(x, type_), normed=0, eps=0.0, n_in=n_in, w=gate[0], w2=up[0], n=n,
    )  # fmt: skip
    wide = x.astype(np.float64)
    function = {"silu": silu, "gelu": gelu_tanh}[activation]
    g, u = (wide @ decoded.T for _, decoded in (gate, up))
    expected = function(g) * u
    steps = np.abs(expected).reshape(n_tok, -1, 16).max(-1) / (127 * 128)
    bound = 0.5001 * np.repeat(steps, 16, axis=1) + 3e-6 * np.abs(expected) + 1e-6
    # Either factor's own rounding; an activation's slope is at most 1.13.
    g_bound, u_bound = (rounding(x, decoded, type_, n_tok) for _, decoded in (gate, up))
    bound += 1.13 * g_bound * (np.abs(u) + u_bound) + (np.abs(function(g)) + g_bound) * u_bound
    assert (np.abs(as_rows(found["to"], n_tok, n) - expected) <= 1.01 * bound).all()


@everywhere(
    "type_,neox,n_tok,n_in,heads,head_dim",
    [("Q8_0", 1, 2, 128, (3, 2), 16), ("Q4_K", 0, 1, 1280, (2, 1), 32)],
    [
        *((type_, neox, n_tok, 2048, (12, 3), 128)
          for type_ in QUANTISED for neox in (0, 1) for n_tok in (1, 3)),
        ("Q5_0", 1, 1, 896, (14, 2), 64), ("Q4_1", 0, 1, 576, (9, 3), 64),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("with_bias", "parts"), [(0, [0]), (1, [0]), (0, [0, 2]), (1, [0, 1])])
def test_qkv_products_with_rope_and_append(
    place, type_, neox, n_tok, n_in, heads, head_dim, with_bias, parts
):
    (n_head, n_head_kv), half, pos = heads, head_dim // 2, PAGE - 1
    rng = np.random.default_rng((n_tok, n_in, neox))
    x, widths = normal(rng, n_tok, n_in), [n_head * head_dim, *2 * [n_head_kv * head_dim]]
    matrices = [weights(type_, rng, n, n_in) for n in widths]
    biases = [normal(rng, n) for n in widths]
    angles = rng.uniform(0, 6, (n_tok, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    pages = rng.standard_normal((2, 3, n_head_kv, PAGE, head_dim)).astype(np.float16)
    tables = np.array([[2, 0], [1, 2]], np.int32)
    fields = {f"w{end}": data for end, (data, _) in zip(("", "2", "3"), matrices, strict=True)}
    for end, bias in zip(("", "2", "3"), biases, strict=True):
        fields[f"bias{end}"] = bias if with_bias else 0
    found = {
        "q": np.full((n_tok, n_head, head_dim), np.nan, np.float32), "k_pages": pages[0],
        "v_pages": pages[1],
    }  # fmt: skip
    first = 0
    for n_row in np.add.reduceat(widths, parts):
        found = run(
            ops.PRODUCT_ROPE_APPEND, (type_, neox), found, step=step_of(n_tok, pos),
            packed=packed(x, type_), normed=0, eps=0.0, n_in=n_in, n=widths[0], n2=widths[1],
            first=first, n_row=int(n_row), cos=cos, sin=sin, n_half=half, k_table=tables[0],
            v_table=tables[1], **fields,
        )  # fmt: skip
        first += int(n_row)
    expected_pages = pages.astype(np.float64), np.zeros(pages.shape)
    for i, (_, decoded) in enumerate(matrices):
        y = x.astype(np.float64) @ decoded.T + with_bias * biases[i]
        bound = rounding(x, decoded, type_, n_tok)
        y, bound = (a.reshape(n_tok, -1, head_dim) for a in (y, bound))
        if i < 2:
            y, bound = _rotated(y, bound, cos.astype(np.float64), sin.astype(np.float64), neox)
        if i == 0:
            assert (np.abs(found["q"] - y) <= 1.01 * bound).all()
            continue
        for t in range(n_tok):
            page, line = tables[i - 1][(pos + t) // PAGE], (pos + t) % PAGE
            expected_pages[0][i - 1, page, :, line] = y[t]
            # A float16 is off by half a step: 2^-11, or 2^-25 of the smallest.
            expected_pages[1][i - 1, page, :, line] = (
                1.01 * bound[t] + 2**-11 * np.abs(y[t]) + 2**-25
            )
    for i, name in enumerate(("k_pages", "v_pages")):
        off = np.abs(found[name] - expected_pages[0][i])
        assert (off <= expected_pages[1][i]).all()


def _rotated(y, bound, cos, sin, neox):
    """Rows rotated by their positions, and the largest errors that they may have then."""
    cos, sin, half = cos[:, None], sin[:, None], y.shape[-1] // 2
    one = slice(0, half) if neox else slice(0, None, 2)
    other = slice(half, None) if neox else slice(1, None, 2)
    rotated, wide = np.empty_like(y), np.empty_like(y)
    rotated[..., one] = y[..., one] * cos - y[..., other] * sin
    rotated[..., other] = y[..., one] * sin + y[..., other] * cos
    wide[..., one] = np.abs(cos) * bound[..., one] + np.abs(sin) * bound[..., other]
    wide[..., other] = np.abs(sin) * bound[..., one] + np.abs(cos) * bound[..., other]
    return rotated, wide + 3e-7 * (np.abs(y) + np.abs(y[..., np.r_[half : 2 * half, 0:half]]) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("n_split", [1, 3, 40])
@pytest.mark.parametrize("n_tok", [1, 4])
@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")], ids=str)
def test_rows_of_attention_are_packed(gpu, types, n_tok, n_split, early):
    for head_dim, group in ((64, 3), (128, 4), (128, 1), (64, 14)):
        heads = Heads(head_dim=head_dim, group=group, q_block=1, n_row=4, heads_per_kv=group)
        for pos, block in ((20, 1), (2500, 16)):
            case = new_case(heads, n_tok, pos, block, window=0, weighted=True, types=types)
            expected, lse = attention(case)
            n, room = head_dim * group * 4, (n_tok, heads.n_head, n_split, head_dim + 2)
            out = {
                "out": np.full(expected.shape, np.nan, np.float32),
                "lse": np.full(lse.shape, np.nan, np.float32),
                "partial": np.full(room, np.nan, np.float32),
                "packed": np.full((n_tok, 3 * n), 0xA5, np.uint8),
            }
            with on_gpu(gpu), np.errstate(all="ignore"):
                found = run(
                    ops.ATTEND_PACK, (head_dim, group, *types), out, scratch=0, n_split=n_split,
                    early=early, **case.fields(),
                )  # fmt: skip
                check({name: found[name] for name in ("out", "lse")}, (expected, lse), heads, types)
                rows = found["out"].reshape(n_tok, n).astype(np.float64)
                steps = np.abs(rows).reshape(n_tok, -1, 16).max(-1) / (127 * 128)
                bound = 0.5001 * np.repeat(steps, 16, axis=1) + 1e-6 * np.abs(rows)
                assert (np.abs(as_rows(found["packed"], n_tok, n) - rows) <= bound).all()
                del out["packed"]
                apart = run(
                    ops.ATTEND_PACK, (head_dim, group, *types), out, scratch=0, n_split=n_split,
                    early=early, packed=0, **case.fields(),
                )  # fmt: skip
                np.testing.assert_array_equal(apart["out"], found["out"])
                np.testing.assert_array_equal(apart["lse"], found["lse"])
