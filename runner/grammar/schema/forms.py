"""The values that a schema allows: for every type of JSON alternatives, each a record of limits.

A part of a value is described by a `Conj`: places of the schema that must or must not hold. These
are read only when they are written, so that schemas may refer to themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Any, TypeVar

from tamis.grammar.schema.places import Place

TYPES = ("null", "boolean", "number", "string", "array", "object")
ALL = 1 << 62  # as a number of items: no limit


@dataclass(frozen=True, slots=True)
class Term:
    """A condition: a place of the schema that must or must not hold, or one of some Conjs."""

    place: Place
    wanted: bool = True
    scope: tuple[str, ...] = ()
    either: "tuple[Conj, ...] | None" = None


Conj = tuple[Term, ...]
NEVER: Conj = (Term(Place("#", False, ""), either=()),)


def both(*some: Conj) -> Conj:
    """The conjunction of several ones."""
    return tuple(dict.fromkeys(term for conj in some for term in conj))


@dataclass(frozen=True, slots=True)
class Constants:
    """The allowed ones of null, true and false."""

    values: tuple[bool | None, ...]
    named: bool = False  # whether the schema names their type

    def meet(self, other: "Constants") -> "Constants | None":
        """The intersection, None if it is empty."""
        values = tuple(value for value in self.values if value in other.values)
        return Constants(values, self.named or other.named) if values else None


@dataclass(frozen=True, slots=True)
class Numbers:
    """A range of numbers; open ends are excluded."""

    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    whole: bool | None = None  # False: only numbers with a fraction
    multiple: Fraction | None = None
    named: bool = False

    def meet(self, other: "Numbers") -> "Numbers | None":
        """The intersection, None if it is empty."""
        low, low_open = _higher(self, other)
        high, high_open = _lower(self, other)
        if None not in (self.whole, other.whole) and self.whole != other.whole:
            return None
        whole = other.whole if self.whole is None else self.whole
        multiple = _common_multiple(self.multiple, other.multiple)
        named = self.named or other.named
        return Numbers(low, low_open, high, high_open, whole, multiple, named).checked()

    def checked(self) -> "Numbers | None":
        """The range, with integral ends if it is whole; None if it is empty."""
        low, high, found = self.low, self.high, self
        if self.whole:
            if low is not None:
                low = Fraction(floor(low) + 1 if self.low_open else ceil(low))
            if high is not None:
                high = Fraction(ceil(high) - 1 if self.high_open else floor(high))
            found = replace(self, low=low, high=high, low_open=False, high_open=False)
        if low is None or high is None:
            return found
        if low > high or (low == high and (found.low_open or found.high_open)):
            return None
        if low == high:
            if self.multiple is not None and (low / self.multiple).denominator != 1:
                return None
            if self.whole is not None and self.whole != (low.denominator == 1):
                return None
        return found


@dataclass(frozen=True, slots=True)
class Test:
    """A condition on a string: a pattern, a format or one value that it must or must not match."""

    kind: str
    text: str
    wanted: bool = True
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings of certain lengths that pass tests; values: only these."""

    low: int = 0
    high: int | None = None
    tests: tuple[Test, ...] = ()
    values: tuple[str, ...] | None = None
    named: bool = False

    def meet(self, other: "Strings") -> "Strings | None":
        """The intersection, None if it is empty."""
        low, high = max(self.low, other.low), _least(self.high, other.high)
        tests = tuple(dict.fromkeys(self.tests + other.tests))
        values = other.values if self.values is None else self.values
        if values is not None:
            values = tuple(
                value
                for value in values
                if (self.values is None or other.values is None or value in other.values)
                and low <= len(value) <= (ALL if high is None else high)
                and Test("value", value, False) not in tests
            )
        if values == () or (high is not None and low > high):
            return None
        return Strings(low, high, tests, values, self.named or other.named)


