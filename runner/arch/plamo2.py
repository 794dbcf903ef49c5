"""PLaMo 2: Mamba-2 with normed time steps, B and C, or attention; norms after the parts."""

from collections.abc import Mapping
from dataclasses import replace

from tamis.graph.context import Graph, State
from tamis.graph.layer import self_attention
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, norm, norm_of
from tamis.graph.recurrent import (
    Part,
    Scan,
    convolved,
    copied,
    gated,
    linear_scan,
    normed_part,
    recurrence,
    steps,
    whole,
)
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    out = _mamba(g, il, h) if il in g.hp.recurrent else self_attention(g, il, h)
    add(g, norm_of(g, out, w.post_attention_norm))
    add(g, norm_of(g, mlp(g, norm(g, g.x, w.ffn_norm), w), w.post_ffw_norm))


def _mamba(g: Graph, il: int, h: Source) -> Product:
    """Record a linear scan of x with keys B and queries C.

    These and the time step are made from x.
    """
    w, s = g.weights(il), g.hp.ssm
    n_head, n_rank = s.n_rank, _rank(g.hp)
    head_v, width = s.n_inner // n_head, s.n_inner + 2 * s.n_state
    (zx,) = linears(g, h, w.ssm_in)  # for each head z, then x
    x = gated(g, "ssm_x_in", Part(zx, head_v, head_v, n_head, 2 * head_v), "none")
    conv = convolved(g, il, whole(x), w.ssm_conv1d)
    (bcdt,) = linears(g, conv, w.ssm_x)
    xbc, rank = g.ws.rows("xbc", width), g.ws.rows("rank", n_rank)
    copied(g, whole(conv), Part(xbc, 0, s.n_inner))
    for weights, first, n, to in (
        (w.ssm_b_norm, 0, s.n_state, Part(xbc, s.n_inner, s.n_state)),
        (w.ssm_c_norm, s.n_state, s.n_state, Part(xbc, s.n_inner + s.n_state, s.n_state)),
        (w.ssm_dt_norm, 2 * s.n_state, n_rank, whole(rank)),
    ):
        normed_part(g, Part(bcdt, first, n), weights, to)
    (raw,) = linears(g, rank, replace(w.ssm_dt, added=None))  # `steps` adds it
    dt, decay = steps(g, whole(raw), w.ssm_dt, w.ssm_a.vector())
    assert decay is not None
    out = g.ws.rows("scan", s.n_inner)

    def record(state: State) -> None:
        b, c = (
            Part(xbc, first, s.n_state, 1, s.n_state) for first in (s.n_inner, width - s.n_state)
        )
        v = Part(xbc, 0, head_v, n_head, head_v)
        scan = Scan("add", q=c, k=b, v=v, decay=decay, beta=dt, skip=w.ssm_d.vector())
        linear_scan(g, state, scan, out)

    recurrence(g, il, [xbc, dt, decay], out, record)
    z, y = Part(zx, 0, head_v, n_head, 2 * head_v), Part(out, 0, head_v, n_head, head_v)
    return linear(g, gated(g, "gated", z, "silu", y), w.ssm_out)


def _rank(hp: HParams) -> int:
    return max(64, hp.n_embd // 16)


def _tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    s = hp.ssm
    return {
        "attn_q_norm": (hp.n_head, hp.head_dim),
        "attn_k_norm": (hp.n_head_kv, hp.head_dim),
        "ssm_in": (2 * s.n_inner, hp.n_embd),
        "ssm_conv1d": (s.n_inner, s.n_tap),
        "ssm_x": (_rank(hp) + 2 * s.n_state, s.n_inner),
        "ssm_dt": (s.n_rank, _rank(hp)),
        "ssm_a": (s.n_rank,),
        "ssm_d": (s.n_rank,),
        "ssm_out": (hp.n_embd, s.n_inner),
        "ssm_dt_norm": (_rank(hp),),
        "ssm_b_norm": (s.n_state,),
        "ssm_c_norm": (s.n_state,),
    }


ARCH = Arch(
    neox=True, layer=layer, tensors=_tensors, rope_factors=False, refused=("ssm.group_count",)
)
