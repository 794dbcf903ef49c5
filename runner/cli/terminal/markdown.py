"""Markdown on a terminal while it is generated: every character is printed once, never again.

So nothing is redrawn when the window changes, and showing costs no more than printing. Words are
wrapped once they are complete. A mark that opens bold, italic or code is held back until its
closing mark has come or its line is over, as only then it is known to be one. Tables are held back
until they end.
"""

import os
import re
import sys
import unicodedata
from collections.abc import Callable

BOLD, ITALIC, CODE, HEAD, DIM, RESET = (
    "\x1b[1m", "\x1b[3m", "\x1b[36m", "\x1b[1;4m", "\x1b[2m", "\x1b[0m",
)  # fmt: skip
HELD = 120  # characters of a span that are held back at most
_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_HEADING = re.compile(r"(#{1,6})\s+")
_ITEM = re.compile(r"(\s*)([-*+]|\d{1,9}[.)])\s+")
_QUOTE = re.compile(r"\s{0,3}>\s?")
_RULE = re.compile(r"\s{0,3}([-*_])(\s*\1){2,}\s*$")
# What is held back: a line that may become a list, a heading or a rule, and a fence or table.
_OPEN = re.compile(r"[-*+>#`~_\s]*$|\s*\d{1,9}[.)]?\s*$|\s*(```|~~~|\|)")
_SPAN = re.compile(r"(\*\*|__|`+|\*|_)")


