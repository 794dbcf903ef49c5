r"""Parses GBNF into a tree for every rule, with llama.cpp's rules.

Escapes are \xNN, \uNNNN, \UNNNNNNNN, \t, \r, \n, \\, \", \[, \], \-. Among rules of the same name
the last one counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tamis.grammar.characters import LAST, Characters, joined, one, others
from tamis.grammar.errors import GrammarError
from tamis.grammar.trees import Chars, Either, Node, Row, Times

MOST_LEVELS = 100
MOST_TIMES = 2000  # a higher limit means no limit, as in llama.cpp
_HEX = {"x": 2, "u": 4, "U": 8}
_MARKS = {"t": "\t", "r": "\r", "n": "\n"} | {c: c for c in '\\"[]-'}
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_EVERY = Chars(Characters(((0, LAST),)))


@dataclass(frozen=True, slots=True)
class Reference(Node):
    """A reference to another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Token(Node):
    """One token of the vocabulary, or any token except it."""

    token_id: int
    wanted: bool = True


def parsed(text: str, token: Callable[[str], int]) -> dict[str, Node]:
    """The trees of a grammar's rules by their names; token: returns the id of a token's text.

    Raises GrammarError with the line and the column of the error.
    """
    return _Parser(text, token).rules()


class _Parser:
    def __init__(self, text: str, token: Callable[[str], int]) -> None:
        self.text, self.at, self.level, self._token = text, 0, 0, token

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        uses: dict[str, int] = {}
        self._uses = uses
        self.space(lines=True)
        while self.at < len(self.text):
            name = self.name()
            self.space(lines=False)
            if not self.take("::="):
                raise self.wrong("::=")
            self.space(lines=True)
            found[name] = self.either(nested=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self.wrong("the end of the line")
            self.space(lines=True)
        for name, at in uses.items():
            if name not in found:
                self.at = at
                raise self.wrong(f"a rule, there is none named {name}", shown=False)
        if "root" not in found:
            raise GrammarError("grammar: it has no rule named root, expected one to begin with")
        return found

    def wrong(self, expected: str, *, shown: bool = True) -> GrammarError:
        before = self.text[: self.at]
        line, column = before.count("\n") + 1, self.at - before.rfind("\n")
        here = self.text[self.at : self.at + 20]
        what = f"has {here!r}, expected" if here else "is the end, expected"
        what = what if shown else "expected"
        return GrammarError(f"grammar: line {line}, column {column} {what} {expected}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def space(self, *, lines: bool) -> None:
        while (c := self.peek()) and (c in " \t#" or (lines and c in "\r\n")):
            if c == "#":
                while self.peek() and self.peek() not in "\r\n":
                    self.at += 1
            else:
                self.at += 1

    def name(self) -> str:
        start = self.at
        while self.peek() and self.peek() in _NAME:
            self.at += 1
        if start == self.at:
            raise self.wrong("a rule's name")
        return self.text[start : self.at]

    def number(self) -> int:
        start = self.at
        while self.peek() and self.peek() in "0123456789":
            self.at += 1
        if start == self.at or self.at - start > 18:
            self.at = start
            raise self.wrong("a number")
        return int(self.text[start : self.at])

    def either(self, *, nested: bool) -> Node:
        parts = [self.row(nested=nested)]
        while self.take("|"):
            self.space(lines=True)
            parts.append(self.row(nested=nested))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def row(self, *, nested: bool) -> Node:
        parts: list[Node] = []
        while c := self.peek():
            if c in "*+?{":
                if not parts:
                    raise self.wrong(f"something before {c}")
                parts[-1] = Times(parts[-1], *self.times(nested))
            elif (part := self.part(c)) is not None:
                parts.append(part)
            else:
                break
            self.space(lines=nested)
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def part(self, c: str) -> Node | None:
        if c == '"':
            return self.literal()
        if c == "[":
            return self.set()
        if c in "<!":
            return self.token()
        if c == ".":
            self.at += 1
            return _EVERY
        if c == "(":
            return self.group()
        if c in _NAME:
            at = self.at
            name = self.name()
            self._uses.setdefault(name, at)
            return Reference(name)
        return None

    def group(self) -> Node:
        self.at, self.level = self.at + 1, self.level + 1
        if self.level > MOST_LEVELS:
            raise self.wrong(f"at most {MOST_LEVELS} groups in each other")
        self.space(lines=True)
        found = self.either(nested=True)
        if not self.take(")"):
            raise self.wrong(")")
        self.level -= 1
        return found

    def times(self, nested: bool) -> tuple[int, int | None]:
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(mark):
                return times
        start = self.at
        self.take("{")
        self.space(lines=nested)
        least = self.number()
        most: int | None = least
        self.space(lines=nested)
        if self.take(","):
            self.space(lines=nested)
            most = self.number() if self.peek() != "}" else None
            self.space(lines=nested)
        if not self.take("}"):
            raise self.wrong("}")
        if least > MOST_TIMES or (most is not None and most < least):
            self.at = start
            raise self.wrong(f"{{m,n}} with m up to n and at most {MOST_TIMES}")
        return least, None if most is None or most > MOST_TIMES else most

    def literal(self) -> Node:
        self.at += 1
        found: list[Node] = []
        while not self.take('"'):
            found.append(Chars(one(self.character())))
        return found[0] if len(found) == 1 else Row(tuple(found))

    def set(self) -> Node:
        self.at += 1
        negated, ranges = self.take("^"), list[tuple[int, int]]()
        while not self.take("]"):
            low = high = ord(self.character())
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = ord(self.character())
            ranges.append((low, high))
        if not ranges:
            return Row(())
        found = joined(pair for pair in ranges if pair[0] <= pair[1])
        return Chars(others(found) if negated else found)

    def character(self) -> str:
        c = self.peek()
        if not c:
            raise self.wrong("its end: a quotation mark or a bracket")
        self.at += 1
        if c != "\\":
            return c
        kind = self.peek()
        if kind in _MARKS and kind:
            self.at += 1
            return _MARKS[kind]
        if kind not in _HEX or not kind:
            self.at -= 1
            raise self.wrong(
                'one of the escapes \\xNN \\uNNNN \\UNNNNNNNN \\t \\r \\n \\\\ \\" \\[ \\] \\-'
            )
        digits = self.text[self.at + 1 : self.at + 1 + _HEX[kind]]
        if len(digits) < _HEX[kind] or set(digits) - set("0123456789abcdefABCDEF"):
            raise self.wrong(f"{_HEX[kind]} hexadecimal digits after \\{kind}")
        if int(digits, 16) > LAST:
            raise self.wrong("a character of Unicode")
        self.at += 1 + _HEX[kind]
        return chr(int(digits, 16))

    def token(self) -> Node:
        start = self.at
        wanted = not self.take("!")
        if not self.take("<"):
            raise self.wrong("a token in < >")
        if self.take("["):
            token_id = self.number()
            if not self.take("]>"):
                raise self.wrong("]> after the number of a token")
            return Token(token_id, wanted)
        name, end, _ = self.text[self.at :].partition(">")
        if not end:
            self.at = start
            raise self.wrong("a token in < >")
        self.at += len(name) + 1
        return Token(self._token(f"<{name}>"), wanted)
