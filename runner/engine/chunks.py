"""How a prompt is cut into chunks.

With more than FEW_ROWS rows of activations the CPU's quantised products keep 8 bits, with fewer all
that matter. The logits come from a prompt's last rows, and errors of its first rows reach them
through attention only: with the last rows in a chunk of their own, the logits of 800 tokens are 3
to 10 times as near to exact ones, for one more pass over the weights. A chat's first question is
short and has no rows to average over, so all of it is read in such chunks.
"""

from collections.abc import Iterator

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.model import Model

SHORT = 3 * ops.FEW_ROWS  # the most tokens of a prompt that is read only in chunks of few rows


def exact_rows(model: Model) -> int:
    """The number of rows whose products keep more bits than a long chunk's; 0: there are none."""
    if model.arch.is_encoder:  # it reads a whole text at once
        return 0
    layers = (t.data for layer in model.weights.blk for t in layer.values())
    matrices = (w for w in layers if isinstance(w, QTensor))
    return ops.FEW_ROWS if any(ops.packed_form(w.type) == "bytes" for w in matrices) else 0


def of_prompt(n: int, most: int, few: int) -> Iterator[range]:
    """Yield the chunks of a prompt's n tokens, of at most `most` each.

    few: its model's exact_rows.
    """
    return chunks(0, n, min(most, few) if few and n <= SHORT else most, few)


def chunks(start: int, end: int, most: int, few: int) -> Iterator[range]:
    """Yield positions start .. end - 1 in chunks of at most `most`; the last `few` are one."""
    exact = max(start, end - min(few, most))
    for first in range(start, exact, most):
        yield range(first, min(first + most, exact))
    if exact < end:
        yield range(exact, end)
