"""HRM-Text: two alternating stacks of layers, the low one run repeatedly.

Each pass has its own KV.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import gated_self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, mapped, norm, record_norm, record_row_added
from tamis.model.arch import Arch
from tamis.model.hparams import MAX_LAYER, HParams, UnsupportedKey
from tamis.model.keys import ArchKeys, key


@dataclass(frozen=True, slots=True)
class StackKeys(ArchKeys):
    """The passes through two stacks: the low one's n_low times, then the high one's."""

    n_layer: int = key("hrm.layers_per_stack", 1, MAX_LAYER)
    n_high: int = key("hrm.h_cycles", 1, MAX_LAYER)
    n_low: int = key("hrm.l_cycles", 1, MAX_LAYER)  # passes of the low stack in each high cycle

    @property
    def n_pass(self) -> int:
        """The number of passes through a stack, over all cycles."""
        return self.n_high * (self.n_low + 1)


def layer(g: Graph, il: int) -> None:
    """Record layer il of all passes: a stack reads both states and replaces one of them."""
    stacks = g.hp.keys(StackKeys)
    turn, at = divmod(il, stacks.n_layer)
    low, high = g.ws.rows("low", g.hp.n_embd), g.ws.rows("high", g.hp.n_embd)
    w = g.weights(il)
    if il == 0:
        mapped(g, g.x, high)
        record_row_added(g, g.x, g.model.weights.top["hrm.z_l_init"].vector())
    elif at == 0:
        mapped(g, low, g.x)
        mapped(g, high, g.x, add=True)
    add(g, gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "sigmoid"))
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))
    # The output norm applies to the last stack's result.
    if at == stacks.n_layer - 1 and turn < stacks.n_pass - 1:
        state = high if _is_high(g.hp, turn) else low
        record_norm(g, norm(g, g.x, w.attn_norm), state)


def _is_high(hp: HParams, turn: int) -> bool:
    n_low = hp.keys(StackKeys).n_low
    return turn % (n_low + 1) == n_low


def _block(hp: HParams, il: int) -> int:
    """The file's block of layer il: the low stack's layers come first, then the high one's."""
    n_layer = hp.keys(StackKeys).n_layer
    turn, at = divmod(il, n_layer)
    return at + n_layer * _is_high(hp, turn)


def _tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    return {"attn_gate": (hp.n_embd_q, hp.n_embd)}


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters.

    Raises UnsupportedKey if the file's layers are not as many as all passes have together.
    """
    keys = hp.keys(StackKeys)
    if hp.n_layer != keys.n_layer * keys.n_pass:
        what = f"is {hp.n_layer}, expected {keys.n_layer} * {keys.n_high} * ({keys.n_low} + 1)"
        raise UnsupportedKey("block_count", what)
    return {}


ARCH = Arch(
    neox=True,
    weighted=False,
    layer=layer,
    tensors=_tensors,
    block=_block,
    one_device=True,
    derived=_derived,
    declares=StackKeys,
    keys=("embedding_scale",),
)
