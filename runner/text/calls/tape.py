"""Text that arrives in pieces, for readers that are generators; each character is read once.

A generator yields while it needs more text. What a reader has taken can be kept, so that it becomes
text if it is not a call. Marks are plain texts: no expression here backtracks.
"""

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]

_SPACE = re.compile(r"\s*")  # one class of characters: nothing to go back over
_NAME = re.compile(r"[^\s<>{}\[\]()\"'`|,=;]*")
_KEY = re.compile(r"[^<>\"\n]*")
MAX_NAME = 256  # characters in the name of a tool or an argument


class _Marks(NamedTuple):
    pattern: re.Pattern[str] | None  # the longest mark at the first position that has one
    longest: int
    beginnings: frozenset[str]
    longer: frozenset[str]  # marks that are prefixes of other marks


@lru_cache(maxsize=256)
def _compiled(marks: tuple[str, ...]) -> _Marks:
    by_length = sorted({mark for mark in marks if mark}, key=len, reverse=True)
    return _Marks(
        re.compile("|".join(map(re.escape, by_length))) if by_length else None,
        len(by_length[0]) if by_length else 0,
        frozenset(mark[:n] for mark in by_length for n in range(1, len(mark))),
        frozenset(
            m for m in by_length for other in by_length if m != other and other[: len(m)] == m
        ),
    )


class Tape:
    """Text in pieces; ``last`` says that no more will come.

    Methods that are generators wait for as much text as they need to be sure, and return what does
    not depend on how the text was cut.
    """

    def __init__(self, text: str = "", *, last: bool = False):
        self.last = last
        self._text, self._at = text, 0
        self._kept: list[str] | None = None

    def push(self, text: str) -> None:
        """Append ``text``; what was taken is dropped."""
        self._text, self._at = self._text[self._at :] + text, 0

    # Keeping what is taken

    def keep(self, text: str = "") -> None:
        """Keep what is taken from here on, after ``text``."""
        self._kept = [text]

    def kept(self) -> str:
        """Return what was taken since `keep`, and end keeping."""
        text, self._kept = "".join(self._kept or ()), None
        return text

    @property
    def place(self) -> int:
        """Where the tape stands in what it keeps, for `back` and `between`."""
        return len(self._kept or ())

    def back(self, place: int) -> None:
        """Undo every `take` since ``place``."""
        assert self._kept is not None
        text = "".join(self._kept[place:])
        del self._kept[place:]
        if text == self._text[max(0, self._at - len(text)) : self._at]:
            self._at -= len(text)
        else:
            self.begin_again(text)

    def between(self, start: int, end: int) -> str:
        """What was taken between two places, and kept."""
        return "".join((self._kept or ())[start:end])

    def take(self, n: int) -> str:
        """Take ``n`` characters, which must have arrived."""
        taken = self._text[self._at : self._at + n]
        self._at += n
        if self._kept is not None and taken:
            self._kept.append(taken)
        return taken

    def put_back(self, mark: str) -> None:
        """Undo the last `take`, which was that of ``mark``."""
        self._at -= len(mark)
        if self._kept is not None:
            self._kept.pop()

    def begin_again(self, text: str) -> None:
        """Put ``text``, which was taken, back in front."""
        self._text, self._at = text + self._text[self._at :], 0

    @property
    def is_empty(self) -> bool:
        """Whether all text that has arrived was taken."""
        return self._at == len(self._text)

    def feed(self, read: Callable[[str, int], int]) -> None:
        """Take as much of the text as ``read`` returns, given a text and a position."""
        self.take(read(self._text, self._at) - self._at)

    # Reading

    def peek(self) -> Steps[str]:
        """The next character without taking it; "" at the end."""
        while self._at >= len(self._text) and not self.last:
            yield
        return self._text[self._at : self._at + 1]

    def space(self) -> Steps[str]:
        """Take all white space that comes next."""
        return (yield from self._run(_SPACE, None))

    def name(self) -> Steps[str]:
        """Take the characters of a name, MAX_NAME of them at most."""
        return (yield from self._run(_NAME, MAX_NAME + 1))

    def key(self) -> Steps[str]:
        """Take the characters of an argument's key: no mark begins within them."""
        return (yield from self._run(_KEY, MAX_NAME + 1))

    def _run(self, pattern: re.Pattern[str], most: int | None) -> Steps[str]:
        taken: list[str] = []
        n = 0
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None
            length = found.end() - found.start()
            length = length if most is None else min(length, most - n)
            taken.append(self.take(length))
            n += length
            if self._at < len(self._text) or self.last or n == most:
                return "".join(taken)
            yield

    def ahead(self, marks: Iterable[str]) -> Steps[str]:
        """The longest of ``marks`` that comes next, without taking it; "" if none does."""
        marks = [mark for mark in marks if mark]
        while not self.last and any(self._begins(mark) for mark in marks):
            yield
        there = (mark for mark in marks if self._text.startswith(mark, self._at))
        return max(there, key=len, default="")

    def _begins(self, mark: str) -> bool:
        """Whether the remaining text is a proper prefix of ``mark``."""
        n = len(self._text) - self._at
        return n < len(mark) and mark.startswith(self._text[self._at :])

    def mark(self, marks: Iterable[str]) -> Steps[str]:
        """Take the longest of ``marks`` that comes next; "" if none does."""
        found = yield from self.ahead(marks)
        return self.take(len(found))

    def upto(self, marks: Sequence[str], use: Callable[[str], Any], most: int = 0) -> Steps[str]:
        """Pass all text before the first of ``marks`` to ``use``; take and return the mark.

        "" at the end of the text, and, if ``most`` is given, after so many characters without a
        mark.
        """
        pattern, longest, beginnings, longer = _compiled(tuple(marks))
        n = 0
        while True:
            limit = self._at + most - n if most else len(self._text)
            found = pattern.search(self._text, self._at) if pattern else None
            if (
                found
                and not (most and found.start() >= limit)
                and (
                    self.last
                    or found[0] not in longer
                    or found.start() + longest <= len(self._text)
                )
            ):
                use(self.take(found.start() - self._at))
                return self.take(len(found[0]))
            end = len(self._text)
            if found:
                end = found.start()
            elif not self.last:
                end -= self._n_begun(longest, beginnings)
            end = min(end, limit)
            n += end - self._at
            use(self.take(end - self._at))
            if (self.last and self._at == len(self._text)) or 0 < most <= n:
                return ""
            yield

    def _n_begun(self, longest: int, beginnings: frozenset[str]) -> int:
        """The number of characters at the end that may begin a mark."""
        most = min(longest - 1, len(self._text) - self._at)
        end = len(self._text)
        return next((n for n in range(most, 0, -1) if self._text[end - n :] in beginnings), 0)
