"""BIGBIRD_SELECT against the method's algorithm, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from selection_cases import rows_of

from tamis.jit_kernels.contract import ops
from tamis.select.bigbird import BigBird, chosen

KERNELS = [(ops.BIGBIRD_SELECT, ())]


@pytest.mark.parametrize(("n_sink", "n_recent", "n_random"), [(0, 1, 0), (2, 20, 3), (1, 1, 500)])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize(
    ("n_tok", "pos", "q_block"), [(1, 0, 1), (1, 300, 1), (37, 0, 16), (37, 300, 16)]
)
@in_child
def test_sinks_a_window_and_random_blocks(n_tok, pos, q_block, block, n_sink, n_recent, n_random):
    n_row, seed, rows = 2, 11, []
    p = BigBird(block=block, sink=n_sink * block, recent=n_recent, random=n_random * block)
    for first in range(pos, pos + n_tok, q_block):
        queries = range(first, min(pos + n_tok, first + q_block))
        rows += [chosen(p, queries, seed, n_row, r) for r in range(n_row)]
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
