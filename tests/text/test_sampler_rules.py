"""The sampler's rules where they begin and end: ranges, states, texts of its parts, few tokens."""

import copy
import dataclasses
import io
import math
import os
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from tamis.platform import limits
from tamis.sampling import base, dry, grammar, infill, truncate
from tamis.sampling.base import RANGES, Candidates, RandomStream, SamplerError, Step, resolve_seed
from tamis.sampling.chain import (
    MIROSTAT_M,
    Dist,
    Dry,
    DynaTemp,
    Greedy,
    LogitBias,
    MinP,
    Mirostat,
    MirostatV2,
    Penalties,
    Sampler,
    SamplerParams,
    Temp,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
    build_chain,
)
from tamis.sampling.logits import check_bias
from tamis.sampling.vocabulary import Bytes, GrammarTokenizer

BELOW, ABOVE = -1e-9, 1 + 1e-9
HUGE = 1e30
# Each parameter: values at the ends of its range, and the nearest that are not in it.
EDGES = {
    "temp": ([-HUGE, 0, HUGE], [math.nan, math.inf, -math.inf]),
    "dynatemp_range": ([0, HUGE], [BELOW, math.nan, math.inf]),
    "dynatemp_exponent": ([0, HUGE], [BELOW]),
    "top_k": ([-(1 << 40), 0, 1 << 40], [1.0]),
    "top_p": ([0, 1], [BELOW, ABOVE]),
    "min_p": ([0, 1], [BELOW, ABOVE]),
    "typical_p": ([0, 1], [BELOW, ABOVE]),
    "top_n_sigma": ([-HUGE, HUGE], [math.nan]),
    "xtc_probability": ([0, 1], [BELOW, ABOVE]),
    "xtc_threshold": ([0, 1], [BELOW, ABOVE]),
    "repeat_last_n": ([-1, 0, 1 << 40], [-2, 1.0]),
    "repeat_penalty": ([1e-300, HUGE], [0, BELOW]),
    "frequency_penalty": ([-HUGE, HUGE], [math.inf]),
    "presence_penalty": ([-HUGE, HUGE], [math.inf]),
    "dry_multiplier": ([0, HUGE], [BELOW]),
    "dry_base": ([0, HUGE], [BELOW]),
    "dry_allowed_length": ([1, 1 << 40], [0, 1.0]),
    "dry_penalty_last_n": ([-1, 1 << 40], [-2, 1.0]),
    "mirostat": ([0, 1, 2], [-1, 3, 1.0]),
    "mirostat_tau": ([0, HUGE], [BELOW]),
    "mirostat_eta": ([0, HUGE], [BELOW]),
    "min_keep": ([0, 1 << 40], [-1, 1.0]),
    "seed": ([-(1 << 63), (1 << 63) - 1], [-(1 << 63) - 1, 1 << 63, 1.0]),
}


def from_logits(*logits):
    return Candidates(np.arange(len(logits), dtype=np.int32), np.array(logits, np.float32))


def ids(c):
    return c.ids.tolist()


@pytest.mark.parametrize("name", RANGES)
def test_a_range_ends_where_it_says(name):
    right, wrong = EDGES[name]
    for value in right:
        base.check(name, value)
    for value in [*wrong, True, None, "1", [1]]:
        with pytest.raises(SamplerError, match=f"{name} is .*, expected .*: "):
            base.check(name, value)


