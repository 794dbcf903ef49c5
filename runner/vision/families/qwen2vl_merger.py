"""Qwen2-VL (Wang et al. 2024, arXiv 2409.12191): any size, 2D rotary positions, 2 x 2 merger."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tamis.vision.family import Family, Piece, Plan
from tamis.vision.layouts import blocks, rotated_2d
from tamis.vision.params import VisionParams
from tamis.vision.resizing import BICUBIC, fitted, smart_size
from tamis.vision.tower import Vision

LEAST, MOST = 8, 4096  # rows of a picture after the merger


def params(p: VisionParams) -> VisionParams:
    """The parameters, with the sizes of pictures."""
    merge = p.number("spatial_merge_size", 2, 2, 2)
    area = (p.patch_size * merge) ** 2
    return replace(p, merge=merge, min_pixels=LEAST * area, max_pixels=MOST * area)


def cut(pixels: np.ndarray, p: VisionParams) -> list[Piece]:
    """One tile, of nearly the picture's own size."""
    height, width = pixels.shape[:2]
    align = p.patch_size * p.merge
    size = smart_size(width, height, align=align, least=p.min_pixels, most=p.max_pixels)
    return [fitted(pixels, *size, BICUBIC)]


def plan(p: VisionParams, weights: Any, nx: int, ny: int) -> Plan:
    """Patches of a square that is merged are neighbours."""
    order = blocks(nx, ny, p.merge)
    angles = rotated_2d(order // nx, order % nx, n_half(p))
    return Plan(order, None, angles, grid=(nx // p.merge, ny // p.merge))


def n_half(p: VisionParams) -> int:
    """All pairs of a head are rotated."""
    return p.head_dim // 2


def project(v: Vision) -> np.ndarray:
    """Record the merger: a perceptron over the joined rows of a square."""
    merged, x = v.grouped(v.g.x)
    return v.perceptron(merged, x, "mm.0", "mm.2", "gelu")


def tensors(p: VisionParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the merger's tensors."""
    wide = p.n_embd * p.merge**2
    return {"mm.0": (wide, wide), "mm.2": (p.n_out, wide)}


FAMILY = Family(
    cut=cut,
    plan=plan,
    project=project,
    tensors=tensors,
    params=params,
    n_half=n_half,
    begin="<|vision_start|>",
    end="<|vision_end|>",
    in_grid=True,
)
