"""RWKV-6: time mixing and channel mixing, which also read the previous row; no attention."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.linear import linears
from tamis.graph.mixers.rwkv import shifted
from tamis.graph.mixers.rwkv6 import RankKeys, rwkv6_tensors, time_mix
from tamis.graph.norm import add, mapped, record_layer_norm
from tamis.graph.recurrent import gated, whole
from tamis.model.arch import Arch
from tamis.model.hparams import MAX_LAYER, HParams
from tamis.model.keys import key
from tamis.model.weights import Tensor


@dataclass(frozen=True, slots=True)
class Rwkv6Keys(RankKeys):
    """The ranks, and the number of layers after which rows are halved (0: never)."""

    n_rescale: int = key("rescale_every_n_layers", 0, MAX_LAYER, 0)


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, time_mix(g, il, _normed(g, w.attn_norm)))
    rates = [x.vector().reshape(-1) for x in (w.channel_mix_lerp_k, w.channel_mix_lerp_r)]
    xk, xr = shifted(g, il, _normed(g, w.attn_norm_2), rates, "channel_mix_x")
    (key,), (share,) = linears(g, xk, w.channel_mix_key), linears(g, xr, w.channel_mix_receptance)
    (value,) = linears(g, mapped(g, key, key, "relu2"), w.channel_mix_value)
    mapped(g, gated(g, "mixed", whole(share), "sigmoid", whole(value)), g.x, add=True)
    every = g.hp.keys(Rwkv6Keys).n_rescale
    if every and (il + 1) % every == 0:
        mapped(g, g.x, g.x, outer=0.5)


def _normed(g: Graph, w: Tensor) -> np.ndarray:
    y = g.ws.rows("mix_norm", g.hp.n_embd)
    record_layer_norm(g, g.x, y, w.vector(), w.bias())
    return y


def tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors."""
    return {
        **rwkv6_tensors(hp),
        "attn_norm_2": (hp.n_embd,),
        **{f"channel_mix_lerp_{name}": (1, 1, hp.n_embd) for name in "kr"},
        "channel_mix_key": (hp.n_ff, hp.n_embd),
        "channel_mix_value": (hp.n_embd, hp.n_ff),
        "channel_mix_receptance": (hp.n_embd, hp.n_embd),
    }


ARCH = Arch(
    neox=False,
    norm="layer",
    norm_embedding="weighted",
    layer=layer,
    tensors=tensors,
    recurrent=lambda hp: tuple(range(hp.n_layer)),
    declares=Rwkv6Keys,
)