def test_a_range_is_said_in_words():
    assert {name: str(each) for name, each in RANGES.items()} == {
        "temp": "a finite number",
        "top_n_sigma": "a finite number",
        "frequency_penalty": "a finite number",
        "presence_penalty": "a finite number",
        "dynatemp_range": "a finite number of at least 0.0",
        "dynatemp_exponent": "a finite number of at least 0.0",
        "dry_multiplier": "a finite number of at least 0.0",
        "dry_base": "a finite number of at least 0.0",
        "mirostat_tau": "a finite number of at least 0.0",
        "mirostat_eta": "a finite number of at least 0.0",
        "repeat_penalty": "a finite number above 0.0",
        "top_k": "an integer",
        "top_p": "a finite number from 0.0 to 1.0",
        "min_p": "a finite number from 0.0 to 1.0",
        "typical_p": "a finite number from 0.0 to 1.0",
        "xtc_probability": "a finite number from 0.0 to 1.0",
        "xtc_threshold": "a finite number from 0.0 to 1.0",
        "repeat_last_n": "an integer of at least -1",
        "dry_penalty_last_n": "an integer of at least -1",
        "dry_allowed_length": "an integer of at least 1",
        "min_keep": "an integer of at least 0",
        "mirostat": "an integer from 0 to 2",
        "seed": f"an integer from {-(1 << 63)} to {(1 << 63) - 1}",
    }


STEPS = {
    "TopNSigma(n=1.5)": lambda: TopNSigma(1.5),
    "TopK(k=3)": lambda: TopK(3),
    "Typical(p=0.5, min_keep=0)": lambda: Typical(0.5),
    "TopP(p=0.5, min_keep=0)": lambda: TopP(0.5),
    "MinP(p=0.5, min_keep=0)": lambda: MinP(0.5),
    "Xtc(probability=0.5, threshold=0.1, min_keep=0, seed=3)": lambda: Xtc(0.5, seed=3),
    "LogitBias(bias={1: 2.0})": lambda: LogitBias({1: 2.0}),
    "Penalties(last_n=64, repeat=1.0, freq=0.0, present=0.0)": Penalties,
    "Temp(temp=0.5)": lambda: Temp(0.5),
    "DynaTemp(temp=1.0, range=0.5, exponent=1.0)": lambda: DynaTemp(1.0, 0.5),
    "Dry(multiplier=0.8, base=1.75, allowed_length=2, last_n=-1, breakers=())": lambda: Dry(0.8),
    "Greedy()": Greedy,
    "Dist(seed=3)": lambda: Dist(3),
    "MirostatV2(tau=5.0, eta=0.1, seed=3, mu=10.0)": lambda: MirostatV2(seed=3),
    "Mirostat(tau=5.0, eta=0.1, seed=3, mu=10.0, m=100, n_vocab=None)": lambda: Mirostat(seed=3),
}


@pytest.mark.parametrize("text", STEPS)
def test_a_step_is_written_as_its_parameters_alone(text):
    """Errors of chains show it; its history may be a prompt's. Steps without one cannot change."""
    step = STEPS[text]()
    assert repr(step) == text
    step.accept(2)
    assert repr(step) == text
    held = bool(step.get_state())
    assert step.__dataclass_params__.frozen == (not held)
    if not held:
        for field in dataclasses.fields(step):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(step, field.name, 1)


