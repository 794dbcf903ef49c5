"""What the quick tier leaves out: never the only case with a value."""

import itertools

import pytest
from quick_cases import quick_cases


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
