"""Qwen3.5: Gated DeltaNet, and attention with an output gate in every fourth layer."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.delta_net import delta_net, delta_net_tensors, gated_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams

FULL_ATTENTION_EVERY = 4


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, delta_net(g, il, h, tiled=True) if il in g.hp.recurrent else gated_attention(g, il, h))
    add(g, mlp(g, norm(g, g.x, w.post_attention_norm), w))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    gates = {"ssm_alpha": (hp.ssm.n_rank, hp.n_embd), "ssm_beta": (hp.ssm.n_rank, hp.n_embd)}
    return {**delta_net_tensors(hp), **gates, "ssm_ba": (2 * hp.ssm.n_rank, hp.n_embd)}


def recurrent(hp: HParams) -> tuple[int, ...]:
    """The layers of Gated DeltaNet."""
    return tuple(il for il in range(hp.n_layer) if (il + 1) % FULL_ATTENTION_EVERY)


ARCH = Arch(neox=True, layer=layer, tensors=tensors, recurrent=recurrent)
