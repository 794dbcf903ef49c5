"""Strings of JSON as terminals of llguidance's Lark, from patterns, lengths and values.

A terminal includes the quotation marks. Terminals of one string are joined by & and may be negated.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tamis.grammar.characters import LAST, Characters, literal, quoted
from tamis.grammar.schema.patterns import Edge, Look, Unsupported, parsed
from tamis.grammar.trees import (
    MOST_FORCED,
    Either,
    Node,
    Row,
    Times,
    TooLong,
    nullable,
    regex,
    shortest,
)

CHARACTER = quoted(Characters(((0, LAST),)))
ANY = f"/(?:{CHARACTER})*/"
QUOTE = "/\\x22/"
STRING = f"/\\x22(?:{CHARACTER})*\\x22/"
_MOST_ROWS = 64
_MOST_LENGTH = 60_000  # characters of a pattern's terminal


def text_of(value: str) -> str:
    """A string as JSON, in the only form that terminals match."""
    found = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in found)


def exact(text: str) -> str:
    """The terminal of exactly this text."""
    return f"/{literal(text)}/"


def one_of(values: Iterable[str]) -> str:
    """The terminal of some strings."""
    return f"/{'|'.join(literal(text_of(value)) for value in values)}/"


def lengths(low: int, high: int | None) -> str:
    """The terminal of strings whose number of characters is in a range."""
    return f"/\\x22(?:{CHARACTER}){{{low},{'' if high is None else high}}}\\x22/"


@lru_cache(maxsize=256)
def matching(pattern: str) -> str:
    """The terminal of strings in which a pattern is found. Raises Unsupported, WrongPattern."""
    if len(pattern) > _MOST_LENGTH:
        raise Unsupported("too long")
    found = _whole(parsed(pattern), True, True)
    if found is None:
        return "/[^\\x{0}-\\x{10ffff}]/"
    if len(found) > _MOST_LENGTH:
        raise Unsupported("too long")
    return f"({QUOTE} {found} {QUOTE})"


def _whole(node: Node, open_start: bool, open_end: bool) -> str | None:
    """The terminal of texts that a tree matches; open: with any text before, or after it."""
    rows = [_row(row, open_start, open_end) for row in _rows(node)]
    found = list(dict.fromkeys(row for row in rows if row is not None))
    return f"({' | '.join(found)})" if found else None


def _row(row: Sequence[Node], open_start: bool, open_end: bool) -> str | None:
    starts = [i for i, part in enumerate(row) if part == Edge(True)]
    ends = [i for i, part in enumerate(row) if part == Edge(False)]
    before = row[: starts[-1]] if starts else ()
    after = row[ends[0] :] if ends else ()
    if not all(map(_can_be_empty, [*before, *after])):
        return None
    outside = set(range(len(before))) | {len(row) - 1 - i for i in range(len(after))}
    kept = [
        part
        for i, part in enumerate(row)
        if not isinstance(part, Edge) and (i not in outside or isinstance(part, Look))
    ]
    behind = max((i for i, p in enumerate(kept) if isinstance(p, Look) and not p.ahead), default=-1)
    if any(isinstance(part, Look) and part.ahead for part in kept[: behind + 1]):
        raise Unsupported("a look back after a look ahead")
    left = "" if starts or not open_start else ANY
    for part in kept[: behind + 1]:
        left = _and(part, left) if isinstance(part, Look) else f"{left} {_plain(part)}".strip()
    right = "" if ends or not open_end else ANY
    for part in reversed(kept[behind + 1 :]):
        right = _and(part, right) if isinstance(part, Look) else f"{_plain(part)} {right}".strip()
    return f"{left} {right}".strip() or '""'


def _and(look: Look, rest: str) -> str:
    """The intersection of a side's match with a look-around at its end."""
    if any(part == Edge(look.ahead) for row in _rows(look.what) for part in row):
        raise Unsupported("an anchor in a group that looks around")
    found = _whole(look.what, not look.ahead, look.ahead)
    rest = rest or '""'
    if found is None:
        return "/[^\\x{0}-\\x{10ffff}]/" if look.wanted else f"({rest})"
    return f"(({rest}) & {'' if look.wanted else '~'}{found})"


def _plain(node: Node) -> str:
    try:
        shortest(node)
    except TooLong:
        raise Unsupported(f"over {MOST_FORCED} characters at least") from None
    found = regex(node, quoted)
    return f"/{found}/" if found else '""'


def _rows(node: Node) -> list[tuple[Node, ...]]:
    """The tree as alternatives, whose parts have no anchor and no look-around inside."""
    if not _has_places(node):
        return [(node,)]
    match node:
        case Row(parts):
            found: list[tuple[Node, ...]] = [()]
            for part in parts:
                found = [row + more for row in found for more in _rows(part)]
                if len(found) > _MOST_ROWS:
                    raise Unsupported("too many alternatives around its anchors")
            return found
        case Either(parts):
            return [row for part in parts for row in _rows(part)]
        case Times(what, least, most):
            if most == 1:
                return [()] * (1 - least) + _rows(what)
            raise Unsupported("an anchor or a look around in a repeated group")
    return [(node,)]


def _has_places(node: Node) -> bool:
    match node:
        case Edge() | Look():
            return True
        case Row(parts) | Either(parts):
            return any(map(_has_places, parts))
        case Times(what, _, _):
            return _has_places(what)
    return False


def _can_be_empty(node: Node) -> bool:
    return isinstance(node, Edge | Look) or nullable(node)
