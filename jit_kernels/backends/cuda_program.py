"""A Program with device addresses, replayed as CUDA graphs."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from tamis.jit_kernels.backends.cuda_memory import ALIGNMENT, Mapped, Mirror
from tamis.jit_kernels.backends.fusion import Step, fused, merged, passed_on
from tamis.jit_kernels.contract.ops import MATMUL, MOE_MATMUL, PACK_ROWS
from tamis.jit_kernels.contract.program import Call, Moved, OpCost, Program
from tamis.jit_kernels.cuda.lang.scratch import (
    COUNTERS,
    class_of,
    expert_scratch,
    matmul_scratch,
    some_scratch,
)
from tamis.jit_kernels.cuda.runtime.driver import Buffer, Device, Event, Function, Graph
from tamis.jit_kernels.cuda.runtime.ptx_library import PtxLibrary

_Marks = list[tuple[int, Event]]  # (number of an op, event captured before it)


class Launches(Protocol):
    """What a Program needs of its backend: memory, kernels and launches."""

    device: Device
    library: PtxLibrary
    n_thread: int
    timed: bool

    def mirror(self, array: np.ndarray) -> Mirror | Mapped:
        """The device copy of the memory that an array lies in."""

    def scratch(self, n_bytes: int) -> Buffer:
        """Scratch that one kernel at a time may use."""

    def launch(
        self, steps: Sequence[Step], rows: str = "few", *, times: int = 1, after_mark: bool = False
    ) -> None:
        """Launch the kernels of steps for a class of rows, within a capture."""


class CudaProgram:
    """A Program with device addresses, which `CudaBackend.run` replays. Keeps its memory alive."""

    def __init__(self, program: Program, backend: Launches) -> None:
        self.program = program
        self._mirrors = {at: backend.mirror(array) for at, array in program.arrays.items()}
        self._sums = some_scratch(backend.n_thread)
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
        """The class of kernels of the next replay: those for "few" rows, "some" or "many"."""
        return class_of(1 if self._step is None else int(self._step[0]))

    def launches(self, backend: Launches) -> list[Graph]:
        """Each launch of a replay as a separate graph, for measurements."""
        found = []
        for step in self._launched(backend, 0, len(self)):
            for function in backend.library.functions(step.spec):
                if is_for(function, self.rows):
                    with backend.device.capture() as captured:
                        n_shared = step.fields.get("n_shared")
                        values = tuple(step.fields.values())
                        backend.device.launch(function, values, n_shared=n_shared)
                    found += captured
        return found

    def _launched(self, backend: Launches, first: int, last: int) -> list[Step]:
        """The launches of ops first .. last; for few rows, one launch may cover several ops."""
        steps = self.steps[first:last]
        if self.rows == "many" or backend.timed or not backend.device.target.overlaps:
            return steps
        if self.rows == "some":
            return merged(steps, self._private, self._others.__getitem__, backend.n_thread)
        return fused(steps, self._private, self._others.__getitem__, backend.n_thread)

    def start(self, backend: Launches, first: int, last: int) -> None:
        """Start the launches of ops first .. last, for the step record's number of rows.

        If the backend is timed, it waits for them and adds to the ops' costs.
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

    def _captured(self, backend: Launches, first: int, last: int) -> tuple[Graph, _Marks]:
        """The launches as a graph, with marks where the pass's part changes if they are timed."""
        with backend.device.capture() as captured:
            marks = self.launch(backend, first, last)
        return captured[0], marks

    def launch(self, backend: Launches, first: int, last: int) -> _Marks:
        """Launch ops first .. last, within a capture."""
        calls = self.program.calls
        marks: _Marks = []
        steps = self._launched(backend, first, last)
        if not backend.timed:
            backend.launch(steps, self.rows)
            return marks
        # The ops of the calls; marked where another part of the pass begins.
        parts = [calls[i].part for i in range(first, last)]
        starts = [i for i in range(len(parts)) if i == 0 or parts[i] != parts[i - 1]]
        for begin, end in itertools.pairwise([*starts, len(parts)]):
            marks.append((first + begin, backend.device.mark()))
            backend.launch(steps[begin:end], self.rows, after_mark=True)
        marks.append((last, backend.device.mark()))
        return marks

    def count(self, n_tok: int, pos: int, first: int = 0, last: int | None = None) -> None:
        """Add the counts of ops first..last in the last replay, of n_tok rows from pos on."""
        self._moved.add(n_tok, pos, first, last)

    def costs(self) -> list[OpCost]:
        """Nanoseconds since `reset_costs`, and the counts of each op, in recorded order.

        Of consecutive ops in the same part of a pass, the last one has the time of all.
        """
        return self._moved.costs(self._spent)

    def reset_costs(self) -> None:
        """Set all costs to zero."""
        self._spent[...] = 0
        self._moved.reset()

    def _scratch_bytes(self, call: Call) -> int:
        field = {k: int(v) for k, v in zip(call.spec.op.fields, call.values, strict=True)}
        if call.spec.op is MATMUL:
            return max(matmul_scratch(field["n_in"], field["n_out"]), self._sums)
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
        """Yield the two halves of arrays of packed rows, each by the other's address."""
        for call, step in zip(self.program.calls, self.steps, strict=True):
            if call.spec.op is PACK_ROWS:
                host = call.values[call.spec.op.fields.index("packed")]
                first = int(step.fields["packed"])
                other = first + self.program.arrays[int(host)].nbytes // 2 // ALIGNMENT * ALIGNMENT
                yield from ((first, other), (other, first))


def is_for(function: Function, rows: str) -> bool:
    """Whether a kernel is launched for a class of rows: "few", "some" or "many"."""
    return function.rows == "any" or rows in function.rows.split()
