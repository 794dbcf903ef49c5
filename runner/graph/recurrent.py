"""Recurrent layers, which have a state instead of a KV cache.

Their parts are functions from rows to rows; the ops over a layer's states belong to the sequence's
side, between two transfers: see Program.transfer.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tamis.graph.context import Graph, State
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.values import note_written
from tamis.model.weights import MissingTensor, Tensor


class Part(NamedTuple):
    """Some elements of each row of x: rows_per_tok runs of n, `step` elements apart."""

    x: np.ndarray  # f32 [n_tok, width]
    first: int
    n: int
    rows_per_tok: int = 1
    step: int = 0

    @property
    def at(self) -> np.ndarray:
        """The elements from the first one on."""
        return self.x.reshape(-1)[self.first :]

    @property
    def stride(self) -> int:
        """Elements from a token's row to the next one's; 0 if all tokens share x."""
        return 0 if self.x.ndim == 1 else int(np.prod(self.x.shape[1:]))


def whole(x: np.ndarray) -> Part:
    """All elements of each row."""
    return Part(x, 0, int(np.prod(x.shape[1:])))


def recurrence(
    g: Graph, il: int, rows: Sequence[np.ndarray], out: np.ndarray, record: Callable[[State], None]
) -> np.ndarray:
    """The array out, which `record(state)` makes from `rows` and a layer's states.

    Each f32 [n_tok, ...].
    """
    g.rec.program.transfer(g.rec.step, *rows)
    g.hooks.recur(g, il, record)
    # the buffer counts as overwritten even if the hooks record nothing
    note_written(out, "recurrence")
    g.rec.program.transfer(g.rec.step, out)
    return out


def convolved(
    g: Graph, il: int, x: Part, w: Tensor, *, activation: str = "silu", name: str = "conv"
) -> np.ndarray:
    """The causal convolution of each channel of x, as a recurrence of its own: see short_conv."""
    y = g.ws.rows(name, x.n)

    def record(state: State) -> None:
        short_conv(g, state, x, w, y, activation=activation, name=name)

    return recurrence(g, il, [x.x], y, record)


def short_conv(
    g: Graph, state: State, x: Part, w: Tensor, y: np.ndarray | None = None, *,
    activation: str = "silu", name: str = "conv",
) -> np.ndarray:  # fmt: skip
    """The causal convolution of each channel of x, f32 [n_tok, n]; name: of its state.

    The result is y if that is given, else in the buffer of this name.
    """
    taps = np.ascontiguousarray(w.vector().reshape(x.n, -1).T)  # [n_tap, n]
    y = g.ws.rows(name, x.n) if y is None else y
    g.rec.program.add(
        ops.SHORT_CONV,
        (activation,),
        step=g.rec.step,
        x=x.at,
        w=taps,
        bias=w.bias(),
        state=state(name, len(taps) - 1, x.n),
        y=y,
        n=x.n,
        n_tap=len(taps),
        x_stride=x.stride,
        y_stride=x.n,
    )
    return y


def pooled(
    g: Graph, il: int, name: str, x: np.ndarray, gate: np.ndarray | None, w: np.ndarray, every: int
) -> np.ndarray:
    """The mean of the rows of each block of `every` positions, at its last one; elsewhere 0.

    x, gate: f32 [n_tok, n_half * n], see POOL_KEYS; without gates rows have equal weights. w: f32
    [n_row, n]. The result, f32 [n_tok, n], and the state have this name.
    """
    width, n = x.shape[1], w.shape[1]
    both, y = g.ws.rows(f"{name}_rows", 2 * width), g.ws.rows(name, n)
    copied(g, whole(x), Part(both, 0, width))
    if gate is not None:
        copied(g, whole(gate), Part(both, width, width))

    def record(state: State) -> None:
        g.rec.program.add(
            ops.POOL_KEYS,
            step=g.rec.step,
            x=both,
            w=w,
            state=state(name, len(w) - 1, 2 * width),
            y=y,
            n=n,
            n_row=len(w),
            n_half=width // n,
            every=every,
        )

    return recurrence(g, il, [both], y, record)


def gated(g: Graph, name: str, z: Part, activation: str, x: Part | None = None) -> np.ndarray:
    """The product x * activation(z), or activation(z) alone, in the buffer of this name."""
    n = z.n if x is None else x.n  # z may have one element for each run of x
    y = g.ws.rows(name, z.rows_per_tok * n)
    gate_rows(g, z, activation, x, Part(y, 0, n, z.rows_per_tok, n))
    return y


def copied(g: Graph, x: Part, y: Part) -> None:
    """Record a copy of x to y, which has as many runs."""
    gate_rows(g, x, "none", None, y)


def normed_part(g: Graph, x: Part, w: Tensor, y: Part) -> None:
    """Record y = the norm of x's runs; the runs of each are contiguous."""
    g.rec.program.add(
        ops.RMS_NORM,
        (0,),
        step=g.rec.step,
        x=x.at,
        w=w.vector(),
        y=y.at,
        n=x.n,
        rows_per_tok=x.rows_per_tok,
        x_stride=x.stride,
        y_stride=y.stride,
        eps=g.hp.rms_eps,
    )


