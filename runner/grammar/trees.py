"""Regular expressions as trees, and in Rust's syntax."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tamis.grammar.characters import Characters

MOST_FORCED = 100_000  # characters that a part has at least: llguidance takes 5 us for each


class TooLong(Exception):
    """A part of a tree has more than MOST_FORCED characters at least."""


class Node:
    """A part of a tree. Modules with further kinds of parts derive from it."""


@dataclass(frozen=True, slots=True)
class Chars(Node):
    """One character of a set."""

    some: Characters


@dataclass(frozen=True, slots=True)
class Row(Node):
    """Parts in sequence; without parts the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either(Node):
    """Alternatives."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Times(Node):
    """A repeated part; most None: without limit."""

    what: Node
    least: int
    most: int | None


def regex(node: Node, one: Callable[[Characters], str]) -> str:
    """Rust's regular expression of a tree; one: that of a single character."""
    match node:
        case Chars(some):
            return one(some)
        case Row(parts):
            found = (regex(part, one) for part in parts)
            return "".join(
                f"(?:{text})" if isinstance(part, Either) else text
                for part, text in zip(parts, found, strict=True)
            )
        case Either(parts):
            return "|".join(regex(part, one) for part in parts)
        case Times(what, least, most):
            return f"(?:{regex(what, one)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(node)


def shortest(
    node: Node, of: Callable[[Node], float] = lambda part: 1, *, check: bool = True
) -> float:
    """The characters that a tree has at least; infinite if no text matches it.

    of: those of parts of further kinds. Raises TooLong if a part has too many, unless check is
    False: it then counts as one more than a part may have.
    """
    match node:
        case Times(what, least, _):
            inner = shortest(what, of, check=check)
            found = least * inner if least else 0
        case Row(parts) | Either(parts):
            each = [shortest(part, of, check=check) for part in parts]
            found = min(each, default=math.inf) if isinstance(node, Either) else sum(each)
        case _:
            return 1 if isinstance(node, Chars) else of(node)
    if found <= MOST_FORCED or math.isinf(found):
        return found
    if check:
        raise TooLong
    return MOST_FORCED + 1


def nullable(node: Node) -> bool:
    """Whether a tree matches the empty text."""
    match node:
        case Row(parts):
            return all(map(nullable, parts))
        case Either(parts):
            return any(map(nullable, parts))
        case Times(what, least, _):
            return least == 0 or nullable(what)
    return False
