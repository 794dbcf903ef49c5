"""The op tests of tests/kernels, found by file name: other levels and backends run them too.

A test of an op that a GPU does not have is marked `cpu_only`; one whose CUDA kernels are made of
what Python has words for (no matrix units, no copies by descriptor) is marked `on_threads`.
"""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cuda import OPS

FOLDER = Path(__file__).parents[1] / "kernels"


@cache
def module(name: str) -> ModuleType:
    """The module tests/kernels/test_kernels_<name>.py."""
    spec = importlib.util.spec_from_file_location(
        f"op_tests_{name}", FOLDER / f"test_kernels_{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def modules() -> list[ModuleType]:
    """All op test modules."""
    files = sorted(FOLDER.glob("test_kernels_*.py"))
    return [module(file.stem.removeprefix("test_kernels_")) for file in files]


def kernels() -> list[KernelSpec]:
    """The kernels that op tests run, each once."""
    found = [KernelSpec(op, tuple(c)) for m in modules() for op, c in m.KERNELS]
    return list(dict.fromkeys(found))


def gpu_tests(mark: str | None = None) -> list[Callable[..., Any]]:
    """The tests of ops that a GPU has: those with a mark, or where None, those not `cpu_only`."""
    found = []
    for m in modules():
        if any(op.name in OPS for op, _ in m.KERNELS):
            found += [test for name, test in vars(m).items() if name.startswith("test_")]
    return [t for t in found if (mark in marks(t) if mark else "cpu_only" not in marks(t))]


def marks(test: Callable[..., Any]) -> set[str]:
    """The names of a test's marks."""
    return {mark.name for mark in getattr(test, "pytestmark", [])}


def cases(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The values of a test's parameters, all that its marks ask for."""
    choices = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0]
            names = names.split(",") if isinstance(names, str) else names
            rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
            choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for choice in itertools.product(*choices):
        yield {k: v for part in choice for k, v in part.items()}
