"""The logic of CUDA kernels without a GPU: their Python, a thread each of this process's."""

import importlib

import numpy as np
import pytest
import test_kernels_kv_frames
from guarded import on_gpu
from on_threads import OnThreads, as_python, local, run_block

pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
attend_ends = importlib.import_module("tamis.jit_kernels.cuda.attend_ends")
kv_frames = importlib.import_module("tamis.jit_kernels.cuda.kv_frames")

CASES = [
    ("test_pages_that_are_written_to_have_their_frames", {"seed": 1, "pos": 70, "n_tok": 1}),
    ("test_pages_that_are_written_to_have_their_frames", {"seed": 2, "pos": 257, "n_tok": 64}),
    ("test_the_home_gets_what_was_written", {"pos": 70, "n_tok": 1}),
    ("test_the_home_gets_what_was_written", {"pos": 300, "n_tok": 129}),
    *(
        ("test_the_pages_of_a_selection_are_wanted",
         {"n_tok": 37, "pos": 500, "q_block": 16, "stride": 1, "window": window, "block": block})
        for window, block in ((0, 96), (150, 16))
    ),
    *(
        ("test_frames_are_taken_that_are_needed_last",
         {"n_page": 40, "n_cache": n_cache, "share": share})
        for n_cache, share in ((48, 1), (112, 0.6))
    ),
    *(
        ("test_what_an_op_reads_is_found_from_its_fields", {"case": case, "n_tok": 1, "pos": 1215})
        for case in (1, 3, 6, 8, 9)  # one of each reader
    ),
    ("test_what_is_missing_comes_to_its_frames", {"n": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values"), CASES, ids=str)
def test_frames_are_what_their_oracle_says(name, values):
    test = getattr(test_kernels_kv_frames, name)
    with as_python(kv_frames), on_gpu(OnThreads(kv_frames)):
        test.__wrapped__(**values)


@pytest.mark.parametrize("room", [4, 40])
def test_rows_of_attention_that_have_more_and_fewer_parts_are_joined_apart(room):
    """Blocks end parts of rows in any order; the last one of a row joins them."""
    rng, head_dim, heads, n_row, n_warp = np.random.default_rng(room), 32, 2, 4, 8
    n_part = [room, 3, 2, 1]
    n_head, size = heads * n_row, head_dim + 2
    scores = rng.standard_normal((n_head, room, n_warp, 16)) * 4
    values = rng.standard_normal((n_head, room, n_warp, 16, head_dim))
    tops = scores.max(axis=-1)
    weights = np.exp(scores - tops[..., None])
    sums = (weights[..., None] * values).sum(axis=-2)
    partial = np.full((n_head, room, size), np.nan, np.float32)
    out, lse = np.full((n_head, head_dim), np.nan, np.float32), np.zeros(n_head, np.float32)
    turns = np.zeros(n_row, np.int32)
    parts = [(row, part) for row in range(n_row) for part in range(n_part[row])]
    with as_python(attend_ends):
        finish = attend_ends.finishing(head_dim, heads, 1, n_warp)
        join = attend_ends.joining(head_dim)
        for row, part in rng.permutation(parts).tolist():
            own, n = slice(heads * row, heads * (row + 1)), int(n_part[row])
            ends = tops[own, part], weights[own, part].sum(axis=-1)
            left = _left(sums[own, part], ends)

            def body(row=row, part=part, n=n, left=left):
                local.block.shared.update(left)
                local.block.barrier.wait()
                where = partial.ctypes.data, (part, n, room), out.ctypes.data, lse.ctypes.data
                finish(0, 1, heads * row, n_head, *where)
                turn = turns[row:].ctypes.data
                if n > 1 and attend_ends.is_last(turn, n):
                    counts = partial.ctypes.data, (n, room), out.ctypes.data, lse.ctypes.data
                    join(heads * row, heads, *counts)

            run_block(body, 256, [partial, out, lse, turns])
    assert not turns.any()
    for head in range(n_head):
        seen = slice(0, n_part[head // heads])
        w = np.exp(scores[head, seen] - scores[head, seen].max())
        mean = (w[..., None] * values[head, seen]).sum(axis=(0, 1, 2)) / w.sum()
        np.testing.assert_allclose(out[head], mean, atol=2e-5)
        log_sum = np.log(w.sum()) + scores[head, seen].max()
        np.testing.assert_allclose(lse[head], log_sum, atol=2e-5)


def _left(sums, ends):
    """What warps leave in shared memory of a part: sums, maximum (in log 2) and total of heads."""
    top, total = ends
    found = np.concatenate([sums, top[..., None] / attend_ends.LN_2, total[..., None]], axis=-1)
    found = found.swapaxes(0, 1).reshape(-1)  # [warp, head, size]
    return {4 * i: float(x) for i, x in enumerate(found)}
