"""Output to the terminal: notes, progress, tables, answers and their Markdown."""

import sys
import textwrap

from tamis.cli.terminal.progress import columns


def printable(text: str) -> str:
    """A foreign text, safe for a terminal or a log: control characters are escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def note(text: str) -> None:
    """Write a line for the user to standard error."""
    sys.stderr.write(printable(text) + "\n")


def say(text: str) -> None:
    """Write lines for a person to standard error, on a terminal broken between words.

    Where other programs may read them, and of commands that end with one, lines stay whole: `note`.
    """
    text = printable(text)
    if sys.stderr.isatty():
        text = "\n".join(map(_broken, text.split("\n")))
    sys.stderr.write(text + "\n")


def _broken(line: str) -> str:
    """A line in lines that the terminal does not break; a word that is too long stays whole."""
    width = columns()
    if len(line) <= width:
        return line
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
