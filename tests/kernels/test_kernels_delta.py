"""DELTA_ROWS and DELTA_ADD against the method's algorithm, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.select.delta import Delta, corrected
from tamis.select.dense import Dense

HEAD_DIMS = [16, 80]
KERNELS = [(ops.DELTA_ROWS, ()), *((ops.DELTA_ADD, (head_dim,)) for head_dim in HEAD_DIMS)]
# begin and end of a prompt, position and rows of a chunk of it, gamma
CHUNKS = [
    (0, 1, 0, 1, 64),  # a prompt of one token: all of it is its dense end
    (0, 100, 0, 40, 16),
    (0, 100, 40, 40, 16),  # starts between exact rows, ends where the dense end begins
    (0, 100, 80, 20, 16),  # within the dense end, but for four rows
    (7, 60, 30, 16, 9),  # a prompt that starts late
    (7, 60, 46, 14, 200),  # and one shorter than gamma
    (5, 300, 21, 33, 1),
]


def rows_of(begin, end, pos, n_tok, gamma):
    """Rows of the chunk gamma apart, counted from begin, and those of the prompt's last gamma."""
    at = range(pos, pos + n_tok)
    last = [p - pos for p in at if p >= end - gamma]
    apart = [p - pos for p in at if p < end - gamma and (p - begin) % gamma == 0]
    return apart, last


def record_of(rows, pos):
    first = rows[0] if rows else 0
    return step_of(len(rows), pos + first, first)


@pytest.mark.on_threads
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@in_child
def test_rows_of_a_chunk(chunk):
    begin, end, pos, n_tok, gamma = chunk
    unwritten = np.full(ops.STEP_SIZE, -7, np.int64)
    step = step_of(n_tok, pos, prompt=(begin, end))
    for found in runs(
        ops.DELTA_ROWS, out={"apart": unwritten, "last": unwritten}, step=step, gamma=gamma
    ):
        for name, rows in zip(("apart", "last"), rows_of(*chunk), strict=True):
            count, first_pos, first, *_ = found[name].tolist()
            assert count == len(rows)
            if rows:
                assert (first_pos, first) == (pos + rows[0], rows[0])


@pytest.mark.on_threads
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@in_child
def test_rows_get_the_difference_of_the_last_exact_row(chunk, known, recompute):
    begin, end, pos, n_tok, gamma = chunk
    head_dim, n_head = HEAD_DIMS[gamma % 2], 3
    rng, mode = np.random.default_rng(chunk), "recompute" if recompute else "delta"
    apart, last = rows_of(*chunk)
    sparse, dense = normal(rng, 2, end - begin, n_head, head_dim)
    expected = corrected(Delta(Dense(), gamma, mode), sparse, dense)[pos - begin :][:n_tok]
    # What an earlier chunk left: the difference that this chunk goes on with, or another one.
    at = begin + (pos - begin) // gamma * gamma
    delta = dense[at - begin] - sparse[at - begin]
    out, exact = sparse[pos - begin :][:n_tok], dense[pos - begin :][:n_tok]
    if not known:
        at = pos - 1000
        alone = [t for t in range(n_tok) if t < min([*apart, *last, n_tok])]
        expected[alone] = out[alone]
    left, left_at = (exact[apart[-1]] - out[apart[-1]], pos + apart[-1]) if apart else (delta, at)
    apart_out, last_out = (exact[rows] if rows else exact[:1] * 0 for rows in (apart, last))
    for found in runs(
        ops.DELTA_ADD, (head_dim,),
        out={"out": out, "delta": delta, "delta_pos": np.full(n_head, at)},
        step=step_of(n_tok, pos, prompt=(begin, end)), apart=record_of(apart, pos),
        last=record_of(last, pos), apart_out=apart_out, last_out=last_out, n_head=n_head,
        gamma=gamma, recompute=recompute,
    ):  # fmt: skip
        # One float32 difference and one sum of values below 10.
        np.testing.assert_allclose(found["out"], expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(found["delta"], left, rtol=0, atol=1e-6)
        assert (found["delta_pos"] == left_at).all()
        for t in (*apart, *last):
            np.testing.assert_array_equal(found["out"][t], exact[t])
