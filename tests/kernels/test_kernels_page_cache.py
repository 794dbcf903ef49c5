"""The ops of the page cache over a backing store, between unmapped pages."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv import access_spans as reads

KERNELS = [
    (ops.KV_ALLOCATE, ()), (ops.KV_WRITE_BACK, ()), (ops.KV_MARK, ()), (ops.KV_FETCH, ()),
    *((ops.KV_EVICT, (reader,)) for reader in ops.KV_READERS),
]  # fmt: skip
N_LAYER, N_RING, N_HEAD_KV, ROWS = 3, 3, 2, (34, 96)  # rows: of q8_0 and of f16, in bytes
N_FIRST = N_LAYER * N_RING
STATE = {name: at // 8 for name, at in ops.KV_STATE._asdict().items()}


class Maps:
    """A state of frames that passes may have left: who is where, at random."""

    def __init__(self, rng, n_page, n_cache, n_pass=9):
        self.n_page, self.n_cache = n_page, n_cache
        self.table = np.full((N_LAYER, n_page), -1, np.int32)
        self.ring = np.full((N_LAYER, N_RING), -1, np.int32)
        self.owner = np.full(n_cache, -1, np.int32)
        self.used = np.full(n_cache, -ops.KV_OLD, np.int32)
        self.state = np.zeros(ops.KV_STATE_SIZE, np.int64)
        self.state[:] = n_pass, 77, 5, 1000, 100
        for layer in range(N_LAYER):
            for slot in range(min(N_RING, n_page)):
                page = int(rng.choice(np.arange(slot, n_page, N_RING)))
                kind = rng.integers(3)  # nothing; a page; one that was there
                if kind:
                    self.ring[layer, slot] = page
                    self.table[layer, page] = layer * N_RING + slot if kind == 1 else -1
        free = list(rng.permutation(n_cache)[: int(n_cache * rng.choice([0.3, 0.7, 1]))])
        for at in rng.permutation(N_LAYER * n_page):
            if free and self.table.flat[at] < 0:
                frame = free.pop()
                self.table.flat[at], self.owner[frame] = N_FIRST + frame, at
                last = n_pass - rng.integers(1, 4)
                self.used[frame] = last * N_LAYER + at // n_page
        self.used[self.owner < 0] = rng.integers(-ops.KV_OLD, 5, (self.owner < 0).sum())

    def fields(self, *names):
        return {name: getattr(self, name).copy() for name in names}

    def check(self, found):
        """Frames that have an owner are where the table says, and no others."""
        owner, table = found["owner"], found["table"]
        for frame in np.flatnonzero(owner >= 0):
            assert table.flat[owner[frame]] == N_FIRST + frame
        assert (table >= N_FIRST).sum() == (owner >= 0).sum()


def pages_of(rng, n):
    """K and V of n pages, bytes."""
    return [rng.integers(0, 256, (n, N_HEAD_KV, PAGE * size), np.uint8) for size in ROWS]


SIZES = {"n_layer": N_LAYER, "n_ring": N_RING, "n_head_kv": N_HEAD_KV}
SIZES |= {"k_bytes": ROWS[0], "v_bytes": ROWS[1]}


@pytest.mark.on_threads
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("pos", "n_tok"), [(0, 1), (64, 1), (70, 1), (127, 1), (300, 128), (257, 64), (319, 3)]
)
@in_child
def test_pages_that_are_written_to_have_their_frames(seed, pos, n_tok):
    rng, n_page = np.random.default_rng((seed, pos)), 7
    maps = Maps(rng, n_page, 16)
    stored, frames = pages_of(rng, N_LAYER * n_page), pages_of(rng, N_FIRST + 16)
    chunk = range(pos // PAGE, (pos + n_tok - 1) // PAGE + 1)
    table, used = maps.table.copy(), maps.used.copy()
    expected = [each.copy() for each in frames]
    for layer in range(N_LAYER):
        slots = {layer * N_RING + page % N_RING: page for page in chunk}
        for page in range(n_page):
            if table[layer, page] in slots:
                table[layer, page] = -1
        for slot, page in slots.items():
            before = maps.table[layer, page]
            if before >= N_FIRST:
                used[before - N_FIRST] = -ops.KV_OLD
            table[layer, page] = slot
            if before != slot and page == chunk[0]:
                for size, at, to in zip(ROWS, stored, expected, strict=True):
                    n = (pos % PAGE * size + 15) // 16 * 16
                    to[slot, :, :n] = at[layer * n_page + page, :, :n]
    out = maps.fields("state", "table", "ring", "owner", "used")
    out |= {"k_frames": frames[0], "v_frames": frames[1]}
    for found in runs(
        ops.KV_ALLOCATE, out=out, step=step_of(n_tok, pos), k_store=stored[0], v_store=stored[1],
        n_page=n_page, **SIZES,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["table"], table)
        np.testing.assert_array_equal(found["used"], used)
        np.testing.assert_array_equal(found["k_frames"], expected[0])
        np.testing.assert_array_equal(found["v_frames"], expected[1])
        np.testing.assert_array_equal(found["state"], np.add(maps.state, [1, 0, 0, 0, 0]))
        for page in chunk:
            assert (found["ring"][:, page % N_RING] == page).all()
        maps.check(found)


@pytest.mark.on_threads
@pytest.mark.parametrize(("pos", "n_tok"), [(0, 1), (63, 1), (70, 1), (300, 129), (257, 64)])
@in_child
def test_the_home_gets_what_was_written(pos, n_tok):
    rng, n_page = np.random.default_rng(pos), 7
    stored, frames = pages_of(rng, N_LAYER * n_page), pages_of(rng, N_FIRST)
    expected = [each.copy() for each in stored]
    for layer in range(N_LAYER):
        for page in range(pos // PAGE, (pos + n_tok - 1) // PAGE + 1):
            low, high = max(0, pos - PAGE * page), min(PAGE, pos + n_tok - PAGE * page)
            slot = layer * N_RING + page % N_RING
            for size, source, to in zip(ROWS, frames, expected, strict=True):
                part = slice(low * size // 16 * 16, (high * size + 15) // 16 * 16)
                to[layer * n_page + page, :, part] = source[slot, :, part]
    for found in runs(
        ops.KV_WRITE_BACK, out={"k_store": stored[0], "v_store": stored[1]},
        step=step_of(n_tok, pos),
        k_frames=frames[0], v_frames=frames[1], n_page=n_page, **SIZES,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["k_store"], expected[0])
        np.testing.assert_array_equal(found["v_store"], expected[1])


@pytest.mark.on_threads
@pytest.mark.parametrize("block", [1, 16, 64, 96])
@pytest.mark.parametrize(
    ("n_tok", "pos", "q_block", "stride", "window"),
    [(1, 0, 1, 1, 0), (1, 900, 1, 1, 0), (1, 900, 1, 1, 200), (37, 500, 16, 1, 0),
     (37, 500, 16, 1, 150), (5, 130, 16, 64, 0), (0, 130, 16, 64, 0)],
)  # fmt: skip
@in_child
def test_the_pages_of_a_selection_are_marked(n_tok, pos, q_block, stride, window, block):
    rng, n_row, n_page = np.random.default_rng((block, pos)), 3, 16
    rows = -(-n_tok // q_block) * n_row
    sets = [np.flatnonzero(rng.random(-(-1024 // block)) < 0.1) for _ in range(rows)]
    indptr = np.cumsum([0, *map(len, sets)]).astype(np.int32)
    indices = np.concatenate([*sets, [1000]]).astype(np.int32)  # the last one is no row's
    seen = range(max(0, pos - window + 1) if window else 0, pos + stride * (n_tok - 1) + 1)
    chosen = {j // PAGE for j in seen for s in sets if j // block in s}
    state, wanted = np.zeros(ops.KV_STATE_SIZE, np.int64), np.arange(n_page, dtype=np.int32)
    state[STATE["serial"]] = 99
    expected = np.where(np.isin(np.arange(n_page), [*chosen]), 99, wanted)
    for found in runs(
        ops.KV_MARK, out={"marks": wanted}, step=step_of(n_tok, pos), state=state, indptr=indptr,
        indices=indices, n_row=n_row, q_block=q_block, block=block, window=window, stride=stride,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["marks"], expected)


def ranks(used, now):
    """Which frames are taken first, as the contract says."""
    age = now - used.astype(np.int64)
    rank = np.where(age >= N_LAYER, age, N_LAYER - age)
    return np.where(age == 0, 0, np.minimum(rank, ops.KV_RANKS - 1))


def check_taken(maps, layer, wanted, n_tok, pos, reader, **fields):
    """KV_EVICT gives frames to those of the wanted pages that have none."""
    now, table = maps.state[STATE["n_pass"]] * N_LAYER + layer, maps.table[layer]
    absent = sorted(page for page in wanted if table[page] < 0)
    hits = [page for page in wanted if table[page] >= 0]
    used = maps.used.copy()
    used[[table[page] - N_FIRST for page in hits if table[page] >= N_FIRST]] = now
    rank, n = ranks(used, now), len(absent)
    out = maps.fields("state", "table", "owner", "used")
    out |= {"missing": np.zeros(maps.n_page, np.int32), "counts": np.zeros(ops.KV_RANKS, np.int32)}
    serial = int(maps.state[STATE["serial"]])
    marks = np.full(maps.n_page, serial - 1, np.int32)
    if reader == "chosen":
        marks[[*wanted]] = serial
    for found in runs(
        ops.KV_EVICT, (reader,), out=out, step=step_of(n_tok, pos), marks=marks, layer=layer,
        n_layer=N_LAYER, n_page=maps.n_page, n_first=N_FIRST, n_cache=maps.n_cache, **fields,
    ):  # fmt: skip
        np.testing.assert_array_equal(
            found["state"], [maps.state[0], serial + 1, n, 1000 + len(hits), 100 + n]
        )
        assert sorted(found["missing"][:n]) == absent
        taken = found["table"][layer, absent] - N_FIRST
        assert ((taken >= 0) & (taken < maps.n_cache)).all()
        assert (found["table"][layer, hits] == table[hits]).all()
        left = np.delete(np.arange(maps.n_cache), taken)
        assert (rank[taken] > 0).all()
        assert n == 0 or rank[taken].min() >= rank[left].max(initial=0)
        np.testing.assert_array_equal(found["used"][left], used[left])
        np.testing.assert_array_equal(found["owner"][left], maps.owner[left])
        assert (found["used"][taken] == now).all()
        expected = maps.table.copy()
        expected.flat[maps.owner[taken][maps.owner[taken] >= 0]] = -1
        expected[layer, absent] = taken + N_FIRST
        np.testing.assert_array_equal(found["table"], expected)
        maps.check(found)


NOTHING = {"found": 0, "n_found": 0, "block": 0, "x": 0, "y": 0}


@pytest.mark.parametrize("share", [0, 0.1, 0.6, 1])
@pytest.mark.parametrize(("n_page", "n_cache"), [(7, 16), (40, 48), (40, 112), (3000, 4112)])
@in_child
def test_frames_are_taken_that_are_needed_last(n_page, n_cache, share):
    for layer in range(N_LAYER):
        rng = np.random.default_rng((n_page, n_cache, layer))
        pos = PAGE * n_page - 5
        wanted = np.flatnonzero(rng.random(n_page) < share).tolist()
        check_taken(Maps(rng, n_page, n_cache), layer, wanted, 1, pos, "chosen", **NOTHING)


def spans_of(op, step, fields):
    """The positions that kv/access_spans.py says an op reads."""
    arrays = {name: value for name, value in fields.items() if not isinstance(value, int)}
    arrays["step"] = step
    values = dict.fromkeys(op.fields, 0) | fields
    values |= {name: array.ctypes.data for name, array in arrays.items()}
    by_address = {array.ctypes.data: array for array in arrays.values()}
    return reads.spans(op.reads, reads.Fields(values, by_address))


READERS = [  # op, the fields that tell what it reads
    (ops.QUEST_BOUNDS, {"filled": [0], "page": 16}),
    (ops.QUEST_BOUNDS, {"filled": [1000], "page": 48}),
    (ops.QUEST_BOUNDS, {"filled": [5000], "page": 16}),
    (ops.HIP_MEANS, {"filled": [500, 70], "block": 2, "top": 3}),
    (ops.HIP_MEANS, {"filled": [9000, 9000], "block": 2, "top": 3}),
    (ops.HIP_SEARCH, {"block": 16, "n_sink": 9, "n_local": 100}),
    (ops.HIP_SEARCH, {"block": 2, "n_sink": 1, "n_local": 5000}),
    (ops.LFPS_START, {"meta": [[1200, 0, 0, 0, 0, 0]] * 3}),
    (ops.LFPS_START, {"meta": [[1200, 0, 0, 0, 0, 0], [1199, 0, 0, 0, 0, 0]]}),
    (ops.TACTIC_JOINT_RANK, {"extent": [4, 900, 30], "n_sink": 4, "counted": 1}),
    (ops.TACTIC_JOINT_RANK, {"extent": [4, 900, 30], "n_sink": 4, "counted": 0}),
    (ops.SCORE_KEYS, {}),
    (ops.KEY_CODES, {"filled": [1000, 1000]}),
    (ops.KEY_CODES, {"filled": [5000, 5000]}),
]  # fmt: skip


@pytest.mark.on_threads
@pytest.mark.parametrize("case", range(len(READERS)))
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 1200), (1, 1215), (70, 1200)])
@in_child
def test_what_an_op_reads_is_found_from_its_fields(case, n_tok, pos):
    op, fields = READERS[case]
    fields = {k: np.array(v, np.int64) if isinstance(v, list) else v for k, v in fields.items()}
    spans = spans_of(op, step_of(n_tok, pos), fields)
    end = (pos + n_tok - 1) // PAGE + 1
    wanted = {page for a, b in spans for page in range(a // PAGE, min(end, -(-b // PAGE)))}
    how, rng = op.reads, np.random.default_rng(case)
    found, block, x, y = (fields.get(name, 0) for name in (how.found, how.block, how.x, how.y))
    n_found = 0 if isinstance(found, int) else found.size // how.every
    given = {"found": found, "n_found": n_found, "block": block, "x": x, "y": y}
    check_taken(Maps(rng, 22, 32), 1, sorted(wanted), n_tok, pos, how.name, **given)


@pytest.mark.on_threads
@pytest.mark.parametrize("n", [0, 1, 5])
@in_child
def test_what_is_missing_comes_to_its_frames(n):
    rng, n_page, layer = np.random.default_rng(n), 7, 1
    stored, frames = pages_of(rng, N_LAYER * n_page), pages_of(rng, 20)
    table = np.full((N_LAYER, n_page), -1, np.int32)
    missing = rng.permutation(n_page).astype(np.int32)
    table[layer] = rng.permutation(20)[:n_page]
    state = np.zeros(ops.KV_STATE_SIZE, np.int64)
    state[STATE["n_missing"]] = n
    expected = [each.copy() for each in frames]
    for page in missing[:n]:
        for source, to in zip(stored, expected, strict=True):
            to[table[layer, page]] = source[layer * n_page + page]
    for found in runs(
        ops.KV_FETCH, out={"k_frames": frames[0], "v_frames": frames[1]}, state=state, table=table,
        missing=missing, k_store=stored[0], v_store=stored[1], layer=layer, n_page=n_page,
        n_head_kv=N_HEAD_KV, k_bytes=ROWS[0], v_bytes=ROWS[1],
    ):  # fmt: skip
        np.testing.assert_array_equal(found["k_frames"], expected[0])
        np.testing.assert_array_equal(found["v_frames"], expected[1])
