"""ERNIE 4.5 mixture of experts: dense first layers, shared experts, a bias in their selection."""

from dataclasses import dataclass

from tamis.graph import layer as graph_layer
from tamis.graph.context import Graph
from tamis.model.arch import Arch
from tamis.model.hparams import MAX_LAYER, UnsupportedKey
from tamis.model.keys import ArchKeys, key


@dataclass(frozen=True, slots=True)
class StepKeys(ArchKeys):
    """The interval of layers with experts: layer i may have them if it divides i + 1.

    0: all may.
    """

    moe_every: int = key("interleave_moe_layer_step", 0, MAX_LAYER, 0)


def layer(g: Graph, il: int) -> None:
    """Record layer il, like llama's.

    Raises UnsupportedKey for experts in a layer that may have none.

    llama.cpp loads such a file, and leaves the layer without a feed-forward part.
    """
    every = g.hp.keys(StepKeys).moe_every
    if every and (il + 1) % every and g.weights(il).ffn_gate_inp:
        what = f"is {every}: only each such layer may have experts, but layer {il} has some"
        raise UnsupportedKey("interleave_moe_layer_step", what)
    graph_layer.layer(g, il)


ARCH = Arch(
    neox=False,
    layer=layer,
    declares=StepKeys,
    unread=("attn_output.bias",),
)