class Markdown:
    """Writes pieces of Markdown as text with escape sequences."""

    def __init__(
        self,
        write: Callable[[str], object] | None = None,
        width: Callable[[], int] | None = None,
    ) -> None:
        self._write = write or sys.stdout.write
        self._width = width or columns
        self._line = ""  # the part of the source's open line that is not shown yet
        self._begun = False  # whether the open line's kind is known
        self._fence, self._table = "", list[str]()
        self._indent, self._style = "", ""
        self._column, self._word = 0, ""
        self._blank = True  # whether the last line shown was empty, or none was shown

    def push(self, text: str) -> None:
        """Show more."""
        self._line += text
        while "\n" in self._line:
            line, self._line = self._line.split("\n", 1)
            self._end_line(line)
        if self._line and not self._fence and not self._begun and not _OPEN.match(self._line):
            self._begin()
        if self._begun:
            self._line = self._inline(self._line, last=False)

    def close(self) -> None:
        """Show what was held back; the cursor is then at the start of a line."""
        if self._line or self._begun:
            line, self._line = self._line, ""
            self._end_line(line)
        self._end_table()
        self._break()

    def _end_line(self, line: str) -> None:
        fence = _FENCE.match(line)
        if self._fence:
            if fence and fence[1].startswith(self._fence) and not line.strip(" `~"):
                self._fence = ""
            else:
                self._print(f"  {CODE}{line}{RESET}" if line else "")
            return
        if not self._begun:
            if fence:
                self._end_table()
                self._break()
                self._fence = fence[1]
                return
            if line.lstrip().startswith("|"):
                self._break()
                self._table.append(line.strip())
                return
            self._end_table()
            if not line.strip():
                self._break()
                self._indent = ""
                if not self._blank:
                    self._print("")
                return
            if _RULE.match(line):
                self._break()
                self._print(DIM + "─" * min(self._width() - 1, 40) + RESET)
                return
            self._line, rest = line, self._line
            self._begin()
            line, self._line = self._line, rest
        self._inline(line, last=True)
        self._flush()
        if self._style:
            self._write(RESET)
            self._break()
        elif line.endswith("  "):
            self._break()
        elif self._column:  # a paragraph continues: a line break of the source is a space
            self._space()
        self._begun, self._style = False, ""

    def _begin(self) -> None:
        """Consume the marks at a line's start, and show what they stand for."""
        self._end_table()
        self._begun = True
        if found := _HEADING.match(self._line):
            self._break()
            self._style = HEAD
            self._write(HEAD)
        elif found := _ITEM.match(self._line):
            self._break()
            mark = found[2] if found[2][0].isdigit() else "•"
            self._start(f"{found[1]}{mark} ")
        elif found := _QUOTE.match(self._line):
            self._break()
            self._start("│ ")
        if found is not None:
            self._line = self._line[found.end() :]

    def _start(self, mark: str) -> None:
        self._write(mark)
        self._column, self._indent, self._blank = display_width(mark), " " * len(mark), False

    def _inline(self, text: str, *, last: bool) -> str:
        """Show text with its spans; returns the part that must wait for more."""
        while text:
            mark = _SPAN.search(text)
            if mark is None:
                self._text(text, "")
                return ""
            self._text(text[: mark.start()], "")
            text = text[mark.start() :]
            if not last and len(text) == len(mark[0]):
                return text  # the mark may be longer by the next character
            if not self._opens(text, mark[0]):
                self._text(mark[0], "")
                text = text[len(mark[0]) :]
                continue
            end = self._closing(text, mark[0])
            if end < 0 and not last and len(text) < HELD:
                return text
            if end < 0 or (not last and end + len(mark[0]) == len(text)):
                if end >= 0:
                    return text
                self._text(mark[0], "")
                text = text[len(mark[0]) :]
                continue
            inner = text[len(mark[0]) : end]
            style = {"`": CODE, "*": ITALIC, "_": ITALIC}[mark[0][0]]
            self._text(inner, BOLD if mark[0] in ("**", "__") else style)
            text = text[end + len(mark[0]) :]
        return ""

    def _opens(self, text: str, mark: str) -> bool:
        after = text[len(mark) : len(mark) + 1]
        if mark[0] == "`":
            return True
        inside = mark[0] == "_" and (self._word[-1:].isalnum())
        return bool(after) and not after.isspace() and not inside

    def _closing(self, text: str, mark: str) -> int:
        at = text.find(mark, len(mark))
        while at >= 0 and mark[0] != "`" and (text[at - 1].isspace() or _runs_on(text, at, mark)):
            at = text.find(mark, at + len(mark) + 1)
        return at

    def _text(self, text: str, style: str) -> None:
        """Print words, wrapped; a style holds for all of them."""
        for part in re.split(r"(\s+)", text):
            if not part:
                continue
            if part.isspace():
                self._flush()
                self._space()
            else:
                restored = f"{RESET}{self._style}" if style else ""
                self._word += f"{style}{part}{restored}"

    def _space(self) -> None:
        if self._column > len(self._indent):
            self._word = " "

    def _flush(self) -> None:
        """Print the complete word, on the next line if this one has no room."""
        n = display_width(self._word)
        if self._column + n >= self._width() and self._column > len(self._indent):
            self._write("\n" + self._indent)
            self._column = len(self._indent)
            self._word = self._word.lstrip(" ")
            n = display_width(self._word)
        if self._word.strip(" ") or not self._word:
            self._write(self._word)
            self._column += n
            self._blank = self._blank and not self._word
            self._word = ""

    def _break(self) -> None:
        """Begin a new line unless the cursor is at the start of one."""
        if self._word.strip():
            self._flush()
        self._word = ""
        if self._column:
            self._write("\n")
            self._column = 0
        self._begun = False

    def _print(self, line: str) -> None:
        self._write(line + "\n")
        self._blank = not line

    def _end_table(self) -> None:
        """Print the rows that were held back, in columns if the terminal has room."""
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in self._table]
        self._table = []
        if not rows:
            return
        ruled = len(rows) > 1 and all(set(cell) <= set("-: ") and cell for cell in rows[1])
        body = rows[:1] + rows[2:] if ruled else rows
        n = max(map(len, body))
        cells = [[re.sub(r"\*\*|`", "", c) for c in row] + [""] * (n - len(row)) for row in body]
        widths = [max(display_width(row[i]) for row in cells) for i in range(n)]
        for i, row in enumerate(cells):
            padded = [c + " " * (w - display_width(c)) for c, w in zip(row, widths, strict=True)]
            line = "  ".join(padded).rstrip()
            if sum(widths) + 2 * n > self._width():
                line = " | ".join(row)
            self._print(f"{BOLD}{line}{RESET}" if ruled and i == 0 else line)


def _runs_on(text: str, at: int, mark: str) -> bool:
    """Whether a mark is part of a longer one, such as the star of two stars."""
    return len(mark) == 1 and text[at + 1 : at + 2] == mark


def display_width(text: str) -> int:
    """The columns that a text takes; escape sequences take none."""
    if text.isascii() and "\x1b" not in text:
        return len(text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in plain
    )


def columns() -> int:
    """The current columns of the terminal of standard output."""
    try:
        n = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        n = 0
    return max(n or 80, 8)
