"""Context shift: K and V move to earlier positions, and K is re-rotated to them.

In NumPy, a layer at a time: for a context that is full, not for hot paths.
"""

import numpy as np

from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.cache import KVCache
from tamis.kv.convert import as_float32, as_rows


def close_up(
    kv: KVCache,
    layer: int,
    n_tokens: int,
    gone: range,
    *,
    inv_freq: np.ndarray,
    neox: bool,
) -> None:
    """Move a layer's K and V that come after positions `gone` to the place of these.

    n_tokens: how many positions there are before. What is beyond them after is undefined.
    inv_freq, neox: see `rerotated`. Raises KVFileError.
    """
    page = gone.start // PAGE
    first, end = gone.start - page * PAGE, gone.stop - page * PAGE
    k, v = kv.read(layer, n_tokens, page)
    moved = rerotated(as_float32(k[end:]), inv_freq, -len(gone), neox=neox)
    k = np.concatenate([k[:first], as_rows(moved, kv.types.k)])
    kv.write(layer, k, np.concatenate([v[:first], v[end:]]), page)


def rerotated(x: np.ndarray, inv_freq: np.ndarray, by: int, *, neox: bool) -> np.ndarray:
    """Copies of rows that RoPE rotated, as they are `by` positions later.

    x float32 [.., head_dim], of which the first n_rot elements are rotated: pairs
    (i, i + n_rot / 2) if neox, else (2i, 2i + 1); inv_freq float64 [n_rot / 2] in radians a token.
    Angles are linear in the position (RoFormer Eq. 15), however the frequencies were scaled; a
    scale of cosine and sine is in the rows already.
    """
    half, y = len(inv_freq), x.copy()
    pairs = (slice(half), slice(half, 2 * half))
    if not neox:
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = (x[..., part] for part in pairs)
    cos, sin = (f(by * inv_freq).astype(np.float32) for f in (np.cos, np.sin))
    y[..., pairs[0]], y[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return y
