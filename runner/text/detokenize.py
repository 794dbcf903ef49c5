"""Text of an answer while its tokens arrive: whole characters only, and no stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text that may be shown.

    ``stopped`` is the stop string that has ended the text, or None: the first to be complete. The
    text before it is returned; the stop string and everything after it is not.
    """

    def __init__(self, stop: Sequence[str] = ()):
        if isinstance(stop, str):
            raise TypeError(f"stop is a sequence of strings, got {stop!r}: write ({stop!r},)")
        if not all(stop):
            raise ValueError("an empty stop string would stop before the first token: leave it out")
        self.stopped: str | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, but possibly the beginning of a stop string
        self._n_hold = max(map(len, stop), default=1) - 1
        self._stop = tuple(stop)

    def push(self, piece: bytes) -> str:
        """Return the text that is certain after one more token; often "" at first.

        Bytes that are not UTF-8 become U+FFFD. After a stop string it is always "".
        """
        return self._emit(self._decoder.decode(piece), last=False)

    def finish(self) -> str:
        """Return what was held back; an incomplete character becomes U+FFFD."""
        return self._emit(self._decoder.decode(b"", True), last=True)

    def _emit(self, text: str, *, last: bool) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        found = [(self._held.index(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            # The first to be complete, however the text is divided into pieces; of those, the
            # longest.
            n, self.stopped = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
        else:
            n = len(self._held) if last else self._n_certain()
        out, self._held = self._held[:n], self._held[n:]
        return out

    def _n_certain(self) -> int:
        """The number of characters that cannot be part of an incomplete stop string."""
        n = len(self._held)
        for start in range(max(0, n - self._n_hold), n):
            tail = self._held[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return n
