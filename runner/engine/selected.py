"""The positions that attention has read, as arrays."""

from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.contract.types import Selection


class Selected(NamedTuple):
    """The positions that a layer read for one token, one row per KV head or query head.

    positions: int64 arrays [n_row], each ascending. mask: bool [n_row, n_kv], true where read; the
    last column is the token's own position.
    """

    positions: tuple[np.ndarray, ...]
    mask: np.ndarray


def selected(sel: Selection, pos: int, window: int) -> Selected:
    """The rows of the Selection of a decode step at `pos`; window: the layer's own, 0 = none."""
    first = max(0, pos + 1 - window) if window else 0
    mask = np.zeros((sel.n_row, pos + 1), bool)
    for row in range(sel.n_row):
        blocks = sel.indices[sel.indptr[row] : sel.indptr[row + 1]].astype(np.int64)
        positions = (blocks[:, None] * sel.block + np.arange(sel.block)).ravel()
        mask[row, positions[(positions >= first) & (positions <= pos)]] = True
    return Selected(tuple(np.flatnonzero(row) for row in mask), mask)
