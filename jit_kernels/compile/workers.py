"""Compile processes of a kernel library: ops to compile go in, files of the store come out.

Numba is imported only by these processes, never in the one that starts them.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tamis.jit_kernels.compile.store import remove_unfinished, write_object
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import Op
from tamis.jit_kernels.contract.program import KernelSpec

Progress = Callable[[int, int], None]


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message ends with the compiler's last lines."""


class NoKernelError(CompileError):
    """A backend has no kernel for an op that is asked for."""


class Command(NamedTuple):
    """A compiler: a module that is run with a folder and a target and calls `serve`."""

    folder: Path
    module: str
    target: str
    env: dict[str, str]


def compile_specs(
    command: Command, specs: list[KernelSpec], n_worker: int, progress: Progress | None = None
) -> None:
    """Share the specs among worker processes and wait for all of them; progress(done, total).

    Raises CompileError; what was compiled before stays in the folder.
    """
    waiting = deque(specs)  # whichever worker is free takes the next
    workers = [_Worker(command, waiting) for _ in range(min(n_worker, len(specs)))]
    try:
        done = -1
        while any(worker.running for worker in workers):
            time.sleep(0.05)
            finished = sum(len(worker.finished) for worker in workers)
            if finished != done and progress is not None:
                progress(finished, len(specs))
            done = finished
        for worker in workers:
            worker.check()
    finally:
        for worker in workers:
            worker.stop()


def serve(folder: Path, compile_kernel: Callable[[KernelSpec], bytes]) -> None:
    """In a worker: compile what standard input names, [op, constants] a line; print each symbol.

    An empty line ends the list: the pipe itself may stay open in a fork of the parent.
    """
    by_name = {op.name: op for op in vars(ops).values() if isinstance(op, Op)}
    for line in iter(sys.stdin.readline, "\n"):
        if not line:
            return
        name, constants = json.loads(line)
        spec = KernelSpec(by_name[name], tuple(constants))
        code = compile_kernel(spec)
        try:
            write_object(folder, spec.symbol, code)
        except OSError as error:
            # One line, for the parent's error: it has no use for a traceback.
            sys.exit(
                f"cannot write to {folder}: {error.strerror}; free some space or set "
                "XDG_CACHE_HOME to an absolute folder elsewhere"
            )
        sys.stdout.write(spec.symbol + "\n")
        sys.stdout.flush()


class _Worker:
    """One compile process; `finished` grows by a symbol a kernel."""

    def __init__(self, command: Command, waiting: deque[KernelSpec]) -> None:
        self.finished: list[str] = []
        self._folder = command.folder
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            [sys.executable, "-m", command.module, str(command.folder), command.target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **command.env},
            # Ctrl-C in the terminal is for the parent, which stops its workers itself.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._feed, args=(waiting,), daemon=True)
        self._reader.start()

    def _feed(self, waiting: deque[KernelSpec]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A worker that died closes the pipe: check() tells why it died.
        with contextlib.suppress(BrokenPipeError, IndexError):
            while True:
                spec = waiting.popleft()
                self._process.stdin.write(json.dumps([spec.op.name, spec.constants]) + "\n")
                self._process.stdin.flush()
                symbol = self._process.stdout.readline()
                if not symbol:
                    return
                self.finished.append(symbol.strip())
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.close()

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
