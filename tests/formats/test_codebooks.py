"""Codebooks of IQ types: the gguf package's, element by element."""

import gguf
import numpy as np
import pytest

from tamis.formats.codebooks import SHAPES, grid_of
from tamis.formats.ggml_types import GGMLType


@pytest.mark.parametrize("type_", SHAPES, ids=lambda type_: type_.name)
def test_a_codebook_is_the_gguf_packages(type_: GGMLType) -> None:
    quant = getattr(gguf.quants, type_.name)
    quant.init_grid()
    expected = quant.grid.reshape(SHAPES[type_])
    assert np.array_equal(grid_of(type_), expected)
    assert grid_of(type_).dtype == np.int8
    assert not grid_of(type_).flags.writeable
