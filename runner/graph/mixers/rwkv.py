"""RWKV-7's time mixing (Peng et al. 2025, arXiv 2503.14456): a delta rule with rates per vector."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tamis.graph.context import Graph, State
from tamis.graph.linear import Product, linear, linears
from tamis.graph.norm import mapped, record_layer_norm, record_row_added
from tamis.graph.recurrent import (
    Part,
    bounded_decay,
    gated,
    l2_normed,
    short_conv,
    whole,
)
from tamis.jit_kernels.contract import ops
from tamis.model.hparams import MAX_EMBD, HParams, UnsupportedKey
from tamis.model.keys import ArchKeys, key
from tamis.model.weights import Tensor

LEAST_DECAY = -0.606531  # decays are above exp(exp of this), which is exp(-exp(-0.5))
NORM_EPS = 64e-5
LANES = 16  # the widest vector of any CPU level: threads share the state by vectors


@dataclass(frozen=True, slots=True)
class RankKeys(ArchKeys):
    """Ranks of RWKV-7's low-rank products; 0: the file does not name it."""

    decay: int = key("attention.decay_lora_rank", 0, MAX_EMBD, 0)
    iclr: int = key("attention.iclr_lora_rank", 0, MAX_EMBD, 0)
    value: int = key("attention.value_residual_mix_lora_rank", 0, MAX_EMBD, 0)
    gate: int = key("attention.gate_lora_rank", 0, MAX_EMBD, 0)


def whole_vectors(hp: HParams) -> dict[str, Any]:
    """No fields. Raises UnsupportedKey for a head of the state that is not whole vectors."""
    head = hp.ssm.n_key
    if not head or head % LANES or hp.n_embd % head:
        what = f"is {head}, expected a multiple of {LANES} and a divisor of {hp.n_embd}, the width"
        raise UnsupportedKey("wkv.head_size", what)
    return {}


