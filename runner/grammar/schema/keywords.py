"""The checked values of a schema's keywords, and what its own keywords allow.

Its own keywords constrain the value by themselves: they do not combine schemas.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tamis.grammar.probe import trouble
from tamis.grammar.schema import terminals
from tamis.grammar.schema.formats import FORMATS, NAMED
from tamis.grammar.schema.forms import (
    ALL,
    NEVER,
    TYPES,
    Arrays,
    Conj,
    Constants,
    Count,
    Forms,
    Layer,
    Numbers,
    Objects,
    Seen,
    Strings,
    Term,
    Test,
    union,
)
from tamis.grammar.schema.patterns import Unsupported, WrongPattern
from tamis.grammar.schema.places import Place, shown, wrong

OWN = {"type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
OWN |= {"multipleOf", "minLength", "maxLength", "pattern", "format", "items", "additionalItems"}
OWN |= {"prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains"}
OWN |= {"maxContains", "properties", "patternProperties", "additionalProperties", "required"}
OWN |= {"propertyNames", "minProperties", "maxProperties"}
_DIGITS = 400  # of a number that is written out
Note = Callable[[Place, str], None]  # called with the place and the keyword that is left out


def conj_of(place: Place, scope: tuple[str, ...]) -> Conj:
    """The condition that the schema at a place holds."""
    if place.schema is True or place.schema == {}:
        return ()
    return NEVER if place.schema is False else (Term(place, True, scope),)


def number(place: Place, key: str) -> Fraction | float | None:
    """The number of a keyword; a float if it is infinite. Raises GrammarError."""
    value = place.schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise wrong(place, f"has {key} {shown(value)}, expected a number")
    return fraction(value)


def fraction(value: int | float) -> Fraction | float:
    """A number of JSON, exact; an infinite one stays a float."""
    if isinstance(value, float):
        return Fraction(Decimal(repr(value))) if math.isfinite(value) else value
    return Fraction(value)


def count(place: Place, key: str) -> int | None:
    """The number of a keyword that counts. Raises GrammarError."""
    value = place.schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise wrong(place, f"has {key} {shown(value)}, expected a whole number, 0 or more")
    return min(int(value), ALL) if math.isfinite(value) else ALL


def texts(place: Place, key: str) -> tuple[str, ...]:
    """The names that a keyword lists. Raises GrammarError."""
    value = place.schema.get(key, ())
    # in draft 3, a boolean of the property itself
    if isinstance(value, bool) and key == "required":
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise wrong(place, f"has {key} {shown(value)}, expected a list of texts")
    return tuple(dict.fromkeys(value))


def parts(place: Place, key: str) -> list[Place]:
    """The schemas that a keyword lists. Raises GrammarError."""
    value = place.schema.get(key, [])
    if not isinstance(value, list):
        raise wrong(place, f"has {key} {shown(value)}, expected a list of schemas")
    return [place.part(key, i) for i in range(len(value))]


def named_parts(place: Place, key: str) -> dict[str, Place]:
    """The schemas that a keyword names. Raises GrammarError."""
    value = place.schema.get(key, {})
    if not isinstance(value, dict):
        raise wrong(place, f"has {key} {shown(value)}, expected an object")
    return {name: place.part(key, name) for name in value}


def own_forms(place: Place, scope: tuple[str, ...], note: Note) -> Forms:
    """The forms that the own keywords of a schema allow. Raises GrammarError for invalid values."""
    kinds = types(place)
    named = kinds is not None or "enum" in place.schema or "const" in place.schema
    found = Forms(
        null=(Constants((None,), named),),
        boolean=(Constants((False, True), named),),
        number=_numbers(place, kinds, named),
        string=_strings(place, named, note),
        array=_arrays(place, scope, named),
        object=_objects(place, scope, named, note),
    )
    if kinds is not None:
        found = found.only({"number" if kind == "integer" else kind for kind in kinds})
    for key in ("enum", "const"):
        if key in place.schema:
            one = values_forms(place, key)
            found = Forms(**{kind: _met(found.of(kind), one.of(kind)) for kind in TYPES})
    return found


def _met(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    met = (x.meet(y) for x in a for y in b)
    return tuple(dict.fromkeys(found for found in met if found is not None))


def types(place: Place) -> list[str] | None:
    """The types that a schema names, None if it names none. Raises GrammarError."""
    if "type" not in place.schema:
        return None
    given = place.schema["type"]
    kinds = [given] if isinstance(given, str) else given
    known = {*TYPES, "integer"}
    if not isinstance(kinds, list) or any(k not in known for k in kinds if isinstance(k, str)):
        raise wrong(place, f"has type {shown(given)}, expected {', '.join(sorted(known))}")
    if not all(isinstance(kind, str) for kind in kinds):
        raise wrong(place, f"has type {shown(given)}, expected names of types")
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def _numbers(place: Place, kinds: list[str] | None, named: bool) -> tuple[Numbers, ...]:
    low, high = number(place, "minimum"), number(place, "maximum")
    low_open = high_open = False
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if place.schema.get(key) is True:  # in draft 4, a boolean that qualifies the limit
            low_open, high_open = low_open or "Min" in key, high_open or "Max" in key
        elif place.schema.get(key) is not False:
            end = number(place, key)
            if end is not None and "Min" in key and (low is None or end >= low):
                low, low_open = end, True
            elif end is not None and "Max" in key and (high is None or end <= high):
                high, high_open = end, True
    multiple = number(place, "multipleOf")
    if multiple is not None and multiple <= 0:
        raise wrong(place, f"has multipleOf {shown(multiple)}, expected a number above 0")
    if low == math.inf or high == -math.inf:
        return ()
    found = Numbers(
        low if isinstance(low, Fraction) else None,
        low_open,
        high if isinstance(high, Fraction) else None,
        high_open,
        True if kinds is not None and "integer" in kinds else None,
        multiple if isinstance(multiple, Fraction) else None,
        named,
    ).checked()
    return () if found is None else (found,)


def _strings(place: Place, named: bool, note: Note) -> tuple[Strings, ...]:
    low, high = count(place, "minLength") or 0, count(place, "maxLength")
    tests = []
    if (pattern := place.schema.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise wrong(place, f"has pattern {shown(pattern)}, expected text")
        if usable(place, "pattern", pattern, note):
            tests.append(Test("pattern", pattern, True, place))
    name = place.schema.get("format")
    if isinstance(name, str) and name in FORMATS:
        tests.append(Test("format", name, True, place))
    elif isinstance(name, str) and name in NAMED:
        note(place, "format")
    if high is not None and low > high:
        return ()
    return (Strings(low, high, tuple(tests), None, named),)


def usable(place: Place, key: str, pattern: str, note: Note) -> bool:
    """Whether a pattern can be enforced; if not, it is noted.

    Raises GrammarError for an invalid one.
    """
    try:
        terminal = terminals.matching(pattern)
    except WrongPattern as error:
        raise wrong(place, f"has {key} {shown(pattern)}, which {error}") from None
    except Unsupported:
        note(place, key)
        return False
    if trouble(terminal):
        note(place, key)
        return False
    return True


def _arrays(place: Place, scope: tuple[str, ...], named: bool) -> tuple[Arrays, ...]:
    schema = place.schema
    first, rest_key = parts(place, "prefixItems"), "items"
    if isinstance(schema.get("items"), list):  # up to draft 2019-09
        first, rest_key = parts(place, "items"), "additionalItems"
    layers: tuple[tuple[tuple[Conj, ...], Conj], ...] = ()
    rest = conj_of(place.part(rest_key), scope) if rest_key in schema else ()
    if first or rest:
        layers = ((tuple(conj_of(part, scope) for part in first), rest),)
    counts: tuple[Count, ...] = ()
    seen_like: tuple[Conj, ...] = ()
    if "contains" in schema:
        like = conj_of(place.part("contains"), scope)
        low, high = count(place, "minContains"), count(place, "maxContains")
        counts, seen_like = (Count(like, 1 if low is None else low, high),), (like,)
    found = Arrays(
        layers,
        count(place, "minItems") or 0,
        count(place, "maxItems"),
        tuple(c for c in counts if c.low or c.high is not None),
        place if schema.get("uniqueItems") is True else None,
        ALL if rest_key in schema else len(first),
        seen_like,
        declared=rest_key in schema or bool(first),
        named=named,
    )
    return (found,) if found.high is None or found.low <= found.high else ()


def _objects(place: Place, scope: tuple[str, ...], named: bool, note: Note) -> tuple[Objects, ...]:
    names, patterns = named_parts(place, "properties"), named_parts(place, "patternProperties")
    kept = {p: part for p, part in patterns.items() if usable(place, p, p, _of(note, p))}
    rest: Conj = ()
    if "additionalProperties" in place.schema:
        if len(kept) == len(patterns):
            rest = conj_of(place.part("additionalProperties"), scope)
        else:  # it would also refuse what the missing patterns allow
            note(place, "additionalProperties")
    layer = Layer(
        tuple((name, conj_of(part, scope)) for name, part in names.items()),
        tuple((pattern, conj_of(part, scope)) for pattern, part in kept.items()),
        rest,
    )
    keys = conj_of(place.part("propertyNames"), scope) if "propertyNames" in place.schema else ()
    found = Objects(
        (layer,) if layer != Layer() else (),
        texts(place, "required"),
        count(place, "minProperties") or 0,
        count(place, "maxProperties"),
        keys,
        place,
        Seen(frozenset(names), frozenset(patterns), "additionalProperties" in place.schema),
        declared="properties" in place.schema,
        opened="additionalProperties" in place.schema,
        named=named,
    )
    return (found,) if found.high is None or found.low <= found.high else ()


def _of(note: Note, pattern: str) -> Note:
    return lambda place, _: note(place.part("patternProperties"), pattern)


def dependents(place: Place, key: str, scope: tuple[str, ...]) -> list[tuple[str, Conj]]:
    """The names of properties, each with the condition that its presence implies.

    Raises GrammarError.
    """
    found = []
    for name, part in named_parts(place, key).items():
        if isinstance(part.schema, list):
            part = part.but("required", {"required": part.schema})
        found.append((name, conj_of(part, scope)))
    return found


def values_forms(place: Place, key: str) -> Forms:
    """The forms that `enum` or `const` of a place allows.

    Raises GrammarError unless it is a list.
    """
    if key == "const":
        return value_forms(place.part("const"))
    values = place.schema["enum"]
    if not isinstance(values, list):
        raise wrong(place, f"has enum {shown(values)}, expected a list")
    texts_ = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    found = [
        value_forms(place.part("enum", i))
        for i, value in enumerate(values)
        if not isinstance(value, str)
    ]
    if texts_:
        found.append(Forms(string=(Strings(values=texts_, named=True),)))
    return union(found)


def value_forms(place: Place) -> Forms:
    """The form of the one value at a place of the document."""
    value = place.schema
    match value:
        case None:
            return Forms(null=(Constants((None,), True),))
        case bool():
            return Forms(boolean=(Constants((value,), True),))
        case str():
            return Forms(string=(Strings(values=(value,), named=True),))
        case int() | float():
            exact = fraction(value)
            if not isinstance(exact, Fraction) or abs(exact) > 10**_DIGITS:
                raise wrong(place, "is a number that is too large to be written")
            return Forms(number=(Numbers(exact, False, exact, named=True),))
        case list():
            first = tuple(_same(place.part(i)) for i in range(len(value)))
            size = len(value)
            return Forms(array=(Arrays(((first, NEVER),), size, size, declared=True, named=True),))
    layer = Layer(tuple((name, _same(place.part(name))) for name in value), (), NEVER)
    return Forms(object=(Objects((layer,), tuple(value), declared=True, opened=True, named=True),))


def _same(place: Place) -> Conj:
    return (Term(Place(f"{place.pointer}=", {"const": place.schema}, place.base)),)
