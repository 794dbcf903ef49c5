"""Programs: a forward pass recorded once as op calls over fixed buffers, replayed every step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tamis.jit_kernels.contract.arrays import bound
from tamis.jit_kernels.contract.op import Op
from tamis.jit_kernels.contract.types import Selection
from tamis.jit_kernels.contract.values import Value

# (n_tok, pos) of a call -> bytes of weights or KV that it reads, and its floating-point operations.
Cost = Callable[[int, int], tuple[int, int]]

# Parts of a pass that are counted separately: selecting keys, attending to them, checking.
SELECT, ATTEND, AUDIT = "select", "attend", "audit"


class KernelSpec(NamedTuple):
    """One kernel to compile: an op and the values of its constants."""

    op: Op
    constants: tuple[int | str, ...]

    @property
    def symbol(self) -> str:
        """The kernel's name in the kernel library."""
        values = (f"__{k}_{v}" for k, v in zip(self.op.constants, self.constants, strict=True))
        return f"tamis_{self.op.name}" + "".join(values)


class Call(NamedTuple):
    """One recorded op: its kernel, its argument struct and whether the team waits after it."""

    spec: KernelSpec
    values: tuple[int | float, ...]
    sync: bool
    label: str
    cost: Cost
    part: str  # the part of the pass that it belongs to: see Program.part


class Transfer(NamedTuple):
    """A device transfer within a Program: from op `at` on, ops run on the other side.

    One side has the ops over rows alone, between the weights; a Program begins there. The other has
    those over what a sequence holds: positions, KV cache, attention. Each side may run on another
    backend: except for these rows no op reads what an op of the other side has written.
    """

    at: int
    step: np.ndarray  # int64 [STEP_SIZE]: has the number of rows
    rows: tuple[np.ndarray, ...]  # the arrays that are transferred, as many rows of each


