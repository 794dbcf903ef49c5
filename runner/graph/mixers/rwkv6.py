"""RWKV-6's time mixing (Peng et al. 2024, arXiv 2404.05892): linear attention with decay."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tamis.graph.context import Graph, State
from tamis.graph.experts import products
from tamis.graph.linear import Product, linear, linears
from tamis.graph.mixers.latent import every_head
from tamis.graph.mixers.rwkv import NORM_EPS, shifted
from tamis.graph.norm import mapped, record_layer_norm, record_row_added
from tamis.graph.recurrent import Part, Scan, copied, gated, linear_scan, recurrence, whole
from tamis.model.hparams import MAX_EMBD, HParams
from tamis.model.keys import ArchKeys, key

MIXED = "wkvrg"  # the products whose rows are mixed: decays, keys, values, receptances, gates


@dataclass(frozen=True, slots=True)
class RankKeys(ArchKeys):
    """Ranks of RWKV-6's low-rank products."""

    mix: int = key("time_mix_extra_dim", 1, MAX_EMBD)
    decay: int = key("time_decay_extra_dim", 1, MAX_EMBD)


def rwkv6_tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of the tensors of time mixing."""
    n, ranks = hp.n_embd, hp.keys(RankKeys)
    mix, decay = ranks.mix, ranks.decay
    any_heads = "|".join(str(m) for m in range(hp.ssm.n_key, n + 1, hp.ssm.n_key))
    return {
        **{f"time_mix_{name}": (n, n) for name in ("receptance", "gate", "output")},
        **{f"time_mix_{name}": (any_heads, n) for name in ("key", "value")},
        **{f"time_mix_lerp_{name}": (1, 1, n) for name in ("x", *MIXED)},
        "time_mix_lerp_fused": (len(MIXED), 1, 1, n),
        "time_mix_w1": (len(MIXED) * mix, n),
        "time_mix_w2": (len(MIXED), n, mix),
        "time_mix_decay": (n,),
        "time_mix_decay_w1": (decay, n),
        "time_mix_decay_w2": (n, decay),
        "time_mix_first": (n // hp.ssm.n_key, hp.ssm.n_key),
        "time_mix_ln": (n,),
    }


def time_mix(g: Graph, il: int, h: np.ndarray) -> Product:
    """Time mixing of the rows h, f32 [n_tok, n_embd]."""
    w, n, head = g.weights(il), g.hp.n_embd, g.hp.ssm.n_key
    xw, xk, xv, xr, xg = _mixed(g, il, h)
    ((r,), (k,), (v,), (gate,)) = (
        linears(g, x, own)
        for x, own in (
            (xr, w.time_mix_receptance),
            (xk, w.time_mix_key),
            (xv, w.time_mix_value),
            (xg, w.time_mix_gate),
        )
    )
    (low,) = linears(g, xw, w.time_mix_decay_w1)
    last = replace(w.time_mix_decay_w2, added=w.time_mix_decay.vector())
    (raw,) = linears(g, mapped(g, low, low, "tanh"), last)
    decay = mapped(g, mapped(g, raw, raw, "exp"), raw, "exp", inner=-1.0)
    k, v = (_every_head(g, name, x, n, head) for name, x in (("wkv_k", k), ("wkv_v", v)))
    y = g.ws.rows("wkv", n)
    if w.time_mix_first:
        _with_first(g, il, (r, k, v, decay), y)
        record_layer_norm(g, y, y, w.time_mix_ln.vector().reshape(-1, head), eps=NORM_EPS)
        if (bias := w.time_mix_ln.bias()) is not None:
            record_row_added(g, y, bias)
    else:
        kept = gated(g, "wkv_kept", whole(decay), "none", whole(k))
        # k *= 1 - decay: channels of faster decay take in more
        mapped(g, kept, k, outer=-1.0, add=True)

        def record(state: State) -> None:
            linear_scan(g, state, _scan(r, k, v, decay, head, head**-0.5), y)

        recurrence(g, il, (r, k, v, decay), y, record)
    activation = "silu" if w.time_mix_first else "sigmoid"
    return linear(g, gated(g, "wkv_gated", whole(gate), activation, whole(y)), w.time_mix_output)


def _scan(
    r: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, head: int, scale: float = 1.0
) -> Scan:
    n_head = r.shape[1] // head
    q, keys, values = (Part(x, 0, head, n_head, head) for x in (r, k, v))
    return Scan("add", q, keys, values, decay, scale=scale)


def _with_first(g: Graph, il: int, rows: tuple[np.ndarray, ...], y: np.ndarray) -> None:
    """Record y: the output of the state before a row, plus the row's weighted key and value.

    The state before a row is that after the previous row: the scan reads the queries of a row
    before.
    """
    r, k, v, decay = rows
    n, head = r.shape[1], g.hp.ssm.n_key
    k_before, v_before, decay_before = (
        shifted(g, il, x, [np.ones(n, np.float32)], f"wkv_before_{name}")[0]
        for name, x in (("k", k), ("v", v), ("w", decay))
    )
    first = g.weights(il).time_mix_first.vector().reshape(-1)
    own_k = gated(g, "wkv_first", Part(first, 0, n), "none", whole(k))
    own, nothing_kept = g.ws.rows("wkv_own", n), np.zeros((1, n), np.float32)

    def record(state: State) -> None:
        linear_scan(g, state, _scan(r, k_before, v_before, decay_before, head), y)
        linear_scan(g, state, _scan(r, own_k, v, nothing_kept, head), own, name="scan_own")

    g.rec.program.transfer(g.rec.step, r, k_before, v_before, decay_before, own_k, v)
    g.hooks.recur(g, il, record)
    g.rec.program.transfer(g.rec.step, y, own)
    mapped(g, own, y, add=True)


def _mixed(g: Graph, il: int, h: np.ndarray) -> list[np.ndarray]:
    """Rows of h interpolated towards the row before, by rates that are made from both."""
    w, n = g.weights(il), g.hp.n_embd
    rates = [w.time_mix_lerp_x.vector().reshape(-1), np.ones(n, np.float32)]
    between, apart = shifted(g, il, h, rates, "time_mix_x")
    mapped(g, h, apart, outer=-1.0, add=True)
    (low,) = linears(g, between, w.time_mix_w1)
    mapped(g, low, low, "tanh")
    each = low.reshape(len(low), len(MIXED), -1)
    moved = products(g, each, w.time_mix_w2, every_head(len(low), len(MIXED)), len(MIXED))
    moved = moved.reshape(len(low), -1)
    if w.time_mix_lerp_fused:
        fixed = w.time_mix_lerp_fused.vector().reshape(-1)
    else:
        fixed = np.concatenate([w[f"time_mix_lerp_{name}"].vector().reshape(-1) for name in MIXED])
    record_row_added(g, moved, fixed)
    found = []
    for i, name in enumerate(MIXED):
        x = gated(g, f"time_mix_{name}", Part(moved, i * n, n), "none", whole(apart))
        found.append(mapped(g, h, x, add=True))
    return found


def _every_head(g: Graph, name: str, x: np.ndarray, n: int, head: int) -> np.ndarray:
    """Rows with as many heads as there are receptances; neighbours share those of x."""
    y, n_kv = g.ws.rows(name, n), x.shape[1] // head
    group = n // x.shape[1]
    for i in range(group):
        copied(g, Part(x, 0, head, n_kv, head), Part(y, i * head, head, n_kv, group * head))
    return y
