"""What an op is said to read, against sets of positions."""

from types import SimpleNamespace

import numpy as np
import pytest

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv import access_spans
from tamis.kv.access_spans import EVERYTHING, fields_of, reads_all

DIM, N_HEAD_KV, N_PAGE = 16, 2, 5


def attending(sel_rows, *, block, n_row, q_block, step, window, stride):
    """A Program with one call of ATTEND, of a Selection with these blocks a row."""
    program = Program()
    pages = np.zeros((N_PAGE, N_HEAD_KV, PAGE, DIM), np.float16)
    table = np.arange(N_PAGE, dtype=np.int32)
    indptr = np.cumsum([0, *map(len, sel_rows)]).astype(np.int32)
    # Room for more rows than there are, and entries of an earlier step after them.
    indptr = np.concatenate([indptr, np.full(3, indptr[-1] + 2, np.int32)])
    indices = np.concatenate([*sel_rows, [0, 0]]).astype(np.int32)
    program.add(
        ops.ATTEND, (DIM, 2 * N_HEAD_KV // n_row, q_block, "f16", "f16"), step=step,
        q=np.zeros((64, 2 * N_HEAD_KV, DIM), np.float32), k_pages=pages, v_pages=pages,
        k_table=table, v_table=table, indptr=indptr, indices=indices, log_weight=None, block=block,
        n_row=n_row, heads_per_kv=2, n_head_kv=N_HEAD_KV, window=window, n_split=1, stride=stride,
        partial=None, out=np.zeros((64, 2 * N_HEAD_KV, DIM), np.float32), lse=None,
        scratch=np.zeros(1, np.uint8), scale=1.0,
    )  # fmt: skip
    return program


@pytest.mark.parametrize("seed", range(24))
def test_a_selections_units_are_those_with_a_position_that_is_read(seed):
    rng = np.random.default_rng(seed)
    block, unit = (int(rng.choice(x)) for x in ((1, 4, 16, 48, 64), (1, 16, 64)))
    n_row, q_block = (int(rng.choice(x)) for x in ((N_HEAD_KV, 2 * N_HEAD_KV), (1, 4)))
    n_tok = 1 if q_block == 1 else int(rng.integers(1, 10))
    stride = int(rng.choice((1, 1, 3)))
    pos = int(rng.integers(0, N_PAGE * PAGE - stride * n_tok))
    window, end = int(rng.choice((0, 0, 70))), pos + stride * (n_tok - 1) + 1
    step = np.array([n_tok, pos, 0, pos, pos + n_tok, 0], np.int64)
    blocks = [
        np.flatnonzero(rng.random(-(-end // block)) < rng.choice((0.05, 0.4)))
        for _ in range(-(-n_tok // q_block) * n_row)
    ]
    program = attending(
        blocks, block=block, n_row=n_row, q_block=q_block, step=step, window=window, stride=stride
    )
    grain = int(np.gcd(np.gcd(unit, block), PAGE))
    expected, grains = np.zeros((N_PAGE, N_HEAD_KV, PAGE // unit), bool), set()
    for r, row in enumerate(blocks):
        head = r % n_row * N_HEAD_KV // n_row
        for at in (j for b in row for j in range(b * block, (b + 1) * block)):
            if at < end and (not window or at > pos - window):
                expected[at // PAGE, head, at % PAGE // unit] = True
                grains.add((head, at // grain))
    found, n_key = access_spans.chosen(program.calls[0], program, N_PAGE, unit)
    np.testing.assert_array_equal(found, expected)
    assert n_key == len(grains) * grain


def test_spans_are_the_ops_own_without_empty_ones():
    asked = []

    def ranges(*given):
        asked.append(given)
        return 3, 9, 20, 20

    reads = SimpleNamespace(
        found="filled", first=1, every=3, block="block", x="n", y="", spans=ranges
    )
    values = {"step": 1, "filled": 2, "block": 16, "n": 7}
    arrays = {1: np.array([5, 40, 0]), 2: np.array([[9, 6, 9], [9, 2, 9], [9, 4, 9]])}
    fields = access_spans.Fields(values, arrays)
    assert access_spans.spans(reads, fields) == [(3, 9)]
    assert asked == [(2, 6, 16, 7, 0, 5, 40)]
    reads.found, reads.spans = "", lambda *given: (0, 1, 5, 6)
    assert access_spans.spans(reads, fields) == [(0, 1), (5, 6)]
    del values["step"]
    assert access_spans.spans(reads, access_spans.Fields(values, arrays)) == [(0, EVERYTHING)]


@pytest.mark.parametrize(("n_recent", "found"), [(0, True), (1, False), (64, False)])
def test_a_window_of_no_size_reads_all(n_recent, found):
    program, step = Program(), np.zeros(ops.STEP_SIZE, np.int64)
    program.add(
        ops.SELECT_WINDOW, step=step, indptr=np.zeros(3, np.int32), indices=np.zeros(9, np.int32),
        n_row=2, q_block=1, block=64, n_sink=4, n_recent=n_recent,
    )  # fmt: skip
    (call,) = program.calls
    assert reads_all(call, program) is found
    assert fields_of(call, program)["n_sink"] == 4
    assert fields_of(call, program).array("step") is step


def test_attention_reads_what_was_chosen_only():
    step = np.array([1, 3, 0, 3, 4, 0], np.int64)
    rows = [np.array([0])] * 2
    program = attending(rows, block=1, n_row=2, q_block=1, step=step, window=0, stride=1)
    assert not reads_all(program.calls[0], program)


@pytest.mark.parametrize("n", [2, 4])
def test_an_op_has_as_many_values_as_fields(n):
    op = SimpleNamespace(fields=("step", "k_table", "block"))
    call = SimpleNamespace(spec=SimpleNamespace(op=op), values=tuple(range(n)))
    with pytest.raises(ValueError, match="zip"):
        fields_of(call, SimpleNamespace(arrays={}))
