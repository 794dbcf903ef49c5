"""Regular expressions as trees, and in Rust's syntax."""

from collections.abc import Callable
from dataclasses import dataclass

from tamis.grammar.characters import Characters


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
