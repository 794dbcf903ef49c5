"""The GPU that CUDA tests run on."""

import functools

import pytest

from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.cuda.runtime.driver import CudaError

# One of a process: after an error that a GPU does not recover from, tests fail; none is skipped.
opened = functools.cache(CudaBackend)


@pytest.fixture(scope="session")
def gpu():
    try:
        return opened()
    except CudaError as error:
        pytest.skip(str(error))
