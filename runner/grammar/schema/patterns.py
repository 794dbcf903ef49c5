r"""Patterns of JSON schemas: ECMA-262's regular expressions, parsed into a tree.

Notations of Python and Rust are also read if they are unambiguous: `\A`, `\Z`, `\z`, `(?P<name>`,
`(?i)`.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, pairwise
from operator import ne

from tamis.grammar.characters import LAST, Characters, joined, one, others
from tamis.grammar.trees import Chars, Either, Node, Row, Times

MOST_LEVELS = 60


class Unsupported(Exception):
    """A pattern that cannot be enforced."""


class WrongPattern(Exception):
    """A text is not a valid regular expression."""


@dataclass(frozen=True, slots=True)
class Edge(Node):
    """An anchor: the beginning or the end of the text."""

    start: bool


@dataclass(frozen=True, slots=True)
class Look(Node):
    """A look-around: what must, or must not, follow or precede a position."""

    what: Node
    ahead: bool
    wanted: bool


_DIGITS = joined([(48, 57)])
_WORD = joined([(48, 57), (65, 90), (95, 95), (97, 122)])
_OTHER_SPACE = (0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)
_SPACE = joined(
    (code, code) for code in (*range(9, 14), 32, 160, 0x1680, *range(0x2000, 0x200B), *_OTHER_SPACE)
)
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_SETS |= {name.upper(): others(some) for name, some in _SETS.items()}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_LINE_ENDS = joined([(10, 10), (13, 13), (0x2028, 0x2029)])
_CATEGORIES = {"L", "M", "N", "P", "S", "Z", "C"}
_LONG = {"Letter": "L", "Mark": "M", "Number": "N", "Punctuation": "P", "Symbol": "S"}
_LONG |= {"Separator": "Z", "Other": "C", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll"}
_LONG |= {"Decimal_Number": "Nd", "digit": "Nd", "punct": "P", "Alphabetic": "", "Any": ""}


@lru_cache(maxsize=64)
def parsed(pattern: str) -> Node:
    """The tree of a pattern. Raises Unsupported, WrongPattern."""
    return _Parser(pattern).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.level, self.fold = text, 0, 0, False

    def whole(self) -> Node:
        if self.text.startswith("(?i)"):
            self.at, self.fold = 4, True
        found = self.either()
        if self.at < len(self.text):
            raise WrongPattern(f"has {self.text[self.at]!r} where nothing opens it")
        return found

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if self.peek(text):
            self.at += len(text)
            return True
        return False

    def next(self) -> str:
        if self.at >= len(self.text):
            raise WrongPattern("ends in the middle")
        self.at += 1
        return self.text[self.at - 1]

    def either(self) -> Node:
        parts = [self.row()]
        while self.take("|"):
            parts.append(self.row())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def row(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def repeated(self, what: Node) -> Node:
        while (times := self.times()) is not None:
            self.take("?")  # laziness does not change what it matches
            what = Times(what, *times)
        return what

    def times(self) -> tuple[int, int | None] | None:
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(mark):
                return times
        if not self.peek("{"):
            return None
        inner, end, _ = self.text[self.at + 1 :].partition("}")
        low, comma, high = inner.partition(",")
        if not end or not _number(low) or (high and not _number(high)):
            return None  # a literal brace
        self.at += len(inner) + 2
        most = int(high) if high else None if comma else int(low)
        if most is not None and most < int(low):
            raise WrongPattern(f"has {{{inner}}}, whose numbers are out of order")
        return int(low), most

    def atom(self) -> Node:
        c = self.next()
        if c == "(":
            return self.group()
        if c == "[":
            return Chars(self.folded(self.set()))
        if c == ".":
            return Chars(others(_LINE_ENDS))
        if c in "^$":
            return Edge(c == "^")
        if c in "*+?":
            raise WrongPattern(f"has {c!r} after nothing")
        if c == "\\":
            return self.escape()
        return Chars(self.folded(one(c)))

    def group(self) -> Node:
        self.level += 1
        if self.level > MOST_LEVELS:
            raise Unsupported("nested too deeply")
        look: Callable[[Node], Node] = lambda found: found  # noqa: E731
        fold = self.fold
        if self.take("?"):
            if self.take("i:"):
                self.fold = True
            elif not self.take(":"):
                look = self.kind()
        found = self.either()
        if not self.take(")"):
            raise WrongPattern("has a group without its end")
        self.level, self.fold = self.level - 1, fold
        return look(found)

    def kind(self) -> Callable[[Node], Node]:
        for mark, ahead, wanted in (
            ("=", True, True),
            ("!", True, False),
            ("<=", False, True),
            ("<!", False, False),
        ):
            if self.take(mark):
                return lambda found: Look(found, ahead, wanted)
        if self.take("P<") or self.take("<"):
            name, end, _ = self.text[self.at :].partition(">")
            if not end or not name.replace("$", "_").isidentifier():
                raise WrongPattern("has a group whose name has no end")
            self.at += len(name) + 1
            return lambda found: found
        raise Unsupported("a group of another kind")

    def escape(self) -> Node:
        c = self.next()
        if c in "bB":
            raise Unsupported("a word's boundary")
        if c == "A" or c in "zZ":
            return Edge(c == "A")
        if c in "123456789" or c == "k":
            raise Unsupported("a reference to a group")
        return Chars(self.folded(self.escaped(c)))

    def escaped(self, c: str) -> Characters:
        if c in _SETS:
            return _SETS[c]
        if c in "pP":
            return self.property(c == "P")
        if c == "c":
            letter = self.next()
            if not letter.isascii() or not letter.isalpha():
                raise WrongPattern(f"has \\c{letter}, expected a letter after \\c")
            return one(chr(ord(letter) % 32))
        if c in "xu":
            return one(chr(self.code(c)))
        if c in _CONTROLS:
            return one(chr(_CONTROLS[c]))
        if c.isalnum():
            raise WrongPattern(f"has \\{c}, which means nothing")
        return one(c)

    def code(self, kind: str) -> int:
        if self.take("{"):
            digits, end, _ = self.text[self.at :].partition("}")
            self.at += len(digits) + 1
        else:
            digits, end = self.text[self.at : self.at + (2 if kind == "x" else 4)], "}"
            self.at += 2 if kind == "x" else 4
            if len(digits) < (2 if kind == "x" else 4):
                end = ""
        if not end or not digits or set(digits) - set("0123456789abcdefABCDEF"):
            raise WrongPattern(f"has \\{kind}{digits}, expected hexadecimal digits")
        found = int(digits[:8], 16)
        if 0xD800 <= found < 0xDC00 and self.text[self.at : self.at + 2] == "\\u":
            self.at += 2
            found = 0x10000 + ((found - 0xD800) << 10) + (self.code("u") - 0xDC00)
        if found > LAST:
            raise WrongPattern(f"has \\{kind}{digits}, which is no character")
        return found

    def property(self, negated: bool) -> Characters:
        if self.take("{"):
            name, end, _ = self.text[self.at :].partition("}")
            if not end:
                raise WrongPattern("has \\p{ without its end")
            self.at += len(name) + 1
        else:
            name = self.next()
        found = _property(name)
        return others(found) if negated else found

    def set(self) -> Characters:
        negated, ranges = self.take("^"), list[tuple[int, int]]()
        while not self.take("]"):
            low = self.member()
            if self.peek("-") and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self.member()
                if _single(low) and _single(high):
                    if low.ranges[0][0] > high.ranges[0][0]:
                        raise WrongPattern("has a range that is out of order")
                    ranges.append((low.ranges[0][0], high.ranges[0][0]))
                    continue
                ranges += [(45, 45), *high.ranges]
            ranges += low.ranges
        found = self.folded(joined(ranges))
        return others(found) if negated else found

    def member(self) -> Characters:
        c = self.next()
        if c != "\\":
            return one(c)
        c = self.next()
        return one("\b") if c == "b" else one("-") if c == "-" else self.escaped(c)

    def folded(self, some: Characters) -> Characters:
        if not self.fold or sum(high - low for low, high in some.ranges) > 1000:
            return some
        codes = [c for low, high in some.ranges for c in range(low, high + 1)]
        same = {ord(x) for c in codes for x in (chr(c).lower(), chr(c).upper()) if len(x) == 1}
        return joined([*some.ranges, *((c, c) for c in same)])


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _single(some: Characters) -> bool:
    return len(some.ranges) == 1 and some.ranges[0][0] == some.ranges[0][1]


@lru_cache(maxsize=16)
def _property(name: str) -> Characters:
    key, _, value = name.rpartition("=")
    if key in ("Script", "sc", "Script_Extensions", "scx"):
        raise Unsupported(f"\\p{{{name}}}")
    value = _LONG.get(value, value)
    if name == "Alphabetic":
        return _having(lambda category: category in ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl"))
    if name in ("Any", "ASCII"):
        return joined([(0, LAST if name == "Any" else 127)])
    if value[:1] not in _CATEGORIES or len(value) > 2:
        raise Unsupported(f"\\p{{{name}}}")
    return _having(lambda category: category.startswith(value))


def _having(wanted: Callable[[str], bool]) -> Characters:
    return joined((low, high) for category, low, high in _categories() if wanted(category))


@lru_cache(maxsize=1)
def _categories() -> list[tuple[str, int, int]]:
    """Runs of characters of one category, found without a loop over a million of them."""
    every = list(map(unicodedata.category, map(chr, range(LAST + 1))))
    ends = [*compress(range(LAST), map(ne, every, every[1:])), LAST]
    return [(every[end], last + 1, end) for last, end in pairwise([-1, *ends])]
