"""Conversion of KV rows between types, in NumPy: for saved sessions, not for hot paths."""

import numpy as np

from tamis.jit_kernels.contract.types import KV_BLOCK, kv_row, kv_type

TINY = 1e-30  # scales up to this one count as 0


def as_type(rows: np.ndarray, type: str) -> np.ndarray:
    """The rows as another type.

    Quantised rows become float16 with an error of at most half a float16 step of their values.
    """
    if kv_type(rows) == type:
        return rows
    return as_rows(as_float32(rows), type)


def as_rows(x: np.ndarray, type: str) -> np.ndarray:
    """Numbers, float32 [.., head_dim], as rows of a type, rounded as in ROPE_APPEND."""
    return x.astype(np.float16) if type == "f16" else quantised(x, type)


def as_float32(rows: np.ndarray) -> np.ndarray:
    """The elements of rows as float32 [.., head_dim]."""
    if kv_type(rows) == "f16":
        return rows.astype(np.float32)
    q = rows["q"] if kv_type(rows) == "q8_0" else _unpacked(rows["q"])
    return q * np.repeat(rows["d"].astype(np.float32), KV_BLOCK, axis=-1)


def all_finite(rows: np.ndarray) -> bool:
    """Whether every element, or every scale, is finite."""
    bits = (rows if kv_type(rows) == "f16" else rows["d"]).view(np.uint16)
    return not (bits & np.uint16(0x7C00) == 0x7C00).any()


def quantised(x: np.ndarray, type: str) -> np.ndarray:
    """Numbers [.., head_dim] as rows of q8_0 or q4_0."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, KV_BLOCK)
    d, q = (_q8_0 if type == "q8_0" else _q4_0)(blocks)
    rows = np.zeros(x.shape[:-1], kv_row(type, x.shape[-1]))
    rows["q"], rows["d"] = q.reshape(rows["q"].shape), d[..., 0]
    return rows


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    y = blocks * _inverse(d)
    size = np.abs(y)
    whole = np.floor(size)
    return d, np.copysign(whole + (size - whole >= 0.5), y)


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.abs(blocks).argmax(axis=-1, keepdims=True)
    d = np.take_along_axis(blocks, at, axis=-1) / np.float32(-8)
    q = np.minimum(15, blocks * _inverse(d) + np.float32(8.5)).astype(np.uint8)
    low, high = np.split(q, 2, axis=-1)
    return d, low | high << 4


def _unpacked(q: np.ndarray) -> np.ndarray:
    """Nibbles of q4_0, uint8 [.., head_dim / 2], as the integers that they stand for."""
    blocks = q.reshape(*q.shape[:-1], -1, KV_BLOCK // 2)
    both = np.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(np.int8) - np.int8(8)
    return both.reshape(*q.shape[:-1], -1)


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.divide(1, d, out=np.zeros_like(d), where=np.abs(d) > TINY)
