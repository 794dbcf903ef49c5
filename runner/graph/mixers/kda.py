"""Kimi Delta Attention (2025, arXiv 2510.26692): a delta rule with a decay per channel."""

from collections.abc import Mapping

from tamis.graph.context import Graph, State
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mixers.latent import latent_tensors
from tamis.graph.recurrent import (
    Part,
    Scan,
    bounded_decay,
    gated,
    gated_norm,
    l2_normed,
    linear_scan,
    recurrence,
    short_conv,
    steps,
    whole,
)
from tamis.model.hparams import HParams

UNREAD = ("attn_q.bias", "attn_k.bias", "attn_v.bias")  # llama.cpp does not add them


def kda_tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors, and of layers with latent attention."""
    n_head, n_embd, n, latent = hp.n_head, hp.n_embd, hp.ssm.n_key, hp.latent
    n_inner, taps = n_head * n, (n_head * n, 1, hp.ssm.n_tap)
    return {
        **latent_tensors(hp),
        "attn_q": (f"{n_inner}|{n_head * latent.n_key}", n_embd),
        "attn_k": (n_inner, n_embd),
        "attn_v": (n_inner, n_embd),
        "attn_output": (n_embd, f"{n_inner}|{n_head * latent.n_value}"),
        **{f"ssm_conv1d_{name}": taps for name in "qkv"},
        "ssm_f_a": (f"{n}|{n_inner}", n_embd),
        "ssm_f_b": (n_inner, n),
        "ssm_g": (n_inner, n_embd),
        "ssm_g_a": (f"{n}|{n_inner}", n_embd),
        "ssm_g_b": (n_inner, n),
        "ssm_beta": (n_head, n_embd),
        "ssm_a": (n_head,),
        "ssm_dt": (n_inner,),
        "ssm_norm": (n,),
    }


def kda(g: Graph, il: int, h: Source, *, negated: bool = False, eps: float = 0.0) -> Product:
    """Kimi Delta Attention of the rows h. Decays and gates are one matrix or two.

    negated: the file has negative rates of bounded decays. eps: of the lengths of queries and keys;
    0: the model's.
    """
    w, n_head, n, least = g.weights(il), g.hp.n_head, g.hp.ssm.n_key, g.hp.gate_least
    q, k, v, beta, raw, z = linears(
        g, h, w.attn_q, w.attn_k, w.attn_v, w.ssm_beta, w.ssm_f_a, w.ssm_g or w.ssm_g_a
    )
    if w.ssm_f_b:
        (raw,) = linears(g, raw, w.ssm_f_b)
    if w.ssm_g_b:
        (z,) = linears(g, z, w.ssm_g_b)
    rate = gated(g, "beta", whole(beta), "sigmoid")
    rates = w.ssm_a.vector()
    if least:
        decay = bounded_decay(g, raw, w.ssm_dt, -rates if negated else rates, least)
    else:
        found = steps(g, whole(raw), w.ssm_dt, rates).decay
        assert found is not None
        decay = found

    def record(state: State) -> None:
        taps = w.ssm_conv1d_q, w.ssm_conv1d_k, w.ssm_conv1d_v
        convolved = [
            short_conv(g, state, whole(x), each, name=f"conv_{name}")
            for name, x, each in zip("qkv", (q, k, v), taps, strict=True)
        ]
        queries, keys, values = (Part(x, 0, n, n_head, n) for x in convolved)
        l2_normed(g, queries, eps=eps)
        l2_normed(g, keys, eps=eps)
        scan = Scan("delta", queries, keys, values, decay=decay, beta=rate, scale=n**-0.5)
        linear_scan(g, state, scan, out)

    out = g.ws.rows("scan", n_head * n)
    recurrence(g, il, [q, k, v, rate, decay], out, record)
    normed = gated_norm(g, out, whole(z), w.ssm_norm, activation="sigmoid")
    return linear(g, normed, w.attn_output)
