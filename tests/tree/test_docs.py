"""The documentation builds without a warning, and its lines and paragraphs stay short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from package_view import package_view

MAX_COLUMNS, MAX_LINES = 110, 8


def pages(root: Path) -> list[Path]:
    """What readers are meant to read: all Markdown but the notebook."""
    found = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    return [path for path in found if "lab" not in path.relative_to(root).parts]


def test_the_site_builds_without_a_warning(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    package_view(root)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Session" in (tmp_path / "reference" / "engine" / "index.html").read_text()


def test_lines_and_paragraphs_are_short(root: Path) -> None:
    found = []
    for path in pages(root):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        name = path.relative_to(root)
        found += [
            f"{name}: {len(line)} columns: {line[:60]}"
            for line in path.read_text().splitlines()
            if len(line) > MAX_COLUMNS
        ]
        for paragraph in text.split("\n\n"):
            lines = paragraph.strip().splitlines()
            if len(lines) > MAX_LINES and not lines[0].startswith(("|", "-", "#", "<", "1")):
                found.append(f"{name}: {len(lines)} lines: {lines[0][:60]}")
    assert not found, "\n".join(found)
