"""Text from token bytes: never half a character, never part of a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Decodes pieces of UTF-8 as they come and ends at the first stop string.

    `stopped` is the stop string that was met, or None.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if any(not s for s in stop):
            raise ValueError("a stop string is empty: every text would end at once")
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """The text that has become certain with this piece; empty after a stop."""
        return self._certain(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest: what was held back, with U+FFFD for bytes that never became a character."""
        text = self._certain(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _certain(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        found = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            # Of stop strings that start at the same place, the longest is the one reported.
            at, self.stopped = min(found, key=lambda f: (f[0], -len(f[1])))
            text, self._held = self._held[:at], ""
            return text
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
