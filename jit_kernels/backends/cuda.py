"""The CUDA backend: Programs over host arrays, replayed as CUDA graphs over their device copies.

Recorded Programs name arrays of this process. Here each of them has a copy in device memory, which
kernels read and write; `send` and `fetch` copy what Python wrote or wants to read. The host arrays
of activations and of the KV cache are never touched, so they take address space only.
"""

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tamis.jit_kernels.backends import GPU
from tamis.jit_kernels.backends.base import Backend, Segments
from tamis.jit_kernels.backends.cuda_joined import MOST_ROWS, JoinedProgram
from tamis.jit_kernels.backends.fusion import Step, candidates, fused, merged, passed_on
from tamis.jit_kernels.compile.workers import Progress
from tamis.jit_kernels.contract.ops import MATMUL, MOE_MATMUL, PACK_ROWS
from tamis.jit_kernels.contract.program import Call, KernelSpec, Moved, OpCost, Program
from tamis.jit_kernels.contract.types import KV_TYPES
from tamis.jit_kernels.cuda.lang.scratch import (
    COUNTERS,
    FEW_ROWS,
    class_of,
    expert_scratch,
    matmul_scratch,
)
from tamis.jit_kernels.cuda.runtime.driver import Buffer, Device, Event, Function, Graph
from tamis.jit_kernels.cuda.runtime.ptx_library import PtxLibrary

ALIGNMENT = 256  # a copy starts at its array's address modulo this: kernels may read 16 bytes
PARTS = 1  # a multiprocessor's: parts that attention over a context is cut into
SHARE = 2  # of products of the same rows, as many are on the GPU together
PINNED = 1 << 16, 1 << 26  # bytes of arrays whose memory is pinned when they are fetched
CHUNK = 1 << 22  # bytes looked at at once for whether there is anything to copy


class Mirror:
    """The device copy of an array that owns its memory, which it keeps alive."""

    def __init__(self, device: Device, array: np.ndarray) -> None:
        self._device, self._array = device, array
        self._host, self.n_bytes = array.ctypes.data, array.nbytes
        self._unpinned = PINNED[0] <= array.nbytes <= PINNED[1]
        self._buffer = device.allocate(array.nbytes + ALIGNMENT)
        self.address = self._buffer.address + self._host % ALIGNMENT
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            if not array.flags.writeable or part.any():  # the buffer is zero, as most arrays are
                device.upload(self.address + start, part.ctypes.data, len(part))

    def at(self, host: int) -> int:
        """Device address of a host address within the array."""
        return self.address + host - self._host

    def pin(self) -> None:
        """Make copies to the array fast, once; not of small arrays, nor of very large ones."""
        if self._unpinned and self._device.pin(self._host, self._array.nbytes):
            weakref.finalize(self, self._device.unpin, self._host).atexit = False
        self._unpinned = False


class Mapped:
    """An array in host memory that kernels see itself: as a Mirror, but nothing is copied."""

    def __init__(self, device: Device, array: np.ndarray) -> None:
        self._array, self._host = array, array.ctypes.data
        self.address = device.map(self._host, array.nbytes)
        weakref.finalize(self, device.unmap, self._host).atexit = False

    def at(self, host: int) -> int:
        """Device address of a host address within the array."""
        return self.address + host - self._host


_Marks = list[tuple[int, Event]]  # captured before the op of this number


