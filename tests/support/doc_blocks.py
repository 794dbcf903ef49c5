"""The code blocks of README and docs, as they stand."""

import re
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    language: str
    page: str
    line: int
    text: str


def pages(root: Path) -> list[Path]:
    """The pages whose code must hold: not the notebook, nor CONTRIBUTING with its own test."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [path for path in found if "lab" not in path.relative_to(root).parts]


def blocks(root: Path, *languages: str) -> list[Block]:
    """Blocks of these languages."""
    found = []
    for path in pages(root):
        text = path.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(match[1], str(path.relative_to(root)), line, match[2]))
    return found


def borders(root: Path) -> list[tuple[str, str]]:
    """Each line that begins or ends a block of code in any spelling of Markdown: (place, line)."""
    found = []
    for path in pages(root):
        for i, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r"\s*(?:[>*+-]\s*)*(```|~~~)|.*<(pre|code)\b", line):
                found.append((f"{path.relative_to(root)}:{i}", line))
    return found
