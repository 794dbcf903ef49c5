"""Sizes and resampling of pictures, to the pixel as llama.cpp, which resamples as Pillow does."""

import math
from typing import Any

import numpy as np

from tamis.vision.decoding import PictureError

MOST_RATIO = 200  # of the longer side to the shorter one
BILINEAR, BICUBIC, LANCZOS = "bilinear", "bicubic", "lanczos"


def resized(pixels: np.ndarray, width: int, height: int, method: str) -> np.ndarray:
    """Pixels uint8 [height, width, 3], resampled to this size."""
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    resample: Any = getattr(Image.Resampling, method.upper())
    return np.asarray(Image.fromarray(pixels).resize((width, height), resample))


def fitted(
    pixels: np.ndarray,
    width: int,
    height: int,
    method: str,
    color: tuple[int, int, int] = (0, 0, 0),
) -> np.ndarray:
    """Pixels resampled without distortion to fit this size, centred on a colour."""
    if pixels.shape[:2] == (height, width):
        return pixels
    h, w = pixels.shape[:2]
    f32 = np.float32
    scale = min(f32(width) / f32(w), f32(height) / f32(h))
    new_w = min(math.ceil(f32(w) * scale), width)
    new_h = min(math.ceil(f32(h) * scale), height)
    inner = resized(pixels, new_w, new_h, method)
    full = np.empty((height, width, 3), np.uint8)
    full[:] = color
    top, left = (height - new_h) // 2, (width - new_w) // 2
    full[top : top + new_h, left : left + new_w] = inner
    return full


def smart_size(
    width: int, height: int, *, align: int, least: int = 0, most: int = 0, longest: int = 0
) -> tuple[int, int]:
    """The size nearest to a picture's with sides that are multiples of `align`.

    least, most: of its pixels, 0: no limit; longest: the longer side that it is scaled to. As in
    Qwen2-VL's processor. Raises PictureError for a picture that is too long.
    """
    if max(width, height) > MOST_RATIO * min(width, height):
        raise PictureError(
            f"the picture is {width} x {height}, expected sides of a ratio up to {MOST_RATIO}: "
            "crop it"
        )
    f32 = np.float32

    def rounded(x: Any) -> int:
        return math.floor(f32(x) / f32(align) + 0.5) * align

    def up(x: Any) -> int:
        return math.ceil(f32(x) / f32(align)) * align

    def down(x: Any) -> int:
        return math.floor(f32(x) / f32(align)) * align

    if longest:
        scale = min(f32(longest) / f32(width), f32(longest) / f32(height))
        w, h = up(f32(width) * scale), up(f32(height) * scale)
    else:
        w, h = max(align, rounded(width)), max(align, rounded(height))
    if most and w * h > most:
        beta = np.sqrt(f32(height) * f32(width) / f32(most))
        return max(align, down(f32(width) / beta)), max(align, down(f32(height) / beta))
    if least and w * h < least:
        beta = np.sqrt(f32(least) / (f32(height) * f32(width)))
        return up(f32(width) * beta), up(f32(height) * beta)
    return w, h


def normalized(pixels: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Pixels uint8 [height, width, 3] as float32, each channel less its mean in units of std."""
    x = pixels.astype(np.float32) / np.float32(255)
    return (x - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)


def best_candidate(width: int, height: int, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """The size that keeps most of a picture's pixels without distortion, and wastes fewest."""
    best, found = (-1, 0), sizes[0]
    f32 = np.float32
    for w, h in sizes:
        scale = min(f32(w) / f32(width), f32(h) / f32(height))
        kept = min(int(f32(width) * scale) * int(f32(height) * scale), width * height)
        if (kept, kept - w * h) > best:
            best, found = (kept, kept - w * h), (w, h)
    return found
