"""Fails the n-th system call of an operation in a child process, for every n.

What is failed are the calls that `os` has, and those of Python's files, which are made to use them.
A fault is an error (ENOSPC, EIO), half of what was asked (short), or the end of the process before
the call (kill).
"""

import builtins
import errno
import io
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

FAULTS = ("ENOSPC", "EIO", "short", "kill")
MOVES = ("write", "pwrite", "pwritev", "read", "pread", "preadv")
WRITES = ("write", "pwrite", "pwritev", "ftruncate", "mkdir", "link", "symlink")
CALLS = (*MOVES, "open", "fsync", "fdatasync", "replace", "rename", "unlink", "ftruncate", "mkdir")
DONE, FAILED, KILLED = "done", "failed", "killed"


class Injector:
    """Counts calls, and fails the n-th."""

    def __init__(self, n: int, fault: str) -> None:
        self.n, self.fault, self.count = n, fault, 0
        self.real = {name: getattr(os, name) for name in CALLS}

    def install(self) -> None:
        """Put the failing calls in the place of the real ones, for the life of this process."""
        for name in CALLS:
            setattr(os, name, self._call(name))
        io.open = builtins.open = self._open
        os.fdopen = self._fdopen

    def _call(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.n:
                if self.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "short" and name in MOVES:
                    return self.real[name](arguments[0], *self._half(name, arguments[1:]))
                if self.fault != "short" and (
                    self.fault == "EIO" or name not in ("unlink", "read")
                ):
                    number = getattr(errno, self.fault)
                    raise OSError(number, os.strerror(number))
            return self.real[name](*arguments, **options)

        return call

    def _half(self, name: str, rest: tuple[Any, ...]) -> tuple[Any, ...]:
        what, *others = rest
        if name in ("read", "pread"):
            what = max(1, what // 2)
        elif name in ("write", "pwrite"):
            what = memoryview(what)[: max(1, len(what) // 2)]
        else:
            first = memoryview(what[0]).cast("B")
            what = [first[: max(1, len(first) // 2)]]
        return what, *others

    def _open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not isinstance(file, int) and mode == "a+b" and not arguments:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return io.BufferedRandom(_Raw(os.open(file, flags, 0o666), "a+"))
        if not isinstance(file, int) and "b" in mode and "+" not in mode and not arguments:
            flags = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}.get(mode[0])
            if flags is not None:
                return self._fdopen(os.open(file, flags | os.O_CLOEXEC, 0o666), mode)
        return _REAL_OPEN(file, mode, *arguments, **options)

    def _fdopen(self, handle: int, mode: str = "r", *_: Any, **options: Any) -> Any:
        raw = _Raw(handle, "r" if mode.startswith("r") else "w")
        if "+" in mode or "b" not in mode:
            return _REAL_OPEN(handle, mode, **options)
        return io.BufferedReader(raw) if mode.startswith("r") else io.BufferedWriter(raw)


_REAL_OPEN = io.open


class _Raw(io.FileIO):
    """A file whose bytes go through `os`."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def readinto(self, buffer: Any) -> int:
        data = os.read(self.fileno(), len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size

    def readall(self) -> bytes:
        return b"".join(iter(lambda: os.read(self.fileno(), 1 << 16), b""))


def outcomes(run: Callable[[], Any], fault: str, most: int = 2000) -> Iterator[tuple[int, str]]:
    """n and what came of `run` with its n-th call failed, for every n that it reaches.

    What `run` raises other than OSError and its subclasses of this package is an error of the test.
    """
    for n in range(1, most):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            injector, code = Injector(n, fault), b"?"
            try:
                injector.install()
                run()
                code = b"d"
            except Exception as error:
                allowed = isinstance(error, OSError | RuntimeError | ValueError)
                code = b"f" if allowed else b"?"
                if not allowed:
                    traceback.print_exc()
            finally:
                reached = b"1" if injector.count >= n else b"0"
                injector.real["write"](writing, code + reached)
                os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        assert not said.startswith(b"?"), f"call {n} with {fault}: see the traceback above"
        if said.endswith(b"0"):
            assert said.startswith(b"d")
            return
        yield n, {b"d": DONE, b"f": FAILED, b"": KILLED}[said[:1]]
    raise AssertionError(f"more than {most} calls")
