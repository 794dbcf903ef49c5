"""A vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929) in the vocabulary of graph/."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tamis.graph.attention import (
    PREFILL_Q_BLOCK,
    append,
    attention,
    record_append,
    record_attention,
    rope,
)
from tamis.graph.audit import Queries
from tamis.graph.context import Graph, Heads, Hooks, State
from tamis.graph.linear import Product, Source, linear, linears, stored
from tamis.graph.norm import add, mapped, norm, norm_rows
from tamis.graph.workspace import Buffers
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView, QTensor, Selection, zeros
from tamis.jit_kernels.contract.values import Buffer
from tamis.model.arch import Arch
from tamis.model.heads import Heads as TextHeads
from tamis.model.hparams import HParams, LayerShape, RopeScaling
from tamis.model.model import Model
from tamis.model.rope import RopeFrequencies
from tamis.model.weights import Tensor, Tensors, Weights
from tamis.select.base import Recording, SelectorShape, SelectorState
from tamis.vision.family import Family, Plan
from tamis.vision.params import VisionParams
from tamis.vision.weights import VisionWeights

VECTOR = 16  # elements that head widths are padded to
QUICK = 1.702  # of gelu_quick: x * sigmoid(QUICK * x) (Hendrycks and Gimpel 2016, arXiv 1606.08415)
WINDOW_BLOCK = 4  # rows of a window are a multiple of these
EVER = 1 << 24  # positions that a row of a picture may see ahead


@dataclass(frozen=True, slots=True)
class Vision:
    """An encoder's graph as its projector sees it."""

    g: Graph
    params: VisionParams
    mm: Any  # the projector's tensors by name
    n_group: int  # rows before the merger for each row after it
    step: np.ndarray  # the step of the rows after it
    deep: list[np.ndarray]  # further rows for the first layers of the text model

    def grouped(self, x: np.ndarray) -> "tuple[Graph, np.ndarray]":
        """Rows f32 [n, width] joined in groups, and a graph over these: [n / n_group, wider]."""
        rec = replace(self.g.rec, step=self.step, n_tok=len(x) // self.n_group)
        return replace(self.g, rec=rec), x.reshape(-1, self.n_group * x.shape[1])

    def perceptron(self, g: Graph, x: np.ndarray, up: str, down: str, act: str) -> np.ndarray:
        """Record down(activation(up(x))) of the projector's tensors of these names."""
        (h,) = linears(g, x, self.mm[up])
        h = activated(g, h, act)
        return stored(g, linear(g, h, self.mm[down]), g.ws.rows(down, self.mm[down].matrix().n_out))


def activated(g: Graph, x: np.ndarray, activation: str) -> np.ndarray:
    """Record an activation of x in place."""
    if activation == "gelu_quick":
        return mapped(g, x, x, "silu", inner=QUICK, outer=1 / QUICK)
    return mapped(g, x, x, activation)


def vit_layer(g: Graph, il: int, activation: str) -> None:
    """Record a layer: attention among all rows of a window, and a feed-forward part."""
    w = g.weights(il)
    h = norm(g, g.x, w.ln1)
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    finished = append(g, il, rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm), v)
    out = linear(g, attention(g, il, finished), w.attn_out)
    _add(g, out, w.ls1, w.attn_post_norm)
    _add(g, _feed_forward(g, norm(g, g.x, w.ln2), w, activation), w.ls2, w.ffn_post_norm)


def _feed_forward(g: Graph, h: Source, w: Tensors, activation: str) -> Product:
    if not w.ffn_gate:
        (up,) = linears(g, h, w.ffn_up)
        return linear(g, activated(g, up, activation), w.ffn_down)
    gate, up = linears(g, h, w.ffn_gate, w.ffn_up)
    if activation in ("silu", "gelu"):
        return linear(g, Source(gate, activation, up), w.ffn_down)
    return linear(g, _multiplied(g, up, activated(g, gate, activation)), w.ffn_down)


def _add(g: Graph, out: Product, scale: Tensor, w_norm: Tensor) -> None:
    """Record g.x += a layer's part, after its scale for each element or its norm."""
    if not scale and not w_norm:
        add(g, out)
        return
    rows = stored(g, out, g.ws.rows("branch", out.w.matrix().n_out))
    if scale:
        rows = _multiplied(g, rows, scale.vector())
    if w_norm:
        norm_rows(g, rows, w_norm.vector(), w_norm.bias())
    mapped(g, rows, g.x, add=True)


