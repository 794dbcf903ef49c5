"""Mamba (Gu and Dao 2023, arXiv 2312.00752) and Mamba-2 (Dao and Gu 2024, arXiv 2405.21060)."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tamis.graph.context import Graph, State
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.recurrent import (
    Part,
    Scan,
    convolved,
    gated,
    gated_norm,
    linear_scan,
    normed_part,
    recurrence,
    short_conv,
    steps,
    whole,
)
from tamis.jit_kernels.contract import ops
from tamis.model.hparams import HParams


def mamba_tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a Mamba layer's tensors."""
    s = hp.ssm
    return {
        "ssm_in": (2 * s.n_inner, hp.n_embd),
        "ssm_conv1d": (s.n_inner, s.n_tap),
        "ssm_x": (s.n_rank + 2 * s.n_state, s.n_inner),
        "ssm_dt": (s.n_inner, s.n_rank),
        "ssm_a": (s.n_inner, s.n_state),
        "ssm_d": (s.n_inner,),
        "ssm_out": (hp.n_embd, s.n_inner),
        "ssm_dt_norm": (s.n_rank,),
        "ssm_b_norm": (s.n_state,),
        "ssm_c_norm": (s.n_state,),
    }


def mamba(g: Graph, il: int, h: Source) -> Product:
    """Mamba of the rows h."""
    w, s = g.weights(il), g.hp.ssm
    (xz,) = linears(g, h, w.ssm_in)
    conv = convolved(g, il, Part(xz, 0, s.n_inner), w.ssm_conv1d)
    (mixed,) = linears(g, conv, w.ssm_x)
    first = 0
    for weights, n in (
        (w.ssm_dt_norm, s.n_rank),
        (w.ssm_b_norm, s.n_state),
        (w.ssm_c_norm, s.n_state),
    ):
        part, first = Part(mixed, first, n), first + n
        if weights:
            normed_part(g, part, weights, part)
    rank = gated(g, "rank", Part(mixed, 0, s.n_rank), "none")
    (raw,) = linears(g, rank, replace(w.ssm_dt, added=None))  # `steps` adds it
    dt = steps(g, whole(raw), w.ssm_dt, None).dt
    out, rates = g.ws.rows("scan", s.n_inner), np.ascontiguousarray(w.ssm_a.vector().T)

    def record(state: State) -> None:
        flat = mixed.reshape(-1)
        g.rec.program.add(
            ops.SELECTIVE_SCAN,
            (s.n_state,),
            step=g.rec.step,
            x=conv,
            dt=dt,
            b=flat[s.n_rank :],
            c=flat[s.n_rank + s.n_state :],
            a=rates,
            d=w.ssm_d.vector(),
            state=state("scan", s.n_state, s.n_inner),
            y=out,
            n=s.n_inner,
            bc_stride=mixed.shape[1],
        )

    recurrence(g, il, [conv, dt, mixed], out, record)
    z = Part(xz, s.n_inner, s.n_inner)
    return linear(g, gated(g, "gated", z, "silu", whole(out)), w.ssm_out)


def mamba2_tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a Mamba-2 layer's tensors."""
    s = hp.ssm
    n_conv = s.n_inner + 2 * s.n_group * s.n_state
    return {
        "ssm_in": (s.n_inner + n_conv + s.n_rank, hp.n_embd),
        "ssm_conv1d": (n_conv, s.n_tap),
        "ssm_dt": (s.n_rank,),
        "ssm_a": (s.n_rank, 1),
        "ssm_d": (s.n_rank, 1),
        "ssm_norm": (s.n_group, s.n_inner // s.n_group),
        "ssm_out": (hp.n_embd, s.n_inner),
    }


def mamba2(g: Graph, il: int, h: Source) -> Product:
    """Mamba-2 of the rows h: a linear scan whose keys, queries and values are B, C and x."""
    w, s = g.weights(il), g.hp.ssm
    n_head, n_bc = s.n_rank, s.n_group * s.n_state
    head_v, n_conv = s.n_inner // n_head, s.n_inner + 2 * n_bc
    (zxbcdt,) = linears(g, h, w.ssm_in)
    dt, decay = steps(g, Part(zxbcdt, s.n_inner + n_conv, n_head), w.ssm_dt, w.ssm_a.vector())
    assert decay is not None

    def record(state: State) -> None:
        x = short_conv(g, state, Part(zxbcdt, s.n_inner, n_conv), w.ssm_conv1d)
        scan = Scan(
            "add",
            q=Part(x, s.n_inner + n_bc, s.n_state, s.n_group, s.n_state),
            k=Part(x, s.n_inner, s.n_state, s.n_group, s.n_state),
            v=Part(x, 0, head_v, n_head, head_v),
            decay=decay,
            beta=dt,
            skip=w.ssm_d.vector(),
        )
        linear_scan(g, state, scan, out)

    out = g.ws.rows("scan", s.n_inner)
    recurrence(g, il, [zxbcdt, dt, decay], out, record)
    z = Part(zxbcdt, 0, s.n_inner)
    if w.ssm_norm:
        return linear(g, gated_norm(g, out, z, w.ssm_norm, order="gate"), w.ssm_out)
    return linear(g, gated(g, "gated", z, "silu", whole(out)), w.ssm_out)
