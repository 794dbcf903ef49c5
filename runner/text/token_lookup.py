"""The tokens that begin at a position of a text: one lookup for each possible length."""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

_Text = TypeVar("_Text", str, bytes)
_HEAD = 3  # characters that determine the lengths to try


class TokenLookup(Generic[_Text]):
    """Texts, or bytes, none empty, and the number of each; of equal ones the last counts."""

    def __init__(self, items: Iterable[tuple[_Text, int]]):
        self._ids: dict[_Text, int] = dict(items)
        lengths: dict[Any, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:_HEAD], set()).add(len(text))
        for head in [*lengths]:  # a prefix of a head has its lengths, too
            for n in range(1, len(head)):
                lengths[head] |= {n} & lengths.get(head[:n], set())
        self._lengths: dict[Any, list[int]] = {head: sorted(ns) for head, ns in lengths.items()}

    def at(self, text: _Text, start: int) -> list[tuple[int, int]]:
        """The (end, token) of tokens in ``text`` at ``start``, the shortest first."""
        for n in range(_HEAD, 0, -1):
            lengths = self._lengths.get(text[start : start + n])
            if lengths is not None:
                break
        else:
            return []
        found = []
        for n in lengths:
            token = self._ids.get(text[start : start + n])
            if token is not None and start + n <= len(text):
                found.append((start + n, token))
        return found
