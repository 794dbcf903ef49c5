"""CRC32C against a bit-by-bit oracle and the RFC's own examples, between unmapped pages."""

import numpy as np
import pytest
from crc32c import crc32c
from guarded import in_child, runs

from tamis.jit_kernels.contract import ops

KERNELS = [(ops.CRC32C, ())]


def sums_of(data, rows):
    out = {"sums": np.zeros(len(rows), np.uint32)}
    fields = {"data": data, "rows": rows, "n": len(rows), "size": data.shape[1]}
    return [found["sums"] for found in runs(ops.CRC32C, out=out, **fields)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
@in_child
def test_the_examples_of_rfc_3720(data, expected):
    assert crc32c(data) == expected
    for found in sums_of(np.frombuffer(data, np.uint8)[None].copy(), np.zeros(1, np.int64)):
        assert found.tolist() == [expected]


@pytest.mark.parametrize("size", [1, 7, 8, 18, 68, 2048])
@pytest.mark.parametrize("n", [1, 4, 11])
@in_child
def test_rows_of_any_size_in_any_order(size, n):
    rng = np.random.default_rng((size, n))
    data = rng.integers(0, 256, (n + 3, size)).astype(np.uint8)
    rows = rng.permutation(n + 3)[:n].astype(np.int64)
    expected = [crc32c(data[row].tobytes()) for row in rows]
    for found in sums_of(data, rows):
        assert found.tolist() == expected
