"""Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923): Qwen2-VL's encoder with attention in windows."""

from dataclasses import replace
from typing import Any

import numpy as np

from tamis.vision.families import qwen2vl_merger
from tamis.vision.family import Plan
from tamis.vision.layouts import blocks, rotated_2d
from tamis.vision.params import VisionParams

WINDOW = 112  # pixels a side


def window(p: VisionParams) -> int:
    """Merged squares on a window's side."""
    return max(1, p.number("window_size", 0, 0, 1 << 12) or WINDOW) // p.patch_size // p.merge


def most_window(p: VisionParams) -> int:
    """Rows of a whole window."""
    return max(1, window(p) * p.merge) ** 2


def windowed(p: VisionParams, il: int) -> bool:
    """Whether a layer attends in windows: all but the last of each period."""
    period = p.number("n_wa_pattern", 0, 0, 1 << 10)
    return period > 0 and (il + 1) % period != 0


def plan(p: VisionParams, weights: Any, nx: int, ny: int) -> Plan:
    """Rows of a window are neighbours, and within it those of a square that is merged."""
    side, width, height = max(1, window(p)), nx // p.merge, ny // p.merge
    squares = blocks(nx, ny, p.merge).reshape(height, width, p.merge**2)
    at = np.arange(height * width).reshape(height, width)
    corners = [(y, x) for y in range(0, height, side) for x in range(0, width, side)]
    parts = [at[y : y + side, x : x + side].reshape(-1) for y, x in corners]
    units = np.concatenate(parts)
    order = squares.reshape(height * width, -1)[units].reshape(-1)
    result = np.empty_like(units)
    result[units] = np.arange(len(units))
    angles = rotated_2d(order // nx, order % nx, qwen2vl_merger.n_half(p))
    runs = [len(part) * p.merge**2 for part in parts]
    return Plan(order, None, angles, runs, result, (width, height))


FAMILY = replace(
    qwen2vl_merger.FAMILY,
    plan=plan,
    norm=lambda p: "rms",
    windowed=windowed,
    most_window=most_window,
)
