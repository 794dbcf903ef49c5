"""Which way imports go between folders: the layers of docs/architecture.md, for every import."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "runner": "tamis",
    "jit_kernels": "tamis.jit_kernels",
    "formats": "tamis.formats",
    "bindings": "tamis.bindings",
    "tools": "tamis.tools",
}

# The packages of the tree in the order of docs/architecture.md, lowest first. Packages of one line
# do not import each other; a package imports only itself and lines above its own.
ORDER = """
tamis
tamis.platform
tamis.formats
tamis.jit_kernels.contract
tamis.jit_kernels.contract.ops.select
tamis.jit_kernels.contract.ops
tamis.jit_kernels.common  tamis.jit_kernels.common.select
tamis.jit_kernels.cpu.lang  tamis.jit_kernels.cuda  tamis.jit_kernels.cuda.lang
tamis.jit_kernels.cpu.kv  tamis.jit_kernels.cuda.kv
tamis.jit_kernels.cpu.linear  tamis.jit_kernels.cuda.linear
tamis.jit_kernels.cpu.attention  tamis.jit_kernels.cuda.attention
tamis.jit_kernels.cpu.recurrent  tamis.jit_kernels.cuda.recurrent
tamis.jit_kernels.cpu.select  tamis.jit_kernels.cuda.select
tamis.jit_kernels.compile
tamis.jit_kernels.cpu.runtime  tamis.jit_kernels.cuda.runtime
tamis.jit_kernels.backends
tamis.model
tamis.kv  tamis.select
tamis.graph
tamis.graph.mixers
tamis.vision
tamis.vision.families
tamis.arch
tamis.text.calls
tamis.grammar
tamis.grammar.schema  tamis.grammar.gbnf
tamis.text  tamis.sampling  tamis.fetch
tamis.make.checkpoint
tamis.engine
tamis.engine.reuse
tamis.make
tamis.make.convert
tamis.bindings.flat
tamis.bindings.drop_in
tamis.bindings  tamis.bindings.serve
tamis.bindings.serve.api
tamis.bindings.serve.http
tamis.evals.tasks  tamis.summary
tamis.evals
tamis.cli.terminal
tamis.cli.options
tamis.cli.conversation  tamis.cli.measure
tamis.cli.commands
tamis.cli
tamis.tools  tamis.__pyinstaller  tamis.__pyinstaller.rthooks
"""
LAYERS = {
    package: number for number, line in enumerate(ORDER.splitlines()) for package in line.split()
}
EMPTY = {"tamis.jit_kernels", "tamis.jit_kernels.cpu"}  # packages of nothing but packages
# Text, sampling and the downloads of models are independent of tensors.
WITHOUT_TENSORS = {
    "tamis.text",
    "tamis.text.calls",
    "tamis.sampling",
    "tamis.fetch",
    "tamis.grammar",
}
_BELOW = ("jit_kernels", "arch", "model", "kv", "select", "graph")
TENSORS = {f"tamis.{folder}" for folder in _BELOW}
# What methods may share: the contract, and how compositions are written down.
SELECT_SHARED = {
    "tamis.select",
    "tamis.select.base",
    "tamis.select.clusters",
    "tamis.select.in_numpy",
    "tamis.select.key_codes",
    "tamis.select.meter",
    "tamis.select.metered",
    "tamis.select.notation",
    "tamis.select.plugins",
}
HEAVY = {"torch", "transformers", "tensorflow", "jax"}


class Import(NamedTuple):
    name: str  # the module, or module.name where that is what the statement says
    line: int
    relative: bool = False


def module_name(path: Path, root: Path = ROOT) -> str:
    folder, *rest = path.relative_to(root).with_suffix("").parts
    return ".".join([FOLDERS[folder], *rest]).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "tamis_llama_cpp" not in path.parts  # a distribution of its own, above all of these
}


def _called(node: ast.Call) -> str:
    """The last name of what is called; "" for what has none."""
    name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
    return str(name)


def imports(source: str) -> Iterator[Import]:
    """Every import of a source text, wherever it stands, and importlib's with a literal name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                name = whole if whole in MODULES else str(node.module)
                yield Import(name, node.lineno, relative=node.level > 0)
        elif isinstance(node, ast.Call) and _called(node).endswith("import_module"):
            literal = [arg for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(str(arg.value), node.lineno) for arg in literal)


