"""The op contract: every op once, its argument struct and its compile-time constants, no body.

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


STEP = _Step(0, 8, 16)
STEP_SIZE = 3


def _op(file: str, name: str, constants: str, fields: str) -> Op:
    return Op(name, file, tuple(constants.split()), tuple(fields.split()))


# Decoding weights and multiplying by them. type: the ggml type's name.

# table: [n_vocab] rows of n elements in their ggml encoding; ids int32 [n_tok];
# y f32 [n_tok, n] = row * scale.
EMBED = _op("embed", "embed", "type", "step ids table y n scale_f")

# x f32 [n_tok, n], rows from step.row on -> xq [n_tok] rows: n int8, then n/32 f32 scales, then
# n/32 f32 sums of the decoded block (scale * sum of its int8). n is a multiple of 32.
QUANTIZE = _op("quantize", "quantize", "", "step x xq n")

# y [n_tok, n_out] (+)= x @ w.T + bias. w: n_out rows of n_in elements in their ggml encoding;
# x: rows as QUANTIZE writes them, or f32 where type is F32, F16 or BF16; bias f32 [n_out] or 0;
# add: 1 adds to y; y_stride in elements; scratch: n_thread * MATMUL_SCRATCH bytes.
MATMUL = _op("matmul", "matmul", "type", "step x w bias y n_in n_out y_stride add scratch")
MATMUL_SCRATCH = 1 << 18

# The thread team's own entries: no argument struct, see cpu/team.py.
TEAM_RUN = _op("team", "team_run", "", "")
TEAM_WORKER = _op("team", "team_worker", "", "")
