"""Orders of patches and their positions, shared by families."""

import numpy as np

from tamis.vision.weights import VisionWeights


def blocks(nx: int, ny: int, merge: int) -> np.ndarray:
    """Raster indices of patches such that those of each merge x merge square are neighbours.

    Squares, and patches within each, are in raster order.
    """
    at = np.arange(nx * ny).reshape(ny // merge, merge, nx // merge, merge)
    return np.ascontiguousarray(at.transpose(0, 2, 1, 3)).reshape(-1)


def positions_of(weights: VisionWeights, order: np.ndarray) -> np.ndarray:
    """Learned positions of patches in an order, and the bias of patches: f32 [n, n_embd]."""
    n = len(weights.patch.matrix().data) // 4 // weights.patch.matrix().n_in
    found = np.zeros((len(order), n), np.float32)
    if weights.positions is not None:
        found += weights.positions[order]
    if weights.patch_bias is not None:
        found += weights.patch_bias
    return found


def rotated_2d(
    rows: np.ndarray, columns: np.ndarray, n_half: int, base: float = 1e4
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of 2D positions, f32 [n, n_half]: half the pairs turn by the row.

    Each half has the frequencies base ** (-2 i / n_half), as of a head of n_half elements.
    """
    inv_freq = base ** (-2.0 * np.arange(n_half // 2) / n_half)
    angles = np.concatenate([rows[:, None] * inv_freq, columns[:, None] * inv_freq], axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def stretched_positions(weights: VisionWeights, nx: int, ny: int) -> np.ndarray:
    """Learned positions of a square, stretched to nx * ny, with the bias: f32 [nx * ny, n_embd].

    Bilinear, with the corners of both grids at the same places.
    """
    assert weights.positions is not None
    side = round(len(weights.positions) ** 0.5)
    table = weights.positions.reshape(side, side, -1)
    for axis, n in ((0, ny), (1, nx)):
        at = np.arange(n) * ((side - 1) / (n - 1) if n > 1 else 0.0)
        low = np.minimum(at.astype(int), side - 1)
        high, part = np.minimum(low + 1, side - 1), (at - low).astype(np.float32)
        shape = [-1 if i == axis else 1 for i in range(3)]
        part = part.reshape(shape)
        table = table.take(low, axis) * (1 - part) + table.take(high, axis) * part
    flat = table.reshape(nx * ny, -1)
    return flat if weights.patch_bias is None else flat + weights.patch_bias
