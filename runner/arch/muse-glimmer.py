"""Muse Glimmer: gated attention, norms around each part; positions in sliding-window layers."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import gated_self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm, norm_of
from tamis.model.arch import Arch
from tamis.model.hparams import HParams

EPS = 1e-8  # epsilon of the norms after each part


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    attended = gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "sigmoid")
    add(g, norm_of(g, attended, w.post_attention_norm, eps=EPS))
    out = mlp(g, norm(g, g.x, w.ffn_norm), w)
    add(g, norm_of(g, out, w.post_ffw_norm, eps=EPS))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {"attn_gate": (hp.n_embd_q, hp.n_embd)}


ARCH = Arch(
    neox=False,
    norm_embedding="plain",
    layer=layer,
    tensors=tensors,
    full_attention_every=4,
    nope_full=True,
    keys=(
        "attention.sliding_window_pattern",
        "rope.freq_base_swa",
        "final_logit_softcapping",
        "logit_scale",
    ),
)
