"""Folders and functions stay small; exceptions are listed here with a reason."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "jit_kernels", "formats", "bindings", "tools")
KERNEL_FOLDERS = ("jit_kernels/cpu/", "jit_kernels/cuda/")
MAX_LINES, MAX_KERNEL_LINES, MAX_PARAMETERS = 60, 120, 7

INLINED = "one kernel's work; Numba inlines what it is split into"
OPERANDS = "an instruction's operands, which an intrinsic cannot take as a record"
# "folder/file.py:Class.function": the reason why it may be longer or take more parameters.
ALLOWED: dict[str, str] = {
    "bindings/compat.py:Llama.__init__": "llama_cpp.Llama's parameters",
    "bindings/compat.py:Llama.create_chat_completion": "llama_cpp.Llama's parameters",
    "bindings/compat.py:Llama.create_completion": "llama_cpp.Llama's parameters",
    "bindings/compat.py:Llama.generate": "llama_cpp.Llama's parameters",
    "bindings/compat.py:Llama.sample": "llama_cpp.Llama's parameters",
    "bindings/flat/sampler.py:llama_sampler_init_dry": "llama.h's parameters, in its order",
    "jit_kernels/cpu/attention/attend.py:_adding.add_few": INLINED,
    "jit_kernels/cpu/attention/attend.py:_adding.add_many": INLINED,
    "jit_kernels/cpu/lang/blocks16.py:decode_u5": OPERANDS,
    "jit_kernels/cpu/lang/blocks16.py:decode_u6": OPERANDS,
    "jit_kernels/cuda/attention/attend_decode.py:attend_few": INLINED,
    "jit_kernels/cuda/lang/register_tiles.py:multiply_add": OPERANDS,
    "runner/engine/engine.py:Engine.load": "one setting each, by the name users know",
    "runner/engine/engine.py:Engine.session": "one setting each, by the name users know",
}

MAX_FILES = 20  # of Python in a folder, beside its __init__.py
# "folder": the reason why it may have more.
ALLOWED_FOLDERS: dict[str, str] = {
    "runner/cli/commands": "one file a command, found by its name",
    "runner/arch": "one file an architecture, found by its name",
    "runner/select": "one file a method, found by its name",
    "jit_kernels/contract/ops/select": "one file a method's ops, found by its name",
    "jit_kernels/cpu/select": "one file a method's ops, found by its name",
    "jit_kernels/cpu/linear": "one file an op, or a part that several ops share",
    "tools": "one file a program, run by its name",
    "tests/engine": "one file a promise of sessions, batches or their files",
    "tests/kernels": "one file a family of ops, found by its name",
    "tests/methods": "one file a method, or a promise that all of them keep",
    "tests/bindings/serve": "one file an API, or a promise that all of them keep",
    "tests/support": "on the path of tests: its modules are imported by their names",
}

FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
]


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name, those in classes and functions included."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, Function | ast.ClassDef):
            name = f"{prefix}{node.name}."
        if isinstance(node, Function):
            yield name[:-1], node
        yield from functions(node, name)


def n_parameters(function: Function) -> int:
    """Parameters without self and cls; *args and **kwargs count as one each."""
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
    own = 1 if names[:1] in (["self"], ["cls"]) else 0
    return len(names) - own + len(a.kwonlyargs) + bool(a.vararg) + bool(a.kwarg)


def n_lines(function: Function) -> int:
    """Lines from the `def` to the end, docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


@pytest.mark.parametrize("file", FILES)
def test_functions_are_short_and_take_few_parameters(file: str) -> None:
    limit = MAX_KERNEL_LINES if file.startswith(KERNEL_FOLDERS) else MAX_LINES
    found = []
    for name, function in functions(ast.parse((ROOT / file).read_text())):
        lines, parameters = n_lines(function), n_parameters(function)
        if (lines > limit or parameters > MAX_PARAMETERS) and f"{file}:{name}" not in ALLOWED:
            found.append(f"{file}:{name}: {lines} lines, {parameters} parameters")
    assert not found, (
        f"over {limit} lines or {MAX_PARAMETERS} parameters: split, use a record, "
        "or give the reason in ALLOWED:\n" + "\n".join(found)
    )


def test_every_exception_is_still_needed_and_has_a_reason() -> None:
    for key, reason in ALLOWED.items():
        file, name = key.split(":")
        function = dict(functions(ast.parse((ROOT / file).read_text())))[name]
        limit = MAX_KERNEL_LINES if file.startswith(KERNEL_FOLDERS) else MAX_LINES
        assert n_lines(function) > limit or n_parameters(function) > MAX_PARAMETERS, key
        assert reason.strip(), key


def files_by_folder() -> dict[str, int]:
    """Python files of every folder of the tree, without __init__.py."""
    roots = (*FOLDERS, "tests", "examples")
    found = [path for root in roots for path in (ROOT / root).rglob("*.py")]
    names = (p.parent.relative_to(ROOT).as_posix() for p in found if p.name != "__init__.py")
    return dict(Counter(names))


def test_a_folder_has_no_more_files_than_a_reader_can_hold() -> None:
    found = {folder: n for folder, n in files_by_folder().items() if n > MAX_FILES}
    assert found.keys() == ALLOWED_FOLDERS.keys(), (
        f"over {MAX_FILES} files: split the folder, or give the reason in ALLOWED_FOLDERS: {found}"
    )
