"""An op of the contract and the record that changes per call; the ops are in contract/ops.

A kernel of either backend is built by a function with the op's name in the op's file
(`cpu/<file>.py`, `cuda/<file>.py`), called with the op's constants as keywords; it returns a
function `kernel(tid, n_thread, *fields)`. A field whose name ends in "_f" is a float (float64 in
the struct, float32 in the kernel), every other one an int64: an address or a count.

`step` is the address of the int64 record that changes per call: see STEP.
Shapes: x [n_tok, n] means n_tok rows of n elements, row-major; n_tok is read from step.
"""

from collections.abc import Callable
from typing import NamedTuple

Ranges = tuple[int, int, int, int]  # positions first .. end - 1, and first .. end - 1


def _everything(_low: int, _high: int, _block: int, _x: int, _y: int, n: int, pos: int) -> Ranges:
    return 0, pos + n, 0, 0


class Reads(NamedTuple):
    """Which keys an op reads of positions before those of its own call, whatever they are.

    spans(low, high, block, x, y, n_tok, pos): two ranges of positions that have all of them. Python
    calls it, and kernels of the KV caches compile it: arithmetic of integers only. low and high are
    the least and the largest of `found`, int64s of which each `every`-th from `first` on counts.
    """

    name: str  # what KV_TAKE knows it as
    spans: Callable[[int, int, int, int, int, int, int], Ranges] = _everything
    found: str = ""  # the op's fields that spans is called with; "": 0
    block: str = ""
    x: str = ""
    y: str = ""
    first: int = 0
    every: int = 1


READS_NOTHING = Reads("nothing")
READS_SELECTION = Reads("chosen")  # what its Selection says
READS_ALL = Reads("all")


class Op(NamedTuple):
    """One op: its name, the file of its kernels, its constants and its argument struct."""

    name: str
    file: str
    constants: tuple[str, ...]
    fields: tuple[str, ...]
    reads: Reads = READS_NOTHING


class _Step(NamedTuple):
    """Byte offsets of the step record."""

    n_tok: int  # rows of this call
    pos: int  # position of the first row
    row: int  # first row of x that the op reads (the output head reads a slice of the chunk)
    begin: int  # position of the first token of the prompt that the chunk is of
    end: int  # position after its last token


STEP = _Step(0, 8, 16, 24, 32)
STEP_SIZE = 5


def op(file: str, name: str, constants: str, fields: str, reads: Reads | None = None) -> Op:
    """An op of these constants and fields, names with spaces between.

    reads: to be said where it is given pages of keys; nothing otherwise.
    """
    names = tuple(fields.split())
    assert reads is not None or "k_pages" not in names, f"{name}: which keys does it read?"
    return Op(name, file, tuple(constants.split()), names, reads or READS_NOTHING)
