"""InternVL (Chen et al. 2024, arXiv 2412.05271): tiles of one size, and pixel shuffle."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tamis.graph.norm import record_layer_norm
from tamis.vision.family import Family, Piece, Plan
from tamis.vision.layouts import blocks, positions_of
from tamis.vision.params import VisionParams
from tamis.vision.resizing import BICUBIC, best_candidate, fitted, resized
from tamis.vision.tower import Vision

EPS = 1e-5  # of the projector's norm
LARGE = (3200, 45)  # width and layers of the encoder with RMS norms


def params(p: VisionParams) -> VisionParams:
    """The parameters, with the patches a side that become one row."""
    return replace(p, merge=p.number("projector.scale_factor", 1, 2, 64))


def cut(pixels: np.ndarray, p: VisionParams) -> list[Piece]:
    """Tiles of the encoder's size, then the whole picture at that size."""
    size, (height, width) = p.image_size, pixels.shape[:2]
    overview = resized(pixels, size, size, BICUBIC)
    if width <= size and height <= size:
        return [overview]
    least, most = p.number("preproc_min_tiles", 1, 0, 64), p.number("preproc_max_tiles", 12, 1, 64)
    grids = [
        (x * size, y * size)
        for x in range(least, most + 1)
        for y in range(least, most + 1)
        if least <= x * y <= most and x * y > 0
    ]
    w, h = best_candidate(width, height, grids)
    whole = fitted(pixels, w, h, BICUBIC)
    tiles = [
        whole[y : y + size, x : x + size] for y in range(0, h, size) for x in range(0, w, size)
    ]
    return [*tiles, overview]


def plan(p: VisionParams, weights: Any, nx: int, ny: int) -> Plan:
    """Patches that become one row are neighbours; the class is last, in no group."""
    order = blocks(nx, ny, p.merge)
    patches = positions_of(weights, order)
    last = weights.class_embd + weights.positions[nx * ny]
    filled = np.concatenate([patches, last[None]])
    return Plan(np.append(order, -1), filled)


def project(v: Vision) -> np.ndarray:
    """Record the norm of the joined rows of a square, and a perceptron."""
    merged, x = v.grouped(v.g.x)
    w = v.mm["mm.model.mlp.0"]
    y = v.g.ws.rows("mm.norm", v.n_group * v.params.n_embd)[: len(x)]
    record_layer_norm(merged, x, y, w.vector(), w.bias(), eps=EPS)
    return v.perceptron(merged, y, "mm.model.mlp.1", "mm.model.mlp.3", "gelu")


def tensors(p: VisionParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the projector's tensors."""
    wide = p.n_embd * p.merge**2
    return {
        "mm.model.mlp.0": (wide,),
        "mm.model.mlp.1": (p.n_out, wide),
        "mm.model.mlp.3": (p.n_out, p.n_out),
    }


FAMILY = Family(
    cut=cut,
    plan=plan,
    project=project,
    tensors=tensors,
    params=params,
    norm=lambda p: "rms" if (p.n_embd, p.n_layer) == LARGE else "layer",
    begin="<img>",
    end="</img>",
)
