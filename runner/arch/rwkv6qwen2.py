"""QRWKV6, made from Qwen2: RWKV-6's time mixing in place of attention."""

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward
from tamis.graph.mixers.rwkv6 import RankKeys, rwkv6_tensors, time_mix
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
    norm_bias=True,
    layer=layer,
    tensors=rwkv6_tensors,
    recurrent=lambda hp: tuple(range(hp.n_layer)),
    declares=RankKeys,
)
