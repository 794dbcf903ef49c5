"""The guard itself: a kernel that strays, and one that writes its input, are caught and named."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops

KERNELS = [(ops.GATE, ("silu",)), (ops.MOE_SUM, ())]


def gate(n_real, n_told):
    ones = np.ones(n_real, np.float32)
    for _ in runs(
        ops.GATE, ("silu",), out={"y": ones}, step=step_of(1), gate=ones, up=ones, n=n_told
    ):
        pass


@in_child
def within(n):
    gate(n, n)


@in_child
def one_past_the_end(n):
    gate(n, n + 1)


@in_child
def written_input(n):
    ones = np.ones((1, n), np.float32)
    # MOE_SUM adds to y: here y is an input, between read-only pages.
    for _ in runs(
        ops.MOE_SUM, (), out={}, step=step_of(1), x=ones, weights=ones[:, :1], y=ones, n=n,
        n_used=1, add=1,
    ):  # fmt: skip
        pass


@in_child
def wrong_value(n):
    assert n == n + 1


def test_a_read_past_the_end_is_a_death_that_names_the_op():
    with pytest.raises(AssertionError, match=r"SIGSEGV in gate\('silu',\), buffers' end"):
        one_past_the_end(n=16)


def test_a_written_input_is_a_death():
    with pytest.raises(AssertionError, match=r"SIGSEGV in moe_sum"):
        written_input(n=8)


def test_a_failed_assertion_comes_back_with_its_traceback():
    with pytest.raises(AssertionError, match="wrong_value"):
        wrong_value(n=1)


def test_the_next_case_runs_in_a_new_child():
    with pytest.raises(AssertionError, match="SIGSEGV"):
        one_past_the_end(n=16)
    within(n=16)
