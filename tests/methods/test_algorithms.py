"""Methods step by step against their algorithms, which stand in NumPy beside them."""

import numpy as np
import pytest
from stage import Stage, kernels, weights_of

from tamis.select import cpe, double_sparsity, h2o, quest, snapkv, topk
from tamis.select.notation import parse_method

HEADS, GROUP, HEAD_DIM, N_KV = 6, 3, 16, 300  # two KV heads
TEXTS = [
    "topk:k=40,sink=3,recent=9",
    "quest:budget=96,page=8,dense=0,sink=4,recent=8",
    "double_sparsity:budget=60,label=0.25,s=12,sink=4,recent=8",
    "h2o:budget=40,recent=0.5,sink=3,s=12",
    "snapkv:budget=60,window=12,sink=3,kernel=5",
    "snapkv:budget=60,window=12,sink=3,kernel=3,pool=mean,ada=0.8",
]
CPE = "cpe:s=6,tau=0.9,k=30,r=2,sink=3,local=9"
CPE_ROWS = ("head", "union", "group")
KERNELS = kernels(
    [
        *TEXTS,
        *(f"{text},rows=head" for text in TEXTS),
        *(f"{CPE},rows={rows}" for rows in CPE_ROWS),
    ],
    (HEAD_DIM, 2, HEADS),
)


class Case:
    """Random keys and queries, and what a method has kept of them at its steps."""

    def __init__(self, text, n_step, n_seen=12):
        rng = np.random.default_rng(5)
        self.k = rng.standard_normal((2, N_KV, HEAD_DIM)).astype(np.float16)
        self.q = rng.standard_normal((N_KV, HEADS, HEAD_DIM)).astype(np.float32)
        self.first = N_KV - n_step  # the first step's position
        self.params, self.n_seen = parse_method(text), n_seen
        stage = Stage(text, self.k, self.k, n_head=HEADS)
        stage.see(self.q[self.first - n_seen : self.first], self.first - n_seen)
        self.kept = [stage.decode(self.q[pos], pos).kept for pos in range(self.first, N_KV)]
        size = GROUP if self.params.rows == "group" else 1
        self.rows = [slice(i, i + size) for i in range(0, HEADS, size)]

    def keys(self, row, n_kv=N_KV):
        """float64 [n_kv, head_dim]"""
        return self.k[row.start // GROUP, :n_kv].astype(float)

    def queries(self, row, pos):
        """float64 [heads, head_dim]"""
        return self.q[pos, row].astype(float)

    def weights(self, row, pos):
        """float64 [heads, n_kv]: of positions after `pos` 0."""
        found = np.zeros((row.stop - row.start, N_KV))
        keys = self.k[row.start // GROUP : row.start // GROUP + 1, : pos + 1]
        found[:, : pos + 1] = weights_of(self.q[pos, row], keys)
        return found

    def seen(self, row):
        """float64 [N_KV]: sums of the weights of all queries before the first step."""
        before = range(self.first - self.n_seen, self.first)
        return sum(self.weights(row, pos).sum(axis=0) for pos in before)

    def check(self, row, expected, step=-1):
        for kept in self.kept[step][row]:
            np.testing.assert_array_equal(np.flatnonzero(kept), np.sort(expected))


def both(texts):
    return pytest.mark.parametrize(
        "text", [f"{text}{rows}" for text in texts for rows in (",rows=group", ",rows=head")]
    )


@both(TEXTS[:1])
def test_top_k(text):
    case = Case(text, 1)
    for row in case.rows:
        scores = (case.queries(row, N_KV - 1) @ case.keys(row).T).max(axis=0)
        case.check(row, np.flatnonzero(topk.chosen(case.params, scores[None])[0]))


@both(TEXTS[1:2])
def test_quest(text):
    case = Case(text, 1)
    for row in case.rows:
        kept = quest.chosen(case.params, case.queries(row, N_KV - 1), case.keys(row))
        case.check(row, np.flatnonzero(kept))


@both(TEXTS[2:3])
def test_double_sparsity(text):
    case, p = Case(text, 1), parse_method(text)
    for row in case.rows:
        h = row.start // GROUP
        past = case.q[case.first - p.s : case.first, h * GROUP : (h + 1) * GROUP]
        labels = double_sparsity.channels(
            past.reshape(-1, HEAD_DIM).astype(float), case.keys(row), int(p.label * HEAD_DIM)
        )
        scores = double_sparsity.scored(case.queries(row, N_KV - 1), case.keys(row), labels)
        ends = topk.TopK(k=p.n_top, sink=p.sink, recent=p.recent)
        case.check(row, np.flatnonzero(topk.chosen(ends, scores[None])[0]))


@both(TEXTS[3:4])
def test_h2o(text):
    case = Case(text, 25)
    for row in case.rows:
        weights = [case.weights(row, pos) for pos in range(case.first, N_KV)]
        for step, kept in enumerate(h2o.chosen(case.params, case.seen(row), weights)):
            case.check(row, kept, step)


def test_h2o_keeps_the_last_position_whatever_the_share_of_the_window():
    for recent, n_local in ((0, 1), (0.1, 1), (0.5, 6), (0.9, 10)):
        p = h2o.H2O(budget=12, recent=recent, sink=1)
        assert (p.n_local, p.n_top) == (n_local, 11 - n_local)


@both(TEXTS[4:])
def test_snapkv(text):
    case, p = Case(text, 3), parse_method(text)
    low, high = p.sink, case.first - p.window
    votes = np.stack([case.seen(row)[low:high] for row in case.rows])
    n_top = p.budget - p.sink - p.window
    for row, kept in zip(case.rows, snapkv.chosen(p, votes, n_top), strict=True):
        for step in range(3):  # what comes after the prompt is kept as well
            ends = [*range(p.sink), *range(high, case.first + step + 1)]
            case.check(row, [*ends, *(low + kept)], step)


@pytest.mark.parametrize("phi", [1, 0.7])
@pytest.mark.parametrize("join", [0, 0.95])
@pytest.mark.parametrize("rows", CPE_ROWS)
def test_cpe(rows, join, phi):
    """Queries that change slowly: some steps of a block share, some retrieve."""
    rng, n_step, n_kv = np.random.default_rng(6), 20, 200
    k = rng.standard_normal((2, n_kv, HEAD_DIM)).astype(np.float16)
    q = np.cumsum(0.4 * rng.standard_normal((n_step, HEADS, HEAD_DIM)), axis=0)
    q = (q + 2 * rng.standard_normal((HEADS, HEAD_DIM))).astype(np.float32)
    text = f"{CPE},rows={rows},join={join},phi={phi}"
    stage, p = Stage(text, k, k, n_head=HEADS), parse_method(text)
    found = [stage.decode(x, n_kv - n_step + i).kept for i, x in enumerate(q)]
    size = GROUP if rows == "group" else 1
    for h in range(2):
        queries = q[:, h * GROUP : (h + 1) * GROUP].astype(float)
        of_rows = queries.reshape(n_step, GROUP // size, size, HEAD_DIM)
        sets = cpe.chosen(p, of_rows, k[h].astype(float), p.dropped(0, 1))
        for kept, expected in zip(found, sets, strict=True):
            union = [np.unique(np.concatenate(expected))] * GROUP
            each = union if rows == "union" else [row for row in expected for _ in range(size)]
            for head, row in zip(kept[h * GROUP : (h + 1) * GROUP], each, strict=True):
                np.testing.assert_array_equal(np.flatnonzero(head), row)
    assert 0.2 < stage.state.retrieval_ratio < 0.9, "some share and some retrieve"
