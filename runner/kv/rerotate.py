"""Context shift: K and V move to earlier positions, and K is re-rotated accordingly.

This is NumPy, one layer at a time: for a context that is full, not for hot paths.
"""

from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.cache import KVCache
from tamis.kv.convert import as_float32, as_rows
from tamis.model.key_basis import KeyBasis


class Pairs(NamedTuple):
    """The rotary pairs of a layer's keys, and the basis in which these are stored.

    inv_freq, neox: see `rerotated`.
    """

    inv_freq: np.ndarray
    neox: bool
    basis: KeyBasis | None = None  # None: keys are stored as they are

    def moved(self, rows: np.ndarray, by: int, type: str) -> np.ndarray:
        """Copies of stored keys, rotated by further `by` positions, as rows of a type."""
        x = as_float32(rows)
        x = x if self.basis is None else self.basis.original(x)
        x = rerotated(x, self.inv_freq, by, neox=self.neox)
        return as_rows(x if self.basis is None else self.basis.stored(x), type)


def close_up(kv: KVCache, layer: int, n_tokens: int, gone: range, pairs: Pairs) -> None:
    """Move a layer's K and V after the positions `gone` down to replace these.

    n_tokens: the number of positions before. The content beyond the remaining ones is undefined.
    Raises KVFileError.
    """
    page = gone.start // PAGE
    first, end = gone.start - page * PAGE, gone.stop - page * PAGE
    k, v = kv.read(layer, n_tokens, page)
    k = np.concatenate([k[:first], pairs.moved(k[end:], -len(gone), kv.types.k)])
    kv.write(layer, k, np.concatenate([v[:first], v[end:]]), page)


def move_together(
    kv: KVCache,
    layer: int,
    n_tokens: int,
    kept: np.ndarray | None,
    n_kept: int,
    pairs: Pairs,
) -> None:
    """Move n_kept positions of each KV head of a layer to the first ones.

    kept int64 [n_head_kv, n_kept], ascending; None: the last ones. Keys are re-rotated by the
    n_tokens - n_kept positions that are gone, so that distances to tokens that follow stay. The
    content beyond the first n_kept is undefined. Raises KVFileError.
    """
    k, v = kv.read(layer, n_tokens)
    n_head = k.shape[1]
    if kept is None:
        kept = np.tile(np.arange(n_tokens - n_kept, n_tokens), (n_head, 1))
    rows, heads = kept.T, np.arange(n_head)  # [n_kept, n_head_kv]
    moved = pairs.moved(k[rows, heads], n_kept - n_tokens, kv.types.k)
    kv.write(layer, moved, v[rows, heads])


def rerotated(x: np.ndarray, inv_freq: np.ndarray, by: int, *, neox: bool) -> np.ndarray:
    """Copies of rows that RoPE has rotated, rotated by further `by` positions.

    x float32 [.., head_dim], of which the first n_rot elements are rotated: pairs (i, i + n_rot /
    2) if neox, else (2i, 2i + 1); inv_freq float64 [n_rot / 2] in radians per token. Angles are
    linear in the position (RoFormer Eq. 15), however the frequencies were scaled; a scale of cosine
    and sine is already in the rows.
    """
    half, y = len(inv_freq), x.copy()
    pairs = (slice(half), slice(half, 2 * half))
    if not neox:
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = (x[..., part] for part in pairs)
    cos, sin = (f(by * inv_freq).astype(np.float32) for f in (np.cos, np.sin))
    y[..., pairs[0]], y[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return y
