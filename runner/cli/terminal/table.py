"""Tables of records, as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from tamis.cli.terminal.answer import visible


def lines(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """A line for each row, below the titles.

    columns: key -> title, dropped if no row has the key.
    """
    used = [key for key in columns if any(key in row for row in rows)]
    cells = [[columns[key] for key in used]]
    cells += [[_shown(str(row.get(key, ""))) for key in used] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(used))]
    cells.insert(1, ["-" * width for width in widths])
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in cells)
    return [f"| {' | '.join(line)} |" for line in padded]


def _shown(text: str) -> str:
    """A cell on one line, even for a file name with control characters or invalid UTF-8."""
    plain = text.encode(errors="backslashreplace").decode()
    return visible(plain).replace("\n", "\u240a").replace("\t", "\u2409")
