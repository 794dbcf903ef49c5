"""Llama 4: routed experts of weighted rows and a shared one; some layers have no positions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from tamis.graph.attention import append, attention, rope
from tamis.graph.context import Graph
from tamis.graph.experts import Chosen, Mixture, chosen_experts, route, shared_expert
from tamis.graph.layer import NO_NORM
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import Branch, add, norm, record_norm
from tamis.graph.recurrent import Part, gated
from tamis.model.arch import Arch
from tamis.model.hparams import HParams
from tamis.model.weights import Tensor

CHUNK = 8192  # tokens of an attention chunk, and of one step of the temperature of queries


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    add(g, _attention(g, il, norm(g, g.x, w.attn_norm)))
    h = norm(g, g.x, w.ffn_norm)
    add(g, _experts(g, il, h) if w.ffn_gate_inp else mlp(g, h, w))


def _attention(g: Graph, il: int, h: Source) -> Product:
    """Record attention: heads are rotated, then normed.

    Without positions queries get a temperature.
    """
    w, hp = g.weights(il), g.hp
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    is_nope = g.model.is_nope(il)
    ones = NO_NORM if is_nope or hp.n_expert == 128 else _ones(hp.head_dim)
    queries, keys = rope(g, il, q, ones), rope(g, il, k, ones)
    queries = replace(queries, scaled=is_nope and hp.temperature[0] > 0)
    return linear(g, attention(g, il, append(g, il, queries, keys, v)), w.attn_output)


@cache
def _ones(n: int) -> Tensor:
    return Tensor("ones", np.ones(n, np.float32))


def _experts(g: Graph, il: int, h: Source) -> Branch:
    """Record the routed experts: their rows are multiplied by the weights, their outputs summed."""
    w, n = g.weights(il), g.hp.n_embd
    x = record_norm(g, h, g.ws.rows("ffn_norm", n))
    (logits,) = linears(g, x, w.ffn_gate_inp)
    chosen = route(g, logits, w.exp_probs_b)
    n_used = chosen.ids.shape[1]
    weights = Part(chosen.weights, 0, 1, n_used, 1)
    rows = gated(g, "expert_rows", weights, "none", Part(x, 0, n, n_used, 0))
    even = Chosen(chosen.ids, np.ones_like(chosen.weights))
    found: Sequence[Mixture | Product] = (
        chosen_experts(g, il, rows.reshape(len(x), n_used, n), even),
        shared_expert(g, il, x),
    )
    return tuple(found)


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: sessions hold one attention chunk at most, so masks need none."""
    return {
        "sliding_window": CHUNK,
        "rope_base_swa": hp.rope_base_swa or hp.rope_base,
        "most_ctx": CHUNK,
        "temperature": (CHUNK, 0.1, 1.0),
    }


ARCH = Arch(
    neox=False,
    layer=layer,
    nope_every=4,
    norm_after_rope=True,
    score_experts="sigmoid",
    normalize_experts=False,
    chunked=True,
    window_scaled=True,
    full_attention_every=4,
    keys=("rope.freq_base_swa", "attention.sliding_window_pattern"),
    # llama.cpp selects groups by logits, not by the experts' weights
    refused=("expert_group_count",),
    # with 0 llama.cpp stops: its last layer would have no scale
    nonzero=("attention.sliding_window",),
    derived=_derived,
)
