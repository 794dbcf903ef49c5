"""Matrix products: of one matrix, or of several that read the same rows."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tamis.graph.context import Graph
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import N_TOK, ROW
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import QTensor
from tamis.jit_kernels.contract.values import taken
from tamis.model.weights import Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """The rows that products read: x itself, its norm, or x as a gate; see PACK_ROWS.

    x and other stand for their contents when the Source was made. The op that reads them is
    recorded later, with the product: if they are overwritten before, that is an error of recording.
    """

    x: np.ndarray
    kind: str = "rows"
    other: np.ndarray | None = None  # the norm's weights, or the branch that is gated
    eps: float = 0.0
    step: np.ndarray | None = None  # which rows of x; None: all of the recording's

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", taken(self.x))
        if self.other is not None:
            object.__setattr__(self, "other", taken(self.other))

    def values(self, first: int, n: int) -> np.ndarray:
        """What n rows from `first` on are, computed as PACK_ROWS does: f32 [n, n_in].

        To be called just before the product runs, while x has what it stands for.
        """
        x = np.asarray(self.x)[first : first + n].reshape(n, -1)
        if self.kind == "rows":
            return x
        assert self.other is not None
        if self.kind == "norm":
            mean = np.square(x, dtype=np.float64).mean(-1, keepdims=True)
            scaled: np.ndarray = (x / np.sqrt(mean + self.eps)).astype(np.float32)
            return scaled * np.asarray(self.other).reshape(-1)
        other = np.asarray(self.other)[first : first + n].reshape(n, -1)
        if self.kind == "silu":
            return x / (1 + np.exp(-x)) * other
        assert self.kind == "gelu", self.kind
        return 0.5 * x * (1 + np.tanh(0.79788456 * x * (1 + 0.044715 * x * x))) * other


class Product(NamedTuple):
    """A matrix product, recorded once it is known what it is added to."""

    rows: Source
    w: Tensor


class _Output(NamedTuple):
    w: Tensor
    y: np.ndarray
    add: bool = False


def linear(g: Graph, rows: Source | np.ndarray, w: Tensor) -> Product:
    """The product rows @ w.T + bias, for `add`, `norm` or `stored`."""
    return Product(_source(rows), w)


def linears(g: Graph, rows: Source | np.ndarray, *ws: Tensor) -> list[np.ndarray]:
    """Record the products of several matrices with the same rows; f32 [n_tok, n_out] each.

    They may run at the same time. Each is stored in the buffer of its tensor's name.
    """
    outputs = [_Output(w, g.ws.rows(w.label, w.matrix().n_out)) for w in ws]
    _record(g, _source(rows), outputs)
    return [output.y for output in outputs]


def stored(g: Graph, product: Product, y: np.ndarray) -> np.ndarray:
    """Record that y becomes a product."""
    _record(g, product.rows, [_Output(product.w, y)])
    return y


def added(g: Graph, product: Product, y: np.ndarray) -> None:
    """Record that a product is added to y."""
    _record(g, product.rows, [_Output(product.w, y, add=True)])


def _source(rows: Source | np.ndarray) -> Source:
    return rows if isinstance(rows, Source) else Source(rows)


def _record(g: Graph, rows: Source, outputs: list[_Output]) -> None:
    """Record products; a matrix with a scale multiplies its product before the bias is added."""
    _record_watch(g, rows, outputs)
    plain = [output if output.w.scale() is None else _unscaled(g, output) for output in outputs]
    _record_plain(g, rows, plain)
    for output, product in zip(outputs, plain, strict=True):
        if (scale := output.w.scale()) is not None:
            _record_scale(g, product.y, output, float(scale[0]))
    _record_deltas(g, rows, outputs)


def _record_watch(g: Graph, rows: Source, outputs: list[_Output]) -> None:
    """Record that what these products read is shown to who watches their matrices."""
    watched = {w.whole: w.watch for w in (output.w for output in outputs) if w.watch is not None}
    if not watched:
        return
    step = g.rec.step if rows.step is None else rows.step

    def show() -> None:
        read = rows.values(int(step[ROW]), int(step[N_TOK]))
        for name, watch in watched.items():
            watch(name, read, None)

    g.rec.program.pause(show)


def _unscaled(g: Graph, output: _Output) -> _Output:
    """The product alone, if it is not added to anything."""
    w = replace(output.w, factor=None, added=None, adapted=None)
    y = g.ws.rows("unscaled", w.matrix().n_out) if output.add else output.y
    return _Output(w, y)


def _record_scale(g: Graph, x: np.ndarray, output: _Output, scale: float) -> None:
    n, bias = output.y[0].size, output.w.bias()
    fields: dict[str, Any] = {"step": g.rec.step, "n": n}
    add = int(output.add)
    g.rec.program.add(
        ops.MAP_ROWS, ("none", add), x=x, y=output.y, inner=1.0, outer=scale, **fields
    )
    if bias is not None:
        g.rec.program.add(ops.ADD_POSITIONS, x=output.y, table=bias, stride=0, **fields)


def _record_plain(g: Graph, rows: Source, outputs: list[_Output]) -> None:
    forms = itertools.groupby(outputs, lambda p: ops.packed_form(p.w.matrix().type))
    for form, group in forms:
        _record_form(g, rows, form, list(group))


def _record_deltas(g: Graph, rows: Source, outputs: list[_Output]) -> None:
    """Record the adapters' terms of the products: y += rows @ a.T @ b.T."""
    deltas = [(output, delta) for output in outputs if (delta := output.w.delta()) is not None]
    if not deltas:
        return
    inner = []
    for output, delta in deltas:
        name = f"{output.w.label}.lora"
        t = g.ws.rows(name, delta.a.n_out)
        inner.append(_Output(Tensor(name, delta.a), t))
    _record_form(g, rows, ops.packed_form("F32"), inner)
    for (output, delta), (_, t, _) in zip(deltas, inner, strict=True):
        to = _Output(Tensor(f"{output.w.label}.lora", delta.b), output.y, add=True)
        _record_form(g, Source(t), ops.packed_form("F32"), [to])


def _record_form(g: Graph, rows: Source, form: str, outputs: list[_Output]) -> None:
    n_in = outputs[0].w.matrix().n_in
    packed = g.ws.packed_rows(n_in)
    g.rec.program.add(
        ops.PACK_ROWS,
        (form, rows.kind),
        step=g.rec.step if rows.step is None else rows.step,
        x=rows.x,
        other=rows.other,
        packed=packed,
        n=n_in,
        scratch=g.ws.scratch,
        eps=rows.eps,
    )
    for i, (tensor, y, add) in enumerate(outputs):
        w = tensor.matrix()
        assert w.n_in == n_in
        g.rec.program.add(
            ops.MATMUL,
            (w.type,),
            sync=i == len(outputs) - 1,
            label=f"matmul {w.type} {tensor.label}",
            cost=_cost(w),
            step=g.rec.step,
            packed=packed,
            w=w.data,
            bias=tensor.bias(),
            y=y,
            n_in=n_in,
            n_out=w.n_out,
            y_stride=w.n_out,
            add=int(add),
            scratch=g.ws.scratch,
        )


def _cost(w: QTensor) -> Cost:
    """The cost of a call, which reads all weights once."""
    return lambda n_tok, pos: (w.data.nbytes, 2 * w.n_in * w.n_out * n_tok)
