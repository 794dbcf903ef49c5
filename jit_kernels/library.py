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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from tamis.jit_kernels.program import KernelSpec
from tamis.jit_kernels.store import open_folder, read_object, user_folder

Progress = Callable[[int, int], None]
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message ends with the compiler's last lines."""


class KernelLibrary:
    """Kernels by spec. Thread-safe; one per process is enough (`shared`)."""

    def __init__(self, root: Path | None = None, n_worker: int = 2) -> None:
        self._folder = open_folder(root or user_folder())
        self._n_worker = n_worker
        self._addresses: dict[str, int] = {}
        self._lock = threading.Lock()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)

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
                self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
            self._engine.finalize_object()
            for symbol in wanted:
                self._addresses[symbol] = self._engine.get_function_address(symbol)

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
        workers = [_Worker(self._folder, specs[i::n_worker]) for i in range(n_worker)]
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


class _Worker:
    """One compile process; `finished` grows by a symbol a kernel."""

    def __init__(self, folder: Path, specs: list[KernelSpec]) -> None:
        self.finished: list[str] = []
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by stop
        command = [sys.executable, "-m", "tamis.jit_kernels.cpu.compiler", str(folder)]
        self._process = subprocess.Popen(
            command,
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


_shared: KernelLibrary | None = None


def shared() -> KernelLibrary:
    """The process's kernel library in the user's folder."""
    global _shared
    if _shared is None:
        _shared = KernelLibrary()
    return _shared
