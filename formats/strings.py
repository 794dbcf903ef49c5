"""A long list of strings as the file has them: a vocabulary as Python strings takes ten times that.

Strings behave as a list of str does, but each look makes the string anew.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

LENGTH = struct.Struct("<Q")  # before every string


class Strings(Sequence[str]):
    """Strings of bytes that may not be UTF-8: what is not is surrogate escapes.

    data: each string after its length, one behind the other. starts: int64 [n + 1], where each
    begins, after its length; the last is where the next one would.
    """

    def __init__(self, data: bytes, starts: np.ndarray) -> None:
        self._data, self._starts = data, starts

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Strings":
        """Strings of these texts."""
        raws = [text.encode("utf-8", "surrogateescape") for text in texts]
        data = b"".join(LENGTH.pack(len(raw)) + raw for raw in raws)
        return cls(data, np.cumsum([LENGTH.size, *(len(raw) + LENGTH.size for raw in raws)]))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index).decode(errors="surrogateescape")

    def raw(self, index: int) -> bytes:
        """The bytes of a string. Raises IndexError."""
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"string {index} of {n}")
        index %= n
        return self._data[self._starts[index] : self._starts[index + 1] - LENGTH.size]

    def __iter__(self) -> Iterator[str]:
        return (raw.decode(errors="surrogateescape") for raw in self.raws())

    def raws(self) -> Iterator[bytes]:
        """The bytes of all strings, in order."""
        data, start = self._data, LENGTH.size
        for begin in self._starts[1:].tolist():
            yield data[start : begin - LENGTH.size]
            start = begin

    def last(self, text: str) -> int | None:
        """The last index of a text, None where there is none; the others are not decoded."""
        raw = text.encode("utf-8", "surrogateescape")
        wanted, end = LENGTH.pack(len(raw)) + raw, len(self._data)
        while (at := self._data.rfind(wanted, 0, end)) >= 0:
            start = at + LENGTH.size
            index = int(np.searchsorted(self._starts, start))
            if self._starts[index] == start:
                return index
            end = at + len(wanted) - 1
        return None

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.last(text) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | Strings) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
