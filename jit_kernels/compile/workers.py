"""Compile processes of a kernel library: ops to compile go in, files of the store come out.

Numba is imported only by these processes, never by the one that starts them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tamis.jit_kernels.contract.program import KernelSpec
from tamis.platform.private_files import remove_unfinished
from tamis.platform.processes import child_environment

Progress = Callable[[int, int], None]
# Numba makes and drops errors while it tries signatures; where colorama is installed, coloring them
# takes a fifth of the time.
PLAIN_ERRORS = {"NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1"}


class CompileError(RuntimeError):
    """A kernel could not be compiled; the message ends with the compiler's last lines."""


class NoKernelError(CompileError):
    """A backend has no kernel for a requested op."""


class Command(NamedTuple):
    """A compiler: a module whose `main(folder, target)` calls worker.serve."""

    folder: Path
    module: str
    target: str
    env: dict[str, str]


def compile_specs(
    command: Command, specs: list[KernelSpec], n_worker: int, progress: Progress | None = None
) -> None:
    """Distribute the specs over worker processes and wait for all of them; progress(done, total).

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


class _Worker:
    """One compile process; `finished` collects the symbols of compiled kernels."""

    def __init__(self, command: Command, waiting: deque[KernelSpec]) -> None:
        self.finished: list[str] = []
        self._folder = command.folder.absolute()
        self._current = ""  # the kernel that is being compiled
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by stop
        arguments = [command.module, str(self._folder), command.target, str(os.getpid())]
        self._process = subprocess.Popen(
            # -P and a private working directory, as Python and Numba read files of it.
            [sys.executable, "-P", "-m", "tamis.jit_kernels.compile.worker", *arguments],
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=child_environment(PLAIN_ERRORS | command.env),
            # Ctrl-C in the terminal is for the parent, which stops its workers itself.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._feed, args=(waiting,), daemon=True)
        self._reader.start()

    def _feed(self, waiting: deque[KernelSpec]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A worker that died closes the pipe: check() finds out why.
        with contextlib.suppress(BrokenPipeError, IndexError):
            while True:
                spec = waiting.popleft()
                self._current = spec.symbol
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
        """Raise CompileError with the worker's last lines if it has failed."""
        if (code := self._process.wait()) != 0:
            self._errors.seek(0)
            last = "\n".join(self._errors.read().strip().splitlines()[-12:])
            raise CompileError(self._why(code, last))

    def _why(self, code: int, last: str) -> str:
        from tamis.jit_kernels.compile.worker import CPU_SECONDS, MEMORY_BYTES

        if code == -signal.SIGXCPU:
            return (
                f"compiling kernel {self._current} took more than {CPU_SECONDS} s: the model or "
                "attn asks for a kernel that is too large"
            )
        if "MemoryError" in last or "out of memory" in last:
            return (
                f"compiling kernel {self._current} took more than {MEMORY_BYTES >> 30} GiB, or "
                f"there is less memory: free some, or the model or attn asks for a kernel that "
                f"is too large:\n{last}"
            )
        killed = f" (the compiler was ended by {signal.Signals(-code).name})" if code < 0 else ""
        return f"compiling kernels failed{killed}:\n{last}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        remove_unfinished(self._folder)
