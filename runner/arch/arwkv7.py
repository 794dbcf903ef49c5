"""ARWKV-7: RWKV-7's time mixing in place of attention, and a gated feed-forward part."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.rwkv import RankKeys, rwkv_tensors, time_mix, whole_vectors
from tamis.graph.norm import add, norm, record_norm
from tamis.model.arch import Arch


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = record_norm(g, norm(g, g.x, w.attn_norm), g.ws.rows("mix_norm", g.hp.n_embd))
    add(g, time_mix(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


ARCH = Arch(
    neox=False,
    layer=layer,
    tensors=rwkv_tensors,
    recurrent=lambda hp: tuple(range(hp.n_layer)),
    derived=whole_vectors,
    declares=RankKeys,
    # only the first layer has them
    unread=("time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight"),
    one_device=True,
)
