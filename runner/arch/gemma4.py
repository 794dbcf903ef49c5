"""Gemma 4: wider heads in full layers, KV caches shared by layers, embeddings of each layer."""

import math
from collections.abc import Mapping
from dataclasses import replace

from tamis.graph.attention import append, attention, norm_heads, rope
from tamis.graph.context import Graph
from tamis.graph.experts import chosen_experts, route, weighed
from tamis.graph.layer_embedding import embedded, layer_embeddings
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import Branch, add, mapped, norm, norm_of, ones, record_norm, summed
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    if il == 0 and g.hp.n_embd_layer:
        layer_embeddings(g, g.x)
    attention_out = attended(g, il, norm(g, g.x, w.attn_norm))
    add(g, norm_of(g, attention_out, w.post_attention_norm))
    out: Branch = mlp(g, norm(g, g.x, w.ffn_norm), w)
    if w.ffn_gate_inp:
        out = norm_of(g, out, w.post_ffw_norm_1), _experts(g, il)
    add(g, norm_of(g, out, w.post_ffw_norm))
    if g.hp.n_embd_layer:
        add(g, embedded(g, il, g.x, w))
    if w.layer_output_scale:
        mapped(g, g.x, g.x, outer=float(w.layer_output_scale.vector()[0]))


def attended(g: Graph, il: int, h: Source) -> Product:
    """Record attention of the rows h; returns its output projection.

    Values are normed; without a matrix for values they are the keys before their norm. In layers
    that read another layer's KV cache, biases have no effect.
    """
    w, own = g.weights(il), g.hp.of(il)
    if g.model.kv_layer(il) != il:
        for projection in (w.attn_q, w.attn_k, w.attn_v):
            projection.leave_bias()
        (q,) = linears(g, h, replace(w.attn_q, added=None))
        finished = append(g, il, rope(g, il, q, w.attn_q_norm))
        return linear(g, attention(g, il, finished), w.attn_output)
    if w.attn_v:
        q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    else:
        q, k = linears(g, h, w.attn_q, w.attn_k)
        v = mapped(g, k, g.ws.rows("attn_v", own.n_embd_kv))
    norm_heads(g, v.reshape(len(v), -1, own.head_dim), ones(own.head_dim))
    queries, keys = rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm)
    return linear(g, attention(g, il, append(g, il, queries, keys, v)), w.attn_output)


def _experts(g: Graph, il: int) -> Source:
    """Record the routed experts beside the dense part; the router has a norm of its own."""
    w, n = g.weights(il), g.hp.n_embd
    scale = w["ffn_gate_inp.scale"].vector() / math.sqrt(n)
    rows = record_norm(g, Source(g.x, "norm", scale, g.hp.rms_eps), g.ws.rows("routed", n))
    (logits,) = linears(g, rows, w.ffn_gate_inp)
    x = record_norm(g, norm(g, g.x, w.pre_ffw_norm_2), g.ws.rows("ffn_norm", n))
    chosen = route(g, logits, w.exp_probs_b)
    if w["ffn_down_exps.scale"]:
        chosen = weighed(g, chosen, w["ffn_down_exps.scale"].vector())
    y = summed(g, chosen_experts(g, il, x, chosen), g.ws.rows("experts", n))
    return norm(g, y, w.post_ffw_norm_2)


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {
        "layer_output_scale": (1,),
        "inp_gate": (hp.n_embd_layer, hp.n_embd),
        "proj": (hp.n_embd, hp.n_embd_layer),
        "post_norm": (hp.n_embd,),
        "pre_ffw_norm_2": (hp.n_embd,),
        "post_ffw_norm_1": (hp.n_embd,),
        "post_ffw_norm_2": (hp.n_embd,),
        "ffn_gate_inp.scale": (hp.n_embd,),
        "ffn_down_exps.scale": (hp.n_expert,),
    }


ARCH = Arch(
    neox=True,
    activation="gelu",
    scale_embedding=True,
    layer=layer,
    tensors=tensors,
    keys=(
        "attention.sliding_window_pattern",
        "attention.key_length_swa",
        "rope.dimension_count_swa",
        "rope.freq_base_swa",
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
        "final_logit_softcapping",
    ),
    derived=lambda hp: {"attention_scale": 1.0},
    unread=("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
    one_device=True,
)
