"""What is written to the terminal: notes, progress, tables, answers and their Markdown."""

import sys


def printable(text: str) -> str:
    """A text that others wrote, for a terminal or a log: control characters as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def note(text: str) -> None:
    """A line for the person, on standard error."""
    sys.stderr.write(printable(text) + "\n")
