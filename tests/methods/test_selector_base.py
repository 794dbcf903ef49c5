"""What methods share: the last queries that are kept, and when decode steps start anew.

Beside it the defaults of all methods, and parts of single ones that are functions of numbers.
"""

import math

import numpy as np
import pytest

from tamis.select import bigbird, hyperattention
from tamis.select.base import LastQueries, SelectorShape, SelectorState, Steps
from tamis.select.notation import methods, of_layers
from tamis.select.tactic import budget_by_samples
from tamis.select.window import Window

SHAPE = SelectorShape(2, 2, 1, 16, n_ctx=128, n_ubatch=16, window=(0, 0))


@pytest.mark.parametrize("n_tokens", [0, 7, 8, 9, 10, 11, 12])
def test_queries_of_dropped_positions_are_dropped(n_tokens):
    """Of positions 8 to 11, those from n_tokens on."""
    queries = LastQueries(SHAPE, 4)
    for layer in range(2):
        queries.of(layer)["past_pos"][:] = 8, 9, 10, 11
    queries.truncate(n_tokens)
    expected = [p if p < n_tokens else -1 for p in (8, 9, 10, 11)]
    assert [queries.of(layer)["past_pos"].tolist() for layer in range(2)] == [expected] * 2


def test_a_step_that_follows_the_last_one_continues_it():
    steps = Steps()
    assert [steps.fresh(i) for i in (5, 6, 7, 9, 10)] == [True, False, False, True, False]
    assert steps.since(12) == 3, "since position 9"


@pytest.mark.parametrize(("n_tokens", "fresh"), [(0, True), (7, True), (8, False), (9, False)])
def test_a_step_starts_anew_where_one_before_it_was_dropped(n_tokens, fresh):
    """After steps at 5, 6 and 7; 8 tokens hold the last of them."""
    steps = Steps()
    for i in (5, 6, 7):
        steps.fresh(i)
    steps.truncate(n_tokens)
    assert steps.fresh(8) == fresh


def test_a_period_has_as_many_steps():
    steps = Steps(period=3)
    assert [steps.fresh(i) for i in range(4, 12)] == [True, False, False] * 2 + [True, False]


def test_recording_asks_for_step_0_and_leaves_nothing():
    steps = Steps()
    assert steps.fresh(0)
    assert steps.fresh(1), "whatever the first step will be"


@pytest.mark.parametrize("old", ["decode", "prefill"])
def test_a_hook_of_an_older_name_is_refused(old):
    """It would never be called: the method would be dense attention in silence."""
    with pytest.raises(TypeError, match=f"rename it select_{old}"):
        type("State", (SelectorState,), {old: lambda self, rec, layer, q, kv: None})


DEFAULTS = {
    "auto": "Auto(mass=0.95, least=12288, part=16, samples=128, seed=0)",
    "bigbird": "BigBird(block=64, sink=128, recent=192, random=192, seed=0)",
    "cpe": "CPE(s=16, tau=0.8, join=0.8, r=1, k=432, sink=16, local=64, phi=0.7, alpha=1.0, "
    "psi=0.5, gamma=1.0, kv='project', rows='union')",
    "dense": "Dense()",
    "double_p": "DoubleP(p1=0.95, p2=0.7, c=16, n_iter=10, period=1024, sink=4, local=64, "
    "segment=8192, seed=0)",
    "double_sparsity": "DoubleSparsity(budget=1024, label=0.25, s=32, sink=4, recent=64, "
    "rows='group')",
    "h2o": "H2O(budget=1024, recent=0.5, sink=4, s=128, rows='group')",
    "hip": "HiP(k=1024, b_k=2, b_sk=1, b_q=64, b_sq=8, r_m=1, l_d=3, sink=16, local=256, span=0, "
    "rows='group', rep='mean')",
    "hshare": "HShare(budget=1024, layers=0.75, heads=0.75, period=2, sink=16, recent=64, "
    "rows='head')",
    "hyperattention": "HyperAttention(block=256, sample=256, recent=512, bits=7, size=32, sink=4, "
    "l_d=0, seed=0)",
    "lfps": "LFPS(a=0.2, r=0.95, s=32, budget=0.02, epsilon=0.85, sink=4, local=64, "
    "bypass='mix', rows='group', renew=8)",
    "magicpig": "MagicPIG(K=10, L=150, dense=1, sink=4, recent=64, period=2048, seed=0)",
    "quest": "Quest(budget=1024, page=16, dense=2, sink=4, recent=16, rows='head')",
    "snapkv": "SnapKV(budget=1024, window=32, kernel=7, pool='max', ada=0.0, beta=1.0, sink=4, "
    "rows='group')",
    "retroinfer": "RetroInfer(c=16, retrieve=0.018, estimate=0.232, n_iter=10, period=1024, "
    "sink=4, local=64, segment=8192, seed=0)",
    "tactic": "Tactic(P=0.9, c=32, n_iter=10, first=0.02, period=2048, sink=4, local=256, "
    "segment=8192, sample=0, margin=0.5, outside='counted', rows='group', reach=0.7, seed=0)",
    "topk": "TopK(k=512, sink=4, recent=64, rows='group')",
    "vertical_slash": "VerticalSlash(n_vertical=1000, n_slash=200, last_q=16, sink=30, local=100, "
    "l_d=0, inner=None)",
    "window": "Window(sink=4, recent=1024, block=16)",
}
WRAPPERS = {
    "beyond": "Beyond(inner=..., least=8192)",
    "delta": "Delta(inner=..., gamma=64, mode='delta')",
    "metered": "Metered(inner=..., mass=0.95, samples=128, even=0.3, seed=0)",
    "tail": "Tail(inner=..., epsilon=0.1, delta=0.1, bound='output', samples=128, even=1.0, "
    "most=0.5, seed=0)",
    "twilight": "Twilight(inner=..., p=0.95)",
}


