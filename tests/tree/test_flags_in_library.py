"""The library names its parameters, never flags: those are in cli/options/errors.py."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tamis.cli.options.errors import FLAGS

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ("arch", "engine", "graph", "kv", "model", "sampling", "select")
BINDINGS = ("bindings/flat", "bindings/drop_in")  # the server names the flags it is started with
FOLDERS = (*(f"runner/{name}" for name in RUNNER), "jit_kernels", "formats", *BINDINGS)
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-(ngl|nkvo|ctk|ctv))(?![\w-])")


def flags(source: str) -> Iterator[str]:
    """Flags in a source text's strings, docstrings not among them."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield from (f"{node.lineno}: {found[0]}" for found in FLAG.finditer(node.value))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_string_of_the_library_names_a_flag(path: Path) -> None:
    assert not list(flags(path.read_text())), "name the parameter; cli/options/errors.py maps it"


def test_flags_are_found() -> None:
    source = '"""--ctx"""\na = "raise --ctx"\nb = f"leave out -ngl {a}"\nc = "x -- y", "-1", "a--b"'
    assert list(flags(source)) == ["2: --ctx", "3: -ngl"]
    assert all(FLAG.fullmatch(flag.split()[0]) for flag in FLAGS.values())
