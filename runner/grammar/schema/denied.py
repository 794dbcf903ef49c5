"""The complement of a schema under `not`: for each of its keywords the values that violate it.

If no forms express that, `Inexact` is raised, and the keyword that asked for it is left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any, Protocol

from tamis.grammar.schema.forms import (
    EVERY,
    NEVER,
    NOTHING,
    TYPES,
    Arrays,
    Conj,
    Constants,
    Count,
    Forms,
    Layer,
    Numbers,
    Objects,
    Strings,
    Term,
    Test,
    both,
    union,
)
from tamis.grammar.schema.keywords import (
    conj_of,
    count,
    dependents,
    fraction,
    named_parts,
    number,
    own_forms,
    parts,
    texts,
    types,
)
from tamis.grammar.schema.places import Document, Place

_MOST_TOGETHER = 6  # schemas of a oneOf, optional properties of a closed object


class Reads(Protocol):
    """What the complement of a schema needs of its reader, a Protocol: the forms of its parts."""

    document: Document

    def forms(self, conj: Conj) -> Forms:
        """The alternatives of a conjunction."""

    def term(self, term: Term) -> Forms:
        """The alternatives of one term that must hold."""

    def guarded(self, term: Term) -> Forms:
        """The alternatives that remain if a term must not hold."""

    def meet(self, a: Forms, b: Forms, place: Place) -> Forms:
        """The intersection of two forms."""


class Inexact(Exception):
    """No forms express the complement of a schema."""


def against(conj: Conj) -> Conj:
    """The negation of a conjunction."""
    if not conj:
        return NEVER
    if len(conj) > 1:
        return (Term(conj[0].place, either=tuple(against((term,)) for term in conj)),)
    (term,) = conj
    if term.either is None:
        return (replace(term, wanted=not term.wanted),)
    return both(*map(against, term.either))


def denied_forms(reader: Reads, place: Place, scope: tuple[str, ...]) -> Forms:
    """The values that a schema does not allow. Raises Inexact, GrammarError."""
    schema = place.schema
    if isinstance(schema, bool):
        return NOTHING if schema else EVERY
    own_forms(place, scope, lambda *_: None)  # raises the errors of the schema itself
    found = []
    for key in schema:
        if key in _INEXACT and not _is_all(schema[key]):
            raise Inexact(key)
        if key in _DENIED:
            found.append(_DENIED[key](place, scope, key))
        elif key in _COMBINED:
            found.append(_COMBINED[key](reader, place, scope, key))
    return union(found)


def _is_all(schema: Any) -> bool:
    return schema is True or schema == {}


# --- types and values -----------------------------------------------------------------------------


def _type(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    kinds = types(place) or []
    left = EVERY.only(kind for kind in TYPES if kind not in kinds)
    return replace(left, number=(Numbers(whole=False),)) if "integer" in kinds else left


def _enum(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    if key == "const":
        return _values([place.part("const")])
    return _values([place.part("enum", i) for i in range(len(place.schema["enum"]))])


def _values(places: list[Place]) -> Forms:
    values = [place.schema for place in places]
    constants = tuple(b for b in (False, True) if not any(v is b for v in values))
    strings = tuple(Test("value", value, False) for value in values if isinstance(value, str))
    numbers = {
        exact
        for value in values
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and isinstance(exact := fraction(value), Fraction)
    }
    arrays, objects = (Arrays(),), (Objects(),)
    if any(isinstance(value, list | dict) for value in values):
        if len(places) > 1:
            raise Inexact("enum")
        arrays, objects = _other_values(places[0])
    return Forms(
        null=() if any(value is None for value in values) else EVERY.null,
        boolean=(Constants(constants),) if constants else (),
        number=_between(sorted(numbers)),
        string=(Strings(tests=strings),),
        array=arrays,
        object=objects,
    )


def _between(numbers: list[Fraction]) -> tuple[Numbers, ...]:
    ends: list[Fraction | None] = [None, *numbers, None]
    found = (Numbers(low, low is not None, high, high is not None) for low, high in pairwise(ends))
    return tuple(found)


def _other_values(place: Place) -> tuple[Any, Any]:
    """An array and an object that differ from the value at a place."""
    value = place.schema
    other = [Place(f"{place.pointer}=", {"const": part}, place.base) for part in _parts(value)]
    size, differ = len(value), [(Term(each, False),) for each in other]
    if isinstance(value, list):
        return (*_other_sizes(size), *map(_item, range(size), differ)), (Objects(),)
    missing = tuple(Objects((Layer(((name, NEVER),)),)) for name in value)
    changed = tuple(map(_property, value, differ))
    return (Arrays(),), (*missing, *changed, Objects(low=size + 1))


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _other_sizes(size: int) -> tuple[Arrays, ...]:
    shorter = (Arrays(high=size - 1),) if size else ()
    return (*shorter, Arrays(low=size + 1))


def _item(i: int, conj: Conj) -> Arrays:
    return Arrays(((((),) * i + (conj,), ()),), low=i + 1)


def _property(name: str, conj: Conj) -> Objects:
    return Objects((Layer(((name, conj),)),), (name,))


# --- limits ---------------------------------------------------------------------------------------


def _number_limit(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    if isinstance(place.schema[key], bool):
        raise Inexact(key)
    end = number(place, key)
    if not isinstance(end, Fraction):
        raise Inexact(key)
    of_old = place.schema.get("exclusive" + key.capitalize()) is True
    open_ = key in ("minimum", "maximum") and not of_old
    if key in ("minimum", "exclusiveMinimum"):
        return Forms(number=(Numbers(high=end, high_open=open_),))
    return Forms(number=(Numbers(low=end, low_open=open_),))


def _length_limit(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    size = count(place, key)
    if size is None or (key.startswith("min") and size == 0):
        return NOTHING
    low, high = (0, size - 1) if key.startswith("min") else (size + 1, None)
    if key.endswith("Length"):
        return Forms(string=(Strings(low, high),))
    if key.endswith("Items"):
        return Forms(array=(Arrays(low=low, high=high),))
    return Forms(object=(Objects(low=low, high=high),))


def _pattern(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    noted: list[str] = []
    forms = own_forms(place, scope, lambda _, key: noted.append(key))
    if "pattern" in noted:
        raise Inexact(key)
    tests = (test for form in forms.string for test in form.tests if test.kind == "pattern")
    return Forms(string=tuple(Strings(tests=(replace(test, wanted=False),)) for test in tests))


# --- arrays and objects ---------------------------------------------------------------------------


def _items(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    schema = place.schema
    if isinstance(schema[key], list):
        first = [against(conj_of(part, scope)) for part in parts(place, key)]
        return Forms(array=tuple(_item(i, conj) for i, conj in enumerate(first)))
    rest = conj_of(place.part(key), scope)
    n_first = len(schema.get("prefixItems", schema["items"] if key != "items" else []))
    if not rest:
        return NOTHING
    if rest == NEVER:
        return Forms(array=(Arrays(low=n_first + 1),))
    if n_first:
        raise Inexact(key)
    return Forms(array=(Arrays(counts=(Count(against(rest), 1, None),)),))


def _contains(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    like = conj_of(place.part("contains"), scope)
    low, high = count(place, "minContains"), count(place, "maxContains")
    low = 1 if low is None else low
    found = [Count(like, 0, low - 1)] if low else []
    found += [Count(like, high + 1, None)] if high is not None else []
    return Forms(array=tuple(Arrays(counts=(one,)) for one in found))


def _properties(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    each = named_parts(place, key).items()
    return Forms(
        object=tuple(
            _property(name, against(conj_of(part, scope)))
            for name, part in each
            if not _is_all(part.schema)
        )
    )


def _required(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    lacks = (Objects((Layer(((name, NEVER),)),)) for name in texts(place, key))
    return Forms(object=tuple(lacks))


def _additional(place: Place, scope: tuple[str, ...], key: str) -> Forms:
    schema = place.schema
    if _is_all(schema[key]):
        return NOTHING
    names, required = named_parts(place, "properties"), texts(place, "required")
    optional = [name for name in names if name not in required]
    if schema[key] is not False or schema.get("patternProperties"):
        raise Inexact(key)
    if len(optional) > _MOST_TOGETHER:
        raise Inexact(key)
    return Forms(object=tuple(_more_than(len(names), some) for some in _subsets(optional)))


def _subsets(names: list[str]) -> Iterable[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


def _more_than(n_name: int, missing: tuple[str, ...]) -> Objects:
    """Objects that lack some properties and have others than the named ones."""
    layer = Layer(tuple((name, NEVER) for name in missing))
    return Objects((layer,) if missing else (), low=n_name - len(missing) + 1, opened=True)


def _dependent(reader: Reads, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    found: list[Forms] = []
    for name, then in dependents(place, key, scope):
        has = Forms(object=(Objects(required=(name,)),))
        found.append(reader.meet(has, reader.forms(against(then)), place))
    return union(found)


# --- schemas that are combined --------------------------------------------------------------------


def _reference(reader: Reads, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    target = reader.document.target(place, key, scope)
    return reader.guarded(Term(target, False, scope))


def _all_of(reader: Reads, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    return union(reader.guarded(Term(part, False, scope)) for part in parts(place, key))


def _any_of(reader: Reads, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    found = EVERY
    for part in parts(place, key):
        found = reader.meet(found, reader.guarded(Term(part, False, scope)), part)
    return found


def _one_of(reader: Reads, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    each = [Term(part, True, scope) for part in parts(place, key)]
    if len(each) > _MOST_TOGETHER:
        raise Inexact(key)
    two = [reader.meet(reader.term(a), reader.term(b), place) for a, b in combinations(each, 2)]
    return union([_any_of(reader, place, scope, key), *two])


def _not(reader: Reads, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    return reader.term(Term(place.part(key), True, scope))


def _if(reader: Reads, place: Place, scope: tuple[str, ...], key: str) -> Forms:
    what, found = Term(place.part(key), True, scope), []
    if "then" in place.schema:
        fails = reader.guarded(Term(place.part("then"), False, scope))
        found.append(reader.meet(reader.term(what), fails, place))
    if "else" in place.schema:
        fails = reader.guarded(Term(place.part("else"), False, scope))
        found.append(reader.meet(reader.guarded(replace(what, wanted=False)), fails, place))
    return union(found)


_INEXACT = {"multipleOf", "uniqueItems", "patternProperties", "propertyNames"}
_INEXACT |= {"unevaluatedItems", "unevaluatedProperties"}
_DENIED: dict[str, Callable[[Place, tuple[str, ...], str], Forms]] = {
    "type": _type,
    "enum": _enum,
    "const": _enum,
    "pattern": _pattern,
    "prefixItems": _items,
    "items": _items,
    "contains": _contains,
    "properties": _properties,
    "required": _required,
    "additionalProperties": _additional,
    **{f"{m}{what}": _length_limit for m in ("min", "max") for what in ("Length", "Items")},
    **{f"{m}Properties": _length_limit for m in ("min", "max")},
    **dict.fromkeys(("minimum", "maximum"), _number_limit),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _number_limit),
}
_COMBINED: dict[str, Callable[[Reads, Place, tuple[str, ...], str], Forms]] = {
    "$ref": _reference,
    "$dynamicRef": _reference,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent,
    "dependencies": _dependent,
}
