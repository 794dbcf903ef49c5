"""What the oracles of selection ops share: the middle of a context, its best keys, CSR rows."""

from itertools import pairwise

import numpy as np

LOWEST = np.float32(-3e38)


def rows_of(found):
    """The rows of a Selection."""
    indptr = found["indptr"]
    assert indptr[0] == 0
    return [found["indices"][a:b].tolist() for a, b in pairwise(indptr)]


def middle(pos, n_sink, n_local, drop=0):
    """The range that a method chooses from."""
    start = max(0, min(pos * drop // 2**32, pos + 1 - n_local))
    return max(n_sink, start), max(n_sink, pos + 1 - n_local)


def maxima_of(scores, low, high):
    """Of spans of 256 positions the maxima of every sixteenth, in the pages of low .. high - 1."""
    rows = np.full((len(scores), -(-scores.shape[1] // 256) * 256), -np.inf, np.float32)
    rows[:, : scores.shape[1]] = scores
    rows[:, : low // 64 * 64] = rows[:, -(-high // 64) * 64 :] = -np.inf
    return rows.reshape(len(rows), -1, 16, 16).max(axis=2).reshape(len(rows), -1)


DROP = 3 << 30  # 3/4 of the past is not seen


def best(scores, n_sink, n_recent, n_top):
    """The kept positions of one row, ties to the lower position."""
    n_kv = len(scores)
    if n_sink + n_recent + n_top >= n_kv:
        return list(range(n_kv))
    middle = np.arange(n_sink, n_kv - n_recent)
    top = middle[np.argsort(-scores[middle], kind="stable")[:n_top]]
    return sorted([*range(n_sink), *range(n_kv - n_recent, n_kv), *top.tolist()])
