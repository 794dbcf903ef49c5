"""The infill sampler: whether a gap is filled, and which tokens go on with it."""

import numpy as np
import pytest

from tamis.sampling.base import Candidates
from tamis.sampling.infill import Infill

PIECES = [b"", b"a", b"ab", b"x", b"y", b""]
END, EOT = 0, 5


def left(probs):
    """Tokens and their probabilities after the step, of those that have one."""
    ids = np.flatnonzero(np.array(probs) > 0).astype(np.int32)
    c = Candidates(ids, np.log(np.array(probs)[ids]).astype(np.float32))
    found = Infill(PIECES.__getitem__, {END, EOT}, EOT).apply(c)
    return dict(zip(found.ids.tolist(), found.probs().tolist(), strict=True))


@pytest.mark.parametrize(
    ("probs", "expected"),
    [
        # 3 x 0.2 x 3 candidates is above 0.8: the text ends
        ([0.2, 0.5, 0, 0.3], {0: 1}),
        # 3 x 0.02 x 4 is not: x is below 0.2 and dropped, the end stays
        ([0.02, 0.4, 0, 0.08, 0.5], {0: 0.02, 1: 0.4, 4: 0.5}),
        # a begins ab: the likelier of both has 0.25
        ([0, 0.1, 0.15, 0.75], {3: 0.75}),
        ([0, 0.1, 0.35, 0.55], {2: 0.45, 3: 0.55}),
    ],
)
def test_what_goes_on_with_a_gap(probs, expected):
    found, total = left(probs), sum(expected.values())
    assert found == {k: pytest.approx(p / total, abs=1e-6) for k, p in expected.items()}


def test_where_no_token_is_likely_the_text_ends():
    pieces = [bytes([65 + i]) for i in range(10)]
    c = Candidates(np.arange(10, dtype=np.int32), np.zeros(10, np.float32))
    assert Infill(pieces.__getitem__, {99}, 99).apply(c).ids.tolist() == [99]
