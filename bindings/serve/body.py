"""A request's JSON object, read field by field; an ApiError names the field that is wrong."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from tamis.bindings.serve.errors import ApiError, invalid


def parse(data: bytes) -> "Body":
    """The object of a request. Raises ApiError."""
    try:
        found = loads(data)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no JSON: {what}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body is no JSON object", code="invalid_json")
    return Body(found)


# The largest body that is read in the server's process, unless it has a grammar: a stranger's text
# of more bytes must not reach the native code of the tokenizer there.
SMALL = 16 << 10


def small_fields(data: bytes) -> "Body":
    """The fields of a body of names and numbers, which is read in the event loop.

    Raises ApiError.
    """
    if len(data) > SMALL:
        raise ApiError(413, f"the body is above {SMALL} bytes", code="body_too_large")
    return parse(data)


def loads(data: bytes) -> Any:
    """A JSON value in UTF-8 whose texts can be encoded as UTF-8 again.

    JSON may escape half a surrogate pair, which is not a character: it becomes U+FFFD. Raises
    ValueError, RecursionError.
    """
    found = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    return writable(found) if _SURROGATE.search(data) else found


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # whole pairs match, too: they do not change
_HALF = re.compile("[\ud800-\udfff]")


def writable(value: Any) -> Any:
    """A JSON value in whose texts U+FFFD replaces each unpaired surrogate."""
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [writable(item) for item in value]
    if isinstance(value, dict):
        return {writable(name): writable(item) for name, item in value.items()}
    return value


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_PARTS = re.compile(f"({_PART.pattern})+", re.ASCII)
_LONGEST = 100  # the most characters of a duration
_FOR_EVER = 1e9  # in seconds, 31 years: a longer time has no end that a date could express


def seconds_of(value: Any) -> float:
    """The seconds for which a model stays loaded, as ollama writes them: "5m", "1h30m".

    Below 0: for ever.

    Raises ValueError.
    """
    expected = 'expected seconds, or a text such as "5m" or "1h30m"; -1 is for ever'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"keep_alive is {shown(value)}, {expected}")
    text = str(value).strip()
    if len(text) > _LONGEST:
        raise ValueError(f"keep_alive has {len(text)} characters, {expected}")
    try:
        seconds = float(text)
    except ValueError:
        unsigned = text.lstrip("+-")
        if len(text) - len(unsigned) > 1 or not _PARTS.fullmatch(unsigned):
            raise ValueError(f"keep_alive is {text[:40]!r}, {expected}") from None
        seconds = sum(float(n) * _UNITS[unit] for n, unit in _PART.findall(unsigned))
        seconds = -seconds if text.startswith("-") else seconds
    if math.isnan(seconds):
        raise ValueError(f"keep_alive is {text[:40]!r}, {expected}")
    return math.inf if seconds < 0 or seconds > _FOR_EVER else seconds


class Body:
    """Typed access to the fields; a field that is absent or null has its default."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The unchecked value of a field, None if it is absent."""
        self._read.add(name)
        return self.fields.get(name)

    def unread(self) -> list[str]:
        """The names of set fields that no method has read."""
        return [name for name, v in self.fields.items() if v is not None and name not in self._read]

    def flag(self, name: str) -> bool:
        """A boolean, False by default."""
        return bool(self.switch(name))

    def switch(self, name: str) -> bool | None:
        """A boolean; None if it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(f"{name} is {shown(value)}, expected true or false", name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number from low to high."""
        value = self.get(name)
        if value is None:
            return default
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, expected {low} to {high}", name)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from low to high; None if it is absent."""
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():  # some languages have only floats
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise invalid(f"{name} is {shown(value)}, expected {low} to {high}", name)
        return value

    def text(self, name: str) -> str | None:
        """A string; None if it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name} is {shown(value)}, expected a string", name)
        return value

    def texts(self, name: str, most: int, longest: int, least: int = 1) -> tuple[str, ...]:
        """A string or a list of up to `most`, of `least` to `longest` characters each."""
        value = self.get(name)
        found = [value] if isinstance(value, str) else value or []
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise invalid(f"{name} is {shown(value)}, expected strings", name)
        if len(found) > most or not all(least <= len(item) <= longest for item in found):
            limits = f"up to {most} strings of {least} to {longest} characters"
            raise invalid(f"{name} has {len(found)} strings, expected {limits}", name)
        return tuple(found)

    def record(self, name: str) -> dict[str, Any] | None:
        """An object; None if it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(f"{name} is {shown(value)}, expected an object", name)
        return value

    def records(self, name: str, most: int) -> list[dict[str, Any]]:
        """A list of up to `most` objects; empty if it is absent."""
        value = self.get(name)
        found: Sequence[Any] = [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise invalid(f"{name} is {shown(value)}, expected a list of objects", name)
        if len(found) > most:
            raise invalid(f"{name} has {len(found)} entries, expected at most {most}", name)
        return found


def shown(value: Any) -> str:
    """A value as a message shows it; strings and objects only as the name of their type."""
    if isinstance(value, str | list | dict):
        return {str: "a string", list: "a list", dict: "an object"}[type(value)]
    return json.dumps(value)
