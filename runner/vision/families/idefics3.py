"""Idefics3 and SmolVLM (Marafioti et al. 2025, arXiv 2504.05299): tiles, and pixel shuffle."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tamis.graph.linear import linear, stored
from tamis.vision.family import Family, Piece, Plan
from tamis.vision.layouts import blocks, positions_of
from tamis.vision.params import VisionParams
from tamis.vision.resizing import LANCZOS, resized
from tamis.vision.tower import Vision

AROUND = "<fake_token_around_image>"


def params(p: VisionParams) -> VisionParams:
    """The parameters, with the patches a side that become one row."""
    return replace(p, merge=p.number("projector.scale_factor", 1, 2, 64))


def cut(pixels: np.ndarray, p: VisionParams) -> list[Piece]:
    """Tiles of the encoder's size in rows, then the whole picture at that size."""
    size, longest = p.image_size, p.number("preproc_image_size", 0, 0, 1 << 14)
    height, width = pixels.shape[:2]
    ratio = width / height
    longest = longest or size
    if width >= height:
        w, h = longest, int(longest / ratio)
        h += h % 2
    else:
        w, h = int(longest * ratio), longest
        w += w % 2
    w, h = max(w, 1), max(h, 1)
    columns, rows = math.ceil(w / size), math.ceil(h / size)
    whole = resized(resized(pixels, w, h, LANCZOS), columns * size, rows * size, LANCZOS)
    pieces: list[Piece] = []
    for y in range(rows):
        for x in range(columns):
            pieces.append(f"{AROUND}<row_{y + 1}_col_{x + 1}>")
            pieces.append(whole[y * size : (y + 1) * size, x * size : (x + 1) * size])
        pieces += ["\n"] if y < rows - 1 else []
    overview = resized(whole, size, size, LANCZOS)
    return [*pieces, "\n\n" + AROUND + "<global-img>", overview, AROUND]


def plan(p: VisionParams, weights: Any, nx: int, ny: int) -> Plan:
    """Patches that become one row are neighbours."""
    order = blocks(nx, ny, p.merge)
    return Plan(order, positions_of(weights, order))


def project(v: Vision) -> np.ndarray:
    """Record the projection of the joined rows of a square."""
    merged, x = v.grouped(v.g.x)
    out = linear(merged, x, v.mm["mm.model.fc"])
    return stored(merged, out, v.g.ws.rows("projected", v.params.n_out))


def tensors(p: VisionParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the projector's tensors."""
    return {"mm.model.fc": (p.n_out, p.n_embd * p.merge**2)}


FAMILY = Family(cut=cut, plan=plan, project=project, tensors=tensors, params=params)
