"""Keys and values from one type to another, in NumPy: for saved sessions, not for hot paths."""

import numpy as np

from tamis.jit_kernels.types import KV_BLOCK, kv_row, kv_type


def as_type(rows: np.ndarray, type: str) -> np.ndarray:
    """The rows as another type; those of q8_0 are at most half a float16 step off in float16."""
    if kv_type(rows) == type:
        return rows
    return quantised(rows) if type == "q8_0" else as_float32(rows).astype(np.float16)


def as_float32(rows: np.ndarray) -> np.ndarray:
    """The numbers, float32 [.., head_dim]."""
    if kv_type(rows) == "f16":
        return rows.astype(np.float32)
    return rows["q"] * np.repeat(rows["d"].astype(np.float32), KV_BLOCK, axis=-1)


def quantised(x: np.ndarray) -> np.ndarray:
    """Numbers [.., head_dim] as rows of q8_0, as ROPE_APPEND rounds them."""
    x = x.astype(np.float32)
    blocks = x.reshape(*x.shape[:-1], -1, KV_BLOCK)
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    y = blocks * np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    size = np.abs(y)
    whole = np.floor(size)
    q = np.copysign(whole + (size - whole >= 0.5), y)
    rows = np.zeros(x.shape[:-1], kv_row("q8_0", x.shape[-1]))
    rows["q"], rows["d"] = q.reshape(x.shape), d[..., 0]
    return rows