@dataclass(frozen=True, slots=True)
class Count:
    """How many items must match a schema: `contains` and its limits."""

    like: Conj
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays; layers: schemas of the first items one by one and of the rest, all of which hold."""

    layers: tuple[tuple[tuple[Conj, ...], Conj], ...] = ()
    low: int = 0
    high: int | None = None
    counts: tuple[Count, ...] = ()
    unique: Place | None = None  # the place that asks for distinct items
    seen: int = 0  # how many first items a keyword has evaluated
    seen_like: tuple[Conj, ...] = ()
    declared: bool = False
    named: bool = False

    def meet(self, other: "Arrays") -> "Arrays | None":
        """The intersection, None if the lengths exclude each other."""
        low, high = max(self.low, other.low), _least(self.high, other.high)
        if high is not None and low > high:
            return None
        return Arrays(
            tuple(dict.fromkeys(self.layers + other.layers)),
            low,
            high,
            tuple(dict.fromkeys(self.counts + other.counts)),
            self.unique or other.unique,
            max(self.seen, other.seen),
            tuple(dict.fromkeys(self.seen_like + other.seen_like)),
            self.declared or other.declared,
            self.named or other.named,
        )

    def item(self, i: int) -> Conj:
        """The condition on item i."""
        return both(*(first[i] if i < len(first) else rest for first, rest in self.layers))

    @property
    def n_first(self) -> int:
        """The number of items before those with a common schema."""
        return max((len(first) for first, _ in self.layers), default=0)


@dataclass(frozen=True, slots=True)
class Layer:
    """What one schema says of properties: by name, by pattern, and of the remaining ones."""

    names: tuple[tuple[str, Conj], ...] = ()
    patterns: tuple[tuple[str, Conj], ...] = ()
    rest: Conj = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """The properties that a keyword has evaluated."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all: bool = False

    def __or__(self, other: "Seen") -> "Seen":
        names, patterns = self.names | other.names, self.patterns | other.patterns
        return Seen(names, patterns, self.all or other.all)


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects; layers: all of them hold. declared: whether a schema lists properties."""

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    keys: Conj = ()  # of each name
    sized: Place | None = field(default=None, compare=False)  # the place that limits their number
    seen: Seen = Seen()
    declared: bool = False
    opened: bool = False  # whether the schema itself allows further properties
    named: bool = False

    def meet(self, other: "Objects") -> "Objects | None":
        """The intersection, None if the numbers of properties exclude each other."""
        low, high = max(self.low, other.low), _least(self.high, other.high)
        required = tuple(dict.fromkeys(self.required + other.required))
        if high is not None and max(low, len(required)) > high:
            return None
        return Objects(
            tuple(dict.fromkeys(self.layers + other.layers)),
            required,
            low,
            high,
            both(self.keys, other.keys),
            self.sized or other.sized,
            self.seen | other.seen,
            self.declared or other.declared,
            self.opened or other.opened,
            self.named or other.named,
        )


Form = Constants | Numbers | Strings | Arrays | Objects
F = TypeVar("F", Constants, Numbers, Strings, Arrays, Objects)


@dataclass(frozen=True, slots=True)
class Forms:
    """The alternatives of each type of JSON; none: no value of that type is allowed."""

    null: tuple[Constants, ...] = ()
    boolean: tuple[Constants, ...] = ()
    number: tuple[Numbers, ...] = ()
    string: tuple[Strings, ...] = ()
    array: tuple[Arrays, ...] = ()
    object: tuple[Objects, ...] = ()

    def of(self, kind: str) -> tuple[Any, ...]:
        """The alternatives of a type."""
        found: tuple[Any, ...] = getattr(self, kind)
        return found

    @property
    def n(self) -> int:
        """The number of alternatives."""
        return sum(len(self.of(kind)) for kind in TYPES)

    @property
    def empty(self) -> bool:
        """Whether there are no alternatives."""
        return not self.n

    def only(self, kinds: Iterable[str]) -> "Forms":
        """The forms of these types only."""
        kinds = set(kinds)
        return Forms(**{kind: self.of(kind) for kind in TYPES if kind in kinds})


EVERY = Forms(
    null=(Constants((None,)),),
    boolean=(Constants((False, True)),),
    number=(Numbers(),),
    string=(Strings(),),
    array=(Arrays(),),
    object=(Objects(),),
)
NOTHING = Forms()


def union(some: Iterable[Forms]) -> Forms:
    """The union of some forms."""
    every = list(some)
    return Forms(
        **{kind: tuple(dict.fromkeys(f for one in every for f in one.of(kind))) for kind in TYPES}
    )


def product(a: Sequence[F], b: Sequence[F]) -> tuple[F, ...]:
    """The non-empty intersections of one alternative of each."""
    pairs = (x.meet(y) for x in a for y in b)
    return tuple(dict.fromkeys(found for found in pairs if found is not None))


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _higher(a: Numbers, b: Numbers) -> tuple[Fraction | None, bool]:
    if a.low is None or (b.low is not None and b.low > a.low):
        return b.low, b.low_open
    return a.low, a.low_open or (b.low == a.low and b.low_open)


def _lower(a: Numbers, b: Numbers) -> tuple[Fraction | None, bool]:
    if a.high is None or (b.high is not None and b.high < a.high):
        return b.high, b.high_open
    return a.high, a.high_open or (b.high == a.high and b.high_open)


def _common_multiple(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None:
        return b if a is None else a
    top = a.numerator * b.numerator // gcd(a.numerator, b.numerator)
    return Fraction(top, gcd(a.denominator, b.denominator))
