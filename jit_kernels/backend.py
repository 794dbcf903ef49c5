"""The CPU backend: links Programs to loaded kernels and replays them on a thread team."""

import atexit
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tamis.jit_kernels import ops
from tamis.jit_kernels.layout import TAPE, TEAM
from tamis.jit_kernels.library import KernelLibrary, Progress, shared
from tamis.jit_kernels.program import KernelSpec, Program

RUN, WORKER = KernelSpec(ops.TEAM_RUN, ()), KernelSpec(ops.TEAM_WORKER, ())
SPIN_CYCLES = 50_000  # about 20 us: longer than the imbalance of an op, shorter than a time slice


class OpCost(NamedTuple):
    """What one recorded op cost over the replays so far."""

    label: str
    cycles: int
    n_bytes: int
    n_flop: int


class LinkedProgram:
    """A Program with addresses: what `Backend.run` replays. Keeps the Program's arrays alive."""

    def __init__(self, program: Program, library: KernelLibrary) -> None:
        self.program = program
        starts = np.cumsum([0] + [len(call.values) for call in program.calls])
        self._args = np.zeros(max(1, int(starts[-1])), np.int64)
        self.tape = np.zeros((max(1, len(program)), TAPE.size // 8), np.int64)
        for i, call in enumerate(program.calls):
            for j, (name, value) in enumerate(zip(call.spec.op.fields, call.values, strict=True)):
                at = slice(starts[i] + j, starts[i] + j + 1)
                view = self._args[at].view(np.float64) if name.endswith("_f") else self._args[at]
                view[0] = value
            args = self._args.ctypes.data + 8 * int(starts[i])
            self.tape[i] = library.address(call.spec), args, call.sync, 0

    def __len__(self) -> int:
        return len(self.program)

    def costs(self) -> list[OpCost]:
        """Cycles since `reset_costs`, bytes and operations of each op, in recorded order."""
        spent = self.tape[:, TAPE.cycles // 8]
        return [
            OpCost(call.label, int(n), call.n_bytes, call.n_flop)
            for call, n in zip(self.program.calls, spent, strict=False)
        ]

    def reset_costs(self) -> None:
        """Start counting cycles anew."""
        self.tape[:, TAPE.cycles // 8] = 0


class Backend:
    """Runs Programs on `n_thread` threads, the calling one included.

    One Program runs at a time (a lock orders callers); idle threads sleep. After fork() the child's
    first run starts a team of its own. `close` ends the threads; it is called at exit.
    """

    def __init__(self, n_thread: int, library: KernelLibrary | None = None) -> None:
        assert n_thread >= 1
        self.n_thread = n_thread
        self.library = library or shared()
        self._lock = threading.Lock()
        self._team: _Team | None = None

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Map (or compile) kernels ahead of `link`. Raises CompileError."""
        self.library.load([RUN, WORKER, *specs], progress)

    def link(self, program: Program) -> LinkedProgram:
        """Fill in the addresses of a recorded Program, loading what is not loaded yet."""
        self.load(program.specs)
        return LinkedProgram(program, self.library)

    def run(self, linked: LinkedProgram, first: int = 0, last: int | None = None) -> None:
        """Replay ops first..last of a Program (all by default) and return when all have ended."""
        stop = len(linked) if last is None else last
        if stop <= first:
            return
        with self._lock:
            if self._team is None or self._team.pid != os.getpid():
                self._team = _Team(self.n_thread, self.library)
            self._team.run(linked.tape[first:stop])

    def close(self) -> None:
        """End the team's threads. A later run starts them again."""
        with self._lock:
            if self._team is not None:
                self._team.close()
                self._team = None


class _Team:
    """The shared record and the threads that sleep on it."""

    def __init__(self, n_thread: int, library: KernelLibrary) -> None:
        self.pid = os.getpid()
        self._n_thread = n_thread
        self._memory = np.zeros(TEAM.size // 8 + 8, np.int64)
        # Aligned so that words of different threads share no cache line.
        self._address = -(-self._memory.ctypes.data // 64) * 64
        offset = (self._address - self._memory.ctypes.data) // 8
        self._words = self._memory[offset : offset + TEAM.size // 8]
        self._words[TEAM.spin // 8] = SPIN_CYCLES
        self._run = library.function(RUN)
        worker = library.function(WORKER)
        self._threads = [
            threading.Thread(target=worker, args=(self._address, n_thread, tid), daemon=True)
            for tid in range(1, n_thread)
        ]
        for thread in self._threads:
            thread.start()
        _teams.add(self)

    def run(self, tape: np.ndarray) -> None:
        self._words[TEAM.tape // 8] = tape.ctypes.data
        self._words[TEAM.n_op // 8] = len(tape)
        self._run(self._address, self._n_thread, 0)

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # the threads are the parent's
        self._words[TEAM.quit // 8] = 1
        self._words[TEAM.n_op // 8] = 0
        # With no ops to walk, run only wakes the workers, which see `quit` and return.
        self._run(self._address, self._n_thread, 0)
        for thread in self._threads:
            thread.join()


_teams: "weakref.WeakSet[Any]" = weakref.WeakSet()


@atexit.register
def _close_teams() -> None:
    """End all threads while the memory they sleep on still exists."""
    for team in list(_teams):
        team.close()
