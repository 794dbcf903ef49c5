"""Run a test's body in a process whose kernels are made for another level of CPU features."""

import ctypes
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import emulated
import llvmlite.binding as llvm
import pytest

from tamis.jit_kernels.cpu.lang import features
from tamis.platform import processor

# A CPU that has just the level's instructions, for looking at the code that it would run.
CPUS = {
    "generic": "x86-64",
    "avx2": "haswell",
    "avx2-vnni": "alderlake",
    "avx512": "skylake-avx512",
    "avx512-vnni": "cascadelake",
}

EMULATED = tuple(emulated.PROCESSORS)


def _start(name: str, root: str) -> None:
    sys.path.insert(0, root)  # the test module's name may start with "tests."
    features.use(name)
    if is_emulated():
        os.environ["NUMBA_OPT"] = "0"  # see compiler.compile_kernel
        from tamis.jit_kernels.cpu.runtime.compiler import take_only_ir

        take_only_ir()


def is_emulated() -> bool:
    """Whether code of this process's level runs on another machine than this."""
    return features.current().machine != processor.MACHINE


def call(dispatcher, *arguments) -> None:
    """Call a compiled function with arrays, by their addresses, and integers; it needs no library.

    Code of another machine runs in an emulated process.
    """
    name = features.current().name
    if not is_emulated():
        dispatcher(*(a if isinstance(a, int) else address(a) for a in arguments))
        assert library_calls(dispatcher, name) == set()
        return
    from numba import types

    from tamis.jit_kernels.cpu.runtime.compiler import target_machine

    dispatcher.compile((types.int64,) * len(arguments))
    code = emulated.emitted(target_machine(), dispatcher, "tamis_entry")
    emulated.call(name, code, "tamis_entry", *arguments)


@cache
def _pool(name: str) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    arguments = (name, str(Path(__file__).resolve().parents[2]))
    return ProcessPoolExecutor(1, mp_context=context, initializer=_start, initargs=arguments)


def skip_unless_runnable(level: str) -> None:
    """Levels of narrower vectors run on a CPU with wider ones; each needs its own instructions."""
    if features.LEVELS[level].machine != processor.MACHINE:
        if level not in emulated.PROCESSORS or emulated.emulator() is None:
            pytest.skip(f"there is no qemu-aarch64 to run {level}")
        return
    if missing := features.missing(features.LEVELS[level]):
        pytest.skip(f"this CPU has no {', '.join(missing)}")


def run_at(level: str, body, *args):
    """body(*args) in the process of a level; a crash there fails the test and starts a new one."""
    skip_unless_runnable(level)
    try:
        return _pool(level).submit(body, *args).result(timeout=300)
    except Exception as error:
        if "terminated abruptly" in str(error):
            _pool.cache_clear()
        raise


def library_calls(dispatcher, level: str) -> set[str]:
    """Names of functions that the code of a compiled kernel calls on the level's CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    if "x86" not in target.triple:
        return set()
    machine = target.create_target_machine(cpu=CPUS[level], features="", opt=3, reloc="pic")
    (text,) = dispatcher.inspect_llvm().values()
    assembly = machine.emit_assembly(llvm.parse_assembly(text))
    found = set(re.findall(r"\b(?:callq?|jmp)\s+\*?([A-Za-z_][\w.]*)", assembly))
    own = {f.name for f in llvm.parse_assembly(text).functions if not f.is_declaration}
    return {name for name in found if name not in own and not name.startswith(("NRT_", "numba_"))}


def address(array) -> int:
    """The address of a C-contiguous array."""
    assert array.flags.c_contiguous
    return ctypes.cast(array.ctypes.data, ctypes.c_void_p).value or 0
