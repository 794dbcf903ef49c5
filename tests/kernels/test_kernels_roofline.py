"""READ_RATE and FMA_RATE: that they read and compute everything, and what the rates may be."""

import numpy as np
import pytest
from guarded import backend, in_child, runs

from tamis.jit_kernels.backends import roofline as ceiling
from tamis.jit_kernels.contract import ops

KERNELS = [(ops.READ_RATE, ()), (ops.FMA_RATE, ())]


@pytest.mark.parametrize("n", [0, 128, 1280])
@in_child
def test_every_element_is_read_once(n):
    x = np.random.default_rng(n).integers(-9, 9, n).astype(np.float32)
    for found in runs(ops.READ_RATE, out={"y": np.zeros(3, np.float32)}, x=x, n=n):
        assert found["y"].sum() == x.sum()  # small integers: exact


@in_child
def test_the_chains_go_to_one():
    start = np.array([0.25, -3, 7], np.float32)
    for found in runs(ops.FMA_RATE, out={"y": start}, n=160 * 40):
        ran = found["y"] != start
        np.testing.assert_allclose(found["y"][ran], 1, rtol=1e-6)
        assert ran[0]


@in_child
def test_a_ceiling_is_the_larger_of_two_times():
    found = ceiling.measure(backend(1))
    assert 1e8 < found.read_bytes < 1e12
    assert 1e8 < found.flop < 1e12
    assert 1e7 < found.cycles < 1e10
    assert ceiling.Ceiling(2, 5, 1).seconds(8, 5) == 4
    assert ceiling.Ceiling(2, 5, 1).seconds(8, 50) == 10
