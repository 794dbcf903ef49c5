"""On a GPU: the tests of the CPU's ops, run with CUDA kernels between canaries."""

import functools
import itertools

import numpy as np
import pytest
import test_kernels_attention
import test_kernels_audit
import test_kernels_cpe
import test_kernels_delta
import test_kernels_elementwise
import test_kernels_hip
import test_kernels_lfps
import test_kernels_logits
import test_kernels_matmul as test_kernels_weights
import test_kernels_moe
import test_kernels_page_cache as test_kernels_kv_frames
import test_kernels_quest
import test_kernels_select
import test_kernels_tactic
import test_kernels_token_freezing as test_kernels_freeze
from guarded import on_gpu, runs

from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.cuda.runtime.driver import CudaError

pytestmark = pytest.mark.gpu

# Rows of float16 have no scales: what lies beyond 65504 is infinite. Strips are a CPU's; the last
# of these calls no kernel.
CPU_ONLY = {
    "test_each_32_elements_of_each_row_have_a_scale",
    "test_strips_give_the_product_of_their_rows",
    "test_nor_does_a_sum_in_strips",
    "test_the_oracle_follows_a_pattern_by_hand",
}
TESTS = [
    *(
        getattr(module, name)
        for module in (
            test_kernels_elementwise, test_kernels_weights, test_kernels_attention,
            test_kernels_select, test_kernels_quest, test_kernels_delta, test_kernels_hip,
            test_kernels_cpe, test_kernels_freeze, test_kernels_tactic, test_kernels_lfps,
            test_kernels_audit, test_kernels_logits, test_kernels_moe, test_kernels_kv_frames,
        )
        for name in vars(module)
        if name.startswith("test_") and name not in CPU_ONLY
    ),
]  # fmt: skip


def cases(test):
    """The values of a test's parameters, all that its marks ask for."""
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    choices = []
    for mark in marks:
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
        choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for choice in itertools.product(*choices):
        yield {k: v for part in choice for k, v in part.items()}


CASES = [(test, values) for test in TESTS for values in cases(test)]


# One of a process: after an error that a GPU does not recover from, tests fail; none is skipped.
opened = functools.cache(CudaBackend)


@pytest.fixture(scope="session")
def gpu():
    try:
        return opened()
    except CudaError as error:
        pytest.skip(str(error))


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
]


@pytest.mark.parametrize(("head_dim", "group", "q_block", "types"), AT_TYPES, ids=str)
def test_keys_and_values_of_each_type_and_width(gpu, head_dim, group, q_block, types):
    attention, n_tok = test_kernels_attention, 3 if q_block == 1 else 37
    heads = attention.Heads(head_dim, group, q_block, n_row=2, heads_per_kv=group)
    case = attention.new_case(heads, n_tok, 190, 16, window=0, weighted=True, types=types)
    with on_gpu(gpu), np.errstate(all="ignore"):
        attention.check_attend(case, with_lse=True)


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q4_0", "f16")], ids=str)
def test_warps_take_keys_of_each_type_round_by_round(gpu, types):
    attention = test_kernels_attention
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
    weights, rng = test_kernels_weights, np.random.default_rng(n_out)
    data, decoded = weights.weights(type_, rng, n_out, n_in)
    for n_tok in (1, 3):
        x = weights.normal(rng, n_tok, n_in)
        with on_gpu(gpu), np.errstate(all="ignore"):
            weights.check_product(type_, data, decoded, x, with_bias=1)


def test_blocks_of_threads_take_many_rows_one_after_the_other(gpu):
    heads = test_kernels_attention.Heads(head_dim=16, group=2, q_block=16, n_row=8, heads_per_kv=2)
    case = test_kernels_attention.new_case(heads, 1500, 100, 64, window=700, weighted=False)
    with on_gpu(gpu), np.errstate(all="ignore"):
        test_kernels_attention.check_attend(case, with_lse=True)


@pytest.mark.parametrize("n_split", [2, 17, 40])
@pytest.mark.parametrize("n_tok", [1, 5])
def test_the_last_block_of_a_row_joins_its_parts(gpu, n_tok, n_split):
    for heads in (h for h in test_kernels_attention.HEADS if h.q_block == 1):
        case = test_kernels_attention.new_case(heads, n_tok, 2500, 16, window=0, weighted=True)
        expected = test_kernels_attention.attention(case)
        out, lse = (test_kernels_attention.unwritten(*x.shape) for x in expected)
        partial = test_kernels_attention.unwritten(n_tok, heads.n_head, n_split, heads.head_dim + 2)
        constants = (heads.head_dim, heads.group, 1, *case.types)
        with on_gpu(gpu), np.errstate(all="ignore"):
            for found in runs(
                ops.ATTEND, constants, out={"out": out, "lse": lse, "partial": partial},
                scratch=0, n_split=n_split, **case.fields(),
            ):  # fmt: skip
                test_kernels_attention.check(found, expected, heads)
                parts = np.isfinite(found["partial"]).all(axis=-1)  # a row's first ones, or none
                assert (parts[..., :-1] >= parts[..., 1:]).all()
                assert (parts.sum(axis=-1) != 1).all()
