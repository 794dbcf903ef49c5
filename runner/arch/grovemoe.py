"""GroveMoE: like qwen3moe; each group of experts has a further one, which reads their output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.experts import Chosen, Mixture, activated, chosen_experts, products, route
from tamis.graph.layer import self_attention
from tamis.graph.linear import linears
from tamis.graph.norm import add, mapped, norm, record_norm, summed
from tamis.jit_kernels.contract import ops
from tamis.model.arch import Arch
from tamis.model.hparams import MAX_EXPERT, HParams, UnsupportedKey
from tamis.model.keys import UNLIMITED, ArchKeys, key
from tamis.model.weights import Tensor


@dataclass(frozen=True, slots=True)
class GroveKeys(ArchKeys):
    """The additional experts: each belongs to a group of experts."""

    n_ff: int = key("expert_chunk_feed_forward_length", 0, 1 << 22, 0)  # 0: head_dim
    n_each: int = key("experts_per_group", 0, MAX_EXPERT, 0)  # the number of experts of a group
    # the factor of the additional experts' output
    scale: float = key("expert_group_scale", 0, UNLIMITED, 0)


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w, n = g.weights(il), g.hp.n_embd
    add(g, self_attention(g, il, norm(g, g.x, w.attn_norm)))
    x = record_norm(g, norm(g, g.x, w.ffn_norm), g.ws.rows("ffn_norm", n))
    (logits,) = linears(g, x, w.ffn_gate_inp)
    chosen = route(g, logits, w.exp_probs_b)
    y = summed(g, chosen_experts(g, il, x, chosen), g.ws.rows("experts", n))
    groups = _groups(g, logits, chosen)
    mapped(g, y, g.x, add=True)

    n_group = g.hp.n_expert // g.hp.keys(GroveKeys).n_each

    def of_groups(rows: np.ndarray, tensor: Tensor) -> np.ndarray:
        return products(g, rows, tensor, groups.ids, n_group)

    hidden = activated(g, of_groups(y, w.ffn_gate_chexps), of_groups(y, w.ffn_up_chexps), 0.0)
    add(g, Mixture(of_groups(hidden, w.ffn_down_chexps), groups.weights))


def _groups(g: Graph, logits: np.ndarray, chosen: Chosen) -> Chosen:
    """The additional experts of the chosen ones (possibly repeated), and their scaled weights."""
    n_chosen, keys = chosen.ids.shape[1], g.hp.keys(GroveKeys)
    n_used = min(n_chosen, g.hp.n_expert // keys.n_each)
    groups = Chosen(
        g.ws.rows("group_ids", n_used, dtype=np.int32), g.ws.rows("group_weights", n_used)
    )
    g.rec.program.add(
        ops.MOE_GROUPS,
        step=g.rec.step,
        logits=logits,
        ids=chosen.ids,
        groups=groups.ids,
        weights=groups.weights,
        n_expert=g.hp.n_expert,
        n_chosen=n_chosen,
        n_used=n_used,
        n_each=keys.n_each,
    )
    mapped(g, groups.weights, groups.weights, outer=keys.scale)
    return groups


def _tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    keys = hp.keys(GroveKeys)
    n, n_ff = hp.n_expert // keys.n_each, keys.n_ff or hp.head_dim
    return {
        "ffn_gate_chexps": (n, n_ff, hp.n_embd),
        "ffn_up_chexps": (n, n_ff, hp.n_embd),
        "ffn_down_chexps": (n, hp.n_embd, n_ff),
    }


def _derived(hp: HParams) -> dict[str, Any]:
    n_each = hp.keys(GroveKeys).n_each
    if not n_each or hp.n_expert % n_each:
        what = f"is {n_each}, expected a divisor of {hp.n_expert}, the number of experts"
        raise UnsupportedKey("experts_per_group", what)
    if (n_group := hp.routing.n_group) > 1:  # chosen by sigmoids, not by what experts weigh
        what = f"is {n_group}, expected 0: no group of experts is chosen before they are"
        raise UnsupportedKey("expert_group_count", what)
    return {}


ARCH = Arch(
    neox=True,
    shared_ff=True,
    layer=layer,
    tensors=_tensors,
    derived=_derived,
    rope_factors=False,
    declares=GroveKeys,
)