def _multiplied(g: Graph, rows: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Record rows *= by, f32 [n_tok, n] or [n]."""
    n = rows.shape[1]
    stride = n if by.ndim == 2 else 0
    g.rec.program.add(
        ops.GATE_ROWS, ("none",), step=g.rec.step, x=by, z=rows, y=rows, n=n, rows_per_tok=1,
        x_stride=stride, x_step=0, z_stride=n, z_step=0, z_each=1, y_stride=n, y_step=0,
    )  # fmt: skip
    return rows


class VisionBuffers(Buffers):
    """Buffers for up to n_tok rows of patches, made when recording asks for them."""

    def __init__(self, hp: HParams, backend: Backend, n_tok: int, n_in: int) -> None:
        self.step = np.zeros(ops.STEP_SIZE, np.int64)
        self.x = zeros((n_tok, hp.n_embd), np.float32)
        self._n_tok, self._n_in = n_tok, n_in
        self._known: dict[str, Buffer] = {}
        self._rows: dict[str, np.ndarray] = {}
        self.packed = zeros(ops.packed_bytes(n_tok, n_in), np.uint8)
        room = max(ops.matmul_scratch(n_in), ops.attend_scratch(1, hp.head_dim))
        self.scratch = zeros(backend.n_thread * room, np.uint8)
        self.partial = zeros((hp.n_head, 1, hp.head_dim + 2), np.float32)

    def rows(self, name: str, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        """The buffer of this name as [n_tok, *shape]."""
        n = self._n_tok * int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._rows or self._rows[name].nbytes < n:
            assert name not in self._known, f"{name} has become wider"
            self._rows[name] = zeros(n, np.uint8)
        return super().rows(name, *shape, dtype=dtype)


class _Windows(SelectorState):
    """A selection of the rows of each row's window, which `set` fills for a picture."""

    def __init__(self, shape: SelectorShape, most: int) -> None:
        super().__init__(shape)
        n_block = -(-shape.n_ubatch // WINDOW_BLOCK)
        n_row = n_block * shape.n_head_kv
        self.selection = Selection(
            indptr=np.zeros(n_row + 1, np.int32),
            indices=zeros(n_row * -(-most // WINDOW_BLOCK), np.int32),
            block=WINDOW_BLOCK,
            q_block=WINDOW_BLOCK,
            n_row=shape.n_head_kv,
        )

    def everything(self, rec: Recording) -> Selection:
        """The rows of the windows."""
        return self.selection

    def set(self, runs: Any) -> None:
        """Select the rows of windows of these lengths, one after the other."""
        n_head, indices, counts, first = self.selection.n_row, [], [], 0
        for run in runs:
            assert run % WINDOW_BLOCK == 0
            n = run // WINDOW_BLOCK
            indices.append(np.tile(np.arange(first, first + n, dtype=np.int32), n * n_head))
            counts.append(np.full(n * n_head, n, np.int64))
            first += n
        flat, ends = np.concatenate(indices), np.cumsum(np.concatenate(counts))
        self.selection.indices[: len(flat)] = flat
        self.selection.indptr[1 : len(ends) + 1] = ends
        self.selection.indptr[len(ends) + 1 :] = ends[-1]


class _OwnPages(Hooks):
    """K and V of a layer's rows in pages that all layers share."""

    def __init__(self, kv: KVView, states: Callable[[int], SelectorState]) -> None:
        self._kv, self._states = kv, states

    def append(
        self, g: Graph, layer: int, q: Heads, k: Heads | None, v: Heads | None
    ) -> np.ndarray:
        return record_append(g, self._kv, q, k, v)

    def attend(
        self, g: Graph, layer: int, q: np.ndarray, out: np.ndarray, lse: np.ndarray | None
    ) -> None:
        record_attention(g, self._states(layer), Queries(layer, q, out, lse), self._kv)

    def recur(self, g: Graph, layer: int, record: Callable[[State], None]) -> None:
        record(lambda name, *shape: zeros(shape, np.float32))


def tower_model(p: VisionParams, weights: VisionWeights, family: Family) -> Model:
    """The encoder as a model of graph/: without tokens and logits."""
    wide = -(-p.head_dim // VECTOR) * VECTOR
    n_half = family.n_half(p)
    own = LayerShape(p.n_head, p.n_head, p.head_dim, p.n_ff)
    hp = HParams(
        arch="clip", n_ctx_train=EVER, n_embd=p.n_embd, n_layer=p.n_layer, n_head=p.n_head,
        n_head_kv=p.n_head, head_dim=wide, n_ff=p.n_ff, n_vocab=1, n_rot=2 * n_half, rms_eps=p.eps,
        rope_base=1e4, rope_scaling=RopeScaling(), n_expert=0, n_expert_used=0, n_ff_expert=0,
        sliding_window=0, attention_scale=p.head_dim**-0.5,
        layers=(own,) * p.n_layer if wide != p.head_dim else (),
        nope_layers=() if n_half else tuple(range(p.n_layer)),
    )  # fmt: skip
    arch = Arch(neox=family.neox, norm=family.norm(p), norm_bias=True, is_encoder=True)
    none = Tensor("")
    found = Weights(none, none, none, weights.top, weights.blk, 0)
    heads = TextHeads("clip", None, "mean", None, None, None, (), (), p.eps)
    return Model(hp, arch, found, (RopeFrequencies(np.zeros(n_half), 1.0),), heads)


class Tower:
    """An encoder's recorded Program for tiles of up to `most` rows."""

    def __init__(
        self, model: Model, weights: VisionWeights, family: Family, p: VisionParams, parts: Any
    ) -> None:
        self._backend, self.most = parts
        self._model, self._weights, self._family, self._p = model, weights, family, p
        hp, most = model.hp, self.most
        n_group = family.pooled if family.pooled > 1 else p.merge**2
        matrices = [t.matrix().n_in for t in weights.mm.values() if isinstance(t.data, QTensor)]
        widest = max([*matrices, weights.patch.matrix().n_in, p.n_embd, *self._layer_widths()])
        self._ws = VisionBuffers(hp, self._backend, most, widest)
        shape = SelectorShape(
            p.n_layer, hp.n_head, hp.n_head, hp.head_dim, -(-most // PAGE) * PAGE, most,
            (0,) * p.n_layer, hp.scale,
        )  # fmt: skip
        window = family.most_window(p)
        self._plain = SelectorState(shape)
        self._windows = _Windows(shape, window) if window else None
        self._step = np.zeros(ops.STEP_SIZE, np.int64)
        self._program = Program()
        self._n_group = n_group
        self._deep: list[np.ndarray] = []
        self._out = self._record(n_group)
        linked = self._program
        self._backend.load(linked.specs, linked.specs)
        self._linked = self._backend.link(linked)

    def _layer_widths(self) -> list[int]:
        return [m.n_in for layer in self._model.weights.blk for m in layer.matrices()]

    def _record(self, n_group: int) -> np.ndarray:
        p, ws, hp = self._p, self._ws, self._model.hp
        n_page = -(-self.most // PAGE)
        pages = [zeros((n_page, hp.n_head, PAGE, hp.head_dim), np.float16) for _ in "kv"]
        table = np.arange(n_page, dtype=np.int32)
        kv = KVView(pages[0], pages[1], table, table.copy())
        rec = Recording(self._program, ws.step, self.most, PREFILL_Q_BLOCK)
        g = Graph(self._model, ws, rec, _OwnPages(kv, self._state))
        self._patches = ws.rows("patches", self._weights.patch.matrix().n_in)
        self._added = ws.rows("added", p.n_embd)
        if self._family.n_half(p):
            self._angles = g.angles(0)
        stored(g, linear(g, self._patches, self._weights.patch), g.x)
        mapped(g, self._added, g.x, add=True)
        for name in ("pre_ln", "post_ln"):
            w = self._weights.top[name]
            if name == "post_ln":
                for il in range(p.n_layer):
                    self._record_layer(g, il)
            if w:
                norm_rows(g, g.x, w.vector(), w.bias())
        vision = Vision(g, p, self._weights.mm, n_group, self._step, self._deep)
        self._vision = vision
        return self._family.project(vision)

    def _record_layer(self, g: Graph, il: int) -> None:
        vit_layer(g, il, self._p.activation)
        if self._family.after_layer is not None:
            vision = Vision(g, self._p, self._weights.mm, self._n_group, self._step, self._deep)
            self._family.after_layer(vision, il)

    def _state(self, layer: int) -> SelectorState:
        if self._windows is not None and self._family.windowed(self._p, layer):
            return self._windows
        return self._plain

    def run(self, patches: np.ndarray, plan: Plan) -> np.ndarray:
        """The projected rows of a tile's patches, f32 [n / n_group, n_out]."""
        n, backend = len(plan.order), self._backend
        assert n <= self.most
        rows = np.where(plan.order[:, None] < 0, np.float32(0), patches[plan.order])
        np.asarray(self._patches)[:n, : rows.shape[1]] = rows
        np.asarray(self._added)[:n] = 0 if plan.added is None else plan.added
        sent = [np.asarray(self._patches), np.asarray(self._added)]
        if plan.angles is not None:
            for to, values in zip((self._angles.cos, self._angles.sin), plan.angles, strict=True):
                np.asarray(to)[:n] = values
                sent.append(np.asarray(to))
        if self._windows is not None:
            self._windows.set(plan.runs)
            sent += [self._windows.selection.indptr, self._windows.selection.indices]
        n_out = n // self._n_group
        self._ws.step[:] = n, 0, 0, 0, n, 0
        self._step[:] = n_out, 0, 0, 0, n_out, 0
        backend.send(self._ws.step, self._step, *sent)
        backend.run(self._linked)
        found = [self._out, *self._deep]
        backend.fetch(*found)
        parts = [np.asarray(x)[:n_out].copy() for x in found]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