@pytest.mark.parametrize("text", STEPS)
def test_only_what_ends_a_chain_chooses(text):
    assert STEPS[text]().chooses == text.startswith(("Greedy", "Dist", "Mirostat"))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: TopNSigma(math.nan), "top_n_sigma"),
        (lambda: TopK(1.5), "top_k"),
        (lambda: Typical(2), "typical_p"),
        (lambda: Typical(0.5, -1), "min_keep"),
        (lambda: TopP(2), "top_p"),
        (lambda: TopP(0.5, -1), "min_keep"),
        (lambda: MinP(2), "min_p"),
        (lambda: MinP(0.5, -1), "min_keep"),
        (lambda: Xtc(2), "xtc_probability"),
        (lambda: Xtc(0.5, 2), "xtc_threshold"),
        (lambda: Xtc(0.5, min_keep=-1), "min_keep"),
        (lambda: Penalties(-2), "repeat_last_n"),
        (lambda: Penalties(repeat=0), "repeat_penalty"),
        (lambda: Penalties(freq=math.nan), "frequency_penalty"),
        (lambda: Penalties(present=math.nan), "presence_penalty"),
        (lambda: Temp(math.nan), "temp"),
        (lambda: DynaTemp(math.nan, 0), "temp"),
        (lambda: DynaTemp(1, -1), "dynatemp_range"),
        (lambda: DynaTemp(1, 1, -1), "dynatemp_exponent"),
        (lambda: Dry(-1), "dry_multiplier"),
        (lambda: Dry(1, -1), "dry_base"),
        (lambda: Dry(1, 1, 0), "dry_allowed_length"),
        (lambda: Dry(1, last_n=-2), "dry_penalty_last_n"),
        (lambda: MirostatV2(-1), "mirostat_tau"),
        (lambda: MirostatV2(1, -1), "mirostat_eta"),
        (lambda: Dist(1 << 63), "seed"),
        (lambda: check_bias(-1, 0.0), "logit_bias has token id -1"),
        (lambda: check_bias(1.0, 0.0), "logit_bias has token id"),
        (lambda: check_bias(0, math.inf), "logit_bias of token 0"),
        (lambda: check_bias(0, math.nan), "logit_bias of token 0"),
        (lambda: check_bias(0, "1"), "logit_bias of token 0"),
    ],
)
def test_a_step_checks_its_own_parameters(make, name):
    with pytest.raises(SamplerError, match=name):
        make()


def test_a_bias_is_a_number_or_minus_infinity_of_a_token_from_0():
    for wrong in ({-1: 0.0}, {0: math.nan}):
        with pytest.raises(SamplerError, match="logit_bias"):
            LogitBias(wrong)
    for token, bias in ((0, -math.inf), (np.int32(5), np.float32(1))):
        check_bias(token, bias)
        assert LogitBias({token: bias}).bias == {token: bias}


@pytest.mark.parametrize("seed", [None, -1, 0xFFFFFFFF])
def test_a_drawn_seed_is_none_that_asks_to_draw(monkeypatch, seed):
    for data, found in ((b"\xff" * 4, 0), (b"\xfe\xff\xff\xff", 0xFFFFFFFE), (b"\1\0\0\0", 1)):
        monkeypatch.setattr(os, "urandom", lambda n, data=data: data[:n])
        assert resolve_seed(seed) == found
    assert resolve_seed(0xFFFFFFFE) == 0xFFFFFFFE
    assert resolve_seed(-2) == -2


def test_a_stream_of_random_numbers_resumes_at_its_state():
    stream = RandomStream(-3)
    first = [stream.uniform() for _ in range(3)]
    assert all(0 <= u < 1 and u * 2**53 == int(u * 2**53) for u in first)
    state, then = stream.get_state(), [stream.uniform() for _ in range(3)]
    other = RandomStream(9)
    other.set_state(state)
    assert other.seed == -3
    assert [other.uniform() for _ in range(3)] == then
    other.reset()
    assert [other.uniform() for _ in range(3)] == first
    assert RandomStream(-3, 1).uniform() != first[0]
    assert RandomStream(2**64 - 3).uniform() == first[0]  # of 64 bits


class Fixed(RandomStream):
    """A stream of one number."""

    def __init__(self, u):
        super().__init__(1)
        self.u = u

    def uniform(self):
        return self.u


def test_a_number_chooses_the_row_whose_part_of_the_sum_it_falls_in():
    probs = np.array([0.0, 0.25, 0.0, 0.25, 0.5, 0.0])
    for u, row in ((0.0, 1), (0.24, 1), (0.25, 3), (0.49, 3), (0.5, 4), (0.999, 4), (1.0, 4)):
        assert Fixed(u).choose(None, probs) == row


