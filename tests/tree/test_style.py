"""The tree is linted, formatted and typed: what a contributor would run by hand, as tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from package_view import package_view


def run(root: Path, *command: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [("check",), ("format", "--check")])
def test_ruff_finds_nothing(root: Path, command: tuple[str, ...]) -> None:
    run(root, "ruff", *command, ".")


def test_mypy_finds_nothing(root: Path) -> None:
    run(root, "mypy", "--cache-dir=.cache/mypy", MYPYPATH=str(package_view(root)))


def test_no_test_module_imports_another(root: Path) -> None:
    """What tests share lies in tests/support."""
    found = [
        f"{path.relative_to(root)}: {line}"
        for path in (root / "tests").rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("import test_", "from test_"))
    ]
    assert not found
