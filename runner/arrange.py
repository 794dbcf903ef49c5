"""Weights in the layout that the backend multiplies fastest: on a CPU, strips of rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tamis.jit_kernels import ops
from tamis.jit_kernels.program import Program, Runner
from tamis.jit_kernels.types import LINE, QTensor, zeros
from tamis.model import Model
from tamis.weights import Dense, Layer, Weights

SHARE = 0.75  # of the free memory that copies of the weights may take
BY_STRIP = {type: name for name, type in ops.STRIP_TYPES.items()}


class Arranged:
    """Matrices copied to strips, one after another; those that have none stay as they are."""

    def __init__(self, weights: Weights, backend: Runner) -> None:
        matrices = [w for w in _matrices(weights) if _fits(w)] if backend.strips else []
        sizes = [-(-ops.strip_bytes(w.type, w.n_out, w.n_in) // LINE) * LINE for w in matrices]
        if sum(sizes) > SHARE * backend.free_bytes():
            matrices = []
        memory, at = zeros(sum(sizes) if matrices else 0, np.uint8), 0
        self._backend, self.program = backend, Program()
        self._copies: dict[int, QTensor] = {}  # by the address of the original
        for w, size in zip(matrices, sizes, strict=False):
            strips = memory[at : at + ops.strip_bytes(w.type, w.n_out, w.n_in)]
            self._copies[w.data.ctypes.data] = w._replace(data=strips, type=BY_STRIP[w.type])
            self.program.add(
                ops.ARRANGE, (w.type,), w=w.data, strips=strips, n_in=w.n_in, n_out=w.n_out
            )
            at += size
        self.weights = self._replaced(weights)

    def run(self, each: Callable[[int, int], None]) -> None:
        """Fill the copies; each(done, total) after every matrix. Raises CompileError."""
        linked = self._backend.link(self.program)
        for i in range(len(self.program)):
            self._backend.run(linked, i, i + 1)
            each(i + 1, len(self.program))

    def _replaced(self, weights: Weights) -> Weights:
        return replace(
            weights, output=self._copy(weights.output), blk=tuple(map(self._layer, weights.blk))
        )

    def _layer(self, layer: Layer) -> Layer:
        ffn = layer.ffn
        if isinstance(ffn, Dense):
            ffn = Dense(self._copy(ffn.gate), self._copy(ffn.up), self._copy(ffn.down))
        return replace(
            layer,
            attn_q=self._copy(layer.attn_q),
            attn_k=self._copy(layer.attn_k),
            attn_v=self._copy(layer.attn_v),
            attn_output=self._copy(layer.attn_output),
            ffn=ffn,
        )

    def _copy(self, w: QTensor) -> QTensor:
        return self._copies.get(w.data.ctypes.data, w)


def _matrices(weights: Weights) -> Iterator[QTensor]:
    """What products read; experts' rows are read by few tokens each."""
    for layer in weights.blk:
        yield from (layer.attn_q, layer.attn_k, layer.attn_v, layer.attn_output)
        if isinstance(layer.ffn, Dense):
            yield from (layer.ffn.gate, layer.ffn.up, layer.ffn.down)
    yield weights.output


def _fits(w: QTensor) -> bool:
    return w.type in BY_STRIP and w.n_in % 64 == 0 and w.n_out % ops.STRIP == 0


def arrange(model: Model, backend: Runner) -> tuple[Model, Arranged]:
    """The model over copies that `run` fills, which must be before a session is used."""
    arranged = Arranged(model.weights, backend)
    return replace(model, weights=arranged.weights), arranged
