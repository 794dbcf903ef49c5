"""A Selection that layers of a Program share is recorded in every Program that reads it."""

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.select.base import Recording, SelectorShape, SelectorState

SHAPE = SelectorShape(2, 4, 2, 16, 128, 32, (0, 0))


def recording(n_tok):
    return Recording(Program(), np.zeros(ops.STEP_SIZE, np.int64), n_tok, 1 if n_tok == 1 else 16)


def test_a_program_with_the_id_of_one_that_is_gone_records_its_own_window():
    """Python gives a new object the id of one that was freed: as a rule already the next one."""
    state, ids = SelectorState(SHAPE), set()
    for _ in range(50):
        rec = recording(1)
        ids.add(id(rec.program))
        for _layer in range(2):
            state.windowed(rec, 4, 32)
        assert [call.spec.op for call in rec.program.calls] == [ops.SELECT_WINDOW]
        del rec
    assert len(ids) < 50  # else this shows nothing


def test_a_program_of_more_tokens_gets_a_full_selection_of_its_own():
    state = SelectorState(SHAPE)
    for n_tok in (1, 32, 1, 32):
        rec = recording(n_tok)
        n_rows = -(-n_tok // rec.q_block) * SHAPE.n_head_kv
        assert len(state.everything(rec).indptr) == n_rows + 1
        del rec


def test_only_the_full_selection_of_this_program_reads_all():
    state, one, other = SelectorState(SHAPE), recording(1), recording(1)
    full = state.windowed(one, 0, 0)
    assert state.reads_all(one, 0, full)
    assert not state.reads_all(other, 0, full)
