"""A long list of strings as the file stores them: Python strings would take ten times the memory.

It behaves like a list of str, but each access makes the string anew.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

LENGTH = struct.Struct("<Q")  # before every string


class Strings(Sequence[str]):
    """Strings of bytes; invalid UTF-8 becomes surrogate escapes.

    data: each string after its length, one after another. starts: int64 [n + 1], the offset of each
    string's bytes; the last one is that of a string after the end.
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

    def __repr__(self) -> str:
        return f"<{len(self)} Strings>"

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

    def places(self, texts: Iterable[str]) -> dict[str, int]:
        """The last index of each text in the list; strings with other first bytes are skipped."""
        wanted = {text.encode("utf-8", "surrogateescape"): text for text in texts}
        sizes = np.diff(self._starts) - LENGTH.size
        # The first byte at an empty string's offset belongs to another one, or is past the end.
        at = np.minimum(self._starts[:-1], max(0, len(self._data) - 1))
        first = np.frombuffer(self._data or b"\0", np.uint8)[at]
        like = np.isin(first, [raw[0] for raw in wanted if raw])
        like = like & (sizes > 0) | (sizes == 0) & (b"" in wanted)
        found = ((i, self.raw(i)) for i in np.flatnonzero(like).tolist())
        return {wanted[raw]: i for i, raw in found if raw in wanted}

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and text in self.places([text])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | Strings) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
