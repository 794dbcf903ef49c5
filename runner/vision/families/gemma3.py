"""Gemma 3: SigLIP at one size, means of neighbouring rows, and a projection."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tamis.graph.linear import Source, linear, stored
from tamis.graph.recurrent import Part, copied, pooled
from tamis.model.weights import Tensor
from tamis.vision.family import Family, Piece, Plan
from tamis.vision.layouts import blocks, positions_of
from tamis.vision.params import VisionParams
from tamis.vision.resizing import BILINEAR, fitted
from tamis.vision.tower import Vision
from tamis.vision.weights import transposed


def params(p: VisionParams) -> VisionParams:
    """The parameters, with the patches a side that become one row."""
    return replace(p, merge=p.number("projector.scale_factor", 4, 1, 64))


def cut(pixels: np.ndarray, p: VisionParams) -> list[Piece]:
    """One tile of the encoder's size."""
    return [fitted(pixels, p.image_size, p.image_size, BILINEAR)]


def plan(p: VisionParams, weights, nx: int, ny: int) -> Plan:
    """Rows whose mean is taken lie one after the other."""
    order = blocks(nx, ny, p.merge)
    return Plan(order, positions_of(weights, order))


def project(v: Vision) -> np.ndarray:
    """Record the mean of each group of rows, its RMS norm, and the projection."""
    g, x, n_group = v.g, v.g.x, v.n_group
    n = x.shape[1]
    means = pooled(g, 0, "pooled", x, None, np.zeros((n_group, n), np.float32), n_group)
    merged, wide = v.grouped(means)
    rows = merged.ws.rows("means", n)
    copied(merged, Part(wide, wide.shape[1] - n, n), Part(rows, 0, n))
    w: Tensor = v.mm["mm.soft_emb_norm"]
    normed = Source(rows, "norm", w.vector(), v.params.eps)
    out = transposed(v.mm["mm.input_projection"])
    return stored(merged, linear(merged, normed, out), g.ws.rows("projected", v.params.n_out))


def tensors(p: VisionParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the projector's tensors."""
    return {"mm.soft_emb_norm": (p.n_embd,), "mm.input_projection": (p.n_embd, p.n_out)}


FAMILY = Family(
    cut=cut,
    plan=plan,
    project=project,
    tensors=tensors,
    params=params,
    begin="<start_of_image>",
    end="<end_of_image>",
    causal=False,
)
