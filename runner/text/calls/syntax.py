"""Calls in Python's syntax (LFM2, Llama 4), and the base of readers of such syntax.

Each character is read once. A quote ends a text only if what follows can follow a text, because
templates do not escape texts between quotes.
"""

import json
import re
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 100
WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_PLAIN = re.compile(r"[\w+\-.]+")  # one class of characters each: nothing to go back over
_NAME = re.compile(r"[\w.\-/]+")
_ARGUMENT = re.compile(r"[\w+\-./$@]+")  # also those of OData: $filter
_SPACE = re.compile(r"\s*")
_TEXT = re.compile(r"[^\\'\"]+")


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return names and arguments of ``[f(a=1), g()]``; None for anything else.

    Values are literals; also true, false and null are.
    """
    reader = _PythonReader(text)
    return whole(reader, reader.calls)


def json_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return names and arguments of objects with ``name`` and ``arguments``, one or a list.

    None for anything else.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(arguments, dict | None):
            return None
        found.append((call["name"], arguments or {}))
    return found


def python_value(text: str) -> Any:
    """Return the value of a literal that JSON can express; None for anything else."""
    reader = _PythonReader(text)
    return whole(reader, lambda: reader.value(0))


def unescaped(text: str) -> str:
    """Return ``text`` with Python's escapes read."""
    reader, pieces = _PythonReader(text), list[str]()
    while (at := text.find("\\", reader.at)) >= 0:
        pieces.append(text[reader.at : at])
        reader.at = at + 1
        pieces.append(reader.escape())
    return "".join([*pieces, text[reader.at :]])


def whole(reader: "Reader", read: Callable[[], Any]) -> Any:
    """Return the result of ``read`` if it reads the whole text, else None."""
    try:
        value = read()
        reader.skip()
    except ValueError:
        return None
    return value if reader.at == len(reader.text) else None


def once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object by their keys. Raises ValueError for a key that is twice."""
    found = dict(members)
    if len(found) < len(members):
        raise ValueError("a key is given twice")
    return found


class Reader:
    """A position in a text, and what is read from there on; errors are ValueErrors."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def skip(self) -> None:
        """Read white space."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def took(self, text: str) -> bool:
        """Read ``text`` if it comes next; return whether it did."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read and return characters of one class."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise ValueError(f"nothing to read at {self.at}")
        self.at = found.end()
        return found[0]

    def items(self, end: str, item: Callable[[], Any]) -> list[Any]:
        """Read items separated by commas, including ``end``."""
        found = []
        self.skip()
        while not self.took(end):
            found.append(item())
            self.skip()
            if not self.took(","):
                if not self.took(end):
                    raise ValueError(f"no comma at {self.at}")
                break
            self.skip()
        return found

    def value(self, depth: int) -> Any:
        """Read one value."""
        raise NotImplementedError

    def deeper(self, depth: int) -> int:
        """Return the depth of what is within this one."""
        if depth >= _MAX_DEPTH:
            raise ValueError("nested too deeply")
        return depth + 1


class _PythonReader(Reader):
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Read a list of calls, or one call."""
        self.skip()
        return self.items("]", self._call) if self.took("[") else [self._call()]

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self.run(_NAME)
        if not self.took("("):
            raise ValueError("no call")
        return name, once(self.items(")", self._argument))

    def _argument(self) -> tuple[str, Any]:
        name = self.run(_ARGUMENT)
        self.skip()
        if not self.took("="):
            raise ValueError("an argument without a name")
        self.skip()
        return name, self.value(0, in_call=True)

    def value(self, depth: int, in_call: bool = False) -> Any:
        """Read a literal."""
        self.skip()
        inner = self.deeper(depth)
        for opening, closing in ("[]", "()"):
            if self.took(opening):
                return self.items(closing, lambda: self.value(inner))
        if self.took("{"):
            return dict(self.items("}", lambda: self._member(inner)))
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self._string(in_call)
        word = self.run(_PLAIN)
        return WORDS[word] if word in WORDS else _number(word)

    def _member(self, depth: int) -> tuple[str, Any]:
        key = self.value(depth)
        if isinstance(key, dict | list):
            raise ValueError("a key that is no literal")
        self.skip()
        if not self.took(":"):
            raise ValueError("no colon")
        return key if isinstance(key, str) else json.dumps(key), self.value(depth)

    def _string(self, in_call: bool) -> str:
        quote = self.text[self.at]
        quote = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        if quote[1:] and not self._has_end(quote):
            quote = quote[0]
        self.at += len(quote)
        pieces: list[str] = []
        while self.at < len(self.text):
            if self.took(quote):
                if quote[1:] or self._can_end(in_call):
                    return "".join(pieces)
                pieces.append(quote)
            elif self.took("\\"):
                pieces.append(self.escape())
            elif self.text[self.at] in "'\"":
                pieces.append(self.text[self.at])
                self.at += 1
            else:
                pieces.append(self.run(_TEXT))
        raise ValueError("a text without an end")

    def _has_end(self, quote: str) -> bool:
        """Whether three quotes begin a text: two quotes are an empty text."""
        return self.text.find(quote, self.at + 3) >= 0

    def _can_end(self, in_call: bool) -> bool:
        """Whether what follows can follow a text: in a call, its next argument or its end."""
        here = self.at
        try:
            self.skip()
            if self.at == len(self.text):
                return True
            if not in_call:
                return self.text[self.at] in ",]}):"
            if self.took(")"):
                self.skip()
                return self.text[self.at : self.at + 1] in ("", ",", "]")
            if not self.took(","):
                return False
            self.skip()
            found = _PLAIN.match(self.text, self.at, self.at + 256)
            self.at = found.end() if found else self.at
            self.skip()
            return found is not None and self.text[self.at : self.at + 1] == "="
        finally:
            self.at = here

    def escape(self) -> str:
        """Read what follows a backslash."""
        c = self.text[self.at : self.at + 1]
        self.at += 1
        if c in _HEX_DIGITS:
            digits = self.text[self.at : self.at + _HEX_DIGITS[c]]
            if len(digits) == _HEX_DIGITS[c] and all(d in "0123456789abcdefABCDEF" for d in digits):
                code = int(digits, 16)
                if code < 0x110000:
                    self.at += len(digits)
                    return chr(code)
        return _ESCAPES.get(c, "\\" + c)


def _number(word: str) -> Any:
    try:
        value = json.loads(word.lstrip("+"), parse_constant=refuse)
    except (ValueError, RecursionError):
        raise ValueError(f"{word[:40]} is no literal") from None
    return value


def refuse(constant: str) -> Any:
    """Raise ValueError for NaN and the infinities, which json.loads takes."""
    raise ValueError(f"{constant} is not JSON")