def rwkv_tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of the tensors of time mixing."""
    n, ranks = hp.n_embd, hp.keys(RankKeys)
    known = {ranks.decay, ranks.iclr, ranks.value, ranks.gate} - {0}
    any_rank = "|".join(map(str, sorted(known)))
    square = ("key", "value", "receptance", "output")
    return {
        **{f"time_mix_{name}": (n, n) for name in square},
        **{f"time_mix_{name}0": (n,) for name in "wav"},
        **{f"time_mix_{name}1": (any_rank, n) for name in "wavg"},
        **{f"time_mix_{name}2": (n, any_rank) for name in "wavg"},
        **{f"time_mix_{name}": (n,) for name in ("k_k", "k_a", "r_k", "ln")},
        "time_mix_lerp_fused": ("6|5", 1, 1, n),
    }


def shifted(
    g: Graph, il: int, x: np.ndarray, rates: Sequence[np.ndarray], name: str
) -> list[np.ndarray]:
    """For each rate, x interpolated towards the row before: f32 [n_tok, n] like x.

    rates: f32 [n] each; name: of states and buffers.
    """
    n, step = x.shape[1], g.rec.step
    found: list[np.ndarray] = []

    def record(state: State) -> None:
        for i, rate in enumerate(rates):
            taps = Tensor(f"{name}{i}", np.stack([rate, 1 - rate], axis=1))
            rows = short_conv(g, state, Part(x, 0, n), taps, activation="none", name=f"{name}{i}")
            found.append(rows)

    g.rec.program.transfer(step, x)
    g.hooks.recur(g, il, record)
    found = found or [g.ws.rows(f"{name}{i}", n) for i in range(len(rates))]
    g.rec.program.transfer(step, *found)
    return found


def time_mix(g: Graph, il: int, h: np.ndarray) -> Product:
    """Time mixing of the rows h, f32 [n_tok, n_embd]; without a gate if the file has none."""
    w, n, head = g.weights(il), g.hp.n_embd, g.hp.ssm.n_key
    rates = [*w.time_mix_lerp_fused.vector().reshape(-1, n)][: 5 + bool(w.time_mix_g1)]
    xr, xw, xk, xv, xa, *xg = shifted(g, il, h, rates, "time_mix_x")
    (r,), (k,), (v,) = (
        linears(g, x, own)
        for x, own in ((xr, w.time_mix_receptance), (xk, w.time_mix_key), (xv, w.time_mix_value))
    )
    (low,) = linears(g, xw, w.time_mix_w1)
    (raw,) = linears(g, mapped(g, low, low, "tanh"), w.time_mix_w2)
    least = Tensor("time_mix_w0", added=w.time_mix_w0.vector())
    decay = bounded_decay(g, raw, least, np.ones(1, np.float32), LEAST_DECAY)
    _mix_first_values(g, il, v, xv)
    a = _rate(g, il, xa, "a")
    removal = gated(g, "removal", Part(w.time_mix_k_k.vector(), 0, n), "none", whole(k))
    l2_normed(g, Part(removal, 0, head, n // head, head), eps=1e-24)
    _rate_keys(g, k, a, w.time_mix_k_a.vector())
    erased = gated(g, "erased", whole(a), "none", whole(removal))

    y, bonus = g.ws.rows("wkv", n), g.ws.rows("wkv_bonus", n)

    def record(state: State) -> None:
        g.rec.program.add(
            ops.WKV,
            (head,),
            step=g.rec.step,
            r=r, w=decay, k=k, v=v, a=removal, b=erased,
            u=w.time_mix_r_k.vector(),
            state=state("wkv", n // head, head, head),
            y=y,
            bonus=bonus,
            n_head=n // head,
        )  # fmt: skip

    g.rec.program.transfer(g.rec.step, r, decay, k, v, removal, erased)
    g.hooks.recur(g, il, record)
    g.rec.program.transfer(g.rec.step, y, bonus)
    ln, bias = w.time_mix_ln, w.time_mix_ln.bias()
    weights = ln.vector().reshape(-1, head) if ln else None
    if weights is not None and bias is not None:  # llama.cpp ignores one without the other
        record_layer_norm(g, y, y, weights, eps=NORM_EPS)
        record_row_added(g, y, bias)
    mapped(g, bonus, y, add=True)
    if not xg:
        return linear(g, y, w.time_mix_output)
    (low,) = linears(g, xg[0], w.time_mix_g1)
    (gate,) = linears(g, mapped(g, low, low, "sigmoid"), w.time_mix_g2)
    return linear(g, gated(g, "wkv_gated", whole(gate), "none", whole(y)), w.time_mix_output)


def _rate(g: Graph, il: int, x: np.ndarray, name: str) -> np.ndarray:
    """The sigmoid of a low-rank product with a bias."""
    w = g.weights(il)
    (low,) = linears(g, x, w[f"time_mix_{name}1"])
    last = replace(w[f"time_mix_{name}2"], added=w[f"time_mix_{name}0"].vector())
    (raw,) = linears(g, low, last)
    return mapped(g, raw, raw, "sigmoid")


def _mix_first_values(g: Graph, il: int, v: np.ndarray, x: np.ndarray) -> None:
    """Record that v is interpolated towards the first layer's values, which that layer stores."""
    first = g.ws.rows("first_values", v.shape[1])
    if il == 0:
        mapped(g, v, first)
        return
    rate = _rate(g, il, x, "v")
    for other, outer in ((v, -1.0), (first, 1.0)):
        moved = gated(g, f"moved{outer}", whole(rate), "none", whole(other))
        mapped(g, moved, v, outer=outer, add=True)


def _rate_keys(g: Graph, k: np.ndarray, a: np.ndarray, k_a: np.ndarray) -> None:
    """Record k *= 1 + (a - 1) * k_a."""
    own = gated(g, "rated", Part(k_a, 0, k.shape[1]), "none", whole(k))
    kept = gated(g, "rated_kept", whole(a), "none", whole(own))
    mapped(g, own, k, outer=-1.0, add=True)
    mapped(g, kept, k, add=True)
