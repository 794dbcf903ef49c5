"""Sets of characters, and regular expressions in Rust's syntax that match them, raw or in JSON.

JSON writes a quotation mark, a backslash and control characters as escapes. The short escape is
used if there is one, so that every text has one form only, by which names can be told apart.
"""

from collections.abc import Iterable
from typing import NamedTuple

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_ESCAPED = [*range(32), 34, 92]
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _:;,=@%'\"<>!")


class Characters(NamedTuple):
    """Sorted, disjoint and non-adjacent ranges of code points, both ends included."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, code: object) -> bool:
        return isinstance(code, int) and any(low <= code <= high for low, high in self.ranges)


def joined(ranges: Iterable[tuple[int, int]]) -> Characters:
    """The union of all these ranges."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return Characters(tuple(found))


def others(some: Characters) -> Characters:
    """The complement of a set."""
    found, start = [], 0
    for low, high in some.ranges:
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        found.append((start, LAST))
    return Characters(tuple(found))


def overlap(a: Characters, b: Characters) -> bool:
    """Whether two sets share a character."""
    return bool(_common(a.ranges, b.ranges))


def one(character: str) -> Characters:
    """The set of a single character."""
    return Characters(((ord(character), ord(character)),))


def plain(some: Characters) -> str:
    """A regular expression that matches one of these characters.

    Of an empty set it never matches.
    """
    parts = "".join(_range(low, high) for low, high in _without_surrogates(some.ranges))
    return f"[{parts}]" if parts else "[^\\x{0}-\\x{10ffff}]"


def quoted(some: Characters) -> str:
    """A regular expression that matches one of these characters as written in a JSON string."""
    safe = others(joined((code, code) for code in _ESCAPED))
    raw = Characters(_common(some.ranges, safe.ranges))
    escaped = [_escape(code) for code in _ESCAPED if code in some]
    if not escaped:
        return plain(raw)
    if not raw.ranges:
        return escaped[0] if len(escaped) == 1 else f"(?:{'|'.join(escaped)})"
    return f"(?:{plain(raw)}|{'|'.join(escaped)})"


def literal(text: str) -> str:
    """A regular expression that matches exactly this text."""
    return "".join(c if c in _PLAIN else f"\\x{{{ord(c):x}}}" for c in text)


def _escape(code: int) -> str:
    return f"\\\\{literal(_SHORT[code])}" if code in _SHORT else f"\\\\u{code:04x}"


def _range(low: int, high: int) -> str:
    return f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"


def _without_surrogates(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return _common(ranges, ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST)))


def _common(
    a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            found.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)
