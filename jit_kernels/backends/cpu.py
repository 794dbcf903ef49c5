"""The CPU backend: links Programs to loaded kernels and replays them on a thread team."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tamis.jit_kernels.backends import HOST
from tamis.jit_kernels.backends.base import Backend, Segments
from tamis.jit_kernels.compile.library import KernelLibrary, Progress, shared
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.layout import TAPE, TEAM, TURNS
from tamis.jit_kernels.contract.ops import FEW_ROWS
from tamis.jit_kernels.contract.program import KernelSpec, Moved, OpCost, Program
from tamis.jit_kernels.contract.types import KV_TYPES
from tamis.platform.cores import pin, pinned, places
from tamis.platform.memory import available_bytes

RUN, WORKER = KernelSpec(ops.TEAM_RUN, ()), KernelSpec(ops.TEAM_WORKER, ())
# parts of a thread's share of a decode step's keys: the units that other threads may take over
PARTS = 8
SPIN_CYCLES = 50_000  # about 20 us: longer than the imbalance of an op, shorter than a time slice


class CpuProgram:
    """A Program with addresses, which `CpuBackend.run` replays.

    Keeps the Program's arrays alive.
    """

    def __init__(self, program: Program, library: KernelLibrary) -> None:
        self.program = program
        self._moved = Moved(program)
        sizes = [TURNS // 8 + len(call.values) for call in program.calls]
        starts = np.cumsum([0, *sizes])
        self._args = np.zeros(max(1, int(starts[-1])), np.int64)
        self.tape = np.zeros((max(1, len(program)), TAPE.size // 8), np.int64)
        for i, call in enumerate(program.calls):
            for j, (name, value) in enumerate(zip(call.spec.op.fields, call.values, strict=True)):
                at = starts[i] + TURNS // 8 + j
                at = slice(at, at + 1)
                a_float = name in call.spec.op.floats
                view = self._args[at].view(np.float64) if a_float else self._args[at]
                view[0] = value
            args = self._args.ctypes.data + 8 * int(starts[i])
            self.tape[i] = library.address(call.spec), args, call.sync, 0

    def __len__(self) -> int:
        return len(self.program)

    def count(self, n_tok: int, pos: int, first: int = 0, last: int | None = None) -> None:
        """Add the counts of ops first..last in the last replay, of n_tok rows from pos on."""
        self._moved.add(n_tok, pos, first, last)

    def costs(self) -> list[OpCost]:
        """Cycles since `reset_costs`, and the counts of each op, in recorded order.

        Cycles are thread 0's until it starts the next op: if the team does not wait between ops,
        the last op of a group has the waiting time of all.
        """
        return self._moved.costs(self.tape[:, TAPE.cycles // 8])

    def reset_costs(self) -> None:
        """Set all costs to zero."""
        self.tape[:, TAPE.cycles // 8] = 0
        self._moved.reset()


class JoinedProgram:
    """Segments of linked Programs joined into one, which `CpuBackend.run` replays.

    steps: run one after another. The segments of a step use different data and have no order among
    them: they run op by op, and the team waits once for the n-th ops of all.
    """

    def __init__(self, steps: Sequence[Sequence[tuple[CpuProgram, range]]]) -> None:
        self._steps = steps  # keeps their arrays alive
        self.tape = np.concatenate([_interleaved_tape(step) for step in steps])

    def __len__(self) -> int:
        return len(self.tape)


def _interleaved_tape(segments: Sequence[tuple[CpuProgram, range]]) -> np.ndarray:
    tapes = [linked.tape[ops.start : ops.stop] for linked, ops in segments]
    if len(tapes) == 1:
        return tapes[0]
    sync, found = TAPE.sync // 8, []
    for i in range(max(map(len, tapes))):
        same = np.array([tape[i] for tape in tapes if i < len(tape)])
        same[:, sync] = [0] * (len(same) - 1) + [same[:, sync].max()]
        found.append(same)
    return np.concatenate(found) if found else tapes[0]


class CpuBackend(Backend):
    """Runs Programs on `n_thread` threads, including the calling one.

    One Program runs at a time (a lock orders callers); idle threads sleep. After fork() the child's
    first run starts a team of its own. The threads end with `close`, with the backend, or at exit.
    """

    name, on_host = HOST, True
    kv_types: tuple[str, ...] = KV_TYPES
    strips, joins = True, FEW_ROWS
    timed = False
    clock = None

    def __init__(self, n_thread: int, library: KernelLibrary | None = None) -> None:
        assert n_thread >= 1
        self.n_thread = n_thread
        self.n_part = PARTS * n_thread if n_thread > 1 else 1
        self.library = library or shared()
        self.layout = f"{ops.STRIP_LAYOUT} {self.library.level.name}"
        self.drop_team()
        _backends.add(self)

    def drop_team(self) -> None:
        """Reset the team in a child of fork(): the holder of the lock does not exist there."""
        self._lock = threading.Lock()
        self._team: _Team | None = None

    def load(
        self,
        rows: Iterable[KernelSpec],
        own: Iterable[KernelSpec] = (),
        progress: Progress | None = None,
    ) -> None:
        """Map (or compile) kernels ahead of `link`. Raises CompileError."""
        self.library.load([RUN, WORKER, *rows, *own], progress)

    def link(self, program: Program) -> CpuProgram:
        """Fill in the addresses of a recorded Program; loads missing kernels."""
        self.load(program.specs)
        return CpuProgram(program, self.library)

    def join(self, steps: Segments, _before: JoinedProgram | None = None) -> JoinedProgram:
        """Segments of Programs that this, or another CpuBackend, has linked, joined into one."""
        return JoinedProgram(steps)

    def run(
        self, linked: CpuProgram | JoinedProgram, first: int = 0, last: int | None = None
    ) -> None:
        """Replay ops first..last of a Program (all by default) and return when all have ended."""
        stop = len(linked) if last is None else last
        if stop <= first:
            return
        with self._lock:
            if self._team is None:
                self._team = _Team(self.n_thread, self.library)
            self._team.run(linked.tape[first:stop])

    def send(self, *arrays: np.ndarray) -> None:
        """Do nothing: kernels and Python share memory."""

    def fetch(self, *arrays: np.ndarray) -> None:
        """Do nothing: kernels and Python share memory."""

    def free_bytes(self, _n_weight: int = 0, /) -> int:
        """The bytes that can be allocated without swapping.

        Weights are mapped: the system may evict their pages.
        """
        return available_bytes()

    def close(self) -> None:
        """End the team's threads. A later run starts them again."""
        with self._lock:
            if self._team is not None:
                self._team.close()
                self._team = None


