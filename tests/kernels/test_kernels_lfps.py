"""The ops of the method `lfps` against its Algorithm 1, between unmapped pages, for many steps."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import normal, page_table, paged
from guarded import in_child, runs, step_of
from lfps_oracle import Renewed

from tamis.jit_kernels.contract import ops
from tamis.select.lfps import BYPASSES, LFPS, threshold

HEAD_DIM, GROUP, N_HEAD_KV = 16, 2, 2
N_HEAD = GROUP * N_HEAD_KV
CAPACITY = 320  # at least 64 more than there are positions
TABLED = (ops.LFPS_START, ops.LFPS_SETS, ops.LFPS_BYPASS)
KERNELS = [
    (ops.LFPS_KEEP, (HEAD_DIM,)),
    (ops.LFPS_PROPOSE, ()),
    *((op, (HEAD_DIM, GROUP, rows)) for op in TABLED for rows in (1, GROUP)),
]
P = LFPS(a=0.2, r=0.95, s=8, budget=0.1, epsilon=0.05, sink=4, local=10, bypass="none")


class Sequence:
    """Keys, values and queries with some structure, and where they lie in pages."""

    def __init__(self, seed, n, capacity=CAPACITY):
        rng = np.random.default_rng(seed)
        self.k = normal(rng, n, N_HEAD_KV, HEAD_DIM).astype(np.float16)
        self.k[:4] += 1  # sinks that some queries look at
        self.v = normal(rng, n, N_HEAD_KV, HEAD_DIM).astype(np.float16)
        drift = np.cumsum(0.3 * normal(rng, n, N_HEAD, HEAD_DIM), axis=0)
        self.q = (drift + normal(rng, n, N_HEAD, HEAD_DIM)).astype(np.float32)
        self.capacity, self.table = capacity, page_table(rng, n, capacity // 64)

    def of_row(self, r, group):
        """Queries [n, group, head_dim], K and V of a row."""
        h, heads = r * group // GROUP, slice(r * group, (r + 1) * group)
        return tuple(x.astype(float) for x in (self.q[:, heads], self.k[:, h], self.v[:, h]))

    def started(self, r, group, pos, n, p=P):
        """The tables of a row before position pos, from the n queries before it."""
        q, k, v = self.of_row(r, group)
        n_ctx = pos + 512 - pos % 256  # room for 256 steps at least
        return Renewed.started(p, q, k[: pos + 1], v[: pos + 1], n_ctx, n)

    def fields(self, *, values):
        pages = {"k_pages": paged(self.k, self.table), "k_table": self.table}
        if values:
            pages |= {"v_pages": paged(self.v, self.table), "v_table": self.table}
        return pages | {"n_head_kv": N_HEAD_KV, "scale": HEAD_DIM**-0.5}


def empty_tables(group, capacity=CAPACITY):
    n_row = N_HEAD // group
    return {
        "ver": np.full((n_row, capacity), 7, np.float32),  # left by another sequence
        "sla": np.full((n_row, capacity), -7, np.float32),
        "bits": np.full((n_row, 2, 2, capacity // 64 + 1), 0x7531, np.int64),
        "stats": np.zeros((n_row, ops.LFPS_STATS_SIZE), np.float64),
        "spread": np.zeros(N_HEAD, np.float64),
        "meta": np.full((n_row, len(ops.LFPS_META)), -1, np.int64),
        "means": np.zeros((N_HEAD_KV, 2, HEAD_DIM), np.float32),
        "scores": np.zeros((N_HEAD, capacity), np.float32),
    }


def scalars(p=P, capacity=CAPACITY):
    return {
        "capacity": capacity, "n_sink": p.sink, "n_local": p.local, "decay": p.r, "a": p.a,
    }  # fmt: skip


@pytest.mark.on_threads
@pytest.mark.parametrize(("n_tok", "pos"), [(1, 0), (3, 6), (37, 100)])
@in_child
def test_the_last_queries_are_kept(n_tok, pos):
    rng = np.random.default_rng(n_tok)
    q = normal(rng, n_tok, N_HEAD, HEAD_DIM)
    past, at = normal(rng, P.s, N_HEAD, HEAD_DIM), np.full(P.s, -1, np.int64)
    expected, expected_at = past.copy(), at.copy()
    for t in range(max(0, n_tok - P.s), n_tok):
        expected[(pos + t) % P.s], expected_at[(pos + t) % P.s] = q[t], pos + t
    for found in runs(
        ops.LFPS_KEEP, (HEAD_DIM,), out={"past": past, "past_pos": at}, step=step_of(n_tok, pos),
        q=q, n_head=N_HEAD, n_past=P.s,
    ):  # fmt: skip
        np.testing.assert_array_equal(found["past"], expected)
        np.testing.assert_array_equal(found["past_pos"], expected_at)


def past_of(seq, pos, n):
    """The n queries before `pos`, as LFPS_KEEP leaves them."""
    past, at = np.zeros((P.s, N_HEAD, HEAD_DIM), np.float32), np.full(P.s, -1, np.int64)
    for p in range(pos - n, pos):
        past[p % P.s], at[p % P.s] = seq.q[p], p
    return {"past": past, "past_pos": at, "n_past": P.s}


def check_tables(found, expected, r, pos):
    """Tables of one row. Float32 entries of at most 1: sums of a few steps' roundings."""
    scale = found["stats"][r, 0]
    middle = np.arange(P.sink, pos + 1 - P.local)
    ver, sla = found["ver"][r] * scale, found["sla"][r] * scale
    np.testing.assert_allclose(ver[middle], expected.ver[middle], rtol=1e-4, atol=2e-6)
    distances = pos - middle
    by_dist = sla[len(sla) - 65 - distances]
    np.testing.assert_allclose(by_dist, expected.sla[distances], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("group", [1, GROUP])
@pytest.mark.parametrize(("pos", "n"), [(150, 8), (150, 3), (150, 0), (15, 8), (14, 8), (13, 8)])
@in_child
def test_tables_start_from_the_last_queries(pos, n, group):
    seq, n_row = Sequence(3, pos + 1), N_HEAD // group
    fields = seq.fields(values=True) | past_of(seq, pos, n) | scalars()
    tables = empty_tables(group)
    last = n_row - GROUP // group
    tables["meta"][last:, 0] = pos  # tables of the last KV head continue
    for found in runs(
        ops.LFPS_START, (HEAD_DIM, GROUP, group), out=tables, step=step_of(1, pos), q=seq.q[pos:],
        **fields,
    ):  # fmt: skip
        for name in ("ver", "sla", "stats", "bits"):
            np.testing.assert_array_equal(found[name][last:], tables[name][last:])
        for r in range(last):
            expected = seq.started(r, group, pos, n)
            if expected is None:  # no middle yet
                np.testing.assert_array_equal(found["ver"][r], 7)
                continue
            check_tables(found, expected, r, pos)
            spread = found["spread"][r * group : (r + 1) * group]
            np.testing.assert_allclose(spread, expected.spread, rtol=1e-4)
            means = [expected.mean_key, expected.mean_value]
            np.testing.assert_allclose(found["means"][r * group // GROUP], means, rtol=0, atol=1e-5)


def step(seq, pos, tables, bypass, *, group, period, p=P):
    """One decode step by the ops, on one thread's buffers; all runs must agree."""
    meta = {"bypass": bypass, "budget": p.budget, "epsilon": p.epsilon}
    n_row, n_set = N_HEAD // group, seq.capacity // 5
    tables = tables | proposed(seq, pos, tables, period, p)
    out = tables | {
        "order": np.zeros((n_row, 2, seq.capacity), np.int32),
        "sets": np.zeros((n_row, n_set), np.int32),
        "counts": np.zeros(n_row, np.int32),
    }
    fixed = {name: out.pop(name) for name in ("means", "spread", "indptr", "indices")}
    # As in a token bank, keys are elsewhere: in the positions before those that they are of.
    places = (pos - fixed["indices"]).astype(np.int32)
    keys = seq.fields(values=False) | {"k_pages": paged(seq.k[pos::-1].copy(), seq.table)}
    results = [
        {name: array.copy() for name, array in found.items()}
        for found in runs(
            ops.LFPS_SETS, (HEAD_DIM, GROUP, group), out=out, step=step_of(1, pos),
            q=seq.q[pos : pos + 1], set_capacity=n_set, n_row=n_row, places=places, **fixed, **keys,
            **scalars(p, seq.capacity), **meta,
        )
    ]  # fmt: skip
    for other in results[1:]:
        for name in ("ver", "sla", "stats", "bits", "meta", "sets", "counts"):
            np.testing.assert_array_equal(other[name], results[0][name])
    return results[0] | fixed


def proposed(seq, pos, tables, period, p=P):
    """What LFPS_PROPOSE makes of the bitmaps, and lists; all runs must agree."""
    n_row, capacity = len(tables["ver"]), seq.capacity
    lists = {
        "sets": np.full((n_row, capacity), -7, np.int32), "counts": np.full(n_row, -7, np.int32),
    }  # fmt: skip
    fields = scalars(p, capacity)
    del fields["decay"]
    found = [
        {name: array.copy() for name, array in each.items()}
        for each in runs(
            ops.LFPS_PROPOSE, out={"bits": tables["bits"], **lists}, step=step_of(1, pos),
            n_row=n_row, period=period, **{name: tables[name] for name in ("ver", "sla", "stats")},
            **fields,
        )
    ]  # fmt: skip
    for r, n in enumerate(found[0]["counts"]):
        listed, near = found[0]["sets"][r, :n].tolist(), [*range(pos + 1 - 6, pos + 1)]
        assert listed[: p.sink] == [*range(p.sink)]
        assert listed[-6:] == near
        assert listed[p.sink : -6] == sorted({*listed[p.sink : -6]})
        for other in found[1:]:
            assert other["counts"][r] == n
            np.testing.assert_array_equal(other["bits"][r], found[0]["bits"][r])
            assert other["sets"][r, :n].tolist() == listed
    rows = [row[:n] for row, n in zip(found[0]["sets"], found[0]["counts"], strict=True)]
    return {
        "bits": found[0]["bits"],
        "indptr": np.cumsum([0, *map(len, rows)]).astype(np.int32),
        "indices": np.concatenate(rows),
    }


def first_tables(seq, pos, group, p=P):
    fields = seq.fields(values=True) | past_of(seq, pos, p.s) | scalars(p, seq.capacity)
    at = {"step": step_of(1, pos), "q": seq.q[pos : pos + 1]}
    heads, tables = (HEAD_DIM, GROUP, group), empty_tables(group, seq.capacity)
    found = next(runs(ops.LFPS_START, heads, out=tables, **at, **fields))
    found["meta"][:, 1:] = 0
    return {name: array.copy() for name, array in found.items()}


@pytest.mark.parametrize("bypass", [0, 1])
@pytest.mark.parametrize(("group", "period"), [(1, 1), (1, 3), (GROUP, 1), (GROUP, 2)])
@in_child
def test_fifty_steps_choose_and_learn_as_the_equations_say(bypass, group, period):
    first, n, n_row = 150, 50, N_HEAD // group
    seq = Sequence(5, first + n)
    found = first_tables(seq, first, group)
    p = replace(P, bypass=BYPASSES[bypass], renew=period)
    expected = [seq.started(r, group, first, p.s, p) for r in range(n_row)]
    for table in expected:
        table.begin(first + 1, CAPACITY)
    n_bypassed = n_scanned = 0
    for pos in range(first, first + n):
        tables = {name: found[name] for name in empty_tables(group)}
        found = step(seq, pos, tables, bypass, group=group, period=period)
        for r in range(n_row):
            q, k, _ = seq.of_row(r, group)
            chosen, scanned = expected[r].step(q[pos], k[: pos + 1])
            row = found["sets"][r, : found["counts"][r]].tolist()
            assert row == chosen.tolist()
            assert found["meta"][r, 1] == (scanned is None)
            check_tables(found, expected[r], r, pos)
            n_bypassed += scanned is None
            n_scanned += scanned or 0
    if bypass:
        assert n_row * n * 0.02 < n_bypassed < n_row * n * 0.95, "both kinds of rows are there"
    else:
        assert found["meta"][:, 4].sum() == n_scanned
        assert 2 * n_row * n < n_scanned < 100 * n_row * n, "some keys, not all"


@pytest.mark.parametrize("group", [1, GROUP])
@in_child
def test_a_long_context_has_more_candidates_than_a_block_of_threads_at_once(group):
    pos, capacity = 2500, 2624
    p, seq = replace(P, a=0, budget=0.05), Sequence(8, pos + 1, capacity)
    seq.q *= np.float32(0.1)  # nearly even weights: half of the keys are above the mean
    tables = first_tables(seq, pos, group, p)
    found = step(seq, pos, tables, 0, group=group, period=1, p=p)
    for r in range(N_HEAD // group):
        q, k, _ = seq.of_row(r, group)
        expected = seq.started(r, group, pos, p.s, replace(p, renew=1)).begin(pos + 1, capacity)
        chosen, scanned = expected.step(q[pos], k)
        assert scanned > 1024
        assert found["sets"][r, : found["counts"][r]].tolist() == chosen.tolist()
        check_tables(found, expected, r, pos)


@in_child
def test_tables_survive_the_multiplication_of_their_scale():
    first = 150
    seq = Sequence(6, first + 3)
    found = first_tables(seq, first, 1)
    p = replace(P, renew=1)
    expected = [seq.started(r, 1, first, P.s, p).begin(first + 1, CAPACITY) for r in range(N_HEAD)]
    small = np.float32(2.0**-50)  # 8.9e-16: below the smallest scale that is kept
    for name in ("ver", "sla"):
        found[name] /= small
    found["stats"][:, 0] *= small
    for i in range(4):
        found["stats"][:, [1 + i, 5 + i]] /= np.float64(small) ** (i + 1)
    for pos in range(first, first + 3):
        tables = {name: found[name] for name in empty_tables(1)}
        found = step(seq, pos, tables, 0, group=1, period=1)
        assert (found["stats"][:, 0] > 0.9).all()
        for r in range(N_HEAD):
            q, k, _ = seq.of_row(r, 1)
            chosen, _ = expected[r].step(q[pos], k[: pos + 1])
            assert found["sets"][r, : found["counts"][r]].tolist() == chosen.tolist()
            check_tables(found, expected[r], r, pos)


@pytest.mark.parametrize("bypass", [1, 2])
@pytest.mark.parametrize("group", [1, GROUP])
@in_child
def test_a_bypassed_row_joins_the_mean_value(bypass, group):
    pos, n_row = 150, N_HEAD // group
    seq = Sequence(7, pos + 1)
    tables = first_tables(seq, pos, group)
    kept = [*range(P.sink), *range(pos + 1 - P.local, pos + 1)]
    tables["meta"][:, 1] = [1] + [0] * (n_row - 1)
    lse = np.zeros(N_HEAD, np.float32)
    before = normal(np.random.default_rng(1), N_HEAD, HEAD_DIM)
    expected = before.astype(float)
    table = seq.started(0, group, pos, P.s, replace(P, bypass=BYPASSES[bypass]))
    q, k, _ = seq.of_row(0, group)
    lse[:group] = np.log(np.exp(q[pos] @ k[kept].T * HEAD_DIM**-0.5).sum(axis=1))
    expected[:group] = table.bypassed(q[pos], pos + 1, expected[:group], lse[:group])
    fixed = {name: tables[name] for name in ("spread", "meta", "means")}
    for found in runs(
        ops.LFPS_BYPASS, (HEAD_DIM, GROUP, group), out={"out": before}, step=step_of(1, pos),
        q=seq.q[pos:], lse=lse, n_head_kv=N_HEAD_KV, bypass=bypass, scale=HEAD_DIM**-0.5, **fixed,
    ):  # fmt: skip
        np.testing.assert_allclose(found["out"], expected, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(found["out"][group:], before[group:])


@pytest.mark.cpu_only
def test_a_threshold_by_hand():
    """One spike among ten entries: mean 0.1, kurtosis 0.811, threshold a little above a * mean."""
    x = np.zeros(10)
    x[3] = 1.0
    # Deviations: 0.9 once, -0.1 nine times. Fourth powers 0.6561 + 0.0009, squares 0.81 + 0.09.
    assert threshold(x, 0.2) == pytest.approx(0.2 * 0.1 / (0.657 / 0.9**2))
