"""Slices of keys that blocks of queries chose, as warps of a GPU list them: without a GPU."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from on_threads import as_python, exchanged, local, run_block

from tamis.jit_kernels.contract.types import PAGE

pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
from tamis.jit_kernels.cuda.attention import key_slices as slices
from tamis.jit_kernels.cuda.attention.attend_mma import FAR
from tamis.jit_kernels.cuda.attention.tile_group import SLICE

N_HEAD_KV, HEAD, LOG2_E = 3, 1, 1 / np.log(2)


class Choice(NamedTuple):
    """What blocks of queries chose of the positions low .. high, and what of it they all see."""

    rows: list[np.ndarray]  # ascending blocks of keys
    block: int  # positions of one
    low: int
    high: int
    seen: list[tuple[int, int]]  # first and last position, a block of queries
    biases: list[np.ndarray] | None
    tables: tuple[np.ndarray, np.ndarray]


class Slice(NamedTuple):
    """A list, read back."""

    kinds: list[int]
    rows: np.ndarray  # of keys and of values [2, SLICE]
    positions: np.ndarray  # [blocks of queries, SLICE]; FAR: not theirs
    biases: np.ndarray


def slices_of(choice: Choice, owned: Any = lambda turn: True) -> list[tuple[int, Slice | None]]:
    """The keys of each slice and its list, those that are not owned without one."""
    n_block, tables = len(choice.rows), choice.tables
    indices = np.concatenate([*choice.rows, [-1]]).astype(np.int32)
    ends = np.cumsum([0, *(len(row) for row in choice.rows)]).tolist()
    weights = choice.biases and np.concatenate([*choice.biases, [np.nan]]).astype(np.float32)
    found: list[tuple[int, Slice | None]] = []
    with as_python(slices):
        walk, note = slices.listing(n_block)

        def body():
            b = local.thread * n_block // 32
            left, used, n = walk(indices.ctypes.data, ends[b], ends[b + 1]), 0, 1
            keys = slices.Keys(
                choice.low, choice.high, choice.block, tables[0].ctypes.data,
                tables[1].ctypes.data, N_HEAD_KV, HEAD,
                0 if weights is None else weights.ctypes.data,
            )  # fmt: skip
            while n > 0:
                mine = owned(len(found))
                left, used, n = note(0, left, used, indices.ctypes.data, choice.seen[b], keys, mine)
                exchanged(0)
                if local.thread == 0:
                    found.append((n, read(local.block.shared, n_block) if mine else None))
                exchanged(0)

        run_block(body, 32, [indices, *tables, *([] if weights is None else [weights])])
    return found


def read(shared: dict[int, float], n_block: int) -> Slice:
    """What a warp has listed at 0."""

    def words(at: int) -> list[float]:
        return [shared[at + 4 * i] for i in range(SLICE)]

    entries = [slices.ENTRIES + 8 * SLICE * b for b in range(n_block)]
    return Slice(
        [int(shared[4 * b]) for b in range(n_block)],
        np.array([words(slices.K_ROWS), words(slices.V_ROWS)], int),
        np.array([words(at) for at in entries], int),
        np.array([words(at + 4 * SLICE) for at in entries]),
    )


def chosen(n_block: int, block: int, n_kv: int, share: float, rng: np.random.Generator) -> Choice:
    """A random choice of n_kv positions; the second block of queries has what the first has."""
    n = -(-n_kv // block)
    rows = [np.flatnonzero(rng.random(n) < share) for _ in range(n_block)]
    if n_block > 2:
        rows[1], rows[2] = rows[0], rows[2][:0]
    n_page = n_kv // PAGE + 1
    return Choice(
        rows, block, 0, n_kv - 1, [(0, n_kv - 1 - 16 * (n_block - 1 - b)) for b in range(n_block)],
        None, (rng.permutation(n_page).astype(np.int32), rng.permutation(n_page).astype(np.int32)),
    )  # fmt: skip


def check(choice: Choice) -> list[Slice]:
    """Each block of queries has its keys once, in rows of their own, and kinds tell no less."""
    (*found, last), n_block = slices_of(choice), len(choice.rows)
    assert last[0] == 0
    assert last[1].kinds == [slices.END] * n_block
    assert all(n == SLICE for n, _ in found[:-1])
    lists = [list_ for _, list_ in found]
    union: list[int] = []
    for n, slice_ in found:
        at = slice_.positions.min(axis=0)
        mine = at != FAR
        assert not mine[n:].any()
        assert np.isin(slice_.positions, [*at, FAR]).all()
        for table, rows in zip(choice.tables, slice_.rows, strict=True):
            where = (table[at[mine] // PAGE] * N_HEAD_KV + HEAD) * PAGE + at[mine] % PAGE
            np.testing.assert_array_equal(rows[mine], where)
            assert (rows[~mine] == -1).all()
        union += at[mine].tolist()
    assert len(set(union)) == len(union)
    for b, (row, (first, end)) in enumerate(zip(choice.rows, choice.seen, strict=True)):
        positions = (row[:, None] * choice.block + np.arange(choice.block)).ravel()
        kept = (choice.low <= positions) & (positions <= choice.high)
        biases = np.zeros(len(row)) if choice.biases is None else choice.biases[b] * LOG2_E
        expected = dict(zip(positions[kept], np.repeat(biases, choice.block)[kept], strict=True))
        got: dict[int, float] = {}
        for slice_ in lists:
            mine = slice_.positions[b] != FAR
            there = slice_.positions[b][mine]
            got |= dict(zip(there, slice_.biases[b][mine], strict=True))
            assert slice_.kinds[b] in (slices.NOTHING, slices.SOME, slices.WHOLE)
            assert (slice_.kinds[b] == slices.NOTHING) <= (len(there) == 0)
            if slice_.kinds[b] == slices.WHOLE:
                assert mine.all()
                assert first <= there.min()
                assert there.max() <= end
        assert got.keys() == expected.keys()
        assert got == pytest.approx(expected, rel=1e-6)
    return lists


@pytest.mark.parametrize("n_block", [1, 2, 4, 8])
@pytest.mark.parametrize(("block", "share"), [(1, 0.3), (2, 0.5), (3, 0.5), (16, 0.9), (128, 0.6)])
def test_every_chosen_key_comes_once(n_block, block, share):
    rng = np.random.default_rng((n_block, block))
    check(chosen(n_block, block, int(rng.integers(200, 900)), share, rng))


@pytest.mark.parametrize("n_kv", [1, SLICE - 1, SLICE, SLICE + 1, 700])
def test_all_keys_come_and_slices_that_all_queries_see_are_whole(n_kv):
    choice = chosen(2, 2 * SLICE, n_kv, 1.0, np.random.default_rng(n_kv))
    kinds = [slice_.kinds for slice_ in check(choice)]
    last = [max(0, end + 1) // SLICE for _, end in choice.seen]  # slices that end where all see
    assert [sum(kind == slices.WHOLE for kind in of) for of in zip(*kinds, strict=True)] == last


def test_positions_out_of_range_and_biases_of_entries():
    rng = np.random.default_rng(3)
    choice = chosen(2, 2, 500, 0.4, rng)
    biases = [rng.standard_normal(len(row)) for row in choice.rows]
    lists = check(choice._replace(low=101, high=333, biases=biases))
    assert all(slices.WHOLE not in slice_.kinds for slice_ in lists)


def test_a_slice_of_another_warp_is_passed():
    choice = chosen(4, 2, 600, 0.5, np.random.default_rng(4))
    whole, some = slices_of(choice), slices_of(choice, lambda turn: turn % 4 == 2)
    assert [n for n, _ in some] == [n for n, _ in whole]
    for i in range(2, len(whole), 4):
        for one, other in zip(whole[i][1], some[i][1], strict=True):
            np.testing.assert_array_equal(one, other)
