"""A row's selection shared by threads: what is chosen does not depend on how many they are."""

import numpy as np
import pytest
from replay import Replay

from tamis.select.notation import parse_method

N_KV, N_QUERY, N_PREFILL = 4096, 44, 32
METHODS = ["topk:k=256", "cpe:k=200", "tactic:c=16,local=64", "quest:budget=256,dense=0"]


def chosen(attn, n_thread):
    """What each decode step reads, of one KV head's seven query heads."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 1, 1, N_KV, 64), np.float32)
    k[..., :4] += 3 * np.sin(np.arange(N_KV) / 300)[:, None]
    q = 2 * k[:, :, rng.integers(0, N_KV, N_QUERY)] + rng.standard_normal((1, 7, N_QUERY, 64))
    replay = Replay(parse_method(attn), q.astype(np.float32), k, v, n_thread=n_thread)
    found = []
    for _ in range(N_QUERY - N_PREFILL):
        replay.state.phase(replay.first + replay.n_done)
        replay.decode()
        found.append(replay.rows(0))
    return found


@pytest.mark.parametrize("attn", METHODS)
def test_the_number_of_threads_does_not_change_what_is_chosen(attn):
    alone = chosen(attn, 1)
    assert sum(map(len, alone[-1])) < len(alone[-1]) * N_KV // 2  # something was left out
    for n_thread in (2, 3, 9):
        for one, other in zip(alone, chosen(attn, n_thread), strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)
