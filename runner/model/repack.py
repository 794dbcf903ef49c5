"""Weights in the layout that the backend multiplies fastest: on a CPU, strips of rows."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import LINE, QTensor, zeros
from tamis.model.model import Model
from tamis.model.placement import Place
from tamis.model.weights import Weights

SHARE = 0.75  # of the free memory that copies of the weights may take
APART = "exps", "attn_k_b", "attn_v_b"  # one matrix of many is multiplied at a time
PART = 1 << 24  # bytes of a matrix that are copied at a time
STRIPS_OF = {type: name for name, type in ops.STRIP_TYPES.items()}


def in_strips(matrices: Sequence[QTensor], backend: Backend) -> tuple[list[QTensor], Program]:
    """The matrices as products are to read them, and the Program that fills the copies.

    As they are: matrices of a type or a shape that has no strips, and all of them where the backend
    wants none or memory is short. Copies lie one after another.
    """
    fit = [
        backend.strips and w.type in STRIPS_OF and w.n_in % 64 == 0 and w.n_out % ops.STRIP == 0
        for w in matrices
    ]
    sizes = [
        ops.strip_bytes(w.type, w.n_out, w.n_in) if yes else 0
        for w, yes in zip(matrices, fit, strict=True)
    ]
    starts = np.cumsum([0, *(-(-size // LINE) * LINE for size in sizes)]).tolist()
    program = Program()
    if starts[-1] > SHARE * backend.free_bytes():
        return list(matrices), program
    memory, found = zeros(starts[-1], np.uint8), []
    for w, size, start in zip(matrices, sizes, starts, strict=False):
        if size:
            strips = memory[start : start + size]
            _record(program, w, strips)
            w = w._replace(data=strips, type=STRIPS_OF[w.type])
        found.append(w)
    return found, program


def _record(program: Program, w: QTensor, strips: np.ndarray) -> None:
    """Record ops that copy a matrix, some rows each: pages read are released after each."""
    row, strip_row = w.data.nbytes // w.n_out, strips.nbytes // w.n_out
    n = max(1, PART // (row * ops.STRIP)) * ops.STRIP
    for first in range(0, w.n_out, n):
        last = min(first + n, w.n_out)
        program.add(
            ops.REPACK,
            (w.type,),
            w=w.data[row * first : row * last],
            strips=strips[strip_row * first : strip_row * last],
            n_in=w.n_in,
            n_out=last - first,
        )


def repack(model: Model, place: Place) -> tuple[Model, Program]:
    """The model over matrices as a place's products are to read them, and what fills them."""
    matrices = list(_matrices(model.weights, place))
    copies, program = in_strips(matrices, place.backend)
    by_address = {w.data.ctypes.data: to for w, to in zip(matrices, copies, strict=True)}

    def copy(w: QTensor) -> QTensor:
        return by_address.get(w.data.ctypes.data, w)

    weights = model.weights
    output = replace(weights.output, data=copy(weights.output.matrix))
    blk = tuple(layer.with_matrices(copy) for layer in weights.blk)
    return replace(model, weights=replace(weights, output=output, blk=blk)), program


def _matrices(weights: Weights, place: Place) -> Iterator[QTensor]:
    """What its products read. Not experts' rows: few tokens read each of them."""
    for layer in weights.blk[place.layers.start : place.layers.stop]:
        for name, tensor in layer.items():
            if isinstance(tensor.data, QTensor) and not name.endswith(APART):
                yield tensor.data
    if place.output:
        yield weights.output.matrix


class Filling:
    """A Program that runs on a thread of its own, while others read a vocabulary and record.

    then() is called on that thread after each op.
    """

    def __init__(self, backend: Backend, program: Program, then: Callable[[], None]) -> None:
        self._backend, self._program, self._then = backend, program, then
        self._done, self._stopped = 0, False
        self._error: BaseException | None = None
        # Not a daemon: the interpreter waits for it before it ends the threads that it runs on.
        self._thread = threading.Thread(target=self._run)
        if len(program):
            self._thread.start()

    def finish(self, each: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Return when all of it has run; each(done, total) every now and then until then.

        Raises CompileError, and what `each` raises. In a child of fork(), which has no such thread,
        it runs the rest itself.
        """
        while self._thread.is_alive():
            self._thread.join(0.05)
            each(self._done, len(self._program))
        if self._error is None and not self._stopped:
            self._run()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Return when it no longer runs; what is left is never run."""
        self._stopped = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            linked = self._backend.link(self._program) if self._left() else None
            while self._left():
                self._backend.run(linked, self._done, self._done + 1)
                self._then()
                self._done += 1
        except BaseException as error:
            self._error = error

    def _left(self) -> bool:
        return self._done < len(self._program) and not self._stopped
