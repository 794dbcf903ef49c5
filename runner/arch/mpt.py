"""MPT: ALiBi or learned positions; LayerNorm."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import self_attention
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.graph.recurrent import Part, gated, whole
from tamis.model.arch import Arch
from tamis.model.hparams import HParams
from tamis.model.weights import MissingTensor


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    if not w.attn_q_norm and w.attn_k_norm:  # keys are normed only if queries are
        w.attn_k_norm.leave()
    n_kv = g.hp.of(il).n_embd_kv
    if w.attn_q_norm and len(w.attn_k_norm.vector()) != n_kv:
        raise MissingTensor(f"{w.attn_k_norm.name}.weight of {n_kv} elements")
    h = norm(g, g.x, w.attn_norm)
    add(g, self_attention(g, il, h, normed_heads=bool(w.attn_q_norm)))
    h = norm(g, g.x, w.ffn_norm)
    add(g, _scaled(g, il, h) if w["ffn.act.scales"] else mlp(g, h, w))


def _scaled(g: Graph, il: int, h: Source) -> Product:
    """Record the feed-forward part of files whose activations were scaled before quantization."""
    w = g.weights(il)
    (up,) = linears(g, h, w.ffn_up)
    scales = Part(1 / w["ffn.act.scales"].vector(), 0, g.hp.n_ff)
    return linear(g, gated(g, "gated", whole(up), "gelu", scales), w.ffn_down)


def tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors."""
    return {
        "ffn.act.scales": (hp.n_ff,),
        "attn_q_norm": (hp.n_embd_q,),
        "attn_k_norm": (f"{hp.n_embd_kv}|{hp.n_embd}",),
    }


ARCH = Arch(
    neox=False,
    norm="layer",
    gated=False,
    activation="gelu",
    nope_every=1,
    positions="some",
    layer=layer,
    tensors=tensors,
    keys=("attention.max_alibi_bias", "attention.clamp_kqv"),
)