def test_xtc_drops_with_less_than_its_probability_and_at_its_threshold():
    c = from_logits(*np.log([0.4, 0.3, 0.2, 0.1]))
    step = Xtc(0.5, 0.19, seed=1)
    for u, kept in ((0.49, [2, 3]), (0.5, [0, 1, 2, 3])):
        step._random = Fixed(u)
        assert ids(step.apply(c)) == kept
    halves = from_logits(0, 0)
    for threshold, kept in ((0.4, [1]), (0.5, [1]), (0.51, [0, 1])):
        assert ids(Xtc(1, threshold, seed=1).apply(halves)) == kept
    assert ids(Xtc(1, 0.1, min_keep=2, seed=1).apply(from_logits(0, 0, 0))) == [0, 1, 2]
    assert ids(Xtc(1, 0.1, min_keep=1, seed=1).apply(from_logits(0, 0, 0))) == [2]
    one = Candidates(np.array([7], np.int32), np.zeros(1, np.float32))
    assert Xtc(1, 0.1, seed=1).apply(one) is one


class Counted(Candidates):
    """Candidates that note how many of the best were asked for."""

    asked = []  # noqa: RUF012

    def head(self, k):
        self.asked.append(k)
        return super().head(k)


@pytest.mark.parametrize(
    ("p", "min_keep", "kept", "asked"),
    [
        (0.1, 0, 2, [2]),  # of 16 equal ones 0.1 are two
        (0.2, 0, 4, [2, 4]),
        (0.25, 0, 4, [2, 4]),
        (0.3, 0, 5, [2, 4, 8]),
        (0.99, 0, 16, [2, 4, 8, 16]),
        (0.1, 2, 2, [2]),
        (0.1, 3, 3, [2, 4]),
        (0.1, 99, 16, [2, 4, 8, 16]),
    ],
)
def test_top_p_sorts_no_more_than_it_needs(monkeypatch, p, min_keep, kept, asked):
    assert (truncate.TOP_P_HEAD, truncate.TOP_P_GROWTH) == (2048, 8)
    monkeypatch.setattr(truncate, "TOP_P_HEAD", 2)
    monkeypatch.setattr(truncate, "TOP_P_GROWTH", 2)
    monkeypatch.setattr(Counted, "asked", [])
    c = Counted(np.arange(16, dtype=np.int32), np.zeros(16, np.float32))
    assert len(TopP(p, min_keep).apply(c)) == kept
    assert Counted.asked == asked


def test_a_grammar_comes_after_the_biases_and_has_seen_nothing():
    class Only(Step):
        seen = 0

        def apply(self, c):
            return c.take(c.ids == 2, c.sorted)

        def accept(self, token_id):
            self.seen += 1

    sampler = Sampler.chain([LogitBias({1: 5.0}), Penalties(present=1.0), Greedy()], 4)
    sampler.accept(1)
    only = Only()
    limited = sampler.limited(only)
    assert [type(s).__name__ for s in limited.steps] == ["LogitBias", "Only", "Penalties", "Greedy"]
    logits = np.zeros(4, np.float32)
    assert (sampler.sample(logits), limited.sample(logits)) == (1, 2)
    limited.accept(2)
    assert only.seen == 1
    assert sampler.get_state()["steps"][1]["state"] == {"window": [1]}
    assert limited.get_state()["steps"][2]["state"] == {"window": [1, 2]}


def test_a_step_of_a_users_own_reads_a_prompt_by_accepting_it():
    class Notes(Step):
        def __init__(self):
            self.found = []

        def accept(self, token_id):
            self.found.append(token_id)

    step = Notes()
    step.read([1, 2])
    assert step.found == [1, 2]
    Step().read([1])
    assert Step().get_state() == {}
    with pytest.raises(NotImplementedError):
        Step().apply(None)


def chain(**params):
    return [type(s).__name__ for s in build_chain(SamplerParams(seed=1, **params), 10)]


