"""Rotary frequencies of a model: plain, linear, YaRN and with factors, in float64."""

import math
from typing import NamedTuple

import numpy as np

from tamis.model.hparams import HParams, RopeScaling


class RopeFrequencies(NamedTuple):
    """Frequencies inv_freq, float64 [n_rot / 2] in radians per token.

    Scale multiplies cos and sin.
    """

    inv_freq: np.ndarray
    scale: float
    # For sessions of more than n_ctx tokens (LongRoPE, Ding et al. 2024, arXiv 2402.13753).
    n_ctx: int = 0
    beyond: "RopeFrequencies | None" = None

    def of(self, n_ctx: int) -> "RopeFrequencies":
        """The frequencies of a session of n_ctx tokens."""
        return self if self.beyond is None or n_ctx <= self.n_ctx else self.beyond


def rope_frequencies(
    hp: HParams,
    *,
    base: float,
    scaling: RopeScaling,
    factors: np.ndarray | None = None,
    n_rot: int = 0,
    interleaved: bool = False,
) -> RopeFrequencies:
    """Frequencies for one kind of layer; n_rot: rotated elements of a head, 0: hp.n_rot.

    interleaved: pairs of the sections of time, height and width alternate. factors: float32 [n_rot
    / 2] of the file (Llama 3, LongRoPE), which divide the frequencies; None for models without
    them.
    """
    n_rot = n_rot or hp.n_rot
    half = n_rot // 2
    plain = base ** (-2.0 * np.arange(half) / n_rot)
    if sum(hp.rope_sections):
        plain = np.where(_of_text(hp.rope_sections, half, interleaved=interleaved), plain, 0.0)
    if factors is not None:
        plain = plain / factors[:half].astype(np.float64)
    if scaling.kind == "none":
        return RopeFrequencies(plain, scaling.attn_factor)
    stretched = plain / scaling.factor
    if scaling.kind in ("linear", "longrope"):
        return RopeFrequencies(stretched, scaling.attn_factor)
    keep = _yarn_ramp(n_rot, base, scaling) * scaling.ext_factor
    scale = scaling.attn_factor * (1.0 + 0.1 * math.log(scaling.factor))
    return RopeFrequencies(stretched * (1.0 - keep) + plain * keep, scale)


def section_angles(
    hp: HParams, found: RopeFrequencies, places: np.ndarray, interleaved: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions of time, height and width, f32 [n, n_half] each.

    places: int [n, 3]. Each rotary pair turns by the position of its section (M-RoPE, Wang et al.
    2024, arXiv 2409.12191); pairs of a fourth section do not turn.
    """
    n = len(found.inv_freq)
    sections = _sections(hp.rope_sections, n, interleaved=interleaved)
    at = np.concatenate([places, np.zeros((len(places), 1), places.dtype)], axis=1)
    angles = at[:, sections].astype(np.float64) * found.inv_freq
    cos, sin = np.cos(angles) * found.scale, np.sin(angles) * found.scale
    return cos.astype(np.float32), sin.astype(np.float32)


def _sections(sections: tuple[int, ...], n: int, *, interleaved: bool) -> np.ndarray:
    """The section of each of n pairs: 0 time, 1 height, 2 width, 3 none."""
    at = np.arange(n) % sum(sections)
    if interleaved:
        own = at % 3
        return np.where(at < 3 * np.array(sections)[own], own, 3)
    ends = np.cumsum(sections[:3])
    return np.searchsorted(ends, at, side="right")


def _of_text(sections: tuple[int, ...], n: int, *, interleaved: bool) -> np.ndarray:
    """Which of n pairs are rotated: text has the same position in all sections but the fourth."""
    at = np.arange(n) % sum(sections)
    if interleaved:
        return at < 3 * np.array(sections)[at % 3]
    return at < sum(sections[:3])


def _yarn_ramp(n_rot: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """YaRN Eq. 18: 1 for dimensions that rotate often in the training context, 0 for slow ones."""

    def dimension(n_turn: float) -> float:
        turns = scaling.n_ctx_orig / (n_turn * 2.0 * math.pi)
        return n_rot * math.log(turns) / (2.0 * math.log(base))

    low = max(0.0, math.floor(dimension(scaling.beta_fast)))
    high = min(n_rot - 1.0, math.ceil(dimension(scaling.beta_slow)))
    ramp = (np.arange(n_rot // 2) - low) / max(0.001, high - low)
    return 1.0 - np.clip(ramp, 0.0, 1.0)
