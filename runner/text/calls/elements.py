"""Arguments in markup: MiniMax M3's elements within elements, and attributes of Kimi K3's tags.

An element's marks have a control token before them, ``mark``; values are written as they are. So a
closing mark ends an element only where another mark, or the end of the call, comes next. Closing
marks are listed once, and each element is tried once: the work is in proportion to the text.
"""

import json
from bisect import bisect_left

from tamis.text.calls.tape import MAX_NAME
from tamis.text.calls.values import Place

_MAX_DEPTH = 100


def attributes(text: str) -> dict[str, str]:
    """Return the attributes in ``text``, as ``tool="f" index="1"``; quotes and & are escaped."""
    parts = text.split('"')
    return {
        name.strip().removesuffix("="): value.replace("&quot;", '"').replace("&amp;", "&")
        for name, value in zip(parts[::2], parts[1::2], strict=False)
    }


def element_arguments(text: str, mark: str, place: Place) -> str | None:
    """Return the object whose members are the elements of ``text``, as JSON text.

    ``place`` has the schema of the object. None if anything but elements is there.
    """
    reader = _Elements(text, mark)
    found = reader.members(0, place, 0)
    if found is None or found[1] != len(text):
        return None
    return _object(found[0])


def _object(members: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in members) + "}"


class _Elements:
    def __init__(self, text: str, mark: str):
        self._text, self._mark = text, mark
        self._ends: dict[str, list[int]] = {}  # possible ends of elements, by their names
        at = text.find(mark + "</")
        while at >= 0:
            key, after = self._tag(at + len(mark) + 2)
            if key and (self._past_space(after) == len(text) or self._is_mark(after)):
                self._ends.setdefault(key, []).append(at)
            at = text.find(mark + "</", at + 1)

    def _past_space(self, at: int) -> int:
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        return at

    def _is_mark(self, at: int) -> bool:
        return self._text.startswith(self._mark + "<", self._past_space(at))

    def _tag(self, at: int) -> tuple[str, int]:
        """The name in a mark and the place after it; "" if there is none."""
        end = self._text.find(">", at, at + MAX_NAME + 1)
        key = self._text[at : max(end, at)]
        return ("", at) if not key.strip() or "<" in key or key[0] == "/" else (key, end + 1)

    def members(
        self, at: int, place: Place, depth: int
    ) -> tuple[list[tuple[str, str]], int] | None:
        """Elements from ``at`` on as names and JSON, and where they end; None if one is none."""
        found: list[tuple[str, str]] = []
        while True:
            at = self._past_space(at)
            if at == len(self._text) or self._text.startswith(self._mark + "</", at):
                return found, at
            if not self._is_mark(at):
                return None
            key, after = self._tag(at + len(self._mark) + 1)
            is_again = key != "item" and any(name == key for name, _ in found)
            value = None if is_again or not key else self._value(key, after, place, depth)
            if value is None:
                return None
            found.append((key, value[0]))
            at = value[1] + len(self._mark) + len(key) + 3

    def _value(self, key: str, at: int, outer: Place, depth: int) -> tuple[str, int] | None:
        """The value of element ``key`` as JSON, and where its closing mark stands."""
        place = outer.item() if key == "item" and "array" in outer.kinds else outer.member(key)
        kinds = place.kinds
        ends = self._ends.get(key, [])
        if self._is_mark(at) and depth < _MAX_DEPTH and (not kinds or kinds & {"array", "object"}):
            found = self.members(at, place, depth + 1)
            if found and found[0] and self._text.startswith(f"{self._mark}</{key}>", found[1]):
                members, end = found
                is_list = "array" in kinds or "object" not in kinds
                if is_list and all(name == "item" for name, _ in members):
                    return "[" + ", ".join(value for _, value in members) + "]", end
                return _object(members), end
        i = bisect_left(ends, at)
        if i == len(ends):
            return None
        text = self._text[at : ends[i]]
        if not text.strip() and kinds and "string" not in kinds:
            for kind, empty in (("array", "[]"), ("object", "{}")):
                if kind in kinds:
                    return empty, ends[i]
        return place.typed(text), ends[i]
