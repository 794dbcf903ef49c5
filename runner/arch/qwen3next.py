"""Qwen3-Next: Gated DeltaNet, gated attention in every fourth layer, experts and a shared one."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.delta_net import (
    delta_net,
    delta_net_layers,
    delta_net_tensors,
    expert_tensors,
    gated_attention,
)
from tamis.graph.experts import experts, shared_expert
from tamis.graph.norm import add, norm, record_norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams

TILED = False  # heads of values that share a head of keys are neighbours


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, delta_net(g, il, h, tiled=TILED) if il in g.hp.recurrent else gated_attention(g, il, h))

    rows = norm(g, g.x, w.post_attention_norm)
    x = record_norm(g, rows, g.ws.rows("ffn_norm", g.hp.n_embd))
    add(g, experts(g, x, w))
    add(g, shared_expert(g, x, w))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {**delta_net_tensors(hp), **expert_tensors(hp)}


# Files with attn_qkv and attn_gate may have their first form too, which llama.cpp then leaves.
UNREAD = ("ssm_in.weight",)
ARCH = Arch(neox=True, layer=layer, tensors=tensors, recurrent=delta_net_layers, unread=UNREAD)
