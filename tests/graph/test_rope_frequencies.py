"""YaRN's ramp by its numbers, beside the paper: which pairs keep their frequency, and how far."""

from types import SimpleNamespace

import numpy as np
import pytest

from tamis.model.hparams import RopeScaling
from tamis.model.rope import rope_frequencies


def frequencies(n_rot, base, scaling, **options):
    hp = SimpleNamespace(n_rot=n_rot, rope_sections=())
    return rope_frequencies(hp, base=base, scaling=scaling, **options)


@pytest.mark.parametrize(
    ("n_rot", "base", "n_ctx_orig", "low", "high"),
    [
        (128, 1e4, 4096, 20, 46),  # 32 turns at pair 20.94, one turn at pair 45.03
        (64, 1e6, 32768, 11, 20),  # at 11.78 and 19.81
        (16, 1e4, 64, 0, 3),  # at -0.99 and 2.02: the first pair is as fast as any
        (16, 10.0, 2048, 8, 15),  # at 8.06 and 20.1: past the last pair, which is the end
    ],
)
def test_the_ramp_of_yarn_begins_and_ends_at_whole_pairs(n_rot, base, n_ctx_orig, low, high):
    """Eq. 18 with the bounds of the released code: down to a whole pair, and up to one."""
    scaling = RopeScaling("yarn", factor=4.0, n_ctx_orig=n_ctx_orig)
    found = frequencies(n_rot, base, scaling)
    pairs = np.arange(n_rot // 2)
    plain = base ** (-2.0 * pairs / n_rot)
    kept = 1 - np.clip((pairs - low) / (high - low), 0, 1)
    np.testing.assert_allclose(found.inv_freq, plain * (kept + (1 - kept) / 4), rtol=1e-12)
    assert found.scale == pytest.approx(1 + 0.1 * np.log(4))


def test_yarn_of_no_strength_is_linear_scaling():
    yarn = RopeScaling("yarn", factor=4.0, n_ctx_orig=4096, ext_factor=0.0)
    linear = frequencies(64, 1e4, RopeScaling("linear", factor=4.0, n_ctx_orig=4096))
    np.testing.assert_allclose(frequencies(64, 1e4, yarn).inv_freq, linear.inv_freq)
