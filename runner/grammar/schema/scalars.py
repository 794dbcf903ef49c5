"""Terminals of strings, numbers and constants."""

import json
from collections.abc import Iterable
from decimal import Context, Decimal
from fractions import Fraction
from math import ceil, floor, inf, isinf, nextafter

from tamis.grammar.probe import matches, refused, trouble
from tamis.grammar.schema import terminals
from tamis.grammar.schema.formats import FORMATS
from tamis.grammar.schema.forms import Constants, Numbers, Strings, Test

# More digits than any double or UUID has; without an end a model may write zeros on and on.
_DIGITS = 40
WHOLE = f"/-?(?:0|[1-9][0-9]{{0,{_DIGITS - 1}}})/"
_ANY_FRACTION = f"\\.[0-9]{{1,{_DIGITS}}}"
NUMBER = f"{WHOLE[:-1]}(?:{_ANY_FRACTION})?(?:[eE][+\\-]?[0-9]{{1,2}})?/"
# With so few digits a double also has a fraction.
_FRACTION, _MOST_FRACTION = "\\.[0-9]{0,4}[1-9]", 10**9 - 1
_NEAR = 10**15  # llguidance has no ranges of numbers that are much larger
_MOST_MULTIPLE = 10_000  # llguidance tracks every remainder
_EXACT = Context(prec=2000)
_MOST_ITEMS = 1_000_000  # more than any answer has: no limit


def limit(most: int | None) -> int | None:
    """A limit that an answer can reach, None for larger ones."""
    return None if most is None or most >= _MOST_ITEMS else most


def constant(form: Constants) -> str:
    """The terminal of the allowed ones of null, true and false."""
    words = {None: "null", True: "true", False: "false"}
    return f"/{'|'.join(words[value] for value in form.values)}/"


def string(form: Strings) -> str | None:
    """The terminal of strings; None if llguidance cannot follow all their tests at once."""
    found = []
    if form.values is not None:
        found.append(terminals.one_of(form.values))
    elif form.low or limit(form.high) is not None:
        found.append(terminals.lengths(form.low, limit(form.high)))
    other = [test.text for test in form.tests if test.kind == "value"]
    found += [_tested(test) for test in form.tests if test.kind != "value"]
    if other:
        found.append(f"~{terminals.one_of(other)}")
    if all(part.startswith("~") for part in found):
        found.insert(0, terminals.STRING)
    whole = f"({' & '.join(found)})" if len(found) > 1 else found[0]
    return None if form.tests and trouble(whole) else whole


def _tested(test: Test) -> str:
    pattern = FORMATS[test.text] if test.kind == "format" else test.text
    return f"{'' if test.wanted else '~'}{terminals.matching(pattern)}"


def fits(form: Strings, value: str) -> bool:
    """Whether a form allows a string."""
    if len(value) < form.low or (form.high is not None and len(value) > form.high):
        return False
    if form.values is not None and value not in form.values:
        return False
    return all(_passes(test, value) for test in form.tests)


def _passes(test: Test, value: str) -> bool:
    if test.kind == "value":
        return value != test.text
    pattern = FORMATS[test.text] if test.kind == "format" else test.text
    return matches(terminals.matching(pattern), terminals.text_of(value)) == test.wanted


def number(form: Numbers, space: str) -> str | None:
    """The symbol of numbers, a terminal or a schema; None if llguidance has none.

    space: the white space that it allows between the tokens of a JSON text.
    """
    if form.low is not None and form.low == form.high:
        return terminals.exact(number_text(form.low))
    if form.whole is False:
        return _fractions(form) if form.multiple is None else None
    if form.multiple is None and form.low is None and form.high is None:
        return WHOLE if form.whole else NUMBER
    if form.whole and form.multiple is None:
        return f"/{integers(_end(form.low), _end(form.high))}/"
    if (schema := _schema(form)) is None:
        return None
    text = json.dumps(schema | {"x-guidance": {"whitespace_pattern": space}})
    found = f"%json {text}"
    return None if refused(found) else found


def in_parts(form: Numbers, space: str) -> list[str]:
    """The symbols of a range with ends that llguidance has not; [] where it has none in parts.

    Beyond _NEAR the parts have whole steps inside the range: an end that is a fraction is left out.
    """
    if form.whole is not None or form.multiple is not None:
        return []
    low, high = _first_whole(form.low, form.low_open), None
    if form.high is not None:
        high = -(_first_whole(-form.high, form.high_open) or 0)
    found = []
    if high is None or high > _NEAR:
        found.append(_beyond("", _NEAR if low is None else max(low, _NEAR), high))
    if low is None or low < -_NEAR:
        least = _NEAR if high is None else max(-high, _NEAR)
        found.append(_beyond("-", least, None if low is None else -low))
    near = form.meet(Numbers(low=Fraction(-_NEAR), high=Fraction(_NEAR)))
    if near is None:
        return found
    return [*found, symbol] if (symbol := number(near, space)) else []


