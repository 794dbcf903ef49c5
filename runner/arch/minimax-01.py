"""MiniMax-01: lightning attention or softmax attention, experts; residuals are normed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tamis.graph.context import Graph, State
from tamis.graph.experts import experts
from tamis.graph.layer import self_attention
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import add, mapped, norm, record_norm
from tamis.graph.recurrent import Part, Scan, gated_norm, linear_scan, recurrence, whole
from tamis.model.arch import Arch
from tamis.model.hparams import HParams
from tamis.model.keys import UNLIMITED, ArchKeys, key

FULL_ATTENTION_EVERY = 8


@dataclass(frozen=True, slots=True)
class CarryKeys(ArchKeys):
    """The factors of the normed rows to which a layer's parts are added."""

    scale: float = key("residual_scale", 0, UNLIMITED, 0)


def layer(g: Graph, il: int) -> None:
    """Record layer il. A part's output is added to the scaled norm that the part has read."""
    w, n, scale = g.weights(il), g.hp.n_embd, g.hp.keys(CarryKeys).scale
    rows = record_norm(g, norm(g, g.x, w.attn_norm), g.ws.rows("attn_rows", n))
    h = Source(rows)
    out = _lightning(g, il, h) if il in g.hp.recurrent else self_attention(g, il, h)
    mapped(g, rows, g.x, outer=scale)
    add(g, out)

    rows = record_norm(g, norm(g, g.x, w.ffn_norm), g.ws.rows("ffn_norm", n))
    chosen = experts(g, il, rows)
    mapped(g, rows, g.x, outer=scale)
    add(g, chosen)


def _lightning(g: Graph, il: int, h: Source) -> Product:
    """Lightning attention (Qin et al. 2024, arXiv 2405.17381): each head decays at its own rate."""
    w, own = g.weights(il), g.hp.of(il)
    n_head, n = own.n_head, own.head_dim
    qkv, z = linears(g, h, w.attn_qkv, w.attn_gate)
    mapped(g, qkv, qkv, "silu")
    decay = _decays(n_head, 1 - il / max(g.hp.n_layer - 1, 1) + 1e-5)
    q, k, v = (Part(qkv, i * n, n, n_head, 3 * n) for i in range(3))

    def record(state: State) -> None:
        linear_scan(g, state, Scan("add", q, k, v, decay=decay), out)

    out = g.ws.rows("scan", n_head * n)
    recurrence(g, il, [qkv], out, record)
    return linear(
        g, gated_norm(g, out, whole(z), w.attn_norm_2, activation="sigmoid"), w.attn_output
    )


def _decays(n_head: int, share: float) -> np.ndarray:
    """The decay of each head, f32 [1, n_head]: ALiBi's slopes, smaller in deeper layers."""
    slopes = 2.0 ** (-8.0 * np.arange(1, n_head + 1) / n_head)
    return np.exp(-slopes * share).astype(np.float32)[None]


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    n = hp.n_embd_q
    return {"attn_qkv": (3 * n, hp.n_embd), "attn_gate": (n, hp.n_embd), "attn_norm_2": (n,)}


def _recurrent(hp: HParams) -> tuple[int, ...]:
    every = hp.full_every or FULL_ATTENTION_EVERY
    return tuple(il for il in range(hp.n_layer) if (il + 1) % every)


ARCH = Arch(
    neox=True,
    layer=layer,
    tensors=tensors,
    recurrent=_recurrent,
    keys=("full_attention_interval",),
    declares=CarryKeys,
)
