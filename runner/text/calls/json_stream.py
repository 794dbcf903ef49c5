"""JSON while it is generated: one object, read once, and the values of some of its keys."""

import re
from collections.abc import Callable

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')  # one class of characters: nothing to go back over
_SCALAR = re.compile(r"[\w+\-.]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_SPACES = frozenset(" \t\n\r")  # JSON's own
_CONTROL = {chr(c): f"\\u{c:04x}" for c in range(32)} | {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_HEX = frozenset("0123456789abcdefABCDEF")
MAX_DEPTH = 200  # of brackets within one another

Path = tuple[str, ...]


class ObjectReader:
    """Reads one object from its brace on; ``feed`` it text until ``done`` or ``failed``.

    ``values`` has the complete values at the paths that ``watched`` is true of, each as JSON text,
    and ``keys`` the object's own keys so far. What models write besides JSON is mended in them:
    line breaks within strings, escapes and white space that JSON has not, and True, False and None.
    Anything else fails at once, and the character that is wrong is not read.
    """

    def __init__(self, watched: Callable[[Path], bool], *, whole: bool = False):
        self.done = self.failed = False
        self.values: dict[Path, str] = {}
        self.keys: list[str] = []
        self._watched = watched
        self._state = self._before_value
        self._is_first = True  # whether nothing was read within the innermost brackets
        self._stack: list[str] = []  # of open brackets
        self._path: list[str] = []  # keys of the enclosing objects; arrays have ""
        self._scalar: list[str] = []
        self._key: list[str] | None = None  # pieces of the key being read
        self._escape = ""  # an incomplete escape
        self._captured: list[str] | None = [] if whole else None
        self._capture_depth = 0

    @property
    def text(self) -> str:
        """The object, repaired, if it is read as a ``whole``."""
        return self.values[()]

    @property
    def begun(self) -> str:
        """The text so far of a watched value that is incomplete; "" for others."""
        return "".join(self._captured or ())

    def feed(self, text: str, at: int) -> int:
        """Continue reading in ``text`` from ``at``.

        Return the end of the object, or of the text.
        """
        while at < len(text) and not self.done and not self.failed:
            at = self._state(text, at)
        return at

    def _add(self, piece: str) -> None:
        if self._captured is not None:
            self._captured.append(piece)
        if self._key is not None:
            self._key.append(piece)

    def _add_space(self, c: str) -> None:
        self._add(c if c in _SPACES else " ")

    # States: each reads something at a position, and returns its end

    def _before_value(self, text: str, at: int) -> int:
        c = text[at]
        if c.isspace():
            self._add_space(c)
        elif c == "]" and self._stack[-1:] == ["["] and self._is_first:
            self._close(c)
        elif self._stack or c == "{":
            return self._value(text, at)
        else:
            self.failed = True
            return at
        return at + 1

    def _value(self, text: str, at: int) -> int:
        c = text[at]
        if not (c in '{["-' or c.isalnum()):
            self.failed = True
            return at
        path = tuple(self._path)
        if self._captured is None and path and "" not in path and self._watched(path):
            self._captured, self._capture_depth = [], len(self._stack)
        if c in "{[":
            self._open(c)
        elif c == '"':
            self._add(c)
            self._state = self._in_string
        else:
            self._state = self._in_scalar
            return at
        return at if self.failed else at + 1

    def _open(self, c: str) -> None:
        if len(self._stack) == MAX_DEPTH:
            self.failed = True
            return
        self._stack.append(c)
        self._path.append("")
        self._is_first = True
        self._add(c)
        self._state = self._before_key if c == "{" else self._before_value

    def _before_key(self, text: str, at: int) -> int:
        c = text[at]
        if c.isspace():
            self._add_space(c)
        elif c == '"':
            self._key = []
            self._add(c)
            self._state = self._in_string
        elif c == "}" and self._is_first:
            self._close(c)
        else:
            self.failed = True
            return at
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text, at)
        run = _IN_STRING.match(text, at)
        if run is not None:
            self._add(run[0])
            return run.end()
        c = text[at]
        if c == "\\":
            self._escape = c
        elif c == '"':
            self._add(c)
            self._end_string()
        else:
            self._add(_CONTROL[c])
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        c, self._escape = text[at], self._escape + text[at]
        if len(self._escape) == 2 and c != "u":
            if c in _ESCAPES:
                self._add(self._escape)
            elif c in _CONTROL:
                self._add("\\\\" + _CONTROL[c])
            else:
                self._add(c if c == "'" else "\\\\" + c)
        elif len(self._escape) > 2 and c not in _HEX:
            self._add("\\" + self._escape[:-1])
            self._escape = ""
            return at
        elif len(self._escape) < 6:
            return at + 1
        else:
            self._add(self._escape)
        self._escape = ""
        return at + 1

    def _end_string(self) -> None:
        if self._key is None:
            self._end_value()
            return
        key, self._key = "".join(self._key)[1:-1], None
        self._path[-1] = key
        if len(self._stack) == 1:
            self.keys.append(key)
        self._state = self._before_colon

    def _before_colon(self, text: str, at: int) -> int:
        c = text[at]
        if c != ":" and not c.isspace():
            self.failed = True
            return at
        if c == ":":
            self._add(c)
            self._state = self._before_value
        else:
            self._add_space(c)
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        run = _SCALAR.match(text, at)
        if run is not None:
            self._scalar.append(run[0])
            if run.end() == len(text):
                return run.end()  # it may continue in the next piece
            at = run.end()
        written = "".join(self._scalar)
        word = _WORDS.get(written) or _PYTHON_WORDS.get(written)
        if word is None and not _NUMBER.fullmatch(written):
            self.failed = True
            return at
        self._scalar = []
        self._add(word or written)
        self._end_value()
        return at

    def _end_value(self) -> None:
        self._is_first = False
        self._state = self._after_value
        if self._captured is not None and self._capture_depth == len(self._stack):
            self.values[tuple(self._path)] = "".join(self._captured)
            self._captured = None
        self.done = not self._stack

    def _after_value(self, text: str, at: int) -> int:
        c = text[at]
        if c.isspace():
            self._add_space(c)
        elif c == ",":
            self._add(c)
            self._state = self._before_key if self._stack[-1] == "{" else self._before_value
        elif c == ("}" if self._stack[-1] == "{" else "]"):
            self._close(c)
        else:
            self.failed = True
            return at
        return at + 1

    def _close(self, c: str) -> None:
        self._add(c)
        self._stack.pop()
        self._path.pop()
        self._end_value()
