"""The logic of CUDA kernels without a GPU: their Python, a thread each of this process's."""

import importlib
from types import SimpleNamespace

import numpy as np
import op_tests
import pytest
from guarded import on_gpu
from on_threads import OnThreads, as_python, local, run_block

from tamis.jit_kernels.cuda.lang.scratch import FEW_ROW

pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
FILES = (
    "linear.activation",
    "attention.attend_epilogue",
    "attention.sink",
    "attention.tail",
    "lang.radix_topk",
    "kv.token_freezing",
    "lang.grid",
    "kv.page_cache",
    "kv.kv_rows",
    "linear.logits",
    "linear.moe",
    "linear.norm",
    "linear.pack",
    "linear.streams",
    "attention.rope",
    "recurrent.conv",
    "recurrent.gates",
    "recurrent.linear_scan",
    "recurrent.norms",
    "recurrent.pool",
    "recurrent.selective_scan",
    "recurrent.wkv",
    "attention.score",
    "select.clusters",
    "select.common",
    "select.cpe",
    "select.delta",
    "select.hip",
    "select.indexer",
    "select.key_copy",
    "select.lfps",
    "select.marks",
    "select.metered",
    "select.quest",
    "select.tactic",
    "select.tactic_budget",
    "select.twilight",
    "select.vertical_slash",
)
MODULES = [importlib.import_module(f"tamis.jit_kernels.cuda.{file}") for file in FILES]
attend_ends, grid, pack, radix_topk, tactic_budget = (
    MODULES[FILES.index(file)]
    for file in (
        "attention.attend_epilogue", "lang.grid", "linear.pack", "lang.radix_topk",
        "select.tactic_budget",
    )
)  # fmt: skip


def some(test):
    """Two of a test's cases, small ones: the second and the third."""
    found = list(op_tests.cases(test))
    return found[1:3] or found


CASES = [(test, values) for test in op_tests.gpu_tests("on_threads") for values in some(test)]
CASES += [
    (
        op_tests.module("page_cache").test_frames_are_taken_that_are_needed_last,
        {"n_page": 40, "n_cache": 48, "share": 1},
    )
]


@pytest.mark.parametrize(
    ("test", "values"), CASES, ids=[f"{test.__name__}-{values}" for test, values in CASES]
)
def test_a_kernel_is_what_its_oracle_says(test, values):
    with as_python(*MODULES), on_gpu(OnThreads()):
        test.__wrapped__(**values)


@pytest.mark.parametrize("few", [3, 256])  # entries of a counter that are compared by pairs
@pytest.mark.parametrize("held", [48, 1 << 14])  # entries that a block holds
def test_the_best_of_rows_that_are_held_in_part_and_in_whole(monkeypatch, held, few):
    rng, check = np.random.default_rng((held, few)), op_tests.module("select").check_top_k
    sizes = np.float32(10) ** rng.uniform(-38, 38, (1, 150)).astype(np.float32)
    signs = np.where(rng.random(sizes.shape) < 0.5, np.float32(-1), np.float32(1))
    with as_python(*MODULES), on_gpu(OnThreads()):
        monkeypatch.setattr(radix_topk, "HELD", held)
        monkeypatch.setattr(radix_topk, "FEW", few)
        check(rng.standard_normal((2, 200)).astype(np.float32), 200, (4, 8, 40))
        check(rng.integers(-3, 3, (1, 150)).astype(np.float32), 150, (1, 2, 60))
        check(sizes * signs, 150, (2, 2, 50))
        monkeypatch.undo()


@pytest.mark.parametrize("few", [3, 256])
def test_the_best_of_weights_of_all_sizes(monkeypatch, few):
    rng = np.random.default_rng(few)
    for weights in (
        np.exp2(rng.uniform(-120, 120, 150)),
        np.exp2(rng.integers(-3, 3, 150)),
        np.full(150, 0.25),
        1e9 + np.arange(150),
    ):
        row, out = weights.astype(np.float32), np.full(40, -1, np.int32)
        with as_python(*MODULES):
            monkeypatch.setattr(radix_topk, "FEW", few)

            def body(row=row, out=out):
                at = row.ctypes.data
                radix_topk.hold(0, at, 0, 150)
                radix_topk.write_best_weights((0, at, 0), 5, 150, 40, out.ctypes.data)

            run_block(body, 64, [row, out])
            monkeypatch.undo()
        best = 5 + np.argsort(-row[5:], kind="stable")[:40]
        np.testing.assert_array_equal(out, np.sort(best))


