"""What each step of a template takes off its budget, in characters, and where the budget ends.

A step counts 32 and what it looks at; a value that is made counts its characters; an item of a list
counts 16. The numbers are written out: a bound that is off by one is a way to more.
"""

import time

import pytest
from jinja2.sandbox import SecurityError

from tamis.text import template_sandbox as sandbox
from tamis.text.template_sandbox import TemplateEnvironment, WorkLimit, size

STEP, ITEM, WIDTH, BITS = 32, 16, 100, 4096


def metered(work, *args, n_left=10**6, max_chars=10**6):
    """What work(*args) takes off."""
    meter = WorkLimit(max_chars, n_left, time.thread_time() + 60)
    token = sandbox._METER.set(meter)
    try:
        work(*args)
    finally:
        sandbox._METER.reset(token)
    return n_left - meter.n_left


def test_the_budget_of_a_rendering():
    meter = WorkLimit.for_input(1000)
    assert (meter.max_chars, meter.n_left) == (2_004_000, 32_064_000)
    assert meter.deadline - time.thread_time() == pytest.approx(1.0005, abs=0.05)


def test_a_step_may_take_the_rest_and_not_one_more():
    assert metered(lambda: sandbox._METER.get().tick(8), n_left=40) == 40
    with pytest.raises(SecurityError, match="takes too long"):
        metered(lambda: sandbox._METER.get().tick(8), n_left=39)
    late = WorkLimit(10, 10**6, time.thread_time() - 1)
    with pytest.raises(SecurityError, match="takes too long"):
        late.tick()


def test_a_value_may_be_as_long_as_the_longest_and_the_rest():
    assert metered(lambda: sandbox._METER.get().grow(9), max_chars=9, n_left=9) == 9
    for limits in ({"max_chars": 8}, {"n_left": 8}):
        with pytest.raises(SecurityError, match="makes texts of over"):
            metered(lambda: sandbox._METER.get().grow(9), **limits)


def test_output_has_a_longest_size():
    meter = WorkLimit(10, 10**6, time.thread_time() + 60)
    meter.write(4)
    meter.write(6)
    with pytest.raises(SecurityError, match="writes over 10"):
        meter.write(1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("abc", 3),
        ("", 0),
        (5, ITEM),
        ([], ITEM),
        (["ab", 5], ITEM + 2 + ITEM),
        (("ab", ["c"]), ITEM + 2 + ITEM + 1),
        ({"a": "bc"}, ITEM + 1 + 2),
        ({"ab"}, ITEM + 2),
        ([["a"] * 3] * 2, ITEM + 2 * (ITEM + 3)),
    ],
)
def test_the_size_of_a_value(value, expected):
    assert size(value, 10**6) == expected
    assert size(value, max(expected, 20 * ITEM)) == expected


def test_a_size_ends_where_the_limit_does():
    assert size(["a" * 4] * 4, 32) == 32
    with pytest.raises(SecurityError, match="makes values of over 31"):
        size(["a" * 4] * 4, 31)
    with pytest.raises(SecurityError, match="makes values of over 20"):
        size([""] * 9, 20)  # items that are not looked at yet count one each


@pytest.mark.parametrize(
    ("operator", "left", "right", "expected"),
    [
        ("*", "ab", 3, 6), ("*", 3, "ab", 6), ("*", [1], 3, 3 * 2 * ITEM), ("*", "ab", -1, 0),
        ("*", "ab", 0, 0), ("*", (1, "a"), 2, 2 * (2 * ITEM + 1)), ("+", "ab", "c", 3),
        ("+", [1], [2, 3], 3), ("+", [1], (2,), 2), ("+", "ab", 5, 2), ("-", 5, 3, 0),
        ("%", "a%s%s", "xy", 5 + 2 * 2), ("%", "%s", ("ab", 1), 2 + 2 * ITEM + 2),
        ("**", 2, 2048, 0), ("**", 2, -2048, 0), ("**", 3, 2048, 0), ("+", 2**BITS - 1, 1, 0),
    ],
)  # fmt: skip
def test_what_operators_make(operator, left, right, expected):
    assert metered(sandbox._check_binop, operator, left, right) == expected


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [("**", 2, 2049), ("**", 2, -2049), ("**", 1, 4097), ("+", 2**BITS, 1), ("*", 1, 2**BITS),
     ("-", -(2**BITS), 0)],
)  # fmt: skip
def test_numbers_of_over_a_thousand_digits_are_refused(operator, left, right):
    with pytest.raises(SecurityError, match="over a thousand digits"):
        metered(sandbox._check_binop, operator, left, right)


