"""Which way imports go: docs/architecture.md's list of layers, enforced on every import statement.

A new module is added to LAYERS here and, where it is a new part, to the list in the document.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "runner": "tamis",
    "jit_kernels": "tamis.jit_kernels",
    "formats": "tamis.formats",
    "bindings": "tamis.bindings",
    "tools": "tamis.tools",
}

# Name (a module, or `package.*` for all that is in a package and itself) -> layer. The most
# precise name counts. A module imports only from its own layer or from lower ones.
LAYERS = {
    "tamis": 0,  # only the version and lazily loaded names
    "tamis.formats.*": 1,
    "tamis.jit_kernels": 2,
    "tamis.jit_kernels.layout": 2,
    "tamis.jit_kernels.ops": 2,
    "tamis.jit_kernels.program": 2,
    "tamis.jit_kernels.types": 2,
    "tamis.jit_kernels.backend": 3,
    "tamis.jit_kernels.ceiling": 3,
    "tamis.jit_kernels.cpu.*": 3,
    "tamis.jit_kernels.cuda.*": 3,
    "tamis.jit_kernels.cuda_backend": 3,
    "tamis.jit_kernels.elf": 3,
    "tamis.jit_kernels.fusion": 3,
    "tamis.jit_kernels.library": 3,
    "tamis.jit_kernels.ptx_library": 3,
    "tamis.jit_kernels.split_backend": 3,
    "tamis.jit_kernels.store": 3,
    "tamis.jit_kernels.workers": 3,
    "tamis.arch.*": 4,
    "tamis.hparams": 4,
    "tamis.kv.*": 5,
    "tamis.select.*": 6,
    "tamis.arrange": 7,
    "tamis.attend": 7,
    "tamis.audit": 7,
    "tamis.best": 7,
    "tamis.block": 7,
    "tamis.forward": 7,
    "tamis.model": 7,
    "tamis.places": 7,
    "tamis.rope": 7,
    "tamis.stage": 7,
    "tamis.weights": 7,
    "tamis.workspace": 7,
    "tamis.bpe": 8,
    "tamis.pretokenize": 8,
    "tamis.prompt": 8,
    "tamis.prompts.*": 8,
    "tamis.sampler": 8,
    "tamis.samplers.*": 8,
    "tamis.spm": 8,
    "tamis.stream": 8,
    "tamis.tokenizer": 8,
    "tamis.tokenizers.*": 8,
    "tamis.batch": 9,
    "tamis.engine": 9,
    "tamis.session": 9,
    "tamis.session_file": 9,
    "tamis.auto": 10,
    "tamis.weigh": 10,
    "tamis.bindings.*": 10,
    "tamis.evals.*": 10,
    "tamis.fetch.*": 10,
    "tamis.models": 10,
    "tamis.summary.*": 10,
    "tamis.__main__": 11,
    "tamis.cli.*": 11,
    "tamis.tools.*": 11,
}
# What methods may share: the contract, and how compositions are written down.
SELECT_SHARED = {"tamis.select", "tamis.select.base", "tamis.select.notation"}
HEAVY = {"torch", "transformers", "tensorflow", "jax"}


class Import(NamedTuple):
    name: str  # the module, or module.name where that is what the statement says
    line: int
    relative: bool = False


def module_name(path: Path, root: Path = ROOT) -> str:
    folder, *rest = path.relative_to(root).with_suffix("").parts
    return ".".join([FOLDERS[folder], *rest]).removesuffix(".__init__")


MODULES = {
    module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
}


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            literal = [arg for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(str(arg.value), node.lineno) for arg in literal)


def layer(module: str) -> int | None:
    """The layer of a module; None where LAYERS does not have it."""
    if module in LAYERS:
        return LAYERS[module]
    package = module
    while package:
        if f"{package}.*" in LAYERS:
            return LAYERS[f"{package}.*"]
        package = package.rpartition(".")[0]
    return None


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
    own, other = layer(module), layer(target)
    if own is None or other is None:
        return f"no layer for {module if own is None else target}: add it to LAYERS"
    if other > own:
        return f"layer {own} imports {target} of layer {other}"
    if own == 8 and 4 <= other <= 7:
        return f"text knows nothing of tensors, but imports {target} of layer {other}"
    a_method = module.startswith("tamis.select.") and module not in SELECT_SHARED
    another = target.startswith("tamis.select.") and target not in {*SELECT_SHARED, module}
    if a_method and another:
        return f"a method imports another method, {target}"
    for one, two in (("cpu", "cuda"), ("cuda", "cpu")):
        inside, outside = f"tamis.jit_kernels.{one}", f"tamis.jit_kernels.{two}"
        if f"{module}.".startswith(f"{inside}.") and f"{target}.".startswith(f"{outside}."):
            return f"{one} imports {target}: what both need goes beside them"
    return None


@pytest.mark.parametrize("module", MODULES)
def test_the_module_has_a_layer(module: str) -> None:
    assert layer(module) is not None, (
        f"{module} has no layer: add it to LAYERS in {Path(__file__).name} "
        "and, where it is a new part, to the list in docs/architecture.md"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_to_the_same_layer_or_down(module: str) -> None:
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
        ("tamis.models", "from . import fetch", "relative"),
        ("tamis.models", "import runner.models", "folder of the tree"),
        ("tamis.models", "import torch.nn", "does without"),
        ("tamis.models", "def f():\n    from numba import njit", "compiler of jit_kernels"),
        ("tamis.formats.gguf", "from tamis import models", "layer 1 imports tamis.models"),
        ("tamis.formats.gguf", "import tamis.nothing", "no module"),
        ("tamis.sampler", "import tamis.kv", "text knows nothing"),
        ("tamis.select.topk", "from tamis.select.window import Window", "another method"),
        ("tamis.jit_kernels.cuda.x", "import tamis.jit_kernels.cpu", "go"),
        ("tamis.newcomer", "import tamis.formats", "add it to LAYERS"),
        ("tamis.formats.gguf", "importlib.import_module('tamis.cli')", "layer 11"),
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
