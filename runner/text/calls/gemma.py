"""Arguments of calls as Gemma 4 writes them: an object whose keys have no quotes.

Texts are between two marks that are tokens. Models also quote them as JSON and Python do, or not
at all; values without quotes take their types from the schema of the tool.
"""

import json
import re
from typing import Any

from tamis.text.calls.syntax import WORDS, Reader, once, refuse, whole
from tamis.text.calls.values import Place

_KEY = re.compile(r"[^:{}\[\],<>\"]+")
_PLAIN = re.compile(r"[^,\[\]{}<>\"]+")  # one class of characters: nothing to go back over
_UNKNOWN = Place(None, None)


def gemma_arguments(
    text: str, quote: str, place: Place = _UNKNOWN, *, lenient: bool = False
) -> dict[str, Any] | None:
    """Return the object ``{key:1,other:[...]}`` whose texts are between two ``quote``.

    ``place`` is the schema of the arguments. None if it is not complete. With ``lenient`` set, a
    comma or the marks of a text may be missing: a value ends where the next key that the schema
    names begins.
    """
    reader = _GemmaReader(text, quote)
    value = whole(reader, lambda: reader.value(0, place))
    if value is None and lenient:
        return _between_keys(text.strip(), quote, place)
    return value if isinstance(value, dict) else None


def _between_keys(text: str, quote: str, place: Place) -> dict[str, Any] | None:
    """The values between the keys that the schema names; None where one cannot be read."""
    keys = sorted(place.keys, key=len, reverse=True)
    if not keys or text[:1] != "{" or text[-1:] != "}":
        return None
    mark = re.escape(quote)
    names = "|".join(re.escape(key) for key in keys)
    before = re.compile(rf"(^|,|{mark})\s*(?:{mark}|[\"'])?({names})(?:{mark}|[\"'])?\s*:")
    inner, parts, begin = text[1:-1], dict[str, str](), 0
    key = ""
    for found in before.finditer(inner):
        if found[2] in parts or found[2] == key:
            continue
        if key:
            parts[key] = inner[begin : found.start()] + found[1].removeprefix(",")
        elif found.start():
            return None
        key, begin = found[2], found.end()
    if not key:
        return None
    parts[key] = inner[begin:]
    try:
        return {key: _part(part, quote, place.member(key)) for key, part in parts.items()}
    except ValueError:
        return None


def _part(text: str, quote: str, place: Place) -> Any:
    """The value that ``text`` is. Raises ValueError where it is none and the schema has no text."""
    reader = _GemmaReader(text, quote)
    try:
        value = reader.value(0, place)
        reader.skip()
        if reader.at == len(text):
            return value
    except ValueError:
        pass
    if "string" not in place.kinds:
        raise ValueError("neither a value nor a text")
    marked = text.strip()
    if marked.startswith(quote) or marked.endswith(quote):
        text = marked.removeprefix(quote).removesuffix(quote)
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text


class _GemmaReader(Reader):
    def __init__(self, text: str, quote: str):
        super().__init__(text)
        self._quote = quote

    def value(self, depth: int, place: Place = _UNKNOWN) -> Any:
        """Read one value."""
        self.skip()
        inner = self.deeper(depth)
        if self.took("{"):
            return once(self.items("}", lambda: self._member(inner, place)))
        if self.took("["):
            item = place.item()
            return self.items("]", lambda: self.value(inner, item))
        if self.took(self._quote):
            return self._string(self._quote)
        quoted = self._quoted(",}]")
        return self._plain(place) if quoted is None else quoted

    def _plain(self, place: Place) -> Any:
        """Read a value without quotes: text where the schema has text and no such value."""
        text = self.run(_PLAIN).strip()
        try:
            value = json.loads(text, parse_constant=refuse)
        except (ValueError, RecursionError):
            value = WORDS.get(text, text)
        if value is None or isinstance(value, str) or place.allows(value):
            return value
        return json.loads(place.typed(text, python=True))

    def _member(self, depth: int, place: Place) -> tuple[str, Any]:
        self.skip()
        if self.took(self._quote):
            key = self._string(self._quote, ":")
        else:
            quoted = self._quoted(":")
            key = self.run(_KEY).strip() if quoted is None else quoted
        self.skip()
        if not key or not self.took(":"):
            raise ValueError("no key")
        return key, self.value(depth, place.member(key))

    def _quoted(self, followers: str) -> str | None:
        """Read a text in the quotes of JSON or of Python; None if there is none."""
        start, quote = self.at, self.text[self.at : self.at + 1]
        if quote not in ("'", '"'):
            return None
        self.at += 1
        try:
            text = self._string(quote, followers)
        except ValueError:
            if quote == '"':
                raise
            self.at = start  # an apostrophe
            return None
        if quote == "'":
            return text.replace("\\'", "'")
        try:
            return str(json.loads(f'"{text}"', strict=False))
        except ValueError:
            return text

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
