r"""Parses GBNF into a tree for every rule, with llama.cpp's rules.

Escapes are \xNN, \uNNNN, \UNNNNNNNN, \t, \r, \n, \\, \", \[, \], \-. Among rules of the same name
the last one counts. Other than there, a line may begin with the | of the rule before it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from tamis.grammar.characters import LAST, Characters, joined, one, others
from tamis.grammar.errors import GrammarError
from tamis.grammar.trees import Chars, Either, Node, Row, Times

MOST_LEVELS = 100
MOST_TIMES = 2000  # a higher limit means no limit, as in llama.cpp
MOST_SYMBOLS = 100_000  # characters of texts, sets and other symbols; more take over 5 s
_HEX = {"x": 2, "u": 4, "U": 8}
_MARKS = {"t": "\t", "r": "\r", "n": "\n"} | {c: c for c in '\\"[]-'}
_NAME = re.compile(r"[A-Za-z0-9_-]++")
_UNESCAPED = re.compile(r'[^"\\]++')
_DIGITS = re.compile(r"[0-9]++")
_SPACE = re.compile(r"(?:[ \t]++|#[^\r\n]*+)*+")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+")
_ESCAPES = r"\xNN \uNNNN \UNNNNNNNN \t \r \n \\ \" \[ \] \-"
# Remedies of errors.
_IN_ONE_RULE = "a rule goes on in the next line only after or before |, or within ( )"
_TIMES = "write {m}, {m,} or {m,n}"
_IN_LITERAL = 'add ", and write a quotation mark within the text as \\"'
_IN_SET = "add ], and write a bracket within the set as \\]"
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


class Vocabulary(Protocol):
    """What a grammar that names tokens needs of a model: a Protocol."""

    n_vocab: int

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""

    def token(self, text: str) -> int | None:
        """The token that is exactly this text; None if it takes several."""


def parsed(text: str, vocabulary: Vocabulary | None) -> dict[str, Node]:
    """The trees of a grammar's rules by their names; vocabulary: resolves the tokens it names.

    Raises GrammarError with the line and the column of the error, what was found there, what was
    expected, and the remedy.
    """
    return _Parser(text, vocabulary).rules()


@lru_cache(maxsize=4096)
def _single(character: str) -> Node:
    return Chars(one(character))


class _Parser:
    def __init__(self, text: str, vocabulary: Vocabulary | None) -> None:
        self.text, self.at, self.level, self._vocabulary = text, 0, 0, vocabulary
        self._n_symbol = 0
        self._uses: dict[str, int] = {}  # where each rule is first referred to

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self.space(lines=True)
        while self.at < len(self.text):
            name = self.name()
            self.space(lines=False)
            if not self.take("::="):
                raise self.wrong(f"::= after the rule's name {name}", _IN_ONE_RULE)
            self.space(lines=True)
            found[name] = self.either(nested=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self.wrong("a symbol, | or the end of the line", self._stray())
            self.space(lines=True)
        for name, at in self._uses.items():
            if name not in found:
                self.at = at
                remedy = f'define it as "{name} ::= ...", or put the text {name} in quotation marks'
                raise self.wrong("the name of a rule of this grammar", remedy)
        if "root" not in found:
            names = ", ".join(list(found)[:5]) or "none"
            remedy = 'define one as "root ::= ...": the grammar begins there'
            raise GrammarError(f"grammar: its rules are {names}, expected one named root: {remedy}")
        return found

    def _stray(self) -> str:
        if self.peek() == ")":
            return "remove the ), or open it with ("
        return 'texts are in quotation marks, and comments begin with "#"'

    def place(self, at: int) -> str:
        """Line and column of a position, both from 1."""
        before = self.text[:at]
        return f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}"

    def wrong(self, expected: str, remedy: str) -> GrammarError:
        """The error at this position: the place, what is found, what is expected, the remedy."""
        here = self.text[self.at : self.at + 20]
        found = repr(here) if here else "the end of the grammar"
        place = self.place(self.at)
        return GrammarError(f"grammar: {place}: found {found}, expected {expected}: {remedy}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def space(self, *, lines: bool) -> None:
        self.skip(_SPACE_AND_LINES if lines else _SPACE)

    def skip(self, what: re.Pattern[str]) -> str:
        """Advance over what matches here, which may be nothing."""
        start, found = self.at, what.match(self.text, self.at)
        self.at = start if found is None else found.end()
        return self.text[start : self.at]

    def count(self, n: int = 1) -> None:
        """Count n more symbols. Raises GrammarError where there are too many."""
        self._n_symbol += n
        if self._n_symbol > MOST_SYMBOLS:
            remedy = "make it smaller, or write a set for alternatives of one character"
            raise self.wrong(f"at most {MOST_SYMBOLS} characters and symbols in all", remedy)

    def name(self) -> str:
        if not (found := self.skip(_NAME)):
            remedy = f"it has letters, digits, - and _; {_IN_ONE_RULE}"
            raise self.wrong("the name of a rule", remedy)
        return found

    def number(self, remedy: str) -> int:
        start, found = self.at, self.skip(_DIGITS)
        if not 1 <= len(found) <= 18:
            self.at = start
            raise self.wrong("a number of at most 18 digits", remedy)
        return int(found)

    def either(self, *, nested: bool) -> Node:
        parts = [self.row(nested=nested)]
        while self.alternative():
            self.space(lines=True)
            parts.append(self.row(nested=nested))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def alternative(self) -> bool:
        """Take the | of an alternative, which may begin a line: no rule begins so."""
        start = self.at
        self.space(lines=True)
        if self.take("|"):
            return True
        self.at = start
        return False

    def row(self, *, nested: bool) -> Node:
        parts: list[Node] = []
        while c := self.peek():
            if c in "*+?{":
                if not parts:
                    remedy = f"write what it repeats before it, or a literal {c} in quotation marks"
                    raise self.wrong(f"a symbol that {c} repeats", remedy)
                parts[-1] = Times(parts[-1], *self.times(nested))
            elif (part := self.part(c)) is not None:
                parts.append(part)
            else:
                break
            self.space(lines=nested)
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def part(self, c: str) -> Node | None:
        self.count()
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
        if _NAME.match(c):
            at = self.at
            name = self.name()
            self._uses.setdefault(name, at)
            return Reference(name)
        return None

    def group(self) -> Node:
        start, self.level = self.at, self.level + 1
        if self.level > MOST_LEVELS:
            remedy = "give an inner group a rule of its own"
            raise self.wrong(f"at most {MOST_LEVELS} groups within each other", remedy)
        self.at += 1
        self.space(lines=True)
        found = self.either(nested=True)
        if not self.take(")"):
            remedy = f"close the group that begins at {self.place(start)}"
            raise self.wrong("a symbol, | or )", remedy)
        self.level -= 1
        return found

    def times(self, nested: bool) -> tuple[int, int | None]:
        for mark, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(mark):
                return times
        start = self.at
        self.take("{")
        self.space(lines=nested)
        least = self.number(_TIMES)
        most: int | None = least
        self.space(lines=nested)
        if self.take(","):
            self.space(lines=nested)
            most = self.number(_TIMES) if self.peek() != "}" else None
            self.space(lines=nested)
        if not self.take("}"):
            raise self.wrong("} after the number of repetitions", _TIMES)
        if least > MOST_TIMES or (most is not None and most < least):
            self.at = start
            limits = f"{{m,n}} with m up to n and at most {MOST_TIMES}"
            raise self.wrong(limits, "for more, repeat a group that repeats")
        return least, None if most is None or most > MOST_TIMES else most

    def literal(self) -> Node:
        begin, found = self.at, list[Node]()
        self.at += 1
        while not self.take('"'):
            if run := self.skip(_UNESCAPED):
                self.count(len(run))
                found += map(_single, run)
            else:
                self.count()
                found.append(_single(self.character(begin, "a quotation mark", _IN_LITERAL)))
        return found[0] if len(found) == 1 else Row(tuple(found))

    def set(self) -> Node:
        begin = self.at
        self.at += 1
        negated, ranges = self.take("^"), list[tuple[int, int]]()
        while not self.take("]"):
            self.count()
            low = high = ord(self.character(begin, "a bracket", _IN_SET))
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = ord(self.character(begin, "a bracket", _IN_SET))
            ranges.append((low, high))
        if not ranges:
            return Row(())
        found = joined(pair for pair in ranges if pair[0] <= pair[1])
        return Chars(others(found) if negated else found)

    def character(self, begin: int, end: str, remedy: str) -> str:
        """The next character of a text or a set that begins there; end, remedy: if none is left."""
        c = self.peek()
        if not c:
            what = "text" if self.text[begin] == '"' else "set"
            raise self.wrong(f"{end} that ends the {what} begun at {self.place(begin)}", remedy)
        if c != "\\":
            self.at += 1
            return c
        kind = self.text[self.at + 1 : self.at + 2]
        if kind in _MARKS:
            self.at += 2
            return _MARKS[kind]
        if kind not in _HEX:
            raise self.wrong(f"one of the escapes {_ESCAPES}", "write a backslash itself as \\\\")
        n = _HEX[kind]
        digits = self.text[self.at + 2 : self.at + 2 + n]
        if len(digits) < n or set(digits) - set("0123456789abcdefABCDEF"):
            raise self.wrong(
                f"{n} hexadecimal digits after \\{kind}", "fill up with zeros in front"
            )
        if int(digits, 16) > LAST:
            raise self.wrong(f"a character of Unicode, at most {LAST:X}", "correct the digits")
        self.at += 2 + n
        return chr(int(digits, 16))

    def token(self) -> Node:
        start = self.at
        wanted = not self.take("!")
        if not self.take("<"):
            raise self.wrong("< after !", "! excludes a token: !<text> or !<[id]>")
        if self.take("["):
            token_id = self._token_of_number()
            if not self.take("]>"):
                raise self.wrong("]> after the number of a token", "write <[id]>")
            return Token(token_id, wanted)
        end = self.text.find(">", self.at)
        if end < 0:
            self.at = len(self.text)
            raise self.wrong(f"> after the token begun at {self.place(start)}", "write <text>")
        found = self._token_of_text(f"<{self.text[self.at : end]}>", start)
        self.at = end + 1
        return Token(found, wanted)

    def _token_of_number(self) -> int:
        start = self.at
        token_id = self.number("write <[id]>, or <text> by the token's text")
        if self._vocabulary is not None and token_id >= self._vocabulary.n_vocab:
            self.at = start
            remedy = "/tokenize returns the ids of a text"
            raise self.wrong(f"a token's id, 0 to {self._vocabulary.n_vocab - 1}", remedy)
        return token_id

    def _token_of_text(self, text: str, start: int) -> int:
        found = None if self._vocabulary is None else self._vocabulary.token(text)
        if found is None:
            self.at = start
            if self._vocabulary is None:
                remedy = "compile it with the tokenizer of a model, or write <[id]>"
                raise self.wrong("no token by its text without a vocabulary", remedy)
            remedy = "put a text in quotation marks, or name the token by <[id]>"
            raise self.wrong("one token of this model", remedy)
        return found
