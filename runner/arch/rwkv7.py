"""RWKV-7: time mixing and channel mixing, which also read the previous row; no attention."""

from collections.abc import Mapping

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.linear import linear, linears
from tamis.graph.mixers.rwkv import RankKeys, rwkv_tensors, shifted, time_mix, whole_vectors
from tamis.graph.norm import add, mapped, record_layer_norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams
from tamis.model.weights import Tensor


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, time_mix(g, il, _normed(g, w.attn_norm)))
    h, rate = _normed(g, w.attn_norm_2), w.channel_mix_lerp_k.vector().reshape(-1)
    (x,) = shifted(g, il, h, [rate], "channel_mix_x")
    (key,) = linears(g, x, w.channel_mix_key)
    add(g, linear(g, mapped(g, key, key, "relu2"), w.channel_mix_value))


def _normed(g: Graph, w: Tensor) -> np.ndarray:
    y = g.ws.rows("mix_norm", g.hp.n_embd)
    record_layer_norm(g, g.x, y, w.vector(), w.bias())
    return y


def tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors."""
    return {
        **rwkv_tensors(hp),
        "attn_norm_2": (hp.n_embd,),
        "channel_mix_lerp_k": (1, 1, hp.n_embd),
        "channel_mix_key": (hp.n_ff, hp.n_embd),
        "channel_mix_value": (hp.n_embd, hp.n_ff),
    }


ARCH = Arch(
    neox=False,
    norm="layer",
    norm_embedding="weighted",
    layer=layer,
    tensors=tensors,
    recurrent=lambda hp: tuple(range(hp.n_layer)),
    derived=whole_vectors,
    declares=RankKeys,
    # only the first layer has them
    unread=("time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight"),
    one_device=True,
)