class CudaProgram:
    """A Program with device addresses: what `CudaBackend.run` replays. Keeps its memory alive."""

    def __init__(self, program: Program, backend: "CudaBackend") -> None:
        self.program = program
        self._mirrors = {at: backend.mirror(array) for at, array in program.arrays.items()}
        self._scratch = backend.scratch(max(map(self._scratch_bytes, program.calls), default=0))
        self.steps = [self._step_of(call) for call in program.calls]
        self._private = passed_on(self.steps)
        self._others = dict(self._halves())  # of packed rows: see fused
        steps = (
            value
            for call in program.calls
            for name, value in zip(call.spec.op.fields, call.values, strict=True)
            if name == "step"
        )
        self._step = program.arrays[int(at)] if (at := next(steps, None)) is not None else None
        self._graphs: dict[tuple[int, int, str, bool], tuple[Graph, _Marks]] = {}
        self._moved, self._spent = Moved(program), np.zeros(len(program))

    def __len__(self) -> int:
        return len(self.program)

    @property
    def rows(self) -> str:
        """Which kernels the next replay needs: those for "few" rows, "some" or "many"."""
        return class_of(1 if self._step is None else int(self._step[0]))

    def launches(self, backend: "CudaBackend") -> list[Graph]:
        """Each launch of a replay as a graph of its own, for measurements."""
        found = []
        for step in self._launched(backend, 0, len(self)):
            for function in backend.library.functions(step.spec):
                if _is_for(function, self.rows):
                    with backend.device.capture() as captured:
                        n_shared = step.fields.get("n_shared")
                        values = tuple(step.fields.values())
                        backend.device.launch(function, values, n_shared=n_shared)
                    found += captured
        return found

    def _launched(self, backend: "CudaBackend", first: int, last: int) -> list[Step]:
        """Ops first .. last as they are launched: of few rows, several at a time."""
        steps = self.steps[first:last]
        if self.rows == "many" or backend.timed or not backend.device.target.overlaps:
            return steps
        if self.rows == "some":
            return merged(steps, self._private, self._others.__getitem__, backend.n_thread)
        return fused(steps, self._private, self._others.__getitem__, backend.n_thread)

    def start(self, backend: "CudaBackend", first: int, last: int) -> None:
        """Start the launches of ops first .. last, for as many rows as the step record says.

        Where the backend is timed, it waits for them and adds to what ops have cost.
        """
        key = (first, last, self.rows, backend.timed)
        if key not in self._graphs:
            self._graphs[key] = self._captured(backend, first, last)
        graph, marks = self._graphs[key]
        backend.device.start(graph)
        if backend.timed:
            backend.device.wait()
            for (_, begin), (i, end) in itertools.pairwise(marks):
                self._spent[i - 1] += backend.device.nanoseconds(begin, end)

    def _captured(self, backend: "CudaBackend", first: int, last: int) -> tuple[Graph, _Marks]:
        """The launches, with marks wherever the part of the pass changes if they are timed."""
        with backend.device.capture() as captured:
            marks = self.launch(backend, first, last)
        return captured[0], marks

    def launch(self, backend: "CudaBackend", first: int, last: int) -> _Marks:
        """Launch ops first .. last, within a capture."""
        calls = self.program.calls
        marks: _Marks = []
        steps = self._launched(backend, first, last)
        if not backend.timed:
            backend.launch(steps, self.rows)
            return marks
        # Those of the calls; marked where another part of the pass begins.
        parts = [calls[i].part for i in range(first, last)]
        starts = [i for i in range(len(parts)) if i == 0 or parts[i] != parts[i - 1]]
        for begin, end in itertools.pairwise([*starts, len(parts)]):
            marks.append((first + begin, backend.device.mark()))
            backend.launch(steps[begin:end], self.rows, after_mark=True)
        marks.append((last, backend.device.mark()))
        return marks

    def count(self, n_tok: int, pos: int, first: int = 0, last: int | None = None) -> None:
        """Add what ops first..last moved in the replay just made, of n_tok rows from pos on."""
        self._moved.add(n_tok, pos, first, last)

    def costs(self) -> list[OpCost]:
        """Nanoseconds since `reset_costs`, and what was counted of each op, in recorded order.

        Of ops in a row that are of the same part of a pass, the last one has the time of all.
        """
        return self._moved.costs(self._spent)

    def reset_costs(self) -> None:
        """Start counting anew."""
        self._spent[...] = 0
        self._moved.reset()

    def _scratch_bytes(self, call: Call) -> int:
        field = {k: int(v) for k, v in zip(call.spec.op.fields, call.values, strict=True)}
        if call.spec.op is MATMUL:
            return matmul_scratch(field["n_in"], field["n_out"])
        if call.spec.op is MOE_MATMUL:
            n_slot = self.program.arrays[field["ids"]].size
            n_row = n_slot if field["x_per_slot"] else n_slot // field["n_used"]
            return expert_scratch(n_row, field["n_in"], n_slot)
        return 0

    def _step_of(self, call: Call) -> Step:
        fields: dict[str, int | float] = {}
        for name, value in zip(call.spec.op.fields, call.values, strict=True):
            if name in call.spec.op.floats:
                fields[name] = float(value)
            elif name == "scratch":
                fields[name] = self._scratch.address + COUNTERS
            else:
                mirror = self._mirrors.get(int(value))
                fields[name] = int(value) if mirror is None else mirror.at(int(value))
        return Step(call.spec, fields, call.sync)

    def _halves(self) -> Iterator[tuple[int, int]]:
        """The halves of arrays that rows are packed to, by each other's address."""
        for call, step in zip(self.program.calls, self.steps, strict=True):
            if call.spec.op is PACK_ROWS:
                host = call.values[call.spec.op.fields.index("packed")]
                first = int(step.fields["packed"])
                other = first + self.program.arrays[int(host)].nbytes // 2 // ALIGNMENT * ALIGNMENT
                yield from ((first, other), (other, first))


