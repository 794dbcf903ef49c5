"""A document of headings, paragraphs, tables and plots, as Markdown and as one HTML page."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from tamis.platform.private_files import write_whole


class Table(NamedTuple):
    """A table: titles, and cells as text."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


class Plot(NamedTuple):
    """A plot, with the name of its file."""

    name: str
    svg: str


class Gallery(NamedTuple):
    """Plots next to each other."""

    plots: tuple[Plot, ...]


# Tables scroll on narrow screens; plots shrink.
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70em;margin:1em auto;padding:0 1em}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9em}"
    "td,th{border:1px solid #8886;padding:.2em .6em;text-align:left;white-space:nowrap}"
    "td:first-child,th:first-child{position:sticky;left:0;background:Canvas}"
    "h1{font-size:1.5em;line-height:1.25}code{font-size:.95em}"
    ".plots svg{max-width:100%;height:auto;margin:0 1em 1em 0}"
)
Block = str | Table | Gallery  # text that begins with "# " is a heading, other text a paragraph


def write_document(blocks: Sequence[Block], folder: Path) -> list[Path]:
    """Write report.md (its plots beside it) and report.html (all in one file) into the folder."""
    plot_folder = folder / "plots"
    plot_folder.mkdir(exist_ok=True)
    for plot in [plot for block in blocks if isinstance(block, Gallery) for plot in block.plots]:
        _write(plot_folder / f"{plot.name}.svg", plot.svg)
    files = {"report.md": markdown(blocks), "report.html": html(blocks)}
    for name, text in files.items():
        _write(folder / name, text)
    return [folder / name for name in files]


def markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown; plots are files in plots/."""
    parts = []
    for block in blocks:
        if isinstance(block, str):
            parts.append(block)
        elif isinstance(block, Table):
            lines = [block.titles, ["---"] * len(block.titles), *block.rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        else:
            parts.append("\n".join(f"![{p.name}](plots/{p.name}.svg)" for p in block.plots))
    return "\n\n".join(parts) + "\n"


def html(blocks: Sequence[Block]) -> str:
    """The blocks as one HTML page that needs no other file."""
    parts = []
    for block in blocks:
        if isinstance(block, str):
            level = len(block) - len(block.lstrip("#"))
            tag = f"h{level}" if level else "p"
            parts.append(f"<{tag}>{_inline(block[level:].strip())}</{tag}>")
        elif isinstance(block, Table):
            head = "".join(f"<th>{escape(title)}</th>" for title in block.titles)
            body = "".join(
                f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>\n"
                for row in block.rows
            )
            parts.append(f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>')
        else:
            parts.append(f"<p class=plots>{''.join(plot.svg for plot in block.plots)}</p>")
    title = next((b.lstrip("# ") for b in blocks if isinstance(b, str) and b[:2] == "# "), "tamis")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _inline(text: str) -> str:
    """Text as HTML; text between backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with write_whole(path, shared=True) as file:
        file.write(text.encode())
