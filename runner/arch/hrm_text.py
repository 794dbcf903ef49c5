"""HRM-Text: two stacks of layers in turn, the low one several times; each pass has its own keys."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import gated_self_attention
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, mapped, norm, record_norm, record_row_added
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il of all passes: a stack reads both states, and gives one of them anew."""
    n, n_high, n_low = g.hp.stacks
    turn, at = divmod(il, n)
    low, high = g.ws.rows("low", g.hp.n_embd), g.ws.rows("high", g.hp.n_embd)
    w = g.weights(il)
    if il == 0:
        mapped(g, g.x, high)
        record_row_added(g, g.x, g.model.weights.top["hrm.z_l_init"].vector)
    elif at == 0:
        mapped(g, low, g.x)
        mapped(g, high, g.x, add=True)
    add(g, gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "sigmoid"))
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))
    # What the last stack gives is normed by the output's norm.
    if at == n - 1 and turn < n_high * (n_low + 1) - 1:
        state = high if _is_high(g.hp, turn) else low
        record_norm(g, norm(g, g.x, w.attn_norm), state)


def _is_high(hp: HParams, turn: int) -> bool:
    n_low = hp.stacks[2]
    return turn % (n_low + 1) == n_low


def _block(hp: HParams, il: int) -> int:
    """The file has the low stack's layers, then the high one's."""
    turn, at = divmod(il, hp.stacks[0])
    return at + hp.stacks[0] * _is_high(hp, turn)


def _tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    return {"attn_gate": (hp.n_embd_q, hp.n_embd)}


ARCH = Arch(
    neox=True,
    weighted=False,
    layer=layer,
    tensors=_tensors,
    block=_block,
    one_device=True,
    keys=("hrm.layers_per_stack", "hrm.h_cycles", "hrm.l_cycles", "embedding_scale"),
)
