"""The kernel library of this process: object files mapped to addresses, compiled if missing.

Numba and LLVM are imported only by the compile workers, never here.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tamis.jit_kernels.compile.code import KernelCode
from tamis.jit_kernels.compile.elf import LinkError, load_code
from tamis.jit_kernels.compile.shipped import came_for
from tamis.jit_kernels.compile.store import can_compile, user_folder
from tamis.jit_kernels.compile.workers import CompileError, Progress
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.features import LEVELS, Features

ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class KernelLibrary:
    """Kernels by spec. Thread-safe; one per process is enough (`shared`).

    level: the CPU features of the kernels, a name of features.LEVELS; `usual_level` by default, and
    a lower one on request. Levels have separate folders. Raises ValueError for a level that this
    CPU cannot run, KernelStoreError.
    """

    def __init__(
        self, root: Path | None = None, n_worker: int = 2, level: str | None = None
    ) -> None:
        # not needed before a model is loaded
        from tamis.jit_kernels.compile.self_test import Checked

        self.level = _checked(level)
        self._code = KernelCode(self.level, root, n_worker)
        self._checked = Checked(root or user_folder())
        self._addresses: dict[str, int] = {}
        self.drop_load()
        _libraries.add(self)

    def drop_load(self) -> None:
        """Reset the lock in a child of fork(): its holder does not exist there."""
        self._lock = threading.Lock()

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Map the kernels, compiling the missing ones; progress(done, total) while compiling.

        Raises CompileError; kernels mapped before stay usable.
        """
        with self._lock:
            wanted = {s.symbol: s for s in specs if s.symbol not in self._addresses}
            code = self._code.take(wanted.values(), progress)
            self._map(code)
            self._check({wanted[symbol]: data for symbol, data in code.items()})

    def _check(self, code: dict[KernelSpec, bytes]) -> None:
        """Test kernels that are new on this machine. Raises CompileError; then none is mapped."""
        from tamis.jit_kernels.compile.self_test import passes

        new = {spec: data for spec, data in code.items() if data not in self._checked}
        passed = {spec: passes(spec, lambda s: self._addresses.get(s.symbol)) for spec in new}
        if wrong := sorted(spec.symbol for spec, good in passed.items() if good is False):
            for spec in code:
                del self._addresses[spec.symbol]
            raise CompileError(
                f"kernel {wrong[0]} gives wrong values on this CPU, level {self.level.name}: it is "
                "not used; try a lower level (KernelLibrary(level=...)), and report this CPU"
            )
        if new:
            self._checked.note(new[spec] for spec, good in passed.items() if good)

    def _map(self, code: dict[str, bytes]) -> None:
        """Map object code: all of it or none, so that a fork sees a consistent state."""
        try:
            self._addresses |= load_code(code)
        except LinkError as error:
            raise CompileError(f"object code cannot be linked: {error}") from error

    def missing(self, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
        """The kernels among `specs` that would have to be compiled."""
        known = self._addresses
        return self._code.missing(s for s in specs if s.symbol not in known)

    def address(self, spec: KernelSpec) -> int:
        """The address of a loaded kernel."""
        return self._addresses[spec.symbol]

    def function(self, spec: KernelSpec) -> Any:
        """A loaded kernel as a ctypes function of three int64.

        Calls release the interpreter lock.
        """
        return ENTRY(self._addresses[spec.symbol])


def usual_level() -> Features:
    """The host's highest level; without a compiler, the highest of the shipped kernels."""
    if not can_compile("cpu"):
        for level in reversed(LEVELS.values()):
            if came_for(level.name) and not features.missing(level):
                return level
    return features.host()


def _checked(name: str | None) -> Features:
    """The level of a name. Raises ValueError if it is unknown or this CPU cannot run it."""
    if name is None:
        return usual_level()
    if name not in LEVELS:
        raise ValueError(f"level is {name!r}, expected one of {', '.join(LEVELS)}")
    if missing := features.missing(LEVELS[name]):
        raise ValueError(
            f"level {name} needs {', '.join(missing)}, which this CPU lacks: "
            f"its highest level is {features.host().name}"
        )
    return LEVELS[name]


_shared: KernelLibrary | None = None


def shared() -> KernelLibrary:
    """The process's kernel library in the user's folder."""
    global _shared
    if _shared is None:
        _shared = KernelLibrary()
    return _shared


_libraries: "weakref.WeakSet[KernelLibrary]" = weakref.WeakSet()


def _after_fork() -> None:
    for library in list(_libraries):
        library.drop_load()


os.register_at_fork(after_in_child=_after_fork)