@pytest.mark.parametrize(
    ("params", "name", "there"),
    [
        ({"repeat_penalty": 1.1}, "Penalties", True),
        ({"frequency_penalty": 0.1}, "Penalties", True),
        ({"presence_penalty": 0.1}, "Penalties", True),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, "Penalties", False),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, "Penalties", True),
        ({}, "Penalties", False),
        ({"dry_multiplier": 0.1}, "Dry", True),
        ({"dry_multiplier": 0.1, "dry_base": 1}, "Dry", True),
        ({"dry_multiplier": 0.1, "dry_base": 0.9}, "Dry", False),
        ({"dry_multiplier": 0.1, "dry_penalty_last_n": 0}, "Dry", False),
        ({"dry_multiplier": 0.1, "mirostat": 1}, "Dry", False),
        ({"top_n_sigma": 0.1}, "TopNSigma", True),
        ({"top_n_sigma": 0}, "TopNSigma", False),
        ({"top_k": 1}, "TopK", True),
        ({"top_k": 0}, "TopK", False),
        ({"typical_p": 0.99}, "Typical", True),
        ({"typical_p": 1}, "Typical", False),
        ({"top_p": 0.99}, "TopP", True),
        ({"top_p": 1}, "TopP", False),
        ({"min_p": 0.01}, "MinP", True),
        ({"min_p": 0}, "MinP", False),
        ({"xtc_probability": 0.01}, "Xtc", True),
        ({"xtc_probability": 0}, "Xtc", False),
        ({"temp": 1}, "Temp", False),
        ({"temp": 0.5}, "Temp", True),
        ({"temp": 0}, "Greedy", True),
        ({"temp": 0}, "TopK", False),
        ({"temp": 0, "typical_p": 0.9}, "TopK", True),
        ({"temp": 0, "xtc_probability": 0.5}, "TopK", True),
        ({"temp": 0, "dynatemp_range": 0.5}, "DynaTemp", True),
        ({"temp": 0, "dynatemp_range": 0.5, "mirostat": 2}, "Greedy", True),
        ({"dynatemp_range": 0}, "DynaTemp", False),
        ({"mirostat": 1}, "Mirostat", True),
        ({"mirostat": 2}, "MirostatV2", True),
        ({"mirostat": 1}, "TopK", False),
        ({"mirostat": 1, "temp": 0.5}, "Temp", True),
        ({"ignore_eos": True}, "LogitBias", False),  # no token ends a text here
    ],
)
def test_a_step_is_there_from_the_value_on_that_does_something(params, name, there):
    assert (name in chain(**params)) == there


def test_steps_get_the_parameters_of_their_names():
    many = SamplerParams(
        seed=5, temp=0.7, dynatemp_range=0.2, dynatemp_exponent=1.5, top_k=3, top_p=0.9, min_p=0.1,
        top_n_sigma=2.0, typical_p=0.8, xtc_probability=0.3, xtc_threshold=0.2, repeat_last_n=9,
        repeat_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.6, dry_multiplier=0.7,
        dry_base=1.6, dry_allowed_length=3, dry_penalty_last_n=50, min_keep=2,
        logit_bias={4: 1.0}, ignore_eos=True,
    )  # fmt: skip
    found = build_chain(many, 10, eog=[7], dry_breakers=[[1]])
    assert [repr(step) for step in found] == [
        "LogitBias(bias={4: 1.0, 7: -inf})",
        "Penalties(last_n=9, repeat=1.2, freq=0.4, present=0.6)",
        "Dry(multiplier=0.7, base=1.6, allowed_length=3, last_n=50, breakers=[[1]])",
        "TopNSigma(n=2.0)",
        "TopK(k=3)",
        "Typical(p=0.8, min_keep=2)",
        "TopP(p=0.9, min_keep=2)",
        "MinP(p=0.1, min_keep=2)",
        "Xtc(probability=0.3, threshold=0.2, min_keep=2, seed=5)",
        "DynaTemp(temp=0.7, range=0.2, exponent=1.5)",
        "Dist(seed=5)",
    ]
    found = build_chain(SamplerParams(seed=5, mirostat=1, mirostat_tau=3, mirostat_eta=0.2), 10)
    assert repr(found[-1]) == (
        f"Mirostat(tau=3, eta=0.2, seed=5, mu=6.0, m={MIROSTAT_M}, n_vocab=10)"
    )
    assert MIROSTAT_M == 100
    found = build_chain(SamplerParams(seed=5, mirostat=2, mirostat_tau=3, mirostat_eta=0.2), 10)
    assert repr(found[-1]) == "MirostatV2(tau=3, eta=0.2, seed=5, mu=6.0)"


