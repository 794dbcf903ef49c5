"""How tests lie in the tree. Lint, format and types are a step of their own: .ci/lint."""

from pathlib import Path


def test_no_test_module_imports_another(root: Path) -> None:
    """What tests share lies in tests/support."""
    found = [
        f"{path.relative_to(root)}: {line}"
        for path in (root / "tests").rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("import test_", "from test_"))
    ]
    assert not found
