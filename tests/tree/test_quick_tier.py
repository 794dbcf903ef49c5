"""What the quick tier leaves out: never the only case with a value, and kernels of none."""

import itertools
from pathlib import Path

import pytest
from quick_cases import quick_cases
from quick_kernels import constants_of, needed

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec

TESTS = Path(__file__).resolve().parents[1]


def named(**values):
    """Cases of parameters that are varied together."""
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def test_the_case_with_a_value_of_its_own_is_quick():
    """As min_keep of top-p, which one row of seven has, the last."""
    cases = named(p=[0.39, 0.5, 0.75, 0.95, 1.0, 0.0, 0.0], min_keep=[0, 0, 0, 0, 0, 0, 3])
    assert 6 in quick_cases(cases, 4)


@pytest.mark.parametrize("period", [2, 3, 4])
def test_every_value_is_quick_where_there_is_room(period):
    """Evenly spaced cases of a product have the same value of what varies fastest."""
    product = itertools.product(range(4), range(period))
    cases = [{"slow": slow, "fast": fast} for slow, fast in product]
    chosen = [cases[i] for i in quick_cases(cases, 4)]
    assert {case["slow"] for case in chosen} == set(range(4))
    assert {case["fast"] for case in chosen} == set(range(period))


def test_a_test_of_few_cases_keeps_them_and_equals_are_spread():
    assert quick_cases([{}], 4) == {0}
    assert quick_cases(named(x=[1, 1, 1]), 4) == {0, 1, 2}
    assert quick_cases(named(x=list(range(20))), 4) == {0, 5, 10, 15}
    assert quick_cases([{"x": object()} for _ in range(8)], 4) == {0, 2, 4, 6}


def test_kernels_of_types_that_no_chosen_case_has_are_not_compiled():
    """Those of a type are there that a case has, its strips too, or that a test's code names."""

    def test(type_, n):
        return "Q8_0", n

    types = ("F32", "Q4_K", "Q4_Kx16", "Q5_K", "Q8_0", "IQ2_XS")
    listed = [KernelSpec(ops.MATMUL, (type_,)) for type_ in types]
    listed.append(KernelSpec(ops.RMS_NORM, (0,)))
    there = ["Q4_K", 1, "Q5_K", 7, ("Q8_0", "IQ2_XS")]
    left_out = {*listed} - needed(listed, ["Q4_K", 1, *constants_of(test)], there)
    assert left_out == {KernelSpec(ops.MATMUL, ("Q5_K",)), KernelSpec(ops.MATMUL, ("IQ2_XS",))}
    assert needed(listed, there, there) == {*listed}


def test_what_is_named_slow_is_there(pytestconfig):
    """A test that was renamed would be quick again, and nobody would see it."""
    found = [p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "SLOW_TESTS")]
    (conftest,) = [p for p in found if Path(p.__file__).parent == TESTS]
    for each in (*conftest.SLOW_FILES, *conftest.ALL_CASES):
        assert (TESTS / each).exists(), each
    for each in conftest.SLOW_TESTS | conftest.THINNED:
        file, _, name = each.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), each