class _Team:
    """The shared record and the threads that sleep on it; they end before it is freed."""

    def __init__(self, n_thread: int, library: KernelLibrary) -> None:
        memory = np.zeros(TEAM.size // 8 + 8, np.int64)
        # Aligned so that words of different threads share no cache line.
        offset = -memory.ctypes.data % 64 // 8
        self._words = memory[offset : offset + TEAM.size // 8]
        self._words[TEAM.spin // 8] = SPIN_CYCLES
        self._address = self._words.ctypes.data
        self._n_thread = n_thread
        self._run = library.function(RUN)
        worker = library.function(WORKER)
        self._places = places(n_thread)
        args = [(worker, self._address, n_thread, tid, self._places) for tid in range(1, n_thread)]
        threads = [threading.Thread(target=_work, args=each, daemon=True) for each in args]
        for thread in threads:
            thread.start()
        # The library is kept alive, too: its memory is the code that the threads run.
        self.close = weakref.finalize(self, _end, os.getpid(), self._words, threads, library)

    def run(self, tape: np.ndarray) -> None:
        self._words[TEAM.tape // 8] = tape.ctypes.data
        self._words[TEAM.n_op // 8] = len(tape)
        with pinned(self._places[0]) if self._places else contextlib.nullcontext():
            self._run(self._address, self._n_thread, 0)


def _work(
    worker: Callable[[int, int, int], None], team: int, n_thread: int, tid: int, cpus: Sequence[int]
) -> None:
    """Run a thread of the team until the team ends.

    cpus: the processor of each thread; empty: any.
    """
    if cpus:
        pin(cpus[tid])
    worker(team, n_thread, tid)


def _end(
    pid: int, words: np.ndarray, threads: list[threading.Thread], library: KernelLibrary
) -> None:
    """End a team's threads and wait for them."""
    if pid != os.getpid():
        return  # the threads are the parent's
    words[TEAM.quit // 8] = 1
    words[TEAM.n_op // 8] = 0
    # With no ops to run, run only wakes the workers, which see `quit` and return.
    library.function(RUN)(words.ctypes.data, len(threads) + 1, 0)
    for thread in threads:
        thread.join()


_backends: "weakref.WeakSet[CpuBackend]" = weakref.WeakSet()


def _after_fork() -> None:
    for backend in list(_backends):
        backend.drop_team()


os.register_at_fork(after_in_child=_after_fork)
