"""JSON as it comes: the text of chosen values of one object, before the object is complete."""

import re
from typing import NamedTuple

_IN_STRING = re.compile(r'[^"\\]+')
_PLAIN = re.compile(r'[^"{}\[\],:\s]+')

Path = tuple[str, ...]


class Fragment(NamedTuple):
    """A part of the JSON text of the value at ``path``; ``last`` once it is complete."""

    path: Path
    text: str
    last: bool


class ObjectScanner:
    """Reads one object, from its brace on; each character is looked at once.

    ``watched`` are the paths of keys whose values are given out, "*" for any key. It accepts more
    than JSON: what is no JSON at all is for those to notice who use the values.
    """

    def __init__(self, watched: frozenset[Path]):
        self.done = False
        self._watched = watched
        self._stack: list[str] = []  # of open brackets
        self._keys: list[str] = []  # of the objects around
        self._key_next = False
        self._string = ""  # "key", "value" or none
        self._escaped = False
        self._key = ""
        self._captured: Path | None = None
        self._capture_depth = 0
        self._in_scalar = False

    def feed(self, text: str) -> tuple[int, list[Fragment]]:
        """Read ``text``; return how much of it belongs to the object, and what was found."""
        self._found: list[Fragment] = []
        at = 0
        while at < len(text) and not self.done:
            at = self._in(text, at) if self._string else self._out(text, at)
        return at, self._found

    def _add(self, text: str, *, last: bool = False) -> None:
        if self._captured is not None:
            self._found.append(Fragment(self._captured, text, last))
            if last:
                self._captured = None

    def _in(self, text: str, at: int) -> int:
        run = None if self._escaped else _IN_STRING.match(text, at)
        end = run.end() if run else at + 1
        piece = text[at:end]
        closes = piece == '"' and not self._escaped
        self._escaped = piece == "\\" and not self._escaped
        if self._string == "key":
            self._key += piece
            self._add(piece)
        else:
            whole = closes and self._capture_depth == len(self._stack)
            self._add(piece, last=whole)
        if closes:
            self._string = ""
        return end

    def _out(self, text: str, at: int) -> int:
        c = text[at]
        if c.isspace():
            self._add(c)
            return at + 1
        if c in ",:}]":
            self._punctuation(c)
            return at + 1
        if c == '"' and self._key_next:
            self._string, self._key = "key", c
            self._add(c)
            return at + 1
        self._begin_value()
        if c == '"':
            self._string = "value"
        elif c in "{[":
            self._stack.append(c)
            self._keys.append("")
            self._key_next = c == "{"
        else:
            self._in_scalar = True
            run = _PLAIN.match(text, at)
            assert run is not None
            self._add(run[0])
            return run.end()
        self._add(c)
        return at + 1

    def _punctuation(self, c: str) -> None:
        if self._in_scalar and self._capture_depth == len(self._stack):
            self._add("", last=True)
        self._in_scalar = False
        if c == ":":
            self._key_next = False
            self._keys[-1:] = [self._key[1:-1]]
            self._add(c)
        elif c == ",":
            self._key_next = self._stack[-1:] == ["{"]
            self._add(c)
        else:
            self._stack[-1:] = []
            self._keys[-1:] = []
            self._key_next = False
            self._add(c, last=self._capture_depth == len(self._stack))
            self.done = not self._stack

    def _begin_value(self) -> None:
        if self._captured is not None or not self._stack or self._in_scalar:
            return
        path = tuple(self._keys)
        pattern = path if path in self._watched else ("*",) if len(path) == 1 else ()
        if pattern in self._watched and "[" not in self._stack:
            self._captured, self._capture_depth = path, len(self._stack)
