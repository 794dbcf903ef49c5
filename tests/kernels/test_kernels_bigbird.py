"""BIGBIRD_SELECT against Python, between unmapped pages."""

import numpy as np
import pytest
from bigbird_draw import drawn
from guarded import in_child, runs, step_of
from selection_cases import rows_of

from tamis.jit_kernels.contract import ops

KERNELS = [(ops.BIGBIRD_SELECT, ())]


@pytest.mark.parametrize(("n_sink", "n_recent", "n_random"), [(0, 1, 0), (2, 20, 3), (1, 1, 500)])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize(
    ("n_tok", "pos", "q_block"), [(1, 0, 1), (1, 300, 1), (37, 0, 16), (37, 300, 16)]
)
@in_child
def test_sinks_a_window_and_random_blocks(n_tok, pos, q_block, block, n_sink, n_recent, n_random):
    n_row, seed, rows = 2, 11, []
    for first in range(0, n_tok, q_block):
        oldest, newest = pos + first, pos + min(n_tok, first + q_block) - 1
        low = max(0, oldest - n_recent + 1) // block
        sinks = min(low, n_sink)
        for r in range(n_row):
            state = (seed * n_row + r) * 1048583 + oldest // block
            for _ in range(2):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            chosen = drawn(sinks, low, min(n_random, low - sinks), state)
            rows.append([*range(sinks), *chosen, *range(low, newest // block + 1)])
    assert n_random == 0 or pos == 0 or block == 16 or rows[0] != rows[1] or n_random > pos
    for found in runs(
        ops.BIGBIRD_SELECT,
        out={
            "indptr": np.full(len(rows) + 1, -7, np.int32),
            "indices": np.full(sum(map(len, rows)), -7, np.int32),
        },
        step=step_of(n_tok, pos), n_row=n_row, q_block=q_block, block=block, n_sink=n_sink,
        n_recent=n_recent, n_random=n_random, seed=seed,
    ):  # fmt: skip
        assert rows_of(found) == rows