def test_logprobs_after_the_steps_leave_them_as_they_were():
    sampler = Sampler.chain([TopK(3), Temp(0.5), MirostatV2(seed=1)], 4)
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    before = sampler.get_state()
    found, chosen = sampler.after_steps(logits, 2, 1)
    weights = np.array([0.16, 0.09, 0.04])
    assert [i for i, _ in found] == [0, 1]
    assert np.exp([x for _, x in found]) == pytest.approx(weights[:2] / weights.sum())
    assert math.exp(chosen) == pytest.approx(0.09 / weights.sum())
    assert sampler.after_steps(logits, 2, 3)[1] == -math.inf
    assert sampler.get_state() == before
    greedy = Sampler.chain([Greedy()], 4)
    assert greedy.after_steps(logits, 9, 0) == ([(0, 0.0)], 0.0)


def test_a_small_temperature_leaves_the_best_alone():
    c = from_logits(1, 3, 2)
    assert ids(Temp(0.9e-30).apply(c)) == [1]
    assert ids(Temp(1e-30).apply(c)) == [0, 1, 2]
    assert len(DynaTemp(0.0, 0.0).apply(c)) == 1
    assert ids(DynaTemp(1.0, 0.5).apply(from_logits(2.0))) == [0]
    flat = DynaTemp(1.0, 0.5).apply(from_logits(2.0, 2.0))  # of the highest entropy
    np.testing.assert_allclose(flat.logits, [2 / 1.5] * 2)
    sure = DynaTemp(1.0, 0.5, 1.0).apply(from_logits(0.0, -math.inf))
    np.testing.assert_allclose(sure.logits, [0.0, -math.inf])


@pytest.mark.parametrize(
    ("n", "kept"), [(0, [0, 1, 2]), (-1, [0, 1, 2]), (0.5, [2]), (3, [0, 1, 2])]
)
def test_sigma_is_that_of_all_logits(n, kept):
    assert ids(TopNSigma(n).apply(from_logits(0, 1, 2))) == kept
    assert ids(TopNSigma(1).apply(from_logits(5))) == [0]
    none = from_logits(-math.inf, -math.inf)
    assert TopNSigma(1).apply(none) is none
    both = TopNSigma(1e-9).apply(from_logits(0, 0))
    assert ids(both) == [0, 1]
    assert ids(TopNSigma(0.5).apply(from_logits(0, 1))) == [1], "two have a deviation"


def test_min_p_keeps_at_least_so_many_and_what_is_at_the_floor():
    c = from_logits(*np.log([0.4, 0.2, 0.1]))
    assert MinP(0).apply(c) is c
    assert ids(MinP(1).apply(from_logits(1, 1, 0))) == [0, 1]
    assert ids(MinP(0.9, 2).apply(c)) == [0, 1]
    assert ids(MinP(0.9, 1).apply(c)) == [0]
    assert not MinP(0.9, 1).apply(c).sorted
    assert MinP(0.9, 2).apply(c).sorted
    ordered = c.all_sorted()
    assert MinP(0.9, 1).apply(ordered).sorted


def test_dry_is_off_where_it_would_do_nothing():
    for step in (Dry(0.0), Dry(1.0, 0.99), Dry(1.0, last_n=0)):
        step.read([1, 2, 3, 1, 2])
        c = from_logits(0, 0, 0, 0)
        assert step.apply(c) is c
    step = Dry(1.0, 1.0)
    step.read([1, 2, 3, 1, 2])
    assert step.apply(from_logits(0, 0, 0, 0)).logits.tolist() == [0, 0, 0, -1]
    assert step.get_state() == {"history": [1, 2, 3, 1, 2]}
    other = Dry(1.0, 1.0)
    other.set_state(step.get_state())
    assert other.get_state() == step.get_state()
    other.reset()
    assert other.get_state() == {"history": []}
    assert Dry(1.0, last_n=0).get_state() == {"history": []}
    assert dry.LOG_FLOAT_MAX == 88.7228391
    assert Dry(1.0, 1.000001)._max_exponent is None
    assert Dry(1.0, 1.75)._max_exponent == 158