@pytest.mark.parametrize("name", sorted(methods()))
def test_a_method_named_alone_has_these_numbers(name):
    """What a method's name means stays the same: figures and saved commands have it alone."""
    method = methods()[name]
    if name in WRAPPERS:
        assert repr(method(Window())) == WRAPPERS[name].replace("...", DEFAULTS["window"])
    else:
        assert repr(method()) == DEFAULTS[name]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["topk"] * 3, "topk"),
        (["dense"] * 3, "dense"),
        (["dense", "topk", "topk", "dense", "lfps"], "topk@1-2+lfps@4"),
        (["topk", "dense"], "topk@0"),
        (["topk", "lfps", "topk", "topk"], "topk@0+lfps@1+topk@2-3"),
    ],
)
def test_methods_of_layers_are_named_by_runs_of_them(names, text):
    assert of_layers(names) == text


def test_bigbirds_draws_are_knuths():
    """The multiplier and the increment of MMIX, the upper 31 bits of a state, and algorithm S."""
    assert bigbird.following(0) == 1442695040888963407
    assert bigbird.following(5) == (5 * 6364136223846793005 + 1442695040888963407) % (1 << 64)
    assert bigbird.draw_key(2, 4, 3, 9) == (2 * 4 + 3) * 1048583 + 9
    assert bigbird.draw(5, range(3, 40), 7) == [3, 13, 24, 33, 37]
    assert bigbird.draw(3, range(10), 1) == [2, 3, 9]
    assert bigbird.draw(4, range(6, 10), 3) == [6, 7, 8, 9]
    assert bigbird.draw(0, range(9), 3) == []


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        # Keys 5, 3 and 8, 1 are read exactly; two drawn ones stand for the other four.
        ([3, 9, 7], {1: 0.0, 3: 0.0, 5: 0.0, 7: math.log(2), 8: 0.0, 9: math.log(2)}),
        ([7], {1: 0.0, 3: 0.0, 5: 0.0, 7: math.log(4), 8: 0.0}),
        ([3, 3, 8], {1: 0.0, 3: 0.0, 5: 0.0, 8: 0.0}),
    ],
)
def test_drawn_keys_of_hyperattention_stand_for_all_that_are_not_read(samples, expected):
    p = hyperattention.HyperAttention.__new__(hyperattention.HyperAttention)
    object.__setattr__(p, "size", 2)
    object.__setattr__(p, "block", 4)
    order = hyperattention.Sorted([5, 3, 8, 1, 9, 7, 2, 4], [1])
    assert hyperattention.voted(p, order, np.array([0])) == [0, 1]
    assert hyperattention.chosen(p, order, np.array([0]), samples) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("outside", "share", "budget"),
    [
        (0.0, 0.5, 2),  # 0.35 is needed: both of the first cluster
        (0.0, 0.9, 4),
        (0.0, 0.35, 2),
        (0.7, 0.5, 0),  # what lies outside is enough
        (3.0, 0.5, 0),
        (0.5, 0.75, 2),
    ],
)
def test_a_budget_of_known_clusters_is_whole_ones(outside, share, budget):
    weights, sizes = np.array([0.25, 0.25, 0.1, 0.1]), np.array([2, 2])
    clusters = weights, sizes, np.zeros(2)
    assert budget_by_samples(clusters, 4, outside, share, (8, 0.5)) == budget
