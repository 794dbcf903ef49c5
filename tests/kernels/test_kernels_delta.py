"""DELTA_ROWS and DELTA_ADD against NumPy, between unmapped pages."""

import numpy as np
import pytest
from attention_cases import normal
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops

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


def corrected(chunk, out, apart_out, last_out, carried, *, recompute):
    """Eq. 7 (or 5) row by row, float64; the difference that is left. carried: (delta, position)."""
    begin, _, pos, n_tok, gamma = chunk
    apart, last = rows_of(*chunk)
    out, (delta, at) = out.astype(np.float64), carried
    for t in range(n_tok):
        g = begin + (pos + t - begin) // gamma * gamma
        if t in last:
            out[t] = last_out[last.index(t)]
        elif t in apart:
            dense = apart_out[apart.index(t)].astype(np.float64)
            delta, at = dense - out[t], g
            out[t] = dense
        elif at == g and not recompute:
            out[t] += delta
    return out, delta, at


@pytest.mark.on_threads
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
@in_child
def test_rows_get_the_difference_of_the_last_exact_row(chunk, known, recompute):
    begin, end, pos, n_tok, gamma = chunk
    head_dim, n_head = HEAD_DIMS[gamma % 2], 3
    rng = np.random.default_rng(chunk)
    apart, last = rows_of(*chunk)
    out, delta = normal(rng, n_tok, n_head, head_dim), normal(rng, n_head, head_dim)
    apart_out = normal(rng, max(1, len(apart)), n_head, head_dim)
    last_out = normal(rng, max(1, len(last)), n_head, head_dim)
    # What an earlier chunk left: the difference that this chunk goes on with, or another one.
    at = begin + (pos - begin) // gamma * gamma if known else pos - 1000
    expected, left, left_at = corrected(
        chunk, out, apart_out, last_out, (delta, at), recompute=recompute
    )
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
        exact = [*((t, apart_out[i]) for i, t in enumerate(apart))]
        exact += [(t, last_out[i]) for i, t in enumerate(last)]
        for t, dense in exact:
            np.testing.assert_array_equal(found["out"][t], dense)