def test_the_longest_breaker_ends_a_repetition_however_far_back_it_begins():
    """Two tokens after a breaker of four; penalties grow up to a length of four."""
    step = Dry(1.0, math.exp(40), 2, breakers=[(7,), (9, 1, 2, 3)])
    assert step._limit(array("i", [9, 1, 2, 3, 5, 6])) == 2
    assert step._limit(array("i", [8, 1, 2, 3, 5, 6])) == 4


def test_dry_keeps_no_more_of_a_long_answer_than_it_needs():
    step = Dry(1.0, last_n=4)
    for i in range(1000):
        step.accept(i)
        assert len(step._history) <= 2 * 4 + 64
        assert step.get_state()["history"] == list(range(max(0, i - 3), i + 1))
    step.read(range(10))
    assert list(step._history) == [6, 7, 8, 9]
    short = Dry(1.0, last_n=1)
    short.read([1, 2])
    assert list(short._history) == [2]


class Piece:
    """A vocabulary of texts."""

    def __init__(self, *texts):
        self.texts = texts

    def __call__(self, i):
        return self.texts[i]


def filled(probs, texts, eog=(3,)):
    c = from_logits(*np.log(np.array(probs)))
    found = infill.Infill(Piece(*texts), eog, 9).apply(c)
    weights = np.exp(found.logits.astype(np.float64))
    return ids(found), (weights / weights.sum()).round(3).tolist()


TEXTS = (b"a", b"b", b"c", b"")


@pytest.mark.parametrize(
    ("probs", "kept"),
    [
        # An end with over a third of what the others have, by their number, ends the text.
        ([0.5, 0.3, 0.1, 0.1], [3]),
        ([0.6, 0.3, 0.06, 0.04], [0, 3]),
        # Of few likely ones each has its share.
        ([0.5, 0.45, 0.04, 0.01], [0, 1, 3]),
        ([0.7, 0.25, 0.04, 0.01], [0, 3]),
        # None likely: the end of no others.
        ([0.19, 0.19, 0.19, 1e-9], [0, 1, 2, 3]),
    ],
)
def test_a_gap_is_filled_by_likely_tokens_or_ends(probs, kept):
    assert filled(probs, TEXTS)[0] == kept


def test_a_gap_without_a_likely_token_ends_by_its_own():
    many = [0.1] * 10
    c = from_logits(*np.log(many))
    found = infill.Infill(Piece(*(bytes([65 + i]) for i in range(10))), [99], 42).apply(c)
    assert (ids(found), found.sorted) == ([42], True)


def test_a_text_that_begins_another_joins_the_likelier():
    kept, weights = filled([0.4, 0.35, 0.24, 0.01], (b"a", b"ab", b"c", b""))
    assert kept == [0, 3]
    assert weights[0] > 0.98
    kept, _ = filled([0.35, 0.4, 0.24, 0.01], (b"a", b"ab", b"c", b""))
    assert kept == [1, 3]
    kept, _ = filled([0.4, 0.35, 0.24, 0.01], (b"", b"ab", b"c", b""))  # an empty one joins none
    assert 1 in kept


def test_a_mask_has_a_bit_for_each_token_the_lowest_first():
    c = from_logits(*range(10)).take(np.array([9, 0, 3]), sorted=False)
    kept = grammar.allowed(c, bytes([0b1001, 0b10]), 10)
    assert ids(kept) == [9, 0, 3]
    assert ids(grammar.allowed(c, bytes([0b1000, 0]), 10)) == [3]
    with pytest.raises(SamplerError, match="allows none"):
        grammar.allowed(c, bytes(2), 10)


