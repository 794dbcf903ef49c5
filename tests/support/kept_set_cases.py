"""Sets of positions that outlive a step, as lists."""

import numpy as np


def listed(rows, n_keep):
    """Rows of positions as ops list them: how many, and these; what follows is not looked at."""
    kept = np.full((len(rows), 1 + n_keep), -7, np.int32)
    for r, row in enumerate(rows):
        kept[r, 0], kept[r, 1 : 1 + len(row)] = len(row), row
    return kept


def rows_in(kept):
    """The rows of such a list."""
    return [row[1 : 1 + row[0]].tolist() for row in kept]


def best(row, low, high, k):
    """The k positions of low .. high - 1 with the largest entries, ascending."""
    order = np.argsort(-row[low:high], kind="stable")[: max(0, k)]
    return sorted((low + order).tolist())
