"""The documentation builds without a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from package_view import package_view


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