@pytest.mark.parametrize(("levels", "n_byte", "tried"), [
    (400, 200_000, False), (401, 1, True), (1, 200_001, True),
])  # fmt: skip
def test_large_grammars_are_tried_in_a_process_of_their_own(monkeypatch, levels, n_byte, tried):
    found = []
    monkeypatch.setattr(grammar, "_try_out", found.append)
    given = SimpleNamespace(n_level=levels, text="x" * n_byte)
    assert grammar.tried(given) is given
    assert bool(found) == tried


def test_the_end_of_a_trial_is_reported(monkeypatch):
    def end(code=0, out=b"", slow=False):
        def run(command, *, timeout, **how):
            assert command[-1] == "tamis.sampling.grammar"
            assert (how["input"], how["cwd"], timeout) == (b"root", "/", 60)
            if slow:
                raise grammar.subprocess.TimeoutExpired(command, timeout)
            return SimpleNamespace(returncode=code, stdout=out)

        monkeypatch.setattr(grammar.subprocess, "run", run)
        grammar._try_out.cache_clear()
        grammar._try_out("root")

    end()
    with pytest.raises(SamplerError, match="by signal 11"):
        end(-11)
    with pytest.raises(SamplerError, match="it is wrong"):
        end(1, b"it is wrong")
    with pytest.raises(SamplerError, match="cannot be compiled"):
        end(1)
    with pytest.raises(SamplerError, match="over 30 s"):
        end(slow=True)
    grammar._try_out.cache_clear()


def test_a_trial_has_limits_and_says_what_is_wrong(monkeypatch, capsys):
    found, lowered = {}, {}
    monkeypatch.setattr(limits, "limit", found.__setitem__)
    monkeypatch.setattr(limits, "lower", lowered.__setitem__)
    for text, code in ((b'start: "a"', 0), (b"start: {", 1)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        assert grammar._trial() == code
    assert capsys.readouterr().out.startswith("grammar: ")
    assert found == {"core": 0, "stack": 4 << 20, "cpu": 31, "memory": 2 << 30}
    assert lowered == {"cpu": 30}


def test_a_vocabulary_knows_its_single_tokens():
    found = GrammarTokenizer(Bytes(), Bytes.n_vocab)
    assert found.token("a") == ord("a")
    assert found.token("ab") is None
    assert found.token("") is None
    assert found("a") == found(b"a") == [97]
    assert found.special_token_ids == [256]
    assert found.tokens[255:] == [b"\xff", b"\xff<end>"]
    assert (found.bos_token_id, found.eos_token_id, found.ends) == (None, 256, {256})
    assert Bytes().piece(256) == b""
    none = SimpleNamespace(eog=frozenset(), piece=lambda i: b"x")
    with pytest.raises(SamplerError, match="no token that ends"):
        GrammarTokenizer(none, 3)


def test_a_grammar_is_followed_copied_and_begun_again():
    vocab = GrammarTokenizer(Bytes(), Bytes.n_vocab)
    step = grammar.Grammar('start: "ab"', vocab)
    c = Candidates(np.arange(257, dtype=np.int32), np.zeros(257, np.float32))
    assert ids(step.apply(c)) == [97]
    step.read([99])
    with pytest.raises(SamplerError, match="does not allow token 98"):
        step.accept(98)
    other = copy.deepcopy(step)
    step.accept(97)
    assert (step.get_state(), other.get_state()) == ({"accepted": [97]}, {"accepted": []})
    assert (ids(step.apply(c)), ids(other.apply(c))) == ([98], [97])
    other.set_state({"accepted": [97, 98]})
    assert ids(other.apply(c)) == [256]
    other.accept(256)  # it has ended
    other.accept(5)
    assert other.get_state() == {"accepted": [97, 98]}
    step.reset()
    assert (step.get_state(), ids(step.apply(c))) == ({"accepted": []}, [97])
    with pytest.raises(SamplerError, match="grammar: "):
        grammar.Grammar("start: {", vocab)
