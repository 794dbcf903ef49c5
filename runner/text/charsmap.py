"""SentencePiece's precompiled map of characters: sequences, and their replacements.

The map is a double array (Aoe 1989; the layout is that of the library Darts-clone) of 32-bit units,
followed by the replacements, each terminated by a zero byte.
"""

import struct

import numpy as np

_MAX_DEPTH = 256  # bytes of a sequence; real ones have fewer than twenty


class CharacterMap:
    """Reads the map of a file; ValueError if it is cut short or points outside of itself."""

    def __init__(self, blob: bytes):
        n_bytes = struct.unpack_from("<I", blob)[0] if len(blob) >= 4 else -1
        if n_bytes <= 0 or n_bytes % 4 or 4 + n_bytes >= len(blob):
            raise ValueError(
                f"precompiled_charsmap of {len(blob)} bytes does not hold the {n_bytes} bytes of "
                "units that it says"
            )
        self._units = np.frombuffer(blob, "<u4", n_bytes // 4, 4).tolist()
        self._texts = blob[4 + n_bytes :]
        # Bytes that begin a sequence: all others are unchanged.
        root = self._base(0)
        self._first = {c for c in range(1, 256) if self._child(root ^ c, c) is not None}

    def _unit(self, index: int) -> int:
        if index >= len(self._units):
            raise ValueError("precompiled_charsmap points outside of itself")
        return self._units[index]

    def _base(self, index: int) -> int:
        unit = self._unit(index)
        return (unit >> 10) << ((unit & 0x200) >> 6)

    def _child(self, index: int, byte: int) -> int | None:
        return index if self._unit(index) & 0x800000FF == byte else None

    def apply(self, text: str) -> str:
        """Return ``text`` with the longest sequence at each position replaced."""
        out = bytearray()
        data, at = text.encode(), 0
        while at < len(data):
            if data[at] not in self._first:
                out.append(data[at])
                at += 1
                continue
            n, new = self._match(data, at)
            if n:
                out += new
            else:
                n = _n_bytes(data[at])
                out += data[at : at + n]
            at += n
        return out.decode("utf-8", "replace")

    def _match(self, data: bytes, at: int) -> tuple[int, bytes]:
        """The length of the longest sequence at a position, and its replacement.

        0 if there is none.
        """
        found = (0, b"")
        index = self._base(0)
        for n in range(1, min(_MAX_DEPTH, len(data) - at) + 1):
            byte = data[at + n - 1]
            index ^= byte
            if byte == 0 or self._child(index, byte) is None:
                break
            is_leaf = self._unit(index) >> 8 & 1
            index ^= self._base(index)
            if is_leaf:
                found = (n, self._text(self._unit(index) & 0x7FFFFFFF))
        return found

    def _text(self, start: int) -> bytes:
        end = self._texts.find(b"\0", start)
        if start >= len(self._texts) or end < 0:
            raise ValueError("precompiled_charsmap has a replacement outside of itself")
        return self._texts[start:end]


def _n_bytes(lead: int) -> int:
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
