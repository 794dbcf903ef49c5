"""Nemotron NAS (DeciLM): like llama; layers differ, some have no attention or only one product."""

from collections.abc import Mapping
from dataclasses import replace

from tamis.graph.context import Graph
from tamis.graph.layer import self_attention
from tamis.graph.linear import linear
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams, UnsupportedKey


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x; without KV heads it is one product, or nothing.

    Raises UnsupportedKey for attention without a feed-forward part, which llama.cpp drops.
    """
    w, n_ff = g.weights(il), g.hp.of(il).n_ff
    if w.attn_output and not n_ff:
        what = f"is 0 in layer {il}, which has attention: expected a feed-forward part as well"
        raise UnsupportedKey("feed_forward_length", what)
    if il not in g.hp.recurrent:
        add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    else:
        w.attn_output.leave_bias()  # llama.cpp adds it only in layers with attention
        if w.attn_output:
            product = replace(w.attn_output, added=None)
            add(g, linear(g, norm(g, g.x, w.attn_norm), product))
    if n_ff:
        add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))


def _tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    return {"attn_output": ("n_embd", "n_embd_q|n_embd")}


ARCH = Arch(neox=False, layer=layer, tensors=_tensors, keys=("attention.head_count",))