LIST = [0] * 40


@pytest.mark.parametrize(
    ("method", "args", "expected"),
    [
        ("ab".upper, (), STEP + 2),
        ("ab".center, (WIDTH,), STEP + 2 + 2),
        ("ab".zfill, (-WIDTH,), STEP + 2 + 2),
        ("ab".expandtabs, (WIDTH,), STEP + 2 + 2 * WIDTH),
        ("aXa".replace, ("a", "bb"), STEP + 3 + 3 + 2 * 2),
        ("aXa".replace, ("a", "bb", 1), STEP + 3 + 3 + 2 * 2),
        (",".join, (["a", "b"],), STEP + 1 + 1 * 2 + ITEM + 2),
        (LIST.append, (1,), ITEM + 40 // ITEM),
        (LIST.pop, (), ITEM + 40 // ITEM),
        (LIST.count, (1,), 0),
        (len, ("a",), 0),
    ],
)
def test_what_calls_make(method, args, expected):
    assert metered(sandbox._check_call, method, args, {}) == expected


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("ab".center, (WIDTH + 1,), {}),
        ("ab".center, (-WIDTH - 1,), {}),
        ("ab".expandtabs, (), {"tabsize": WIDTH + 1}),
        ("ab".translate, ({},), {}),
        ("ab".encode, (), {}),
        (",".join, (iter("ab"),), {}),
        ((5).bit_length, (), {}),
        ((0.5).hex, (), {}),
        (b"ab".hex, (), {}),
    ],
)
def test_calls_that_are_refused(method, args, kwargs):
    with pytest.raises(SecurityError):
        metered(sandbox._check_call, method, args, kwargs)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [("ab", (), 2), ("{}{}%", ("ab",), 5 + 3 * (ITEM + 2)), ("%999d", (), 5 + ITEM)],
)
def test_each_field_of_a_format_counts_all_values(text, values, expected):
    assert metered(sandbox._check_format, text, values) == expected


@pytest.mark.parametrize("text", ["%1000d", "{:1000}", "%*d", "{:{}}", "{0:0000}"])
def test_formats_with_a_width_are_refused(text):
    with pytest.raises(SecurityError, match="width"):
        metered(sandbox._check_format, text, ())


FILTERS = TemplateEnvironment().filters


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("upper", ("abc",), STEP + 3 + 3),
        ("length", ([1, 2],), STEP + 2 * ITEM),
        # A slow one: eight times what all its values are, and the list that it is in.
        ("title", ("abc",), STEP + 8 * (ITEM + 3) + 3),
        # Two lines, each with room for the widest indent, and what comes of it.
        ("indent", ("a\nb",), STEP + 3 + (3 + 2 * WIDTH) + 7),
        ("indent", ("a\nb", "x" * 120), STEP + 120 + (3 + 2 * 120) + 123),
        ("replace", ("aXa", "a", "bb"), STEP + 3 + (3 + 2 * 2) + 5),
        # `[1, 2]` is written as "[1", ", 2" and "]", each a step and its characters.
        ("tojson", ([1, 2],), STEP + 2 * ITEM + 3 * STEP + 6 + 6),
    ],
)
def test_what_filters_make(name, args, expected):
    assert metered(FILTERS[name], *args) == expected


@pytest.mark.parametrize(
    ("name", "args"),
    [("indent", ("a", WIDTH + 1)), ("tojson", ([1], False, WIDTH + 1)), ("round", (1, WIDTH + 1))],
)
def test_filters_have_a_widest_width(name, args):
    with pytest.raises(SecurityError, match=f"over {WIDTH}"):
        metered(FILTERS[name], *args)
    metered(FILTERS[name], *args[:-1], WIDTH)


def test_a_tests_operands_count():
    tests = TemplateEnvironment().tests
    assert metered(tests["eq"], "abc", "ab") == STEP + 3
    assert metered(tests["in"], "a", [1, 2]) == STEP + 2 * ITEM