def gate_rows(g: Graph, z: Part, activation: str, x: Part | None, y: Part) -> None:
    """Record y = x * activation(z), or activation(z) alone."""
    n = y.n
    g.rec.program.add(
        ops.GATE_ROWS,
        (activation,),
        step=g.rec.step,
        x=None if x is None else x.at,
        z=z.at,
        y=y.at,
        n=n,
        rows_per_tok=z.rows_per_tok,
        x_stride=0 if x is None else x.stride,
        x_step=0 if x is None else x.step,
        z_stride=z.stride,
        z_step=z.step,
        z_each=int(z.n == n),
        y_stride=y.stride,
        y_step=y.step,
    )


class Steps(NamedTuple):
    """Time steps, and the decays that they and a state's rates give."""

    dt: np.ndarray  # f32 [n_tok, n]
    decay: np.ndarray | None  # f32 [n_tok, n]


def steps(g: Graph, x: Part, bias: Tensor, rates: np.ndarray | None) -> Steps:
    """Steps softplus(x + bias), and decays exp(steps * rates); rates f32, shared by neighbours."""
    if (added := bias.bias()) is None:
        raise MissingTensor(f"{bias.name}.bias")
    return _steps(g, x, added, rates)


def softplus(g: Graph, x: np.ndarray) -> np.ndarray:
    """The softplus log(1 + exp(x)), f32 [n_tok, n]."""
    return _steps(g, whole(x), np.zeros(x[0].size, np.float32), None).dt


def _steps(g: Graph, x: Part, bias: np.ndarray, rates: np.ndarray | None) -> Steps:
    n = x.n * x.rows_per_tok
    found = Steps(g.ws.rows("dt", n), None if rates is None else g.ws.rows("decay", n))
    g.rec.program.add(
        ops.DECAY,
        step=g.rec.step,
        x=x.at,
        bias=bias,
        a=rates,
        dt=found.dt,
        decay=found.decay,
        n=x.n,
        rows_per_tok=x.rows_per_tok,
        x_stride=x.stride,
        x_step=x.step,
        run=1 if rates is None else n // rates.size,
    )
    return found


def l2_normed(g: Graph, x: Part, *, eps: float = 0.0) -> None:
    """Record that each of x's contiguous runs is scaled to length 1, in place.

    eps: of the length; 0: the model's.
    """
    g.rec.program.add(
        ops.L2_NORM,
        step=g.rec.step,
        x=x.at,
        n=x.n,
        rows_per_tok=x.rows_per_tok,
        stride=x.stride,
        eps=eps or g.hp.rms_eps,
    )


def gated_norm(
    g: Graph, x: np.ndarray, z: Part, w: Tensor, *, order: str = "norm", activation: str = "silu"
) -> np.ndarray:
    """Norm and gate of x, f32 [n_tok, rows * n], in place; w f32 [n] or [rows, n]."""
    n = w.vector().shape[-1]
    g.rec.program.add(
        ops.GATED_NORM,
        (order, activation),
        step=g.rec.step,
        x=x,
        z=z.at,
        w=w.vector(),
        y=x,
        n=n,
        rows_per_tok=x[0].size // n,
        z_stride=z.stride,
        w_step=n if w.vector().ndim == 2 else 0,
        eps=g.hp.rms_eps,
    )
    return x


def bounded_decay(
    g: Graph, x: np.ndarray, bias: Tensor, rates: np.ndarray, least: float
) -> np.ndarray:
    """Decays exp(least * sigmoid(...)): see BOUNDED_DECAY; f32 [n_tok, n]."""
    n = x.shape[1]
    if (added := bias.bias()) is None:
        raise MissingTensor(f"{bias.name}.bias")
    decay = g.ws.rows("decay", n)
    g.rec.program.add(
        ops.BOUNDED_DECAY,
        step=g.rec.step,
        x=x,
        bias=added,
        a=rates,
        decay=decay,
        n=n,
        run=n // rates.size,
        least=least,
    )
    return decay


class Scan(NamedTuple):
    """A linear scan: its rule, the inputs of each token, and the heads."""

    rule: str  # "add" or "delta"
    q: Part  # each head's part of a row
    k: Part
    v: Part
    # f32 [n_tok, n_head] or [n_tok, n_head * head_k]; [1, ...]: the same for all tokens
    decay: np.ndarray
    beta: np.ndarray | None = None  # f32 [n_tok, n_head]
    skip: np.ndarray | None = None  # f32 [n_head]
    # True: head h reads keys of head h % n_head_k; False: neighbours share them
    tiled: bool = False
    scale: float = 1.0


def linear_scan(g: Graph, state: State, scan: Scan, y: np.ndarray, *, name: str = "scan") -> None:
    """Record y, f32 [n_tok, n_head * head_v], of a scan; name: of its state."""
    v, k, n_head = scan.v, scan.k, scan.v.rows_per_tok
    by_channel = scan.decay[0].size > n_head
    assert scan.q.stride == k.stride == v.stride
    g.rec.program.add(
        ops.LINEAR_SCAN,
        (scan.rule, "channel" if by_channel else "head", k.n, v.n),
        step=g.rec.step,
        q=scan.q.at,
        k=k.at,
        v=v.at,
        decay=scan.decay,
        beta=scan.beta,
        skip=scan.skip,
        state=state(name, n_head, k.n, v.n),
        y=y,
        n_head=n_head,
        n_head_k=k.rows_per_tok,
        tiled=int(scan.tiled),
        stride=v.stride,
        qk_step=k.step,
        v_step=v.step,
        decay_stride=scan.decay[0].size if len(scan.decay) > 1 else 0,
        scale=scan.scale,
    )
