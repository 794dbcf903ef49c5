"""The digest of a kernel's sources: its file and all modules that it imports, directly or not.

Object code stored under it survives edits of other kernels. Imports are parsed, not run. The
contract's ops are one name for many files: only the files that declare used names count.
"""

import ast
import functools
import hashlib
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tamis.jit_kernels.contract.op import Op, module_of

CONTRACT = "tamis.jit_kernels.contract"
OPS = f"{CONTRACT}.ops"
COMPILE = "tamis.jit_kernels.compile"  # runs the compiler and stores its output; not a source


@functools.cache
def digest_of(kind: str, op: Op) -> str:
    """16 hex digits of the sources of an op's kernels, `kind` "cpu" or "cuda"."""
    names = _made_of(module_of(kind, op), kind)
    for record in inspect.getmro(op.record)[:-1]:
        names |= _closure(record.__module__)
    digest = hashlib.sha256(repr((op.name, op.fields, op.declared)).encode())
    for name in sorted(names):
        digest.update(name.encode() + b"\0" + _file(name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def _made_of(module: str, kind: str) -> frozenset[str]:
    return _closure(module) | _closure(f"tamis.jit_kernels.{kind}.runtime.compiler")


@functools.cache
def _closure(module: str) -> frozenset[str]:
    """A module of this package and all of the package that it imports, directly or not."""
    found, waiting = set[str](), [module]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += [m for m in _imported(name) if not m.startswith(COMPILE)]
    return frozenset(found)


@functools.cache
def _imported(module: str) -> list[str]:
    """The modules of this package that one imports, including imports in functions."""
    tree, found = ast.parse(_file(module).read_text()), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _is_ours(alias.name)]
        elif isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            for alias in node.names:
                found += _named(node.module or "", alias, tree)
    return found


def _named(module: str, alias: ast.alias, tree: ast.Module) -> Iterator[str]:
    """The modules that `from module import alias` loads, in a file of this tree."""
    inner = f"{module}.{alias.name}"
    if inner == OPS:
        bound = alias.asname or alias.name
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=used) if name == bound:
                    yield from _declaring(used)
    elif module == OPS and alias.name != "*":
        yield from _declaring(alias.name)
    elif module != OPS and not (module.startswith(OPS) and alias.name == "*"):
        is_package = _file(module).name == "__init__.py"
        yield inner if is_package and find_spec(inner) is not None else module


@functools.cache
def _declaring(name: str) -> tuple[str, ...]:
    """The files of the contract that define a name; all of them if none does."""
    root = _file(OPS).parents[1]  # contract
    names = {
        path: ".".join([CONTRACT, *path.relative_to(root).with_suffix("").parts])
        for path in [root / "op.py", *sorted(_file(OPS).parent.rglob("*.py"))]
    }
    found = [of for path, of in names.items() if name in _top_level(path)]
    return tuple(of.removesuffix(".__init__") for of in found or names.values())


@functools.cache
def _top_level(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):  # names that a file re-exports
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "tamis"


@functools.cache
def _file(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin)
