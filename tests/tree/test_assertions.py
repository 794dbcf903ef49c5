"""Every test asserts something: a test that cannot fail is none."""

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
SUPPORT = sorted((ROOT / "tests" / "support").glob("*.py"))
EXPECTING = ("raises", "warns", "fail")  # of pytest
# Helpers that run what they are given: what that asserts counts, not that it ends.
RUNNING = ("fork_and_wait", "run_at")
# "file::test": what fails it, where the tree does not show it.
ALLOWED = {
    "cuda/test_kernels_cuda.py::test_the_op_is_what_its_oracle_says": "the CPU's tests of the op",
    "cuda/test_metered_cuda.py::test_a_property_of_the_cpu_holds": "tests of another file, by name",
    "fuzz/test_targets.py::test_no_input_does_anything_but_be_read_or_refused": (
        "an input that is neither raises in the target"
    ),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def named(node: ast.AST) -> str:
    """The last part of a name, of whatever it is an attribute; "" for what has none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def used(function: ast.AST) -> Iterator[str]:
    """What a function calls, or passes on for others to call."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield named(node.func)
            yield from (named(each) for each in (*node.args, *(k.value for k in node.keywords)))
        elif isinstance(node, ast.ClassDef):
            yield from (named(base) for base in node.bases)


def uses(function: ast.AST, known: frozenset[str]) -> bool:
    """Whether it calls, or passes on, what asserts: another test does, for it is scanned too."""
    return any(name in known or name.startswith("test_") for name in used(function))


def asserts(function: ast.AST) -> bool:
    """Whether it says itself what must hold; `assert True` says nothing."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Raise) and "AssertionError" in ast.unparse(node):
            return True
        if isinstance(node, ast.Call):
            name = named(node.func)
            if name.startswith("assert_") or (
                name in EXPECTING and named(getattr(node.func, "value", node)) == "pytest"
            ):
                return True
    return False


def asserting(trees: list[ast.Module], known: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of functions and classes that assert, themselves or by what they use."""
    defined = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, Function | ast.ClassDef) and node.name not in RUNNING
    ]
    found = known | {node.name for node in defined if asserts(node)}
    while True:
        more = {node.name for node in defined if uses(node, found)}
        if more <= found:
            return found
        found |= more


SHARED = asserting([ast.parse(path.read_text()) for path in SUPPORT])


def silent(text: str) -> list[str]:
    """The tests of a file in which nothing can fail."""
    tree = ast.parse(text)
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.name.startswith("test_")
    ]
    helpers = ast.parse(text)
    helpers.body = [node for node in helpers.body if getattr(node, "name", "")[:5] != "test_"]
    known = asserting([helpers], SHARED)
    return [t.name for t in tests if not asserts(t) and not uses(t, known)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_test_asserts_something(path):
    file = path.relative_to(ROOT / "tests").as_posix()
    assert [name for name in silent(path.read_text()) if f"{file}::{name}" not in ALLOWED] == []


@pytest.mark.parametrize(
    ("body", "is_silent"),
    [
        ("assert x", False),
        ("assert True", True),
        ("session.decode(9)", True),
        ("np.testing.assert_array_equal(a, b)", False),
        ("with pytest.raises(ValueError): f()", False),
        ("with other.raises(ValueError): f()", True),
        ("check()", False),
        ("quiet()", True),
        ("fork_and_wait(check)", False),
        ("fork_and_wait(quiet)", True),
        ("fork_and_wait(lambda: quiet())", True),
        ("outer()", False),
        ("with contextlib.suppress(ValueError): f()", True),
    ],
)
def test_what_counts(body, is_silent):
    helpers = "def quiet():\n    f()\ndef check():\n    assert x\ndef outer():\n    check()\n"
    assert (silent(f"{helpers}def test_it():\n    {body}\n") == ["test_it"]) == is_silent


def test_exceptions_are_of_tests_that_are_there():
    names = {f"{p.relative_to(ROOT / 'tests').as_posix()}" for p in FILES}
    assert {name.partition("::")[0] for name in ALLOWED} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_module_names_a_thing_once(path):
    """A second `TABLE = ...` further down changes what the tests above it are run with."""
    names = [
        name
        for statement in ast.parse(path.read_text()).body
        for name in (
            [ast.unparse(target) for target in statement.targets]
            if isinstance(statement, ast.Assign)
            else [statement.name]
            if isinstance(statement, Function | ast.ClassDef)
            else []
        )
        if name.isidentifier()
    ]
    assert [name for name, times in collections.Counter(names).items() if times > 1] == []
