"""The ops of the token bank, between unmapped pages: who is where, and what came."""

import os
import tempfile

import numpy as np
import pytest
from crc32c import crc32c
from guarded import in_child, is_on_gpu, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE

KERNELS = [(op, ()) for op in (ops.BANK_BEGIN, ops.BANK_LOOKUP, ops.BANK_FETCH, ops.BANK_READ)]
N_LAYER, N_HEAD_KV, N_PAGE, ROWS = 3, 2, 9, (34, 96)  # rows: of q8_0 and of f16, in bytes
AT = {name: at // 8 for name, at in ops.BANK_STATE._asdict().items()}
NOW, N_BANK = 70, N_PAGE + ops.BANK_GROUP + 1


class Bank:
    """A bank that steps may have left: units of random layers in random slots, stamped before."""

    def __init__(self, rng, unit, n_page, share):
        self.unit, self.n_slot, self.n_unit = unit, n_page * PAGE // unit, N_PAGE * PAGE // unit
        self.slots = np.full((N_LAYER, N_HEAD_KV, self.n_unit), -1, np.int32)
        self.owner = np.full((N_HEAD_KV, self.n_slot), -1, np.int32)
        self.used = np.full((N_HEAD_KV, self.n_slot), -ops.KV_OLD, np.int32)
        for h in range(N_HEAD_KV):
            n = int(share * (self.n_slot - 1))
            owners = rng.permutation(N_LAYER * self.n_unit)[:n]
            places = rng.permutation(self.n_slot - 1)[: len(owners)]
            self.owner[h, places] = owners
            self.used[h, places] = rng.integers(NOW - 9, NOW, len(owners))
            self.slots[owners // self.n_unit, h, owners % self.n_unit] = places
        self.state = np.zeros(ops.BANK_STATE_SIZE, np.int64)
        self.state[AT["serial"]], self.state[AT["n_hit"]] = NOW, 1000
        self.hands = rng.integers(0, (self.n_slot - 1) // ops.BANK_GROUP, N_HEAD_KV)

    @property
    def sizes(self):
        """The fields that all ops of a bank have."""
        names = {"n_unit": self.n_unit, "n_slot": self.n_slot, "unit": self.unit}
        return names | {"n_head_kv": N_HEAD_KV}


def selection_of(rng, block, n_row, pos):
    """A Selection of one query: indptr and indices, some blocks and always the last."""
    last = pos // block
    sets = [[*np.flatnonzero(rng.random(last) < 0.4).tolist(), last] for _ in range(n_row)]
    indptr = np.cumsum([0, *map(len, sets)]).astype(np.int32)
    return indptr, np.concatenate(sets).astype(np.int32)


@pytest.mark.parametrize("share", [0, 0.4, 1])
@pytest.mark.parametrize("n_row", [2, 6])
@pytest.mark.parametrize(("unit", "block"), [(2, 1), (2, 2), (16, 2), (16, 16), (64, 16)])
@in_child
def test_units_have_slots_and_rows_are_where_they_are(unit, block, n_row, share):
    rng, layer = np.random.default_rng((unit, block, n_row)), 1
    bank, pos = Bank(rng, unit, N_BANK, share), 530
    indptr, indices = selection_of(rng, block, n_row, pos)
    heads = np.repeat(np.arange(n_row) * N_HEAD_KV // n_row, np.diff(indptr))
    units, top = indices.astype(np.int64) * block // unit, bank.n_slot - 1
    out = {name: getattr(bank, name) for name in ("state", "slots", "owner", "used", "hands")}
    out |= {"missing": np.zeros((N_HEAD_KV, bank.n_unit), np.int32)}
    out |= {"n_missing": np.zeros(N_HEAD_KV, np.int64), "rows": np.zeros(len(indices), np.int32)}
    for found in runs(
        ops.BANK_LOOKUP, out=out, step=step_of(1, pos), indptr=indptr, indices=indices,
        layer=layer, n_layer=N_LAYER, n_row=n_row, block=block, **bank.sizes,
    ):  # fmt: skip
        slots, owner, used = found["slots"], found["owner"], found["used"]
        first = found["rows"].astype(np.int64) * block
        newest = units >= pos // unit
        expected = np.where(newest, top, slots[layer, heads, np.minimum(units, bank.n_unit - 1)])
        np.testing.assert_array_equal(first // unit, expected)
        np.testing.assert_array_equal(first % unit, indices.astype(np.int64) * block % unit)
        n_hit = 0
        for h in range(N_HEAD_KV):
            asked = np.unique(units[(heads == h) & ~newest])
            absent = asked[bank.slots[layer, h, asked] < 0]
            n = found["n_missing"][h]
            assert is_on_gpu() or (found["missing"][h, :n] == absent).all()
            assert sorted(found["missing"][h, :n]) == absent.tolist()
            n_hit += len(asked) - n
            assert (used[h, slots[layer, h, asked]] == NOW).all()
            assert (used[h] == NOW).sum() == len(asked)
            held = np.flatnonzero(owner[h] >= 0)
            where = owner[h, held]
            np.testing.assert_array_equal(slots[where // bank.n_unit, h, where % bank.n_unit], held)
            assert (slots[:, h] >= 0).sum() == len(held)
            # What was evicted is no younger than what its group keeps of this layer's calls.
            assert owner[h, top] == -1
        assert found["state"][AT["n_hit"]] == 1000 + n_hit
        assert found["state"][AT["n_miss"]] == found["n_missing"].sum()


@in_child
def test_of_a_group_the_slot_is_evicted_that_was_used_longest_ago():
    rng = np.random.default_rng(0)
    bank, layer = Bank(rng, 16, N_BANK, 1), 0
    bank.slots[layer], bank.hands[:] = -1, 0
    bank.owner[bank.owner < bank.n_unit] = -1
    indptr, indices = np.array([0, 1, 2], np.int32), np.array([3, 3], np.int32)
    out = {name: getattr(bank, name) for name in ("state", "slots", "owner", "used", "hands")}
    out |= {"missing": np.zeros((N_HEAD_KV, bank.n_unit), np.int32)}
    out |= {"n_missing": np.zeros(N_HEAD_KV, np.int64), "rows": np.zeros(2, np.int32)}
    age = NOW - bank.used[:, : ops.BANK_GROUP].astype(np.int64)
    rank = np.where(age >= N_LAYER, age, N_LAYER - age)
    for found in runs(
        ops.BANK_LOOKUP, out=out, step=step_of(1, 500), indptr=indptr, indices=indices,
        layer=layer, n_layer=N_LAYER, n_row=2, block=16, **bank.sizes,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["rows"], rank.argmax(axis=1))
        np.testing.assert_array_equal(found["hands"], [1, 1])


@pytest.mark.parametrize("n_written", [0, 500, 531, 900])
@in_child
def test_what_is_written_anew_is_dropped(n_written):
    bank, pos = Bank(np.random.default_rng(1), 16, N_BANK, 0.7), 500
    bank.state[AT["n_written"]] = n_written
    out = {name: getattr(bank, name) for name in ("state", "slots", "owner", "used")}
    row_step = np.zeros(ops.STEP_SIZE, np.int64)
    first, end = (pos // 16, (n_written - 1) // 16 + 1) if pos < n_written else (0, 0)
    end = min(end, bank.n_unit)
    if n_written > N_PAGE * PAGE:
        bank.state[AT["n_written"]] = N_PAGE * PAGE
    for found in runs(
        ops.BANK_BEGIN, out=out | {"row_step": row_step}, step=step_of(1, pos), n_layer=N_LAYER,
        **bank.sizes,
    ):  # fmt: skip
        expected, owner = bank.slots.copy(), bank.owner.copy()
        for h in range(N_HEAD_KV):
            gone = expected[:, h, first:end]
            owner[h, gone[gone >= 0]] = -1
            gone[...] = -1
        np.testing.assert_array_equal(found["slots"], expected)
        np.testing.assert_array_equal(found["owner"], owner)
        assert found["state"][AT["n_written"]] == pos + 1
        np.testing.assert_array_equal(
            found["row_step"], [1, (bank.n_slot - 1) * 16 + pos % 16, 0, 0, 0, 0]
        )


def lines(pages, h, first, n):
    """n rows of head h of pages that are in order."""
    return pages[first // PAGE, h].reshape(PAGE, -1)[first % PAGE : first % PAGE + n]


@pytest.mark.parametrize("unit", [2, 16, 64])
@pytest.mark.parametrize("pos", [530, 512, 575])
@in_child
def test_what_is_missing_comes_to_its_slots(unit, pos):
    rng, layer = np.random.default_rng(unit), 2
    bank = Bank(rng, unit, N_BANK, 0.9)
    shapes = (N_LAYER * N_PAGE, N_BANK, 20)
    stores, banks, frames = (
        [rng.integers(0, 256, (n, N_HEAD_KV, PAGE * size), np.uint8) for size in ROWS]
        for n in shapes
    )
    table = rng.permutation(20)[:N_PAGE].astype(np.int32)
    missing = np.zeros((N_HEAD_KV, bank.n_unit), np.int32)
    n_missing = np.zeros(N_HEAD_KV, np.int64)
    expected = [each.copy() for each in banks]
    for h in range(N_HEAD_KV):
        some = np.flatnonzero(bank.slots[layer, h, : pos // unit] >= 0)[: 5 + 3 * h]
        missing[h, : len(some)], n_missing[h] = some, len(some)
        for store, frame, to in zip(stores, frames, expected, strict=True):
            home = store[N_PAGE * layer : N_PAGE * (layer + 1)]
            for u in some:
                slot = int(bank.slots[layer, h, u])
                lines(to, h, slot * unit, unit)[...] = lines(home, h, int(u) * unit, unit)
            n, first = pos % unit + 1, pos // unit * unit
            own = frame[table[first // PAGE]][None]
            top = (bank.n_slot - 1) * unit
            lines(to, h, top, n)[...] = lines(own, h, first % PAGE, n)
    for found in runs(
        ops.BANK_FETCH, out={"k_bank": banks[0], "v_bank": banks[1], "state": bank.state},
        step=step_of(1, pos), slots=bank.slots, missing=missing, n_missing=n_missing,
        k_store=stores[0], v_store=stores[1], k_frames=frames[0], v_frames=frames[1], table=table,
        layer=layer, n_page=N_PAGE, k_bytes=ROWS[0], v_bytes=ROWS[1], **bank.sizes,
    ):  # fmt: skip
        for name, to, kept in zip(("k_bank", "v_bank"), expected, banks, strict=True):
            for h in range(N_HEAD_KV):  # of the last slot, what is beyond the query may be anything
                top = (bank.n_slot - 1) * unit
                seen = top + pos % unit + 1
                one = found[name][:, h].reshape(N_BANK * PAGE, -1)
                other = to[:, h].reshape(N_BANK * PAGE, -1)
                np.testing.assert_array_equal(one[:seen], other[:seen])
            assert kept.shape == found[name].shape
        assert found["state"][AT["serial"]] == NOW + 1


def drop(file, cold):
    """Let the system drop its copies of a file, where it is to be read cold."""
    if cold:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.cpu_only  # BANK_READ is of files, which a GPU does not read
@pytest.mark.parametrize(("unit", "file_unit"), [(2, 16), (16, 16), (16, 4), (64, 16)])
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
@in_child
def test_what_is_missing_is_read_from_a_file_and_checked(unit, file_unit, damaged, cold):
    rng, layer, pos = np.random.default_rng(unit + file_unit), 2, 530
    bank, dirty = Bank(rng, unit, N_BANK, 0.9), pos // PAGE * PAGE
    stores, banks, frames = (
        [rng.integers(0, 256, (n, N_HEAD_KV, PAGE * size), np.uint8) for size in ROWS]
        for n in (N_LAYER * N_PAGE, N_BANK, 20)
    )
    tables = [rng.permutation(20)[:N_PAGE].astype(np.int32) for _ in ROWS]
    sums = [
        np.array(
            [crc32c(each.tobytes()) for each in store.reshape(-1, file_unit * size)], np.uint32
        )
        for store, size in zip(stores, ROWS, strict=True)
    ]
    missing = np.zeros((N_HEAD_KV, bank.n_unit), np.int32)
    n_missing = np.zeros(N_HEAD_KV, np.int64)
    expected = [each.copy() for each in banks]
    for h in range(N_HEAD_KV):
        some = np.flatnonzero(bank.slots[layer, h, : pos // unit] >= 0)
        missing[h, : len(some)], n_missing[h] = some, len(some)
        for store, frame, table, to in zip(stores, frames, tables, expected, strict=True):
            home = store[N_PAGE * layer : N_PAGE * (layer + 1)]
            for u in map(int, some):
                page = u * unit // PAGE
                source = home[page] if u * unit < dirty else frame[table[page]]
                own = lines(source[None], h, u * unit % PAGE, unit)
                lines(to, h, int(bank.slots[layer, h, u]) * unit, unit)[...] = own
            n, first = pos % unit + 1, pos // unit * unit
            own = lines(frame[table[first // PAGE]][None], h, first % PAGE, n)
            lines(to, h, (bank.n_slot - 1) * unit, n)[...] = own
    with tempfile.TemporaryFile() as file:
        k_start, v_start = 100, 100 + stores[0].nbytes
        os.pwrite(file.fileno(), stores[0].tobytes() + stores[1].tobytes(), k_start)
        if damaged:  # a unit of the values that is among the missing ones
            at = (layer * N_PAGE * N_HEAD_KV) * PAGE + int(missing[0, 0]) * unit
            os.pwrite(file.fileno(), b"\1\2\3", v_start + ROWS[1] * at)
        out = {"k_bank": banks[0], "v_bank": banks[1], "state": bank.state, "missing": missing}
        drop(file, cold)
        for found in runs(
            ops.BANK_READ, out=out | {"buffers": np.zeros((8, ops.BANK_BUFFER), np.uint8)},
            step=step_of(1, pos), slots=bank.slots, n_missing=n_missing,
            k_frames=frames[0], v_frames=frames[1], k_table=tables[0], v_table=tables[1],
            k_sums=sums[0], v_sums=sums[1], ahead=np.zeros(ops.BANK_AHEAD_SIZE, np.int64),
            handle=file.fileno(), k_start=k_start, v_start=v_start, layer=layer, n_page=N_PAGE,
            n_layer=N_LAYER, file_unit=file_unit, k_bytes=ROWS[0], v_bytes=ROWS[1], **bank.sizes,
        ):  # fmt: skip
            assert (found["state"][AT["n_bad"]] > 0) == damaged
            assert found["state"][AT["n_read"]] > 0
            assert found["state"][AT["serial"]] == NOW + 1
            for name, to in zip(("k_bank", "v_bank"), expected, strict=True):
                for h in range(0 if damaged else N_HEAD_KV):
                    seen = (bank.n_slot - 1) * unit + pos % unit + 1
                    one = found[name][:, h].reshape(N_BANK * PAGE, -1)
                    other = to[:, h].reshape(N_BANK * PAGE, -1)
                    np.testing.assert_array_equal(one[:seen], other[:seen])
            drop(file, cold)
