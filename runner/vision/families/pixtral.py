"""Pixtral (Agrawal et al. 2024, arXiv 2410.07073) and Mistral 3: any size, marks between rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.graph.linear import Source, linear, stored
from tamis.graph.norm import record_norm
from tamis.model.weights import Tensor
from tamis.vision.families import qwen2vl_merger
from tamis.vision.family import Family, Plan
from tamis.vision.layouts import blocks
from tamis.vision.params import VisionParams
from tamis.vision.tower import Vision
from tamis.vision.weights import float_tensor

LEAST, MOST, BASE = 8, 1024, 1e4


def params(p: VisionParams) -> VisionParams:
    """The parameters, with the sizes of pictures."""
    merge = p.number("spatial_merge_size", 1, 1, 64)
    area = (p.patch_size * merge) ** 2
    return replace(p, merge=merge, min_pixels=LEAST * area, max_pixels=MOST * area)


def plan(p: VisionParams, weights: Any, nx: int, ny: int) -> Plan:
    """Patches that are merged are neighbours; a head's halves turn by the row and the column."""
    order = blocks(nx, ny, p.merge)
    n = p.head_dim // 4
    steps = BASE ** (-4.0 * np.arange(n) / p.head_dim)
    own = np.concatenate(
        [(order // nx)[:, None] * steps, (order % nx)[:, None] * steps * BASE ** (-2 / p.head_dim)],
        axis=1,
    )
    angles = np.cos(own).astype(np.float32), np.sin(own).astype(np.float32)
    return Plan(order, None, angles, grid=(nx // p.merge, ny // p.merge))


def project(v: Vision) -> np.ndarray:
    """Record the merger, if the file has one, and a perceptron."""
    merged, x = v.grouped(v.g.x)
    w = v.mm["mm.patch_merger"]
    if w:
        n = v.params.n_embd
        normed = v.g.ws.rows("mm.input_norm", n)
        eps = v.params.eps
        record_norm(v.g, Source(v.g.x, "norm", v.mm["mm.input_norm"].vector(), eps), normed)
        merged, x = v.grouped(normed)
        own = by_patches(w, n)
        x = stored(merged, linear(merged, x, own), v.g.ws.rows("mm.patch_merger", n))
    return v.perceptron(merged, x, "mm.1", "mm.2", "gelu")


def by_patches(w: Tensor, n: int) -> Tensor:
    """The merger's matrix for rows of whole patches; the file's has the patches innermost."""
    q = w.matrix()
    values = dequantize(q.data, GGMLType[q.type], (q.n_in, q.n_out)).reshape(q.n_out, n, -1)
    return float_tensor(w.name, values.transpose(0, 2, 1).reshape(q.n_out, q.n_in))


def finish(rows: np.ndarray, found: Plan, encoder: Any) -> np.ndarray:
    """Rows with the mark of a break after each row of the grid but the last."""
    columns, n_row = found.grid
    mark = encoder.weights.mm["v.token_embd.img_break"].vector()
    lines = rows.reshape(n_row, columns, -1)
    marks = np.broadcast_to(mark, (n_row, 1, len(mark)))
    joined = np.concatenate([lines, marks], axis=1).reshape(-1, len(mark))
    return joined[:-1]


def n_row(p: VisionParams, nx: int, ny: int) -> int:
    """The rows of a tile with the marks between its lines."""
    return (ny // p.merge) * (nx // p.merge + 1) - 1


def tensors(p: VisionParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the projector's tensors."""
    return {
        "mm.1": (p.n_out, p.n_embd),
        "mm.2": (p.n_out, p.n_out),
        "mm.input_norm": (p.n_embd,),
        "mm.patch_merger": (p.n_embd, p.n_embd * p.merge**2),
        "v.token_embd.img_break": (p.n_out,),
    }


FAMILY = Family(
    cut=qwen2vl_merger.cut,
    plan=plan,
    project=project,
    tensors=tensors,
    params=params,
    norm=lambda p: "rms",
    n_half=lambda p: p.head_dim // 2,
    neox=False,
    end="[IMG_END]",
    finish=finish,
    n_row=n_row,
)
