"""How far logits lie from an oracle's."""

import numpy as np


def relative_error(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()
