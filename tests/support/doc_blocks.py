"""The code blocks of README and docs, as they stand."""

import re
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    language: str
    page: str
    line: int
    text: str


def blocks(root: Path, *languages: str) -> list[Block]:
    """Blocks of these languages, except those of the notebook and the files of CONTRIBUTING."""
    found = []
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    for path in pages:
        if "lab" in path.relative_to(root).parts:
            continue
        text = path.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(match[1], str(path.relative_to(root)), line, match[2]))
    return found
