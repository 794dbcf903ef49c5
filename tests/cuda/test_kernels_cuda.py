"""On a GPU: the tests of the CPU's ops, run with CUDA kernels between canaries."""

import attention_cases as attention
import matmul_cases
import numpy as np
import op_tests
import pytest
from guarded import on_gpu, runs

from tamis.jit_kernels.contract import ops

pytestmark = pytest.mark.gpu

CASES = [(test, values) for test in op_tests.gpu_tests() for values in op_tests.cases(test)]


@pytest.mark.parametrize(
    ("test", "values"), CASES, ids=lambda x: getattr(x, "__name__", None) or str([*x.values()])
)
def test_the_op_is_what_its_oracle_says(gpu, test, values):
    with on_gpu(gpu), np.errstate(all="ignore"):
        test.__wrapped__(**values)


# Widths of heads, heads of a row, tokens of a row; what loads, slices and rows' pieces differ by.
AT_TYPES = [
    (96, 1, 1, ("q4_0", "q8_0")),
    (128, 4, 1, ("q8_0", "q4_0")),
    (32, 2, 16, ("q8_0", "q4_0")),
    (96, 1, 16, ("q8_0", "q8_0")),
    (128, 4, 16, ("q8_0", "q8_0")),
    (128, 4, 16, ("f16", "q4_0")),
    (160, 2, 16, ("q4_0", "q8_0")),
    (256, 4, 16, ("q8_0", "f16")),
    (576, 4, 1, ("f16", "f16")),
    (512, 8, 16, ("q8_0", "f16")),
    (64, 12, 16, ("f16", "f16")),  # rows of more heads than warps: in passes
    (128, 16, 16, ("f16", "f16")),
    (128, 16, 16, ("q8_0", "q4_0")),
    (256, 9, 16, ("f16", "f16")),
    (64, 11, 16, ("f16", "f16")),  # of one head each
    (128, 12, 1, ("f16", "f16")),
]


@pytest.mark.parametrize(("head_dim", "group", "q_block", "types"), AT_TYPES, ids=str)
def test_kv_types_and_head_dims(gpu, head_dim, group, q_block, types):
    n_tok = 3 if q_block == 1 else 37
    heads = attention.Heads(head_dim, group, q_block, n_row=2, heads_per_kv=group)
    case = attention.new_case(heads, n_tok, 190, 16, window=0, weighted=True, types=types)
    with on_gpu(gpu), np.errstate(all="ignore"):
        attention.check_attend(case, with_lse=True)


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q4_0", "f16")], ids=str)
def test_warps_take_keys_of_each_type_round_by_round(gpu, types):
    heads = attention.Heads(head_dim=128, group=4, q_block=1, n_row=1, heads_per_kv=4)
    for pos in (500, 1300):  # an even and an odd number of rounds of 128 keys, and a part of one
        case = attention.new_case(heads, 2, pos, 16, window=0, weighted=True, types=types)
        every = [np.arange(pos // 16 + 1)] * 2
        case = attention.Case(**(vars(case) | {"chosen": every, "log_weight": None}))
        with on_gpu(gpu), np.errstate(all="ignore"):
            attention.check_attend(case, with_lse=True)


@pytest.mark.parametrize(("n_out", "n_in"), [(40000, 72), (300, 5000), (301, 5001)])
@pytest.mark.parametrize("type_", ["F32", "F16", "BF16"])
def test_products_of_few_rows_with_many_and_with_long_rows_of_floats(gpu, type_, n_out, n_in):
    rng = np.random.default_rng(n_out)
    data, decoded = matmul_cases.weights(type_, rng, n_out, n_in)
    for n_tok in (1, 3):
        x = matmul_cases.normal(rng, n_tok, n_in)
        with on_gpu(gpu), np.errstate(all="ignore"):
            matmul_cases.check_product(type_, data, decoded, x, with_bias=1)


@pytest.mark.parametrize("n_kv", [5000, 16384, 50000])  # a block holds the keys of 16384
def test_the_best_of_long_rows(gpu, n_kv):
    rng, check = np.random.default_rng(n_kv), op_tests.module("select").check_top_k
    scores = rng.standard_normal((3, n_kv)).astype(np.float32)
    with on_gpu(gpu):
        check(scores, n_kv, (4, 8, 500))
        check(scores * 1e-3 + 7, n_kv, (1, 1, n_kv // 2))  # scores that differ little
        check(np.round(scores), n_kv, (0, 1, 1000))  # many that are equal
        scores[:, 100] = 1e30  # one that is far from all
        check(scores, n_kv, (4, 8, 500))


def test_blocks_of_threads_take_many_rows_one_after_the_other(gpu):
    heads = attention.Heads(head_dim=16, group=2, q_block=16, n_row=8, heads_per_kv=2)
    case = attention.new_case(heads, 1500, 100, 64, window=700, weighted=False)
    with on_gpu(gpu), np.errstate(all="ignore"):
        attention.check_attend(case, with_lse=True)


@pytest.mark.parametrize("n_split", [2, 17, 40])
@pytest.mark.parametrize("n_tok", [1, 5])
def test_the_last_block_of_a_row_joins_its_parts(gpu, n_tok, n_split):
    for heads in (h for h in attention.HEADS if h.q_block == 1):
        case = attention.new_case(heads, n_tok, 2500, 16, window=0, weighted=True)
        expected = attention.attention(case)
        out, lse = (attention.unwritten(*x.shape) for x in expected)
        partial = attention.unwritten(n_tok, heads.n_head, n_split, heads.head_dim + 2)
        constants = (heads.head_dim, heads.group, 1, *case.types)
        with on_gpu(gpu), np.errstate(all="ignore"):
            for found in runs(
                ops.ATTEND, constants, out={"out": out, "lse": lse, "partial": partial},
                scratch=0, n_split=n_split, **case.fields(),
            ):  # fmt: skip
                attention.check(found, expected, heads)
                parts = np.isfinite(found["partial"]).all(axis=-1)  # a row's first ones, or none
                assert (parts[..., :-1] >= parts[..., 1:]).all()
                assert (parts.sum(axis=-1) != 1).all()