@pytest.mark.parametrize("n_block", [3, 8])  # of two or three rows
@pytest.mark.parametrize(
    "name",
    [
        "test_marked_are_the_positions_of_any_head_of_the_row",
        "test_the_selection_joins_marks_and_what_lies_outside_of_clusters",
    ],
)
def test_blocks_that_have_parts_of_rows_join_them(name, n_block):
    test = getattr(op_tests.module("tactic"), name)
    with as_python(*MODULES), on_gpu(OnThreads(n_block)):
        for values in list(op_tests.cases(test))[-2:]:
            test.__wrapped__(**values)


@pytest.mark.parametrize("n", [0, 3, 300, 700])
def test_the_least_count_is_that_of_the_running_sums(n):
    rng = np.random.default_rng(n)
    weights = rng.random(n).astype(np.float32)
    sums = np.cumsum(weights.astype(np.float64))
    whole = sums[-1] if n else 0.0
    for need in (-1.0, 0.0, 1e-9, 0.3 * whole, 0.9999 * whole, whole + 1):
        counts = set()
        with as_python(*MODULES):

            def body(need=need, counts=counts):
                array = tactic_budget.cuda.shared.array
                found, room = array(2, int), array(256, float)
                counts.add(tactic_budget.least_count(weights.ctypes.data, n, need, room, found))

            run_block(body, 256, [weights])
        (found,) = counts
        expected = 0 if need <= 0 else int(np.searchsorted(sums, need)) + 1
        assert found == (min(n, expected), pytest.approx(whole))


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
    turns, width = np.zeros(n_row, np.int32), n_head * head_dim
    packed = np.full(FEW_ROW.size * width // 4, 0xA5, np.uint8)
    row_of = packed.ctypes.data, width, 0
    parts = [(row, part) for row in range(n_row) for part in range(n_part[row])]
    with as_python(attend_ends, grid, pack):
        finish = attend_ends.finishing(head_dim, heads, 1, n_warp, packs=True)
        join = attend_ends.joining(head_dim, packs=True)
        for row, part in rng.permutation(parts).tolist():
            own, n = slice(heads * row, heads * (row + 1)), int(n_part[row])
            ends = tops[own, part], weights[own, part].sum(axis=-1)
            left = _left(sums[own, part], ends)

            def body(row=row, part=part, n=n, left=left):
                local.block.shared.update(left)
                local.block.barrier.wait()
                addresses = partial.ctypes.data, out.ctypes.data, lse.ctypes.data
                a = SimpleNamespace(**dict(zip(("partial", "out", "lse"), addresses, strict=True)))
                finish(a, 0, 1, heads * row, n_head, (part, n, room), row_of)
                turn = turns[row:].ctypes.data
                if n > 1 and grid.is_last(turn, n):
                    counts = partial.ctypes.data, (n, room), out.ctypes.data, lse.ctypes.data
                    join(heads * row, heads, *counts, row_of)

            run_block(body, 256, [partial, out, lse, turns, packed])
    assert not turns.any()
    for head in range(n_head):
        seen = slice(0, n_part[head // heads])
        w = np.exp(scores[head, seen] - scores[head, seen].max())
        mean = (w[..., None] * values[head, seen]).sum(axis=(0, 1, 2)) / w.sum()
        np.testing.assert_allclose(out[head], mean, atol=2e-5)
        log_sum = np.log(w.sum()) + scores[head, seen].max()
        np.testing.assert_allclose(lse[head], log_sum, atol=2e-5)
    high, low = packed[: 2 * width].view(np.int8).reshape(2, width)
    scales, totals = packed[2 * width :][: width // 2].view(np.float32).reshape(2, -1)
    rows = (128 * high.astype(int) + low) * np.repeat(scales, 16)
    bound = 0.5001 * np.repeat(scales, 16) + 1e-6 * np.abs(out.reshape(-1))
    assert (np.abs(rows - out.reshape(-1)) <= bound).all()
    np.testing.assert_allclose(totals, rows.reshape(-1, 16).sum(axis=1), atol=1e-5)


def _left(sums, ends):
    """What warps leave in shared memory of a part: sums, maximum (in log 2) and total of heads."""
    top, total = ends
    found = np.concatenate([sums, top[..., None] / attend_ends.LN_2, total[..., None]], axis=-1)
    found = found.swapaxes(0, 1).reshape(-1)  # [warp, head, size]
    return {4 * i: float(x) for i, x in enumerate(found)}
