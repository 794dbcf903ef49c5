"""An answer on the screen while it is written: plain, or as Markdown where rich is installed."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol


class Answer(Protocol):
    """Takes the text of an answer piece by piece."""

    def write(self, text: str) -> None:
        """Show more text."""


@contextlib.contextmanager
def open_answer(*, plain: bool = False) -> Iterator[Answer]:
    """An Answer on standard output; where it has text it ends with a line break, come what may."""
    answer: Any = _Plain()
    if sys.stdout.isatty() and not plain:
        with contextlib.suppress(ImportError):
            answer = _Markdown()
    try:
        yield answer
    finally:
        answer.close()


class _Plain:
    """The text as it is; on a terminal without the escape characters that could steer it."""

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
    """Prints blocks for good once they are complete; only the last one is drawn anew.

    So an answer longer than the screen scrolls as any text does; of a block longer than the screen
    the end is seen until it is complete.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.markdown import Markdown

        self._render, self._open, self._drawn = Markdown, "", False
        self._live = Live(console=Console(), transient=True, refresh_per_second=8)
        self._live.start()

    def write(self, text: str) -> None:
        done, self._open = split_blocks(self._open + visible(text))
        if done.strip():
            self._live.console.print(self._render(done))
        # The first words are shown at once, what follows when the display is due.
        self._live.update(_End(self._render(self._open)), refresh=not self._drawn)
        self._drawn = True

    def close(self) -> None:
        self._live.stop()
        if self._open.strip():
            self._live.console.print(self._render(self._open))


class _End:
    """As many of the last lines of something as the terminal has room for."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for line in lines[-(console.height - 1) :]:
            yield from (*line, Segment.line())


def visible(text: str) -> str:
    """The text with control characters replaced by their pictures, but for tab and line break."""
    table = {c: 0x2400 + c for c in range(0x20) if chr(c) not in "\t\n"}
    return text.translate(table | {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), "\ufffd"))


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown cut after its last blank line outside a fence: (complete blocks, the open one)."""
    at = cut = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        mark = line.strip()
        if fence:
            fence = "" if mark.startswith(fence) and not mark.strip(fence[0]) else fence
        elif mark.startswith(("```", "~~~")):
            fence = mark[:3]
        elif not mark and line.endswith("\n"):
            cut = at
    return text[:cut], text[cut:]
