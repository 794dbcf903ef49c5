"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), in the form of Qwen3-Next and Qwen3.5."""

from collections.abc import Callable, Mapping

from tamis.graph.attention import append, attention, rope
from tamis.graph.context import Graph, Index, State
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.recurrent import (
    Part,
    Scan,
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

FULL_ATTENTION_EVERY = 4


def delta_net_tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, in addition to those of attention layers with an output gate."""
    s = hp.ssm
    n_key, n_value = s.n_group * s.n_state, s.n_inner
    return {
        "attn_q": (2 * hp.n_embd_q, hp.n_embd),
        "attn_qkv": (2 * n_key + n_value, hp.n_embd),
        "attn_gate": (n_value, hp.n_embd),
        "ssm_ba": (2 * s.n_rank, hp.n_embd),  # or both apart
        "ssm_alpha": (s.n_rank, hp.n_embd),
        "ssm_beta": (s.n_rank, hp.n_embd),
        "ssm_conv1d": (2 * n_key + n_value, s.n_tap),
        "ssm_dt": (s.n_rank,),
        "ssm_a": (s.n_rank,),
        "ssm_norm": (n_value // s.n_rank,),
        "ssm_out": (hp.n_embd, n_value),
    }


def delta_net_layers(hp: HParams) -> tuple[int, ...]:
    """The layers of Gated DeltaNet if the file does not list them."""
    every = hp.full_every or FULL_ATTENTION_EVERY
    return tuple(il for il in range(hp.n_layer) if (il + 1) % every)


def delta_net(g: Graph, il: int, h: Source, *, tiled: bool, activation: str = "silu") -> Product:
    """Gated DeltaNet of the rows h: heads of values share heads of queries and keys.

    activation: of the gate of its output.
    """
    w, s = g.weights(il), g.hp.ssm
    n_head, n_head_k, head_k = s.n_rank, s.n_group, s.n_state
    head_v, n_key = s.n_inner // n_head, n_head_k * head_k
    if w.ssm_ba:
        qkv, z, both = linears(g, h, w.attn_qkv, w.attn_gate, w.ssm_ba)
        n = n_head // n_head_k  # for each key head its betas, then its alphas
        beta = Part(both, 0, n, n_head_k, 2 * n)
        alpha = Part(both, n, n, n_head_k, 2 * n)
    else:
        qkv, z, betas, alphas = linears(g, h, w.attn_qkv, w.attn_gate, w.ssm_beta, w.ssm_alpha)
        beta, alpha = whole(betas), whole(alphas)
    rate = gated(g, "beta", beta, "sigmoid")
    decay = steps(g, alpha, w.ssm_dt, w.ssm_a.vector()).decay
    assert decay is not None

    def record(state: State) -> None:
        x = short_conv(g, state, whole(qkv), w.ssm_conv1d)
        l2_normed(g, Part(x, 0, head_k, 2 * n_head_k))
        scan = Scan(
            "delta",
            q=Part(x, 0, head_k, n_head_k, head_k),
            k=Part(x, n_key, head_k, n_head_k, head_k),
            v=Part(x, 2 * n_key, head_v, n_head, head_v),
            decay=decay,
            beta=rate,
            tiled=tiled,
            scale=head_k**-0.5,
        )
        linear_scan(g, state, scan, out)

    out = g.ws.rows("scan", s.n_inner)
    recurrence(g, il, [qkv, rate, decay], out, record)
    return linear(g, gated_norm(g, out, whole(z), w.ssm_norm, activation=activation), w.ssm_out)


def gated_attention(
    g: Graph, il: int, h: Source, index: Callable[[], Index | None] = lambda: None
) -> Product:
    """Attention whose output is multiplied by the sigmoid of a gate stored beside each query.

    index(): records the selection of keys, between the products and attention.
    """
    w, own = g.weights(il), g.hp.of(il)
    n_head, head_dim = own.n_head, own.head_dim
    both, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    q = gated(g, "q", Part(both, 0, head_dim, n_head, 2 * head_dim), "none")
    chooser = index()
    queries, keys = rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm)
    out = attention(g, il, append(g, il, queries, keys, v, chooser))
    gate = Part(both, head_dim, head_dim, n_head, 2 * head_dim)
    heads = Part(out, 0, head_dim, n_head, head_dim)
    return linear(g, gated(g, "q", gate, "sigmoid", heads), w.attn_output)