class Program:
    """A list of op calls. Arrays passed to `add` are kept alive as long as the Program."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        # by address: the arrays that fields of calls point to
        self.arrays: dict[int, np.ndarray] = {}
        self.transfers: list[Transfer] = []
        # Python functions, each called before the op of its number runs; only if ops run one after
        # another on the host.
        self.pauses: list[tuple[int, Callable[[], None]]] = []
        self.selections: dict[int, Selection] = {}  # by layer: what its attention reads
        self.part = ""  # the part of ops added from now on: SELECT, ATTEND, AUDIT

    def add(
        self,
        op: Op,
        constants: Sequence[int | str] = (),
        *,
        sync: bool = True,
        label: str = "",
        cost: Cost = lambda n_tok, pos: (0, 0),
        **fields: Any,
    ) -> None:
        """Record one op. Fields are arrays (their address is taken), numbers, or None (0).

        Sizes that the shapes of its arrays determine need not be passed; they are checked if they
        are. sync=False lets the next op start before this one ends: only for ops with different
        outputs. cost is what a call moves, for profiles; it is asked after the call. Raises
        StaleValueError if the op reads a Value that was overwritten, FieldError if an array is not
        of its field's type.
        """
        assert len(constants) == len(op.constants), f"{op.name} needs {op.constants}"
        wrong = set(fields) ^ set(op.fields)
        assert wrong <= set(op.sizes), f"{op.name}: {sorted(wrong - set(op.sizes))}"
        self._follow(op, fields)
        if op.arrays:
            fields |= self._sizes(op, constants, fields)
        values = tuple(self._value(fields[name]) for name in op.fields)
        spec = KernelSpec(op, tuple(constants))
        self.calls.append(Call(spec, values, sync, label or op.name, cost, self.part))

    @staticmethod
    def _sizes(op: Op, constants: Sequence[int | str], fields: dict[str, Any]) -> dict[str, int]:
        """The sizes of an op's arrays, 0 of arrays that are None. Raises FieldError."""
        known = dict(zip(op.constants, constants, strict=True)) | fields
        numbers = {name: int(x) for name, x in known.items() if isinstance(x, int | np.integer)}
        found = bound(op.name, op.arrays, numbers, fields)
        return {name: found.get(name, 0) for name in op.sizes}

    @staticmethod
    def _follow(op: Op, fields: dict[str, Any]) -> None:
        """Check the graph values that an op reads, and note those that it writes."""
        values = {name: value for name, value in fields.items() if isinstance(value, Value)}
        for name, value in values.items():
            if name in op.inputs:
                value.read(op.name)
        for name, value in values.items():
            if name in op.outputs:
                value.written(op.name)

    def pause(self, call: Callable[[], None]) -> None:
        """Record a function that is called before the op that is added next."""
        self.pauses.append((len(self), call))

    def transfer(self, step: np.ndarray, *rows: np.ndarray) -> None:
        """Record that later ops belong to the other side, which reads these rows: see Transfer."""
        self.transfers.append(Transfer(len(self), step, rows))

    @property
    def segments(self) -> list[range]:
        """Its ops between transfers: alternately over rows and over the sequence."""
        ends = [*(transfer.at for transfer in self.transfers), len(self)]
        return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]

    def sides(self) -> "tuple[Program, Program]":
        """The ops over rows, and those over the sequence, each with the arrays that they use."""
        return self._only(self.segments[::2]), self._only(self.segments[1::2])

    def _only(self, segments: "list[range]") -> "Program":
        found = Program()
        for ops in segments:
            found.calls += self.calls[ops.start : ops.stop]
        named = {
            int(value)
            for call in found.calls
            for name, value in zip(call.spec.op.fields, call.values, strict=True)
            if name not in call.spec.op.floats
        }
        found.arrays = {at: array for at, array in self.arrays.items() if at in named}
        return found

    def _value(self, value: Any) -> int | float:
        if value is None:
            return 0
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous, "kernels read contiguous arrays"
            self.arrays[value.ctypes.data] = value
            return value.ctypes.data
        assert isinstance(value, int | float | np.integer | np.floating), type(value)
        return value.item() if isinstance(value, np.generic) else value

    def named(self, *fields: str) -> list[np.ndarray]:
        """The arrays in fields of these names, in all calls."""
        at = dict.fromkeys(
            value
            for call in self.calls
            for name, value in zip(call.spec.op.fields, call.values, strict=True)
            if name in fields and value != 0
        )
        return [self.arrays[int(value)] for value in at]

    @property
    def specs(self) -> set[KernelSpec]:
        """The kernels that this Program needs."""
        return {call.spec for call in self.calls}

    @property
    def kinds(self) -> tuple[KernelSpec, ...]:
        """The kernels of its ops between transfers to and from the sequence's side, in order."""
        own = self.segments[1::2]
        return tuple(call.spec for part in own for call in self.calls[part.start : part.stop])

    def __len__(self) -> int:
        return len(self.calls)


class OpCost(NamedTuple):
    """The cost of one recorded op over the counted replays."""

    label: str
    sync: bool
    n_call: int
    cycles: int  # of the backend's clock
    n_bytes: int
    n_flop: int
    part: str = ""


class Moved:
    """Counters of how often the ops of a Program were run, and of what they moved."""

    def __init__(self, program: Program) -> None:
        self._calls = program.calls
        self._counted = np.zeros((len(program), 3), np.int64)  # calls, bytes and operations

    def add(self, n_tok: int, pos: int, first: int = 0, last: int | None = None) -> None:
        """Count a replay of ops first..last, of n_tok rows from pos on."""
        for total, call in zip(self._counted[first:last], self._calls[first:last], strict=True):
            total += (1, *call.cost(n_tok, pos))

    def costs(self, cycles: Iterable[float]) -> list[OpCost]:
        """The counters with the cycles of each op."""
        return [
            OpCost(call.label, call.sync, int(n), int(spent), int(n_bytes), int(n_flop), call.part)
            for call, spent, (n, n_bytes, n_flop) in zip(
                self._calls, cycles, self._counted, strict=False
            )
        ]

    def reset(self) -> None:
        """Set all counters to zero."""
        self._counted[...] = 0
