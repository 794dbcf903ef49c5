"""Codebooks of ggml's IQ1, IQ2 and IQ3 types.

A code of such a type names a row of its grid: the magnitudes of 8 neighbouring weights, or of 4.
"""

import base64
from functools import cache

import numpy as np

from tamis.formats.ggml_types import GGMLType

# Rows and elements of each type's grid. IQ1_M has IQ1_S's.
SHAPES = {
    GGMLType.IQ1_S: (2048, 8),
    GGMLType.IQ1_M: (2048, 8),
    GGMLType.IQ2_XXS: (256, 8),
    GGMLType.IQ2_XS: (512, 8),
    GGMLType.IQ2_S: (1024, 8),
    GGMLType.IQ3_XXS: (256, 4),
    GGMLType.IQ3_S: (512, 4),
}


@cache
def grid_of(type_: GGMLType) -> np.ndarray:
    """The grid of a type, int8 of its shape, read-only: -1 to 1 for IQ1, 1 to 62 for the others."""
    from tamis.formats.codebook_tables import ROWS, VALUES  # few models have such a type

    name = "IQ1_S" if type_ is GGMLType.IQ1_M else type_.name
    values = np.array(VALUES[name], np.int8)
    n_bit = (len(values) - 1).bit_length()
    packed = np.frombuffer(base64.b85decode(ROWS[name]), np.uint8)
    bits = np.unpackbits(packed, bitorder="little").reshape(-1, n_bit)
    numbers = np.packbits(bits, axis=1, bitorder="little")
    grid = values[numbers].reshape(SHAPES[type_])
    grid.flags.writeable = False
    return grid


def with_parity(signs: np.ndarray) -> np.ndarray:
    """Eight signs made of each seven (uint8, one a bit, set: negative), with even parity."""
    parity = signs ^ signs >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return signs | (parity & 1) << 7
