"""Regular expressions as trees, and as Rust writes them."""

from collections.abc import Callable
from dataclasses import dataclass

from tamis.grammar.characters import Characters


class Node:
    """A part of a tree. Those who need other parts than these derive them."""


@dataclass(frozen=True, slots=True)
class Chars(Node):
    """One character of a set."""

    some: Characters


@dataclass(frozen=True, slots=True)
class Row(Node):
    """One after the other; without parts the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either(Node):
    """One of these."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Times(Node):
    """Repeated; most None: without end."""

    what: Node
    least: int
    most: int | None


def regex(node: Node, one: Callable[[Characters], str]) -> str:
    """Rust's regular expression of a tree of these parts; one: that of a single character."""
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
    """Whether a tree of these parts matches the empty text."""
    match node:
        case Row(parts):
            return all(map(nullable, parts))
        case Either(parts):
            return any(map(nullable, parts))
        case Times(what, least, _):
            return least == 0 or nullable(what)
    return False
