"""On a GPU: the tests of the CPU's ops, run with CUDA kernels between canaries."""

import itertools

import numpy as np
import pytest
import test_kernels_attention
import test_kernels_elementwise
import test_kernels_quest
import test_kernels_select
import test_kernels_weights
from guarded import on_gpu

from tamis.jit_kernels.cuda.driver import CudaError
from tamis.jit_kernels.cuda_backend import CudaBackend

pytestmark = pytest.mark.gpu

# Types of weights that have CUDA kernels: test_cuda.py says so.
ABSENT = {"IQ4_NL", "IQ4_XS", "MXFP4"}
# Rows of float16 have no scales: what lies beyond 65504 is infinite.
CPU_ONLY = {
    "test_each_32_elements_of_each_row_have_a_scale",
    "test_strips_give_the_product_of_their_rows",
    "test_nor_does_a_sum_in_strips",
}
TESTS = [
    *(
        getattr(module, name)
        for module in (
            test_kernels_elementwise, test_kernels_weights, test_kernels_attention,
            test_kernels_select, test_kernels_quest,
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
        values = {k: v for part in choice for k, v in part.items()}
        if values.get("type_") not in ABSENT and "q8_0" not in values.get("types", ()):
            yield values


CASES = [(test, values) for test in TESTS for values in cases(test)]


@pytest.fixture(scope="session")
def gpu():
    try:
        return CudaBackend()
    except CudaError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("test", "values"), CASES, ids=lambda x: getattr(x, "__name__", None) or str([*x.values()])
)
def test_the_op_is_what_its_oracle_says(gpu, test, values):
    with on_gpu(gpu), np.errstate(all="ignore"):
        test.__wrapped__(**values)
