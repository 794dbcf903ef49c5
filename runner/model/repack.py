"""Weights in the layout that the backend multiplies fastest: on a CPU, strips of rows."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import LINE, QTensor
from tamis.model.model import Model
from tamis.model.placement import Place
from tamis.model.prepared import LEAST, MOST, Checking, Prepared, Writing
from tamis.model.weights import Weights
from tamis.platform.memory import huge_zeros

SHARE = 0.75  # of the free memory that copies of the weights may take
PART = 1 << 24  # bytes of a matrix that are copied at a time
STRIPS_OF = {type: ops.strip_type(type) for type in ops.STRIP_TYPES.values()}


class Strips(NamedTuple):
    """The positions of matrices' copies in one block of memory, one after another."""

    spans: tuple[tuple[int, int], ...]  # for each matrix: first byte, number of bytes (0: no copy)
    n_bytes: int

    @staticmethod
    def of(matrices: Sequence[QTensor], backend: Backend) -> "Strips":
        """The strips of matrices.

        Those whose type or shape has no strips on the backend get none.
        """
        fit = [backend.strips and _fits(w) for w in matrices]
        sizes = [
            ops.strip_bytes(w.type, w.n_out, w.n_in) if yes else 0
            for w, yes in zip(matrices, fit, strict=True)
        ]
        starts = np.cumsum([0, *(-(-size // LINE) * LINE for size in sizes)]).tolist()
        return Strips(tuple(zip(starts, sizes, strict=False)), starts[-1])

    def of_memory(self, matrices: Sequence[QTensor], memory: np.ndarray) -> list[QTensor]:
        """The matrices, each with its copy in this memory, uint8 [n_bytes], if it has one."""
        return [
            w._replace(data=memory[start : start + size], type=STRIPS_OF[w.type]) if size else w
            for w, (start, size) in zip(matrices, self.spans, strict=True)
        ]


def _fits(w: QTensor) -> bool:
    """Whether no strip spans two matrices, and products read whole chunks."""
    n_out = w.n_out // w.n_matrix
    return w.type in STRIPS_OF and w.n_in % 64 == 0 and n_out % ops.STRIP == 0


class Copies(NamedTuple):
    """Matrices in the form that products read, and the remaining work for it."""

    matrices: list[QTensor]
    program: Program  # fills them
    memory: np.ndarray | None = None  # uint8: all copies, if the Program fills them
    file: Prepared | None = None  # the file that they will be written to
    check: Checking | None = None  # the check of the file that they are mapped from


def in_strips(
    matrices: Sequence[QTensor],
    backend: Backend,
    file_of: Callable[[Strips], Prepared | None] = lambda strips: None,
) -> Copies:
    """The matrices in the form that products read: mapped from a file, or to be filled.

    Matrices without strips are not changed, and none is if memory is short.
    """
    strips, program = Strips.of(matrices, backend), Program()
    file = file_of(strips)
    if file is not None and (mapped := file.map()) is not None:
        with contextlib.suppress(OSError):  # it has just been removed
            check = Checking(file)
            return Copies(strips.of_memory(matrices, mapped), program, check=check)
    if not strips.n_bytes or strips.n_bytes > SHARE * backend.free_bytes():
        return Copies(list(matrices), program)
    _, memory = huge_zeros((strips.n_bytes,), np.dtype(np.uint8))
    found = strips.of_memory(matrices, memory)
    for w, copy in zip(matrices, found, strict=True):
        if copy is not w:
            _record(program, w, copy.data)
    return Copies(found, program, memory, file)


def _record(program: Program, w: QTensor, strips: np.ndarray) -> None:
    """Record ops that copy a matrix, some rows each.

    Pages that were read are released after each.
    """
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


class Preparing(NamedTuple):
    """Whether and where copies are kept on disk."""

    folder: Path
    most: int = MOST  # bytes of all files there; the least recently used are removed
    least: int = LEAST  # bytes of strips below which they are copied at each load


def repack(
    model: Model,
    place: Place,
    file: GGUFFile,
    preparing: Preparing | None = None,
    *,
    exact: bool = False,
) -> tuple[Model, Copies]:
    """The model over matrices in the form that products read, and the work that fills them.

    exact: see ops.strip_type; the copies are the same.
    """
    matrices = list(_matrices(model.weights, place))

    def file_of(strips: Strips) -> Prepared | None:
        if preparing is None or strips.n_bytes < max(1, preparing.least):
            return None
        told = [(w.type, w.n_out, w.n_in) for w in matrices]
        key = file.identity() + repr((place.backend.layout, place.layers, told)).encode()
        spans = [span for span in strips.spans if span[1]]
        return Prepared.of(preparing.folder, key, spans, preparing.most, str(file.path.absolute()))

    copies = in_strips(matrices, place.backend, file_of)
    if copies.check is not None:
        file.checks.append(copies.check.check)
    pairs = zip(matrices, copies.matrices, strict=True)
    by_address = {w.data.ctypes.data: to for w, to in pairs}

    def copy(w: QTensor) -> QTensor:
        w = by_address.get(w.data.ctypes.data, w)
        in_strips = ops.STRIP_TYPES.get(w.type)
        return w._replace(type=ops.strip_type(in_strips, exact)) if in_strips else w

    weights = model.weights
    output = replace(weights.output, data=copy(weights.output.matrix()))
    blk = tuple(layer.with_matrices(copy) for layer in weights.blk)
    return replace(model, weights=replace(weights, output=output, blk=blk)), copies


def _matrices(weights: Weights, place: Place) -> Iterator[QTensor]:
    """Yield the matrices that a place's products read."""
    for layer in weights.blk[place.layers.start : place.layers.stop]:
        for tensor in layer.values():
            if isinstance(tensor.data, QTensor):
                yield tensor.data
    if place.output:
        yield weights.output.matrix()


class Filling:
    """A Program that runs in its own thread, while others read a vocabulary and record.

    then() is called in that thread after each op. Copies with a file are written to it afterwards,
    in the background.
    """

    def __init__(self, backend: Backend, copies: Copies, then: Callable[[], None]) -> None:
        self._backend, self._copies, self._then = backend, copies, then
        self._program = copies.program
        self._writing: Writing | None = None
        self._done, self._stopped = 0, False
        self._error: BaseException | None = None
        # Not a daemon thread: the interpreter waits for it before ending its team's threads.
        self._thread = threading.Thread(target=self._run)
        if len(self._program):
            self._thread.start()

    def finish(self, each: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Wait until all of it has run; each(done, total) is called now and then until then.

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
        """Wait until it no longer runs; the rest is never run."""
        self._stopped = True
        if self._thread.is_alive():
            self._thread.join()
        if self._writing is not None:
            self._writing.stop()

    def written(self) -> bool:
        """Whether there is a file of the copies; waits until all is filled and written."""
        self.finish()
        if self._writing is not None:
            self._writing.finish()
        return self._copies.file is not None and self._copies.file.path.exists()

    def _run(self) -> None:
        try:
            linked = self._backend.link(self._program) if self._left() else None
            while self._left():
                self._backend.run(linked, self._done, self._done + 1)
                self._then()
                self._done += 1
            memory, file = self._copies.memory, self._copies.file
            if memory is not None and file is not None and not self._stopped and not self._writing:
                self._writing = Writing(file, memory)
        except BaseException as error:
            self._error = error

    def _left(self) -> bool:
        return self._done < len(self._program) and not self._stopped
