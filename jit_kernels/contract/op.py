"""An op of the contract and the record that changes per call; the ops are in contract/ops.

A kernel of either backend is built by a function with the op's name in the op's file
(`cpu/<file>.py`, `cuda/<file>.py`), called with the op's constants as keywords; it returns a
function `kernel(tid, n_thread, *fields)`. A field whose name ends in "_f" is a float (float64 in
the struct, float32 in the kernel), every other one an int64: an address or a count.

`step` is the address of the int64 record that changes per call: see STEP.
Shapes: x [n_tok, n] means n_tok rows of n elements, row-major; n_tok is read from step.
"""

from typing import NamedTuple


class Op(NamedTuple):
    """One op: its name, the file of its kernels, its constants and its argument struct."""

    name: str
    file: str
    constants: tuple[str, ...]
    fields: tuple[str, ...]


class _Step(NamedTuple):
    """Byte offsets of the step record."""

    n_tok: int  # rows of this call
    pos: int  # position of the first row
    row: int  # first row of x that the op reads (the output head reads a slice of the chunk)
    begin: int  # position of the first token of the prompt that the chunk is of
    end: int  # position after its last token


STEP = _Step(0, 8, 16, 24, 32)
STEP_SIZE = 5


def op(file: str, name: str, constants: str, fields: str) -> Op:
    """An op of these constants and fields, names with spaces between."""
    return Op(name, file, tuple(constants.split()), tuple(fields.split()))
