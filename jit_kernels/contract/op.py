"""An op of the contract and the record that changes per call; the ops are in contract/ops.

An op's arguments are a record: a class whose annotations are its fields, in the order in which they
lie in the argument struct, 8 bytes each. An Address is the address of an array, Out[Address] that
of one that the op writes, InOut[Address] of one that it reads and writes. If its elements and shape
are given (see arrays.py), recording checks them and adds the sizes; an int is a count or a flag
(all int64), a float is float64 in the struct and float32 in the kernel. Records are plain classes:
as NamedTuples they would cost every start 20 to 40 ms, so they become NamedTuples only where
kernels are compiled.

A kernel of either backend is built by a function with the op's name in the op's file
(`cpu/<file>.py`, `cuda/<file>.py`), called with the op's constants as keywords; it returns a
function `kernel(tid, n_thread, a)`, and a is the record.

Shapes: x [n_tok, n] means n_tok rows of n elements, row-major; n_tok is read from step.
"""

import functools
import re
from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NewType, TypeVar

from tamis.jit_kernels.contract.arrays import I64, Array, names_in

Address = NewType("Address", int)
PARAMETERS = ["tid", "n_thread", "a"]  # of a kernel
# the arguments of a common kernel: workers are a CPU's or a GPU's threads
WORKERS = ["worker", "n_worker", "a"]


class _Written(NamedTuple):
    """The kind of a field whose array the op writes, and whether the op also reads it."""

    kind: Any
    is_read: bool


if TYPE_CHECKING:
    _T = TypeVar("_T")
    Out = Annotated[_T, "written"]
    InOut = Annotated[_T, "read and written"]
else:

    class Out:
        """Out[Address]: an array that the op writes, whatever it holds before."""

        def __class_getitem__(cls, kind: Any) -> _Written:
            return _Written(kind, is_read=False)

    class InOut:
        """InOut[Address]: an array that the op reads and writes."""

        def __class_getitem__(cls, kind: Any) -> _Written:
            return _Written(kind, is_read=True)


# two ranges of positions: first .. end - 1, and first .. end - 1
Ranges = tuple[int, int, int, int]


def _everything(_low: int, _high: int, _block: int, _x: int, _y: int, n: int, pos: int) -> Ranges:
    return 0, pos + n, 0, 0


class Reads(NamedTuple):
    """The keys that an op reads of positions before those of its call.

    spans(low, high, block, x, y, n_tok, pos): two ranges of positions that contain all of them.
    Python calls it, and kernels of the KV caches compile it, so it uses integer arithmetic only.
    low and high are the least and the largest of `found`, int64s of which each `every`-th from
    `first` on counts.
    """

    name: str  # KV_EVICT's name for it
    spans: Callable[[int, int, int, int, int, int, int], Ranges] = _everything
    found: str = ""  # the op's fields that spans is called with; "": 0
    block: str = ""
    x: str = ""
    y: str = ""
    first: int = 0
    every: int = 1


READS_NOTHING = Reads("nothing")
READS_SELECTION = Reads("chosen")  # the positions of its Selection
READS_ALL = Reads("all")


class Op(NamedTuple):
    """One op: its kernels' file, its argument record, its constants, the keys that it reads."""

    file: str
    record: type
    declared: str  # the constants, separated by spaces
    reads: Reads = READS_NOTHING

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    @property
    def name(self) -> str:
        """The record's name in snake case: that of the op's builders and, in capitals, the op's."""
        return _name_of(self.record)

    @property
    def constants(self) -> tuple[str, ...]:
        """The names of the constants that a kernel is compiled for."""
        return _split(self.declared)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, in the order of the struct; sizes of arrays are last."""
        return _fields_of(self.record, self.declared)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The fields that recording reads off the shapes of arrays."""
        return _sizes_of(self.record, self.declared)

    @property
    def arrays(self) -> dict[str, Array]:
        """The types of the fields that are typed arrays."""
        return _arrays_of(self.record)

    @property
    def floats(self) -> frozenset[str]:
        """The fields that are floats."""
        return _named(self.record, float)

    @property
    def addresses(self) -> frozenset[str]:
        """The fields that are addresses of arrays."""
        return self.inputs | self.outputs

    @property
    def outputs(self) -> frozenset[str]:
        """The fields whose arrays the op writes."""
        return _written(self.record)

    @property
    def inputs(self) -> frozenset[str]:
        """The fields whose arrays the op reads."""
        return _read(self.record)

    @property
    def values(self) -> Any:
        """The record as a NamedTuple, which kernels take."""
        return _values_of(self.record, self.declared)