def package_of(module: str) -> str:
    """The folder that a module lies in; `python -m tamis` belongs to the command line."""
    if module == "tamis.__main__":
        return "tamis.cli"
    path = MODULES.get(module)
    return module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]


def problem(module: str, item: Import) -> str | None:
    """What is wrong with this import in this module, or None."""
    top = item.name.split(".")[0]
    if item.relative:
        return "relative import: write it as tamis.<...>"
    if top in FOLDERS:
        return f"{top} is a folder of the tree: import {FOLDERS[top]}"
    if top in HEAVY:
        return f"{top} is what tamis does without"
    if top == "numba" and not module.startswith("tamis.jit_kernels"):
        return "numba is the compiler of jit_kernels and unknown elsewhere"
    if top != "tamis":
        return None
    if item.name not in MODULES:
        return f"no module {item.name}"
    return _wrong_direction(module, item.name)


def _wrong_direction(module: str, target: str) -> str | None:
    own, other = package_of(module), package_of(target)
    if module == "tamis":  # names for type checkers, loaded when they are asked for
        return None
    for package in (own, other):
        if package not in LAYERS and package not in EMPTY:
            return f"{package} has no layer: add it to ORDER"
    if own != other and LAYERS.get(other, 0) >= LAYERS.get(own, 0):
        return f"{own} imports {target} of a layer that is not below it"
    if own in WITHOUT_TENSORS and any(f"{other}.".startswith(f"{x}.") for x in TENSORS):
        return f"{own} is below tensors, but imports {target}"
    a_method = module.startswith("tamis.select.") and module not in SELECT_SHARED
    another = target.startswith("tamis.select.") and target not in {*SELECT_SHARED, module}
    if a_method and another:
        return f"a method imports another method, {target}"
    for one, two in (("cpu", "cuda"), ("cuda", "cpu")):
        inside, outside = f"tamis.jit_kernels.{one}", f"tamis.jit_kernels.{two}"
        if f"{own}.".startswith(f"{inside}.") and f"{other}.".startswith(f"{outside}."):
            return f"{one} imports {target}: what both need goes beside them"
    return None


def test_every_folder_has_a_layer_and_every_layer_a_folder() -> None:
    """Where a folder is new, it is also drawn in docs/architecture.md."""
    assert {package_of(module) for module in MODULES} == {*LAYERS, *EMPTY}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    path = MODULES[module]
    found = [
        f"{path.relative_to(ROOT)}:{item.line}: {what}"
        for item in imports(path.read_text())
        if (what := problem(module, item)) is not None
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("tamis.fetch.registry", "from . import fetch", "relative"),
        ("tamis.fetch.registry", "import runner.models", "folder of the tree"),
        ("tamis.fetch.registry", "import torch.nn", "does without"),
        ("tamis.fetch.registry", "def f():\n    from numba import njit", "compiler of jit_kernels"),
        ("tamis.formats.gguf", "from tamis.fetch import registry", "not below"),
        ("tamis.formats.gguf", "import tamis.nothing", "no module"),
        ("tamis.sampling.chain", "import tamis.kv.pages", "is below tensors"),
        ("tamis.select.topk", "from tamis.select.window import Window", "another method"),
        ("tamis.jit_kernels.cuda.select.x", "import tamis.jit_kernels.cpu.lang.simd", "beside"),
        ("tamis.newcomer.x", "import tamis.formats", "add it to ORDER"),
        ("tamis.formats.gguf", "importlib.import_module('tamis.cli')", "not below"),
    ],
)
def test_the_rules_find_what_they_forbid(module: str, source: str, complaint: str) -> None:
    found = [problem(module, item) or "" for item in imports(source)]
    assert any(complaint in what for what in found)


def test_folders_of_the_tree_are_not_importable() -> None:
    """A second copy of a module under another name would have its own classes and state."""
    import importlib.util

    for folder in FOLDERS:
        spec = importlib.util.find_spec(folder)
        origins = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
        assert not [o for o in origins if o and Path(o).is_relative_to(ROOT / folder)]
