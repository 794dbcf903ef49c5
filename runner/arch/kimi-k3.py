"""Kimi K3: like kimi-linear; layers read a mix of earlier residuals, experts read a latent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tamis.graph.context import Graph
from tamis.graph.experts import Mixture, products, route
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mixers.kda import UNREAD, kda, kda_tensors
from tamis.graph.mixers.latent import gated_latent_attention, latent_attention
from tamis.graph.norm import Branch, mapped, norm, record_norm, summed, written
from tamis.graph.recurrent import Part, copied, gated, whole
from tamis.graph.streams import record_residual_mix
from tamis.model.arch import Arch
from tamis.model.hparams import MAX_EMBD, MAX_LAYER, HParams
from tamis.model.keys import ArchKeys, key
from tamis.model.weights import Tensor


@dataclass(frozen=True, slots=True)
class KimiKeys(ArchKeys):
    """The kept residuals, the latent of the experts, and the limits of their gates."""

    # layers between kept residuals; 0: none is kept
    n_res_block: int = key("attn_res.block_size", 0, MAX_LAYER, 0)
    n_expert_latent: int = key("expert_latent_length", 0, MAX_EMBD, 0)  # 0: n_embd
    limit: float = key("activation.situ_beta", 1e-6, 1e6)  # of gates
    # limit of the up projection; 0 or less: none
    limit_up: float = key("activation.situ_linear_beta", -1e6, 1e6)


def layer(g: Graph, il: int) -> None:
    """Record layer il.

    `g.x` is the mix that its parts read, and after the last layer that of the head.

    The residuals are rows of one buffer: the kept ones, then the one that parts add to.
    """
    w, top, size = g.weights(il), g.model.weights.top, g.hp.keys(KimiKeys).n_res_block
    if not size:
        _plain_layer(g, il)
        return
    n_kept = -(-il // size)  # kept before this layer, which keeps one more if it begins a block
    if il == 0:
        _set(g, 0, g.x)
    else:
        record_residual_mix(g, _residuals(g), n_kept + 1, w.attn_res_score)
    begins = il % size == 0
    n_kept += begins
    _add(g, n_kept, _attention(g, il, norm(g, g.x, w.attn_norm)), begins=begins)
    record_residual_mix(g, _residuals(g), n_kept + 1, w.ffn_res_score)
    _add(g, n_kept, _feed_forward(g, il, norm(g, g.x, w.ffn_norm)), begins=False)
    if il == g.hp.n_layer - 1:
        record_residual_mix(g, _residuals(g), n_kept + 1, top.output_res_score)


def _plain_layer(g: Graph, il: int) -> None:
    w = g.weights(il)
    for out in (_attention, _feed_forward):
        weights = w.attn_norm if out is _attention else w.ffn_norm
        mapped(g, written(g, out(g, il, norm(g, g.x, weights))), g.x, add=True)


def _attention(g: Graph, il: int, h: Source) -> Product:
    if il in g.hp.recurrent:
        return kda(g, il, h, negated=True)
    latent = gated_latent_attention if g.weights(il).attn_gate else latent_attention
    return latent(g, il, h)


def _residuals(g: Graph) -> np.ndarray:
    """The buffer of the residuals, f32 [n_tok, n, n_embd]."""
    size = g.hp.keys(KimiKeys).n_res_block
    return g.ws.rows("residuals", -(-g.hp.n_layer // size) + 1, g.hp.n_embd)


def _set(g: Graph, row: int, x: np.ndarray) -> None:
    n = g.hp.n_embd
    copied(g, whole(x), Part(_residuals(g), n * row, n))


def _add(g: Graph, row: int, branch: Branch, *, begins: bool) -> None:
    """Record that a branch is added to a row, or replaces it where the row begins."""
    found, n = written(g, branch), g.hp.n_embd
    if not begins:
        before = gated(g, "residual", Part(_residuals(g), n * row, n), "none")
        found = mapped(g, before, found, add=True)
    _set(g, row, found)


def _feed_forward(g: Graph, il: int, h: Source) -> Branch:
    """Record a dense part, or the routed experts of a latent of the rows plus the shared expert."""
    w, n = g.weights(il), g.hp.n_embd
    wide = g.hp.keys(KimiKeys).n_expert_latent or n
    if not w.ffn_gate_inp:
        gate, up = linears(g, h, w.ffn_gate, w.ffn_up)
        return linear(g, _situ(g, gate, up), w.ffn_down)
    x = record_norm(g, h, g.ws.rows("ffn_norm", n))
    (logits,) = linears(g, x, w.ffn_gate_inp)
    latent = linears(g, x, w.ffn_routed_down)[0] if w.ffn_routed_down else x
    chosen = route(g, logits, w.exp_probs_b)

    def of_experts(rows: np.ndarray, tensor: Tensor) -> np.ndarray:
        return products(g, rows, tensor, chosen.ids, g.hp.n_expert)

    hidden = _situ(g, of_experts(latent, w.ffn_gate_exps), of_experts(latent, w.ffn_up_exps))
    out: Mixture | Product = Mixture(of_experts(hidden, w.ffn_down_exps), chosen.weights)
    if w.ffn_routed_up:
        rows = summed(g, out, g.ws.rows("routed", wide))
        out = linear(
            g, norm(g, rows, w.ffn_routed_norm) if w.ffn_routed_norm else rows, w.ffn_routed_up
        )
    if not w.ffn_gate_shexp:
        return out
    gate, up = linears(g, x, w.ffn_gate_shexp, w.ffn_up_shexp)
    return out, linear(g, _situ(g, gate, up), w.ffn_down_shexp)


def _situ(g: Graph, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Record b tanh(gate / b) * sigmoid(gate) * c tanh(up / c), in place of up."""
    limit, limit_up = g.hp.keys(KimiKeys).limit, g.hp.keys(KimiKeys).limit_up
    soft = mapped(g, gate, g.ws.rows("situ", gate[0].size), "tanh", inner=1 / limit, outer=limit)
    act = gated(g, "situ", whole(gate), "sigmoid", whole(soft)).reshape(up.shape)
    if limit_up > 0:
        mapped(g, up, up, "tanh", inner=1 / limit_up, outer=limit_up)
    return gated(g, "situ", whole(act), "none", whole(up)).reshape(up.shape)


def _tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    n, n_ff = hp.n_embd, hp.n_ff_expert
    wide = hp.keys(KimiKeys).n_expert_latent or n
    return {
        **kda_tensors(hp),
        "attn_res_score": (n,),
        "ffn_res_score": (n,),
        "ffn_gate_exps": (hp.n_expert, n_ff, wide),
        "ffn_up_exps": (hp.n_expert, n_ff, wide),
        "ffn_down_exps": (hp.n_expert, wide, n_ff),
        "ffn_routed_down": (wide, n),
        "ffn_routed_up": (n, wide),
        "ffn_routed_norm": (wide,),
    }


def _derived(hp: HParams) -> dict[str, Any]:
    return {"attention_scale": hp.latent.n_key**-0.5}


ARCH = Arch(
    neox=False,
    nope_every=1,
    layer=layer,
    tensors=_tensors,
    unread=(*UNREAD, "attn_res_score.weight"),  # the first layer has no earlier residuals to mix
    derived=_derived,
    one_device=True,
    declares=KimiKeys,
    keys=(
        "attention.kv_lora_rank",
        "kda.gate_lower_bound",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
    ),
)
