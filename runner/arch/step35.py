"""Step 3.5: more heads in sliding-window layers, a gate for each; routed and shared experts."""

from collections.abc import Mapping
from typing import Any

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, gated_self_attention
from tamis.graph.norm import add, norm
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    if not w.ffn_gate_inp:
        w.exp_probs_b.leave_bias()  # this layer has no experts to select
    add(g, gated_self_attention(g, il, norm(g, g.x, w.attn_norm), "sigmoid"))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {"attn_gate": (hp.n_head, hp.n_embd)}


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: layers without a window rotate half as many elements."""
    half = hp.n_rot // 2
    return {"n_rot": half - half % 2, "n_rot_swa": hp.n_rot_swa or hp.n_rot}


ARCH = Arch(
    neox=True,
    layer=layer,
    tensors=tensors,
    derived=_derived,
    score_experts="sigmoid",
    shares_expert=True,
    rope_base_window=10000.0,
    keys=(
        "attention.key_length_swa",
        "attention.sliding_window_pattern",
        "rope.dimension_count_swa",
        "rope.freq_base_swa",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
    ),
)
