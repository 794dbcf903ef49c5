"""Markdown on the terminal: what is shown, however it comes, and whatever happens to the window."""

import random
import re
import time

import pyte
import pytest

from tamis.cli.terminal.markdown import Markdown, display_width

TEXT = """\
# Title

Some **bold text**, *italic* and `code` in a paragraph longer than the line; 2 * 3 * 4 and
snake_case. Its next line.

1. First item that is long enough to be wrapped
2. Second **item**
   - nested *one*
- b **unclosed

```python
def f(x):
    return x ** 2
```

| name | value |
|---|---|
| a | **1** |
| bcd | 22 |

> quoted

---
End with a star *
"""
SHOWN = """\
Title

Some bold text, italic and code in a
paragraph longer than the line; 2 * 3 *
4 and snake_case. Its next line.

1. First item that is long enough to be
   wrapped
2. Second item
   • nested one
• b **unclosed

  def f(x):
      return x ** 2

name  value
a     1
bcd   22

│ quoted

───────────────────────────────────────
End with a star *
"""


def shown(pieces: list[str], width: int = 40) -> str:
    out: list[str] = []
    markdown = Markdown(out.append, lambda: width)
    for piece in pieces:
        markdown.push(piece)
    markdown.close()
    return "".join(out)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_marks_are_styles_and_what_is_no_mark_is_text() -> None:
    assert plain(shown([TEXT])) == SHOWN
    assert "\x1b[1mbold\x1b[0m" in shown([TEXT])
    assert all(display_width(line) < 40 for line in SHOWN.splitlines())


@pytest.mark.parametrize("seed", range(20))
def test_what_is_shown_does_not_depend_on_the_pieces(seed: int) -> None:
    draw, at, pieces = random.Random(seed), 0, []
    while at < len(TEXT):
        n = draw.randint(1, 1 + seed)
        pieces.append(TEXT[at : at + n])
        at += n
    assert shown(pieces) == shown([TEXT])


def test_words_are_shown_as_they_come() -> None:
    out: list[str] = []
    markdown = Markdown(out.append, lambda: 40)
    markdown.push("One two thr")
    assert plain("".join(out)) == "One two"


def test_no_line_is_printed_twice_when_the_window_narrows() -> None:
    """What was drawn anew had more lines in the narrow window than were taken away."""
    screen = pyte.HistoryScreen(60, 12, history=1000)
    stream, width = pyte.Stream(screen), [60]
    markdown = Markdown(lambda text: stream.feed(text.replace("\n", "\r\n")), lambda: width[0])
    words = [f"word{i}" for i in range(200)]
    for i, word in enumerate(words):
        if i == 100:
            width[0] = 24
            screen.resize(12, 24)
        markdown.push(word + " ")
    markdown.close()
    rows = ["".join(row[x].data for x in range(60)) for row in screen.history.top]
    text = "\n".join([*rows, *screen.display])
    found = re.findall(r"word\d+", text)
    assert len(found) == len(set(found))
    assert set(words[101:]) <= set(found)


def test_wide_characters_take_two_columns() -> None:
    lines = shown(["漢字 " * 10], 20).splitlines()
    assert all(display_width(line) < 20 for line in lines)
    assert sum(line.count("漢字") for line in lines) == 10


def test_showing_a_token_takes_microseconds() -> None:
    """3 % of a token's time at 300 tokens a second are 100 microseconds."""
    pieces = re.findall(r"\s*\S+", TEXT) * 20
    start = time.perf_counter()
    shown(pieces, 80)
    assert (time.perf_counter() - start) / len(pieces) < 200e-6