def _first_whole(low: Fraction | None, open_: bool) -> int | None:
    """The first whole number of a range."""
    if low is None:
        return None
    return floor(low) + 1 if open_ else ceil(low)


def _beyond(sign: str, least: int, most: int | None) -> str:
    """The terminal of numbers from least to most with any fraction, and most itself."""
    if most is None:
        return f"/{sign}{integers(least, None)}(?:{_ANY_FRACTION})?/"
    inside = f"{integers(least, most - 1)}(?:{_ANY_FRACTION})?|" if least < most else ""
    return f"/{sign}(?:{inside}{most})/"


def _fractions(form: Numbers) -> str | None:
    """The terminal of numbers with a fraction between the whole numbers of a range."""
    low = -_MOST_FRACTION if form.low is None else max(ceil(form.low), -_MOST_FRACTION)
    high = _MOST_FRACTION if form.high is None else min(floor(form.high), _MOST_FRACTION)
    found = []
    if max(low, 0) < high:
        found.append(f"{integers(max(low, 0), high - 1)}{_FRACTION}")
    if low < min(high, 0):
        found.append(f"-{integers(max(-high, 0), -low - 1)}{_FRACTION}")
    return f"/{'|'.join(found)}/" if found else None


def _end(value: Fraction | None) -> int | None:
    return None if value is None else int(value)


def _schema(form: Numbers) -> dict[str, object] | None:
    multiple = form.multiple
    # whole multiples of a fraction are those of its numerator
    if form.whole and multiple is not None:
        multiple = Fraction(multiple.numerator)
    found: dict[str, object] = {"type": "integer" if form.whole else "number"}
    for key, value, open_ in (
        ("inimum", form.low, form.low_open),
        ("aximum", form.high, form.high_open),
    ):
        if value is not None:
            as_float = _inward(value, up=key == "inimum")
            if as_float is None:
                return None
            name = f"exclusive{'M'}{key}" if open_ and _exact(as_float) == value else f"m{key}"
            found[name] = int(as_float) if as_float.is_integer() else as_float
    if multiple is not None:
        if multiple.numerator > _MOST_MULTIPLE:
            return None
        found["multipleOf"] = int(multiple) if multiple.denominator == 1 else float(multiple)
    return found


def _inward(value: Fraction, *, up: bool) -> float | None:
    """The nearest double within the range."""
    try:
        found = float(value)
    except OverflowError:
        return None
    if up and _exact(found) < value:
        found = nextafter(found, inf)
    elif not up and _exact(found) > value:
        found = nextafter(found, -inf)
    return None if isinf(found) else found


def _exact(value: float) -> Fraction:
    return Fraction(Decimal(repr(value)))


def number_text(value: Fraction) -> str:
    """A number as JSON, without an exponent."""
    if value.denominator == 1:
        return str(value.numerator)
    found = _EXACT.divide(Decimal(value.numerator), Decimal(value.denominator))
    return format(found, "f")


# --- ranges of whole numbers ----------------------------------------------------------------------


def integers(low: int | None, high: int | None) -> str:
    """A regular expression of the whole numbers from low to high; None: without a limit."""
    if low is not None and low >= 0:
        return _naturals(low, high)
    if high is not None and high < 0:
        return f"-{_naturals(-high, None if low is None else -low)}"
    below = f"-{_naturals(1, None if low is None else -low)}" if low != 0 else ""
    return "(?:" + "|".join(part for part in (below, _naturals(0, high)) if part) + ")"


def _naturals(low: int, high: int | None) -> str:
    found = []
    digits = len(str(low))
    if high is None:
        found = [*_same_length(str(low), "9" * digits), f"[1-9][0-9]{{{digits},}}"]
    else:
        for n in _lengths(digits, len(str(high))):
            first = str(low) if n == digits else "1" + "0" * (n - 1)
            last = str(high) if n == len(str(high)) else "9" * n
            found += _same_length(first, last)
    return f"(?:{'|'.join(found)})"


def _lengths(least: int, most: int) -> Iterable[int]:
    return range(least, most + 1)


def _same_length(low: str, high: str) -> list[str]:
    """Regular expressions of the numbers between two with equally many digits."""
    if low == high:
        return [low]
    n = len(low)
    same = next(i for i in range(n) if low[i] != high[i])
    head, rest = low[:same], n - same - 1
    a, b = int(low[same]), int(high[same])
    found = []
    if rest and set(low[same + 1 :]) != {"0"}:
        found += [low[: same + 1] + part for part in _same_length(low[same + 1 :], "9" * rest)]
        a += 1
    ends = []
    if rest and set(high[same + 1 :]) != {"9"}:
        ends = [high[: same + 1] + part for part in _same_length("0" * rest, high[same + 1 :])]
        b -= 1
    if a <= b:
        digit = str(a) if a == b else f"[{a}-{b}]"
        found.append(head + digit + (f"[0-9]{{{rest}}}" if rest else ""))
    return found + ends
