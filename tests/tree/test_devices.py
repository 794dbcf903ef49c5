"""What a device is and can do is asked of its backend: nothing else knows devices by name."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "jit_kernels", "formats", "bindings", "tools")
OWN = "jit_kernels/backends/"  # where the names are
NAMES = {"cpu", "cuda"}


def named(node: ast.expr) -> bool:
    """Whether an expression is the name of a device, or has one among its own."""
    return any(isinstance(n, ast.Constant) and n.value in NAMES for n in ast.walk(node))


def comparisons(source: str) -> list[int]:
    """The lines that compare with a device's name."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [n.lineno for n in found if any(map(named, (n.left, *n.comparators)))]


def test_no_device_is_compared_by_its_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(OWN)
        for line in comparisons(path.read_text())
    ]
    assert not found, (
        "ask the backend (on_host, sides, joins ...): see jit_kernels/backends/base.py"
    )


def test_comparisons_are_found() -> None:
    source = "a = x == 'cpu'\nb = 'cuda' in y\nc = [*d] == ['cuda']\nd = f('cpu')\ne = x != 'gpu'"
    assert comparisons(source) == [1, 2, 3]
