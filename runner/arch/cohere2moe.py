"""Command-A mixture of experts: attention and experts in parallel, positions in windows only."""

from dataclasses import dataclass, replace

from tamis.graph.attention import append, attention, rope
from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import add, mapped, norm, summed
from tamis.model.arch import Arch
from tamis.model.keys import ArchKeys, key


@dataclass(frozen=True, slots=True)
class NormKeys(ArchKeys):
    """The epsilon of RMS norms; 0: norms are LayerNorms."""

    rms_eps: float = key("attention.layer_norm_rms_epsilon", 0, 1, 0)


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x; the average of routed and shared experts is added."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    attended, out = _attention(g, il, h), feed_forward(g, il, h)
    if w.ffn_up_shexp:
        mixed = summed(g, out, g.ws.rows("branch", g.hp.n_embd))
        mapped(g, mixed, g.x, outer=0.5, add=True)
    else:
        add(g, out)
    add(g, attended)


def _attention(g: Graph, il: int, h: Source) -> Product:
    """Record attention of the rows h; sliding-window and dense layers have rotary positions."""
    w = g.weights(il)
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    queries, keys = rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm)
    if not w.ffn_gate_inp:
        angles = g.angles(g.model.rope_of(il))
        queries, keys = replace(queries, angles=angles), replace(keys, angles=angles)
    return linear(g, attention(g, il, append(g, il, queries, keys, v)), w.attn_output)


ARCH = Arch(
    neox=False,
    layer=layer,
    nope_full=True,
    full_attention_every=4,
    full_first=True,
    window_scaled=True,
    score_experts="sigmoid",
    facts=lambda hp: {"norm": "rms" if hp.keys(NormKeys).rms_eps > 0 else "layer"},
    declares=NormKeys,
    keys=(
        "attention.layer_norm_epsilon",
        "attention.sliding_window_pattern",
        "logit_scale",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
