"""The kernel library of this process: object files mapped to addresses, compiled where missing.

Numba is imported only by the compile workers, never here.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from tamis.jit_kernels.cpu import features
from tamis.jit_kernels.cpu.features import LEVELS, Features
from tamis.jit_kernels.program import KernelSpec
from tamis.jit_kernels.store import open_folder, read_object, remove_unfinished, user_folder

Progress = Callable[[int, int], None]
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message ends with the compiler's last lines."""


class KernelLibrary:
    """Kernels by spec. Thread-safe; one per process is enough (`shared`).

    level: the CPU features that kernels are made with, a name of features.LEVELS; the host's by
    default, and a lower one on request. Levels have folders of their own.
    Raises ValueError for a level that this CPU cannot run, KernelStoreError.
    """

    def __init__(
        self, root: Path | None = None, n_worker: int = 2, level: str | None = None
    ) -> None:
        self.level = _checked(level)
        self._folder = open_folder(root or user_folder(), self.level)
        self._n_worker = n_worker
        self._addresses: dict[str, int] = {}
        self.forget_load()
        with _llvm:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_default_triple().create_target_machine()
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        _libraries.add(self)

    def forget_load(self) -> None:
        """Start anew, in a child of fork(): who compiled is not there to free the lock."""
        self._lock = threading.Lock()

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Map the kernels, compiling the missing ones; progress(done, total) while compiling.

        Raises CompileError; kernels mapped before stay usable.
        """
        with self._lock:
            wanted = {s.symbol: s for s in specs if s.symbol not in self._addresses}
            code = {symbol: read_object(self._folder, symbol) for symbol in wanted}
            missing = [wanted[symbol] for symbol, data in code.items() if data is None]
            if missing:
                self._compile(missing, progress or (lambda done, total: None))
                for spec in missing:
                    code[spec.symbol] = read_object(self._folder, spec.symbol)
            for symbol, data in code.items():
                if data is None:
                    raise CompileError(f"the compiler wrote no usable object code for {symbol}")
            with _llvm:
                self._map({symbol: data for symbol, data in code.items() if data})

    def _map(self, code: dict[str, bytes]) -> None:
        """Give object code its addresses: all of it or none, for whoever sees it in a fork."""
        for data in code.values():
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        self._engine.finalize_object()
        found = {symbol: self._engine.get_function_address(symbol) for symbol in code}
        absent = [symbol for symbol, address in found.items() if not address]
        if absent:
            raise CompileError(f"object code does not define {', '.join(absent)}")
        self._addresses |= found

    def missing(self, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
        """The kernels among `specs` that would have to be compiled."""
        known = self._addresses
        return [
            s
            for s in specs
            if s.symbol not in known and read_object(self._folder, s.symbol) is None
        ]

    def address(self, spec: KernelSpec) -> int:
        """Address of a kernel that was loaded."""
        return self._addresses[spec.symbol]

    def function(self, spec: KernelSpec) -> Any:
        """A loaded kernel as a ctypes function of three int64; a call holds no interpreter lock."""
        return ENTRY(self._addresses[spec.symbol])

    def _compile(self, specs: list[KernelSpec], progress: Progress) -> None:
        """Share the specs among worker processes and wait for all of them."""
        n_worker = min(self._n_worker, len(specs))
        shares = [specs[i::n_worker] for i in range(n_worker)]
        workers = [_Worker(self._folder, self.level, share) for share in shares]
        try:
            done = -1
            while any(worker.running for worker in workers):
                time.sleep(0.05)
                finished = sum(len(worker.finished) for worker in workers)
                if finished != done:
                    done = finished
                    progress(done, len(specs))
            for worker in workers:
                worker.check()
        finally:
            for worker in workers:
                worker.stop()


def _checked(name: str | None) -> Features:
    """The level of that name. Raises ValueError where there is none or this CPU cannot run it."""
    if name is None:
        return features.host()
    if name not in LEVELS:
        raise ValueError(f"level is {name!r}, expected one of {', '.join(LEVELS)}")
    if missing := features.missing(LEVELS[name]):
        raise ValueError(
            f"level {name} needs {', '.join(missing)}, which this CPU lacks: "
            f"its highest level is {features.host().name}"
        )
    return LEVELS[name]


class _Worker:
    """One compile process; `finished` grows by a symbol a kernel."""

    def __init__(self, folder: Path, level: Features, specs: list[KernelSpec]) -> None:
        self.finished: list[str] = []
        self._folder = folder
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by stop
        program = [sys.executable, "-m", "tamis.jit_kernels.cpu.compiler"]
        self._process = subprocess.Popen(
            [*program, str(folder), level.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "NUMBA_OPT": "0"},  # see compile_kernel
            # Ctrl-C in the terminal is for the parent, which stops its workers itself.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(specs,), daemon=True)
        self._reader.start()

    def _read(self, specs: list[KernelSpec]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A worker that died early closes the pipe: check() tells why it died.
        with contextlib.suppress(BrokenPipeError):
            for spec in specs:
                self._process.stdin.write(json.dumps([spec.op.name, spec.constants]) + "\n")
            self._process.stdin.write("\n")
            self._process.stdin.close()
        for line in self._process.stdout:
            self.finished.append(line.strip())

    @property
    def running(self) -> bool:
        return self._reader.is_alive()

    def check(self) -> None:
        """Raise CompileError with the worker's last lines where it failed."""
        if self._process.wait() != 0:
            self._errors.seek(0)
            last = "\n".join(self._errors.read().strip().splitlines()[-12:])
            raise CompileError(f"compiling kernels failed:\n{last}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        remove_unfinished(self._folder, self._process.pid)


_shared: KernelLibrary | None = None


def shared() -> KernelLibrary:
    """The process's kernel library in the user's folder."""
    global _shared
    if _shared is None:
        _shared = KernelLibrary()
    return _shared


# Held while LLVM works, which takes milliseconds: a fork waits for it, so that no child inherits
# LLVM's own locks taken. Compiling, which takes long, is under each library's lock instead.
_llvm = threading.RLock()
_libraries: "weakref.WeakSet[KernelLibrary]" = weakref.WeakSet()


def _after_fork() -> None:
    _llvm.release()
    for library in list(_libraries):
        library.forget_load()


os.register_at_fork(before=_llvm.acquire, after_in_parent=_llvm.release, after_in_child=_after_fork)