class CudaBackend(Backend):
    """Runs Programs on a GPU; they start in the order of the calls, `fetch` waits for them.

    Raises CudaError where there is no usable GPU, KernelStoreError.
    """

    name, on_host = GPU, False
    kv_types: tuple[str, ...] = KV_TYPES
    strips = timed = False
    joins, joins_alike, pads = MOST_ROWS, True, FEW_ROWS + 1
    clock = 1e9  # costs are in nanoseconds

    def __init__(self) -> None:
        self.device = Device()
        self.library = PtxLibrary(self.device)
        self.n_thread = self.n_part = PARTS * self.device.n_multiprocessor
        self._lock = threading.RLock()
        self._mirrors: weakref.WeakValueDictionary[tuple[int, int], Mirror | Mapped]
        self._mirrors = weakref.WeakValueDictionary()
        self._weights: list[Mirror] = []  # read-only arrays stay: all sessions share them
        self._scratch: Buffer | None = None

    def load(
        self,
        rows: Iterable[KernelSpec],
        own: Iterable[KernelSpec] = (),
        progress: Progress | None = None,
    ) -> None:
        """Load (or compile) kernels ahead of `link`. Raises CompileError."""
        with self._lock:
            self.device.use()
            specs = {*rows, *own}
            if self.device.target.overlaps:
                specs |= candidates(specs)
            self.library.load(specs, progress)

    def link(self, program: Program) -> CudaProgram:
        """Copy a recorded Program's arrays, loading the kernels that are not loaded yet.

        Raises MemoryError with numbers.
        """
        self.load(program.specs)
        with self._lock:
            return CudaProgram(program, self)

    def run(
        self, linked: CudaProgram | JoinedProgram, first: int = 0, last: int | None = None
    ) -> None:
        """Start a replay of ops first..last of a Program (all by default)."""
        stop = len(linked) if last is None else last
        if stop <= first:
            return
        with self._lock:
            self.device.use()
            if isinstance(linked, JoinedProgram):
                linked.start(self)
            else:
                linked.start(self, first, stop)

    def launch(
        self, steps: Sequence[Step], rows: str = "few", *, times: int = 1, after_mark: bool = False
    ) -> None:
        """Launch the kernels of steps for a class of rows, with so many times their blocks.

        Within a capture. after_mark: the first one does not overlap what is before it.
        """
        # Products of more rows may share their scratch: each waits for the one before.
        together, beside = self.device.target.overlaps and rows == "few", False
        for step in steps:
            others = together and not step.sync
            share = SHARE if beside or others else 1
            for function in self.library.functions(step.spec):
                if _is_for(function, rows):
                    self.device.launch(
                        function, tuple(step.fields.values()), beside=beside, share=share,
                        times=times, overlaps=not after_mark, n_shared=step.fields.get("n_shared"),
                    )  # fmt: skip
                    after_mark = False
            beside = others

    def join(self, steps: Segments, before: JoinedProgram | None = None) -> JoinedProgram:
        """Segments of linked Programs as one, loading the kernels that are not loaded yet."""
        with self._lock:
            self.device.use()
            found = JoinedProgram(self, steps, before)
            self.library.load(found.specs)
            return found

    def send(self, *arrays: np.ndarray) -> None:
        """Show kernels what Python wrote to these arrays; what none names yet, `link` shows."""
        with self._lock:
            self.device.use()
            for array in arrays:
                host = array.ctypes.data
                mirror = self._mirror(array)
                if isinstance(mirror, Mirror):
                    self.device.upload(mirror.at(host), host, array.nbytes)

    def fetch(self, *arrays: np.ndarray) -> None:
        """Show Python what kernels wrote to these arrays; waits for all that was started."""
        with self._lock:
            self.device.use()
            for array in arrays:
                host = array.ctypes.data
                mirror = self._mirror(array)
                if isinstance(mirror, Mirror):
                    mirror.pin()
                    self.device.download(host, mirror.at(host), array.nbytes)
            self.device.wait()

    def mapped(self, array: np.ndarray, /) -> Mapped:
        """Let kernels see an array that owns its memory itself, as long as this is held.

        Raises MemoryError.
        """
        with self._lock:
            self.device.use()
            found = Mapped(self.device, array)
            self._mirrors[array.ctypes.data, array.nbytes] = found
            return found

    def mirror(self, array: np.ndarray) -> Mirror | Mapped:
        """The device copy of the memory that an array lies in, made where there is none."""
        root = _root(array)
        found = self._mirrors.get((root.ctypes.data, root.nbytes))
        if found is None:
            found = Mirror(self.device, root)
            self._mirrors[root.ctypes.data, root.nbytes] = found
            if not array.flags.writeable:
                self._weights.append(found)
        return found

    def _mirror(self, array: np.ndarray) -> Mirror | Mapped | None:
        """The device copy that a linked Program has; None where none names the array."""
        root = _root(array)
        return self._mirrors.get((root.ctypes.data, root.nbytes))

    def scratch(self, n_bytes: int) -> Buffer:
        """COUNTERS bytes of counters, then scratch that one kernel at a time may use."""
        if self._scratch is None or self._scratch.n_bytes < COUNTERS + n_bytes:
            self._scratch = self.device.allocate(COUNTERS + n_bytes)
        return self._scratch

    def free_bytes(self, n_weight: int = 0, /) -> int:
        """Bytes of device memory that can be taken, so many of weights being there."""
        self.device.use()
        held = sum(mirror.n_bytes for mirror in self._weights)
        return self.device.memory()[0] - max(0, n_weight - held)

    def close(self) -> None:
        """Give back the weights. Programs must not be run afterwards."""
        self.device.wait()
        self._weights.clear()
        self._scratch = None


def _is_for(function: Function, rows: str) -> bool:
    return function.rows == "any" or rows in function.rows.split()


def _root(array: np.ndarray) -> np.ndarray:
    """The array that owns an array's memory; of weights, which are read-only, each is its own."""
    while array.flags.writeable and isinstance(array.base, np.ndarray):
        array = array.base
    return array
