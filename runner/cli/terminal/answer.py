"""An answer on the screen while it is generated: plain, or as Markdown on a terminal."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

SHORTEST = 8  # tokens: shorter circles count as one of these
LONGEST, TIMES, LEAST = 160, 4, 64  # of a cycle that ends an answer of a chat: see `circle`


class AnswerOutput(Protocol):
    """Receives the text of an answer piece by piece: a Protocol."""

    def write(self, text: str) -> None:
        """Show more text."""


@contextlib.contextmanager
def open_answer(*, plain: bool = False) -> Iterator[AnswerOutput]:
    """Open an AnswerOutput on standard output; non-empty text always ends with a line break."""
    styled = sys.stdout.isatty() and not plain and not os.environ.get("NO_COLOR")
    answer = _Markdown() if styled else _Plain()
    try:
        yield answer
    finally:
        answer.close()


class _Plain:
    """Writes text unchanged; on a terminal without control characters that could steer it."""

    def __init__(self) -> None:
        self._terminal, self._empty = sys.stdout.isatty(), True

    def write(self, text: str) -> None:
        self._empty = self._empty and not text
        sys.stdout.write(visible(text) if self._terminal else text)
        sys.stdout.flush()

    def close(self) -> None:
        sys.stdout.write("" if self._empty else "\n")
        sys.stdout.flush()


class _Markdown:
    """Writes Markdown; control characters of the answer are made visible."""

    def __init__(self) -> None:
        from tamis.cli.terminal.markdown import Markdown

        self._shown = Markdown()

    def write(self, text: str) -> None:
        self._shown.push(visible(text))
        sys.stdout.flush()

    def close(self) -> None:
        self._shown.close()
        sys.stdout.flush()


def visible(text: str) -> str:
    """The text with control characters, except tab and line break, replaced by their pictures."""
    table = {c: 0x2400 + c for c in range(0x20) if chr(c) not in "\t\n"}
    return text.translate(table | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), "\ufffd"))


def circle(tokens: Sequence[int]) -> int:
    """The period of a cycle at the end of an answer's tokens; 0: it does not go round in a circle.

    The cycle has at most LONGEST tokens and is there at least TIMES times, over at least LEAST
    tokens. Answers that repeat something on purpose, such as a table's rows, are seldom as regular.
    """
    longest = min(LONGEST, len(tokens) // TIMES)
    return _period(tokens, longest, lambda period: max((TIMES - 1) * period, LEAST - period))


def repetition(pieces: Sequence[Any], temp: float) -> str:
    """The hint that a greedy answer goes round in a circle, by its tokens; "" if it does not."""
    tokens = [piece.token_id for piece in pieces]
    if temp > 0 or len(tokens) < 3 * SHORTEST:
        return ""
    if _period(tokens, len(tokens) // 3, lambda period: max(2 * period, 2 * SHORTEST)):
        return "the answer repeats itself, as greedy ones do; a temperature may help"
    return ""


def _period(tokens: Sequence[int], longest: int, repeated: Callable[[int], int]) -> int:
    """The shortest period whose last repeated(period) tokens are those a period before; 0: none."""
    for period in range(1, longest + 1):
        n = repeated(period)
        if n + period > len(tokens) or tokens[-1] != tokens[-1 - period]:
            continue
        if tokens[-n:] == tokens[-n - period : -period]:
            return period
    return 0
