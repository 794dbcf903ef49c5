"""Op calls between unmapped pages, in a child process: a kernel that strays by a byte dies there.

`@in_child` makes a test run in the child, where `runs` calls an op for 1 to 3 threads with every
buffer's end, then every buffer's start, at an unmapped page, and its inputs read-only. The test
module lists its kernels in KERNELS: they are compiled together. No test code of any op is here.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import inspect
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program

PROT_NONE, PROT_READ = 0, 1
PLACES = ("end", "start")
THREADS = (1, 2, 3)
TIMEOUT = 300  # seconds a case may take, with the compilation of its module's kernels

_libc = ctypes.CDLL(None, use_errno=True)


# --- memory --------------------------------------------------------------------------------------


def placed(array: np.ndarray, place: str, *, read_only: bool = False) -> np.ndarray:
    """A copy of `array` whose end (or start) touches an unmapped page; there is one on both sides.

    read_only: writing to it is a fault too. The memory lives as long as the copy.
    """
    array = np.ascontiguousarray(array)
    page = mmap.PAGESIZE
    size = max(page, -(-array.nbytes // page) * page)
    memory = mmap.mmap(-1, size + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = page + (size - array.nbytes if place == "end" else 0)
    copy = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copy[...] = array
    base = np.frombuffer(memory, np.uint8).ctypes.data
    _protect(base, page, PROT_NONE)
    _protect(base + page + size, page, PROT_NONE)
    if read_only:
        _protect(base + page, size, PROT_READ)
    return copy


def _protect(address: int, size: int, mode: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mode) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


# --- op calls, in the child ----------------------------------------------------------------------


def step_of(
    n_tok: int,
    pos: int = 0,
    row: int = 0,
    *,
    prompt: tuple[int, int] | None = None,
    exact_rows: int = 0,
) -> np.ndarray:
    """The step record of a call; the prompt is the call's own rows unless it is given."""
    return np.array([n_tok, pos, row, *(prompt or (pos, pos + n_tok)), exact_rows], np.int64)


_level: str | None = None


@functools.cache
def _library(level: str | None) -> KernelLibrary:
    return KernelLibrary(level=level)


@functools.cache
def _backend(n_thread: int, level: str | None) -> CpuBackend:
    return CpuBackend(n_thread, _library(level))


def backend(n_thread: int) -> CpuBackend:
    """The backend of this process for n_thread threads, at the level that is set."""
    return _backend(n_thread, _level)


@contextlib.contextmanager
def at_level(level: str) -> Iterator[None]:
    """Within it, ops run with kernels made for a level of CPU features."""
    global _level
    before, _level = _level, level
    try:
        yield
    finally:
        _level = before


