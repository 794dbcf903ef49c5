"""Names in the folders for temporary files: none that others can foresee, and make a link."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "jit_kernels", "formats", "bindings", "tools", "tests")
FIXED = re.compile(r"gettempdir\(|mktemp\(\)|[\"'](?:/var)?/tmp/|[\"']/dev/shm/")
THIS = Path(__file__)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_has_a_fixed_name_there(folder):
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != THIS
        for line in path.read_text(encoding="utf-8").splitlines()
        if FIXED.search(line)
    ]
    assert found == []


def test_a_run_of_the_tests_opens_nothing_through_a_link(tmp_path):
    """What an earlier run called its lock is planted as a link to a file of the user's."""
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (temporary / f"tamis-tests-{os.getuid()}.lock").symlink_to(treasure)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    env = os.environ | {"TMPDIR": str(temporary)}
    one = "tests/tree/test_words.py"
    subprocess.run([*command, one], cwd=ROOT, env=env, capture_output=True, check=True, timeout=300)
    assert treasure.read_text() == "mine"
