"""Output to the terminal: notes, progress, tables, answers and their Markdown."""

import sys


def printable(text: str) -> str:
    """A foreign text, safe for a terminal or a log: control characters are escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def note(text: str) -> None:
    """Write a line for the user to standard error."""
    sys.stderr.write(printable(text) + "\n")
