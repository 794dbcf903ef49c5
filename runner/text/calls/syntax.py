"""Calls that are not written in JSON: Python's syntax (LFM2, Llama 4) and Gemma 4's objects.

Each character is read once. A quote ends a text only if what follows can follow a text, because
templates do not escape texts between quotes.
"""

import json
import re
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 100
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
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
_KEY = re.compile(r"[^:{}\[\],<>\"]+")
_GEMMA_PLAIN = re.compile(r"[^,\[\]{}<>\"]+")
_SPACE = re.compile(r"\s*")
_TEXT = re.compile(r"[^\\'\"]+")


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return names and arguments of ``[f(a=1), g()]``; None for anything else.

    Values are literals; also true, false and null are.
    """
    reader = _PythonReader(text)
    return _whole(reader, reader.calls)


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
    return _whole(reader, lambda: reader.value(0))


def gemma_arguments(text: str, quote: str) -> dict[str, Any] | None:
    """Return the object ``{key:1,other:[...]}`` whose texts are between two ``quote``.

    None if it is not complete.
    """
    reader = _GemmaReader(text, quote)
    value = _whole(reader, lambda: reader.value(0))
    return value if isinstance(value, dict) else None


def _whole(reader: "_Reader", read: Callable[[], Any]) -> Any:
    """The result of ``read``, if it reads the whole text."""
    try:
        value = read()
        reader.skip()
    except ValueError:
        return None
    return value if reader.at == len(reader.text) else None


class _Reader:
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

    def _deeper(self, depth: int) -> int:
        if depth >= _MAX_DEPTH:
            raise ValueError("nested too deeply")
        return depth + 1


class _PythonReader(_Reader):
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Read a list of calls, or one call."""
        self.skip()
        return self.items("]", self._call) if self.took("[") else [self._call()]

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self.run(_NAME)
        if not self.took("("):
            raise ValueError("no call")
        return name, dict(self.items(")", self._argument))

    def _argument(self) -> tuple[str, Any]:
        name = self.run(_PLAIN)
        self.skip()
        if not self.took("="):
            raise ValueError("an argument without a name")
        self.skip()
        return name, self.value(0, in_call=True)

    def value(self, depth: int, in_call: bool = False) -> Any:
        """Read a literal."""
        self.skip()
        inner = self._deeper(depth)
        for opening, closing in ("[]", "()"):
            if self.took(opening):
                return self.items(closing, lambda: self.value(inner))
        if self.took("{"):
            return dict(self.items("}", lambda: self._member(inner)))
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self._string(in_call)
        word = self.run(_PLAIN)
        return _WORDS[word] if word in _WORDS else _number(word)

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
                pieces.append(self._escape())
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

    def _escape(self) -> str:
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
        value = json.loads(word.lstrip("+"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ValueError(f"{word[:40]} is no literal") from None
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


class _GemmaReader(_Reader):
    def __init__(self, text: str, quote: str):
        super().__init__(text)
        self._quote = quote

    def value(self, depth: int) -> Any:
        """Read one value."""
        self.skip()
        inner = self._deeper(depth)
        if self.took("{"):
            return dict(self.items("}", lambda: self._member(inner)))
        if self.took("["):
            return self.items("]", lambda: self.value(inner))
        for quote in (self._quote, '"'):
            if self.took(quote):
                return self._string(quote)
        plain = self.run(_GEMMA_PLAIN).strip()
        try:
            return json.loads(plain, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return _WORDS.get(plain, plain)

    def _member(self, depth: int) -> tuple[str, Any]:
        self.skip()
        for quote in (self._quote, '"'):
            if self.took(quote):
                key = self._string(quote, ":")
                break
        else:
            key = self.run(_KEY).strip()
        self.skip()
        if not key or not self.took(":"):
            raise ValueError("no key")
        return key, self.value(depth)

    def _string(self, quote: str, followers: str = ",}]") -> str:
        start = self.at
        while True:
            end = self.text.index(quote, self.at)
            self.at = end + len(quote)
            here = self.at
            self.skip()
            if self.at == len(self.text) or self.text[self.at] in followers:
                self.at = here
                return self.text[start:end]
