"""The ops of the method `lfps` against NumPy, between unmapped pages, over many steps."""

import numpy as np
import pytest
from guarded import in_child, runs, step_of
from lfps_oracle import Params, Tables, started
from test_kernels_attention import normal, page_table, paged

from tamis.jit_kernels import ops

HEAD_DIM, GROUP, N_HEAD_KV = 16, 2, 2
N_HEAD = GROUP * N_HEAD_KV
CAPACITY = 256
KERNELS = [
    (op, (HEAD_DIM,)) for op in (ops.LFPS_KEEP, ops.LFPS_START, ops.LFPS_SETS, ops.LFPS_BYPASS)
]
P = Params(a=0.2, r=0.95, s=8, budget=0.1, epsilon=0.05, sink=4, local=10)


class Sequence:
    """Keys, values and queries with some structure, and where they lie in pages."""

    def __init__(self, seed, n):
        rng = np.random.default_rng(seed)
        self.k = normal(rng, n, N_HEAD_KV, HEAD_DIM).astype(np.float16)
        self.k[:4] += 1  # sinks that some queries look at
        self.v = normal(rng, n, N_HEAD_KV, HEAD_DIM).astype(np.float16)
        drift = np.cumsum(0.3 * normal(rng, n, N_HEAD, HEAD_DIM), axis=0)
        self.q = (drift + normal(rng, n, N_HEAD, HEAD_DIM)).astype(np.float32)
        self.table = page_table(rng, n, CAPACITY // 64)

    def of_head(self, head):
        h = head // GROUP
        return self.q[:, head].astype(float), self.k[:, h].astype(float), self.v[:, h].astype(float)

    def fields(self, *, values):
        pages = {"k_pages": paged(self.k, self.table), "k_table": self.table}
        if values:
            pages |= {"v_pages": paged(self.v, self.table), "v_table": self.table}
        heads = {"n_head": N_HEAD, "heads_per_kv": GROUP, "n_head_kv": N_HEAD_KV}
        return pages | heads | {"scale_f": HEAD_DIM**-0.5}


def empty_tables():
    return {
        "ver": np.full((N_HEAD, CAPACITY), 7, np.float32),  # left by another sequence
        "sla": np.full((N_HEAD, CAPACITY), -7, np.float32),
        "bounds": np.full((2, N_HEAD, CAPACITY // 64), 9, np.float32),
        "stats": np.zeros((N_HEAD, ops.LFPS_STATS_SIZE), np.float64),
        "meta": np.full((N_HEAD, len(ops.LFPS_META)), -1, np.int64),
        "means": np.zeros((N_HEAD, 2, HEAD_DIM), np.float32),
        "scores": np.zeros((N_HEAD, CAPACITY), np.float32),
    }


SCALARS = {"capacity": CAPACITY, "n_sink": P.sink, "n_local": P.local, "decay_f": P.r}


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


def check_tables(found, expected, head, pos):
    """Tables of one head. Float32 entries of at most 1: sums of a few steps' roundings."""
    scale = found["stats"][head, 0]
    low, high = P.sink, pos + 1 - P.local
    ver, sla = found["ver"][head] * scale, found["sla"][head, ::1] * scale
    np.testing.assert_allclose(ver[low:high], expected.ver[low:high], rtol=1e-4, atol=2e-6)
    distances = pos - np.arange(low, high)
    np.testing.assert_allclose(sla[distances], expected.sla[distances], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("pos", "n"), [(150, 8), (150, 3), (150, 0), (15, 8), (14, 8), (13, 8)])
@in_child
def test_tables_start_from_the_last_queries(pos, n):
    seq = Sequence(3, pos + 1)
    fields = seq.fields(values=True) | past_of(seq, pos, n) | SCALARS
    tables = empty_tables()
    tables["meta"][3, 0] = pos  # its tables continue
    for found in runs(
        ops.LFPS_START, (HEAD_DIM,), out=tables, step=step_of(1, pos), q=seq.q[pos:], **fields
    ):
        for name in ("ver", "sla", "stats", "means"):
            np.testing.assert_array_equal(found[name][3], tables[name][3])
        for head in range(3):
            expected = started(P, *seq.of_head(head), pos, n)
            if expected is None:  # no middle yet
                np.testing.assert_array_equal(found["ver"][head], 7)
                continue
            check_tables(found, expected, head, pos)
            np.testing.assert_allclose(found["stats"][head, 1], expected.spread, rtol=1e-4)
            means = [expected.mean_key, expected.mean_value]
            np.testing.assert_allclose(found["means"][head], means, rtol=0, atol=1e-5)


def step(seq, pos, tables, bypass):
    """One decode step by the ops, on one thread's buffers; all runs must agree."""
    meta = {"bypass": bypass, "a_f": P.a, "budget_f": P.budget, "epsilon_f": P.epsilon}
    out = tables | {
        "order": np.zeros((N_HEAD, CAPACITY), np.int32),
        "bits": np.full((N_HEAD, 2, CAPACITY // 64), -1, np.int64),
        "sets": np.zeros((N_HEAD, 64), np.int32),
        "counts": np.zeros(N_HEAD, np.int32),
    }
    means = out.pop("means")
    results = [
        {name: array.copy() for name, array in found.items()}
        for found in runs(
            ops.LFPS_SETS, (HEAD_DIM,), out=out, step=step_of(1, pos), q=seq.q[pos : pos + 1],
            means=means, set_capacity=64, **seq.fields(values=False), **SCALARS, **meta,
        )
    ]  # fmt: skip
    for other in results[1:]:
        for name in ("ver", "sla", "stats", "meta", "sets", "counts"):
            np.testing.assert_array_equal(other[name], results[0][name])
    return results[0] | {"means": means}


def first_tables(seq, pos):
    fields = seq.fields(values=True) | past_of(seq, pos, P.s) | SCALARS
    at = {"step": step_of(1, pos), "q": seq.q[pos : pos + 1]}
    found = next(runs(ops.LFPS_START, (HEAD_DIM,), out=empty_tables(), **at, **fields))
    return {name: array.copy() for name, array in found.items()}


@pytest.mark.parametrize("bypass", [0, 1])
@in_child
def test_fifty_steps_choose_and_learn_as_the_equations_say(bypass):
    first, n = 150, 50
    seq = Sequence(5, first + n)
    found = first_tables(seq, first)
    expected = [started(P, *seq.of_head(head), first, P.s) for head in range(N_HEAD)]
    n_bypassed = n_scanned = 0
    for pos in range(first, first + n):
        found = step(seq, pos, {name: found[name] for name in empty_tables()}, bypass)
        for head in range(N_HEAD):
            q, k, _ = seq.of_head(head)
            chosen, scanned = expected[head].step(q[pos], k[: pos + 1], bypass=bypass)
            row = found["sets"][head, : found["counts"][head]].tolist()
            assert row == chosen
            assert found["meta"][head, 1] == (scanned is None)
            check_tables(found, expected[head], head, pos)
            n_bypassed += scanned is None
            n_scanned += scanned or 0
    if bypass:
        assert 20 < n_bypassed < 180, "both kinds of heads are there"
    else:
        assert found["meta"][:, 4].sum() == n_scanned - N_HEAD  # they count from -1
        assert 2 * N_HEAD * n < n_scanned < 100 * N_HEAD * n, "some keys, not all"


@in_child
def test_tables_survive_the_multiplication_of_their_scale():
    first = 150
    seq = Sequence(6, first + 3)
    found = first_tables(seq, first)
    expected = [started(P, *seq.of_head(head), first, P.s) for head in range(N_HEAD)]
    small = np.float32(2.0**-50)  # 8.9e-16: below the smallest scale that is kept
    for name, power in (("ver", 1), ("sla", 1), ("bounds", 1)):
        found[name] /= small**power
    found["stats"][:, 0] *= small
    for i in range(4):
        found["stats"][:, [2 + i, 6 + i]] /= np.float64(small) ** (i + 1)
    for pos in range(first, first + 3):
        found = step(seq, pos, {name: found[name] for name in empty_tables()}, 0)
        assert (found["stats"][:, 0] > 0.9).all()
        for head in range(N_HEAD):
            q, k, _ = seq.of_head(head)
            chosen, _ = expected[head].step(q[pos], k[: pos + 1], bypass=0)
            assert found["sets"][head, : found["counts"][head]].tolist() == chosen
            check_tables(found, expected[head], head, pos)


@pytest.mark.parametrize("bypass", [1, 2])
@in_child
def test_a_bypassed_head_joins_the_mean_value(bypass):
    pos = 150
    seq = Sequence(7, pos + 1)
    tables = first_tables(seq, pos)
    kept = [*range(P.sink), *range(pos + 1 - P.local, pos + 1)]
    tables["meta"][:, 1] = [1, 0, 0, 1]
    sets = np.tile(np.array(kept, np.int32), (N_HEAD, 1))
    before = normal(np.random.default_rng(1), N_HEAD, HEAD_DIM)
    expected = before.astype(float)
    for head in (0, 3):
        table, (q, k, _) = started(P, *seq.of_head(head), pos, P.s), seq.of_head(head)
        weights = np.exp(k[kept] @ q[pos] * HEAD_DIM**-0.5).sum()
        w_global = np.exp(table.global_logit(q[pos], pos + 1))
        share = w_global / (w_global + weights) if bypass == 1 else 1
        expected[head] += share * (table.mean_value - expected[head])
    fixed = {name: tables[name] for name in ("stats", "meta", "means")}
    for found in runs(
        ops.LFPS_BYPASS, (HEAD_DIM,), out={"out": before, "scores": np.zeros(N_HEAD, np.float32)},
        step=step_of(1, pos), q=seq.q[pos:], sets=sets, counts=np.full(N_HEAD, len(kept), np.int32),
        set_capacity=len(kept), bypass=bypass, **fixed, **seq.fields(values=False),
    ):  # fmt: skip
        np.testing.assert_allclose(found["out"], expected, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(found["out"][[1, 2]], before[[1, 2]])


def test_the_oracle_follows_a_pattern_by_hand():
    """One spike among ten entries: mean 0.1, kurtosis 0.7..., threshold a little under a * mean."""
    x = np.zeros(10)
    x[3] = 1.0
    mean, bar = Tables.mean_and_bar(x, 0.2)
    # Deviations: 0.9 once, -0.1 nine times. Fourth powers 0.6561 + 0.0009, squares 0.81 + 0.09.
    assert mean == pytest.approx(0.1)
    assert bar == pytest.approx(0.2 * 0.1 / (0.657 / 0.9**2))