def runs(
    op: ops.Op,
    constants: tuple[int | str, ...] = (),
    *,
    out: dict[str, np.ndarray],
    scratch: int | None = None,
    absent: Sequence[str] = (),
    **fields: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """Call an op in every place and with every number of threads; yield its outputs after each.

    out: initial contents of what it writes; fields: what it reads, and numbers. scratch: bytes a
    thread for an op that has the field. absent: fields that are 0.
    """
    if _on_gpu is not None:
        # As itself, and as what is launched in its place.
        for _on_gpu.timed in (True, False) if op is ops.ATTEND else (False,):
            yield _run_on_gpu(op, constants, out=out, absent=absent, fields=fields)
        return
    for place in PLACES:
        for n_thread in THREADS:
            _tell(
                f"{op.name}{constants}, buffers' {place} at the unmapped page, {n_thread} threads"
            )
            written = {name: placed(array, place) for name, array in out.items()}
            read = {
                name: placed(value, place, read_only=True)
                if isinstance(value, np.ndarray)
                else value
                for name, value in fields.items()
            }
            if scratch is not None:
                noise = np.random.default_rng(1).integers(0, 256, n_thread * scratch, np.uint8)
                read["scratch"] = placed(noise, place)
            program = Program()
            program.add(op, constants, **read, **written, **dict.fromkeys(absent, 0))
            runner = backend(n_thread)
            runner.run(runner.link(program))
            yield written


# --- on a GPU ------------------------------------------------------------------------------------

_on_gpu: Any = None
GUARD, CANARY = 256, 0xA5  # bytes on both sides of a buffer, and what they hold


@contextlib.contextmanager
def on_gpu(cuda_backend: Any) -> Iterator[None]:
    """Within it, ops run on a GPU; a write beyond a buffer is found by its canaries."""
    global _on_gpu
    _on_gpu = cuda_backend
    try:
        yield
    finally:
        _on_gpu = None


def is_on_gpu() -> bool:
    """Whether ops run on a GPU: its matrix units read float16."""
    return _on_gpu is not None


def _between_canaries(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A copy of an array, at a multiple of 64, and the memory that it lies in."""
    memory = np.full(array.nbytes + 2 * GUARD + 64, CANARY, np.uint8)
    start = GUARD + -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy, memory


def _run_on_gpu(
    op: ops.Op,
    constants: tuple[int | str, ...],
    *,
    out: dict[str, np.ndarray],
    absent: Sequence[str],
    fields: dict[str, Any],
) -> dict[str, np.ndarray]:
    both = {
        name: _between_canaries(np.ascontiguousarray(value))
        for name, value in (fields | out).items()
        if isinstance(value, np.ndarray)
    }
    given = fields | {name: copy for name, (copy, _) in both.items()} | dict.fromkeys(absent, 0)
    if "scratch" in op.fields:
        given["scratch"] = 0
    program = Program()
    program.add(op, constants, **given)
    linked = _on_gpu.link(program)  # holds the device memory
    _on_gpu.run(linked)
    for name, (copy, memory) in both.items():
        before = memory.copy()
        _on_gpu.fetch(memory)
        if name in out:
            start = copy.ctypes.data - memory.ctypes.data
            before[start : start + copy.nbytes] = memory[start : start + copy.nbytes]
        np.testing.assert_array_equal(memory, before, f"{op.name} wrote where it may not: {name}")
    return {name: both[name][0] for name in out}


# --- fork ----------------------------------------------------------------------------------------


def fork_and_wait(work: Callable[[], object]) -> None:
    """Run work() in a forked child of at most 20 s; its failure or death is an AssertionError."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(20)
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the forked child ended with {os.waitstatus_to_exitcode(status)}"


# --- the child -----------------------------------------------------------------------------------


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test's body in the child process; its parameters must be plain values."""

    @functools.wraps(test)
    def wrapper(**parameters: Any) -> None:
        _child().run(inspect.getfile(test), test.__name__, parameters)

    return wrapper


class _Child:
    """The process, started anew after a death."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def run(self, file: str, name: str, parameters: dict[str, Any]) -> None:
        """Run one test there; AssertionError with its traceback, or how the child died."""
        at = "before its first op"
        try:
            self._pipe.send((file, name, parameters))
            while True:
                if not self._pipe.poll(TIMEOUT):
                    self._process.kill()
                kind, text = self._pipe.recv()
                if kind == "done":
                    break
                at = text
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode or 0
            cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise AssertionError(f"the child died of {cause} in {at}") from None
        assert not text, f"in {at}:\n{text}"


@functools.cache
def _first_child() -> list[_Child]:
    return [_Child()]


def _child() -> _Child:
    held = _first_child()
    if not held[0].alive:
        held[0] = _Child()
    return held[0]


_report: Callable[[tuple[str, str]], None] = lambda message: None  # noqa: E731 - set in the child


def _tell(at: str) -> None:
    _report(("at", at))


@functools.cache
def _module(file: str) -> tuple[Any, str]:
    """The test module with its kernels loaded, or why that failed: not tried for every test."""
    try:
        return _loaded(file), ""
    except Exception:
        return None, traceback.format_exc()


def _loaded(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"child_{hash(file)}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listed = [KernelSpec(op, tuple(constants)) for op, constants in module.KERNELS]
    missing = set(_library(_level).missing(listed))  # others than those that the chosen cases need
    backend(1).load(spec for spec in listed if spec not in missing)
    return module


def _serve(pipe: Any) -> None:
    """Run the tests that come in until the pipe closes."""
    global _report
    faulthandler.enable()
    _report = pipe.send
    while True:
        try:
            file, name, parameters = pipe.recv()
        except EOFError:
            sys.exit()
        module, error = _module(file)
        try:
            if module is not None:
                getattr(module, name).__wrapped__(**parameters)
        except Exception:
            error = traceback.format_exc()
        pipe.send(("done", error))