@functools.cache
def _name_of(record: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record.__name__).lower()


@functools.cache
def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


@functools.cache
def _types_of(record: type) -> dict[str, Any]:
    # A record may extend another one: the base's fields come first.
    bases = reversed(record.__mro__)
    return {k: v for base in bases for k, v in vars(base).get("__annotations__", {}).items()}


@functools.cache
def _named(record: type, kind: Any) -> frozenset[str]:
    return frozenset(name for name, type in _types_of(record).items() if type is kind)


@functools.cache
def _written(record: type) -> frozenset[str]:
    return frozenset(name for name, type in _types_of(record).items() if isinstance(type, _Written))


@functools.cache
def _read(record: type) -> frozenset[str]:
    def is_read(kind: Any) -> bool:
        if isinstance(kind, _Written):
            return kind.is_read
        return kind is Address or isinstance(kind, Array)

    return frozenset(name for name, kind in _types_of(record).items() if is_read(kind))


@functools.cache
def _arrays_of(record: type) -> dict[str, Array]:
    kinds = {
        name: kind.kind if isinstance(kind, _Written) else kind
        for name, kind in _types_of(record).items()
    }
    return {name: kind for name, kind in kinds.items() if isinstance(kind, Array)}


@functools.cache
def _sizes_of(record: type, declared: str) -> tuple[str, ...]:
    named = (
        n for kind in _arrays_of(record).values() for size in kind.shape for n in names_in(size)
    )
    known = {*_types_of(record), *_split(declared)}
    return tuple(dict.fromkeys(name for name in named if name not in known))


@functools.cache
def _fields_of(record: type, declared: str) -> tuple[str, ...]:
    return (*_types_of(record), *_sizes_of(record, declared))


@functools.cache
def _values_of(record: type, declared: str) -> Any:
    return namedtuple(record.__name__, _fields_of(record, declared))


class EachRow:
    """The record of an op that is launched once for the rows of a batch.

    Each row has its own record.

    A row's record is at records + stride * row, 8 bytes a field; a float is a float32.
    """

    n_row: Address  # int64 [1]: the number of rows
    records: Address
    stride: int
    n_slot: int  # the number of rows that have blocks; those from n_row on do nothing


EACH = "each_"
COMMON = "common."  # the prefix of op files whose kernels both backends have


@functools.cache
def each(op: Op) -> Op:
    """The op over the rows of a batch, whose records are `op`'s: see EachRow."""
    return Op(op.file, type(f"Each{op.record.__name__}", (EachRow,), {}), op.declared, op.reads)


class _Step(NamedTuple):
    """Byte offsets of the step record: int64s that change per call."""

    n_tok: int  # rows of this call
    pos: int  # position of the first row
    row: int  # first row of x that the op reads (the output head reads a slice of the chunk)
    begin: int  # position of the first token of the chunk's prompt
    end: int  # position after its last token
    exact_rows: int  # most rows whose products keep all bits: see PACK_ROWS; 0: any number


STEP = _Step(0, 8, 16, 24, 32, 40)
STEP_SIZE = 6
# The same as indices, for a step record that is a typed array.
N_TOK, POS, ROW, BEGIN, END, EXACT_ROWS = range(STEP_SIZE)
Step = I64[6]  # the type of a step record


def module_of(kind: str, op: Op) -> str:
    """The module of an op's kernels, of "cpu" or "cuda"; those of COMMON serve both."""
    if op.file.startswith(COMMON):
        return f"tamis.jit_kernels.{op.file}"
    return f"tamis.jit_kernels.{kind}.{op.file}"


def op(file: str, record: type, constants: str = "", reads: Reads | None = None) -> Op:
    """An op with this record and these constants, whose names are separated by spaces.

    reads: required if it takes pages of keys; None otherwise.
    """
    assert reads is not None or "k_pages" not in _types_of(record), (
        f"{record.__name__}: which keys does it read?"
    )
    return Op(file, record, constants, reads or READS_NOTHING)
