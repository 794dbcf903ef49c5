"""Run op tests in this process, without pytest: in an emulated Python, which has no compiler.

`python op_tests_here.py make FOLDER LEVEL...` compiles the kernels that op tests run, on any
machine; `python op_tests_here.py run FOLDER [MODULE]...` runs the tests with them where they run.
It says of each module how many cases passed, and ends with status 1 where one failed.
"""

import contextlib
import importlib.util
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import op_tests
from guarded import backend

from tamis.jit_kernels.backends.cpu import RUN, WORKER
from tamis.jit_kernels.compile import shipped
from tamis.jit_kernels.contract.program import KernelSpec


def make(folder: Path, levels: list[str]) -> None:
    """Compile the kernels of all op tests for levels, into files of a folder."""
    from tamis.tools.ship_kernels import ship_kernels

    specs = {RUN, WORKER, *op_tests.kernels()}
    ship_kernels(folder, specs, levels, progress=lambda name, done, n: print(name, done, "of", n))


@contextlib.contextmanager
def without_numba() -> Iterator[None]:
    """Within it, op tests can be imported where Numba is missing: one reads a kernel's constant."""
    if importlib.util.find_spec("numba"):
        yield
        return
    name = "tamis.jit_kernels.cpu.linear.pack"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    found = re.search(r"^SHARE = np.float32\((\d+)\)", Path(spec.origin).read_text(), re.MULTILINE)
    assert found is not None
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name])["SHARE"] = np.float32(found[1])
    try:
        yield
    finally:
        del sys.modules[name]


def run(folder: Path, names: list[str]) -> int:
    """Run the cases of modules, or of all; the number that failed."""
    shipped.FOLDER = folder
    found = 0
    with without_numba():
        modules = [op_tests.module(name) for name in names] or op_tests.modules()
    for module in modules:
        name = module.__name__.removeprefix("op_tests_")
        backend(1).load([KernelSpec(op, tuple(c)) for op, c in module.KERNELS])
        tests = [test for key, test in vars(module).items() if key.startswith("test_")]
        start, n, failed = time.monotonic(), 0, 0
        for test in tests:
            if not hasattr(test, "__wrapped__"):
                print(f"LEFT OUT {name} {test.__name__}: it is not run in a child")
                continue
            for values in op_tests.cases(test):
                n += 1
                try:
                    with np.errstate(all="ignore"):
                        test.__wrapped__(**values)
                except Exception:
                    failed += 1
                    print(f"FAILED {name} {test.__name__} {values}\n{traceback.format_exc()}")
        print(f"{name}: {n - failed} of {n} passed, {time.monotonic() - start:.0f} s", flush=True)
        found += failed
    return found


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "make":
        make(Path(folder), rest)
    else:
        sys.exit(run(Path(folder), rest) > 0)
