"""The sampler, step by step: distributions of four or five tokens written out by hand.

`given(0.4, 0.3, 0.2, 0.1)` are candidates 0, 1, 2, 3 with these probabilities; a step is specified
by the ids it keeps and, where it changes them, by the probabilities of the kept.
"""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from tamis.sampling.chain import (
    Candidates,
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
    SamplerError,
    SamplerParams,
    Step,
    Temp,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
    breaker_sequences,
    build_chain,
)


def from_logits(*logits: float, dtype=np.float32) -> Candidates:
    return Candidates(np.arange(len(logits), dtype=np.int32), np.array(logits, dtype=dtype))


def given(*probs: float) -> Candidates:
    with np.errstate(divide="ignore"):
        return from_logits(*np.log(probs), dtype=np.float64)


def ids(c: Candidates) -> list[int]:
    return c.ids.tolist()


def names(chain) -> list[str]:
    return [type(step).__name__ for step in chain]


def logits_of(*probs: float) -> np.ndarray:
    return np.log(np.array(probs, dtype=np.float32))


# --- truncation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "kept"), [(1, [1]), (2, [1, 3]), (3, [1, 3, 2]), (9, [1, 3, 2, 0]), (0, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_k_best_in_falling_order(k, kept):
    assert ids(TopK(k).apply(given(0.1, 0.4, 0.2, 0.3))) == kept


def test_equal_logits_fall_in_the_order_of_their_ids_whether_cut_or_sorted_whole():
    c = from_logits(1, 2, 1, 1, 2)
    assert ids(c.head(3)) == [1, 4, 0]
    assert ids(c.all_sorted()) == [1, 4, 0, 2, 3]


@pytest.mark.parametrize(
    ("p", "min_keep", "kept"),
    [
        (0.39, 0, [0]),
        (0.5, 0, [0, 1]),
        (0.75, 0, [0, 1, 2]),
        (0.95, 0, [0, 1, 2, 3]),
        (1.0, 0, [0, 1, 2, 3]),
        (0.0, 0, [0]),  # one is always kept
        (0.0, 3, [0, 1, 2]),
    ],
)
def test_top_p_keeps_the_fewest_whose_mass_reaches_p(p, min_keep, kept):
    assert ids(TopP(p, min_keep).apply(given(0.4, 0.3, 0.2, 0.1))) == kept


def test_top_p_of_a_flat_vocabulary_looks_past_its_first_sorted_head():
    n = 8192  # a power of two: the sums are exact
    c = Candidates(np.arange(n, dtype=np.int32), np.zeros(n, dtype=np.float32))
    assert ids(TopP(0.5).apply(c)) == list(range(4096))


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(
    ("p", "min_keep", "kept"),
    [(0.0, 0, 4), (0.3, 0, 3), (0.6, 0, 2), (0.8, 0, 1), (1.0, 0, 1), (0.8, 3, 3)],
)
def test_min_p_keeps_what_has_p_times_the_best_probability(p, min_keep, kept, is_sorted):
    c = given(0.4, 0.3, 0.2, 0.1)
    c = Candidates(c.ids, c.logits, is_sorted)
    assert ids(MinP(p, min_keep).apply(c)) == list(range(kept))


def test_min_p_leaves_an_unsorted_order_alone():
    assert ids(MinP(0.5).apply(given(0.2, 0.1, 0.4, 0.3))) == [0, 2, 3]


@pytest.mark.parametrize(
    ("p", "min_keep", "kept"),
    [
        # H = 1.277; -ln p = 0.693, 1.386, 1.897, 2.996; distance 0.584, 0.109, 0.620, 1.718.
        (0.2, 0, [1]),
        (0.25, 0, [1, 0]),  # the mass must exceed p
        (0.8, 0, [1, 0, 2]),
        (0.2, 2, [1, 0]),
        (1.0, 0, [0, 1, 2, 3, 4]),
    ],
)
def test_typical_takes_by_nearness_of_surprise_to_the_entropy(p, min_keep, kept):
    assert ids(Typical(p, min_keep).apply(given(0.5, 0.25, 0.15, 0.05, 0.05))) == kept


def test_typical_can_drop_the_most_likely_token():
    # H = 1.505; -ln 0.4 is 0.588 away from it, -ln 0.15 is 0.392 away.
    assert ids(Typical(0.5).apply(given(0.4, 0.15, 0.15, 0.15, 0.15))) == [1, 2, 3, 4]


def test_typical_takes_impossible_tokens_last():
    assert ids(Typical(0.9).apply(given(0.5, 0.0, 0.5))) == [0, 2]


def test_top_n_sigma_keeps_logits_within_n_standard_deviations_of_the_best():
    c = from_logits(0, 1, 2, 3, 4)  # deviation sqrt(2)
    assert ids(TopNSigma(1.0).apply(c)) == [3, 4]
    assert ids(TopNSigma(2.0).apply(c)) == [2, 3, 4]
    assert ids(TopNSigma(0.0).apply(c)) == [0, 1, 2, 3, 4]
    assert ids(TopNSigma(-1.0).apply(c)) == [0, 1, 2, 3, 4]


def test_top_n_sigma_leaves_forbidden_tokens_out_of_mean_and_deviation():
    assert ids(TopNSigma(1.0).apply(from_logits(0, -math.inf, 1, 2, 3, 4))) == [4, 5]


@pytest.mark.parametrize(
    ("threshold", "min_keep", "kept"),
    [
        (0.35, 0, [0, 1, 2, 3]),  # one reaches it: nothing to exclude
        (0.25, 0, [1, 2, 3]),  # 0.4 and 0.3 reach it: all but the last of them go
        (0.15, 0, [2, 3]),
        (0.05, 0, [3]),
        (0.05, 2, [0, 1, 2, 3]),  # fewer than min_keep would be left
        (0.51, 0, [0, 1, 2, 3]),  # above one half it is off
    ],
)
def test_xtc_drops_all_but_the_last_of_those_above_the_threshold(threshold, min_keep, kept):
    step = Xtc(probability=1.0, threshold=threshold, min_keep=min_keep, seed=1)
    assert ids(step.apply(given(0.4, 0.3, 0.2, 0.1))) == kept


def test_xtc_acts_with_its_probability():
    step = Xtc(probability=0.25, threshold=0.1, seed=5)
    acted = sum(len(step.apply(given(0.6, 0.4))) == 1 for _ in range(4000))
    # Standard deviation sqrt(4000 * 0.25 * 0.75) = 27; four of them.
    assert abs(acted - 1000) < 4 * 27


def test_xtc_with_probability_zero_draws_nothing():
    step = Xtc(probability=0.0, seed=5)
    before = step.get_state()
    assert ids(step.apply(given(0.6, 0.4))) == [0, 1]
    assert step.get_state() == before


# --- logits -----------------------------------------------------------------------------------


def test_penalties_divide_positive_logits_multiply_others_then_subtract():
    step = Penalties(last_n=64, repeat=2.0, freq=0.5, present=0.25)
    for token_id in (0, 1, 1, 2):
        step.accept(token_id)
    out = step.apply(from_logits(4.0, -4.0, 0.0, 1.0))
    # 4/2 - 1*.5 - .25 · -4*2 - 2*.5 - .25 · 0*2 - .5 - .25 · not seen
    assert out.logits.tolist() == [1.25, -9.25, -0.75, 1.0]
    assert not out.sorted


def test_penalties_count_only_the_last_n_tokens():
    step = Penalties(last_n=2, freq=1.0)
    for token_id in (0, 0, 1):
        step.accept(token_id)
    assert step.apply(from_logits(5, 5, 5)).logits.tolist() == [4, 4, 5]
    step.accept(1)
    assert step.apply(from_logits(5, 5, 5)).logits.tolist() == [5, 3, 5]


@pytest.mark.parametrize("last_n", [-1, 0, 1, 3, 100])
@pytest.mark.parametrize("make", [lambda n: Penalties(n, 2.0), lambda n: Dry(1.0, last_n=n)])
def test_a_prompt_is_read_as_its_tokens_one_by_one(make, last_n):
    text = [1, 2, 3, 1, 2, 0, 1, 2, 3, 1]
    whole, parts = make(last_n), make(last_n)
    whole.read(text[:6])
    whole.read(text[6:])
    for token_id in text:
        parts.accept(token_id)
    for step in (whole, parts):
        step.accept(2)
    assert whole.get_state() == parts.get_state()
    logits = [step.apply(from_logits(5, 5, 5, 5)).logits.tolist() for step in (whole, parts)]
    assert logits[0] == logits[1]


def test_a_prompt_has_no_tokens_outside_the_vocabulary():
    sampler = Sampler(SamplerParams(repeat_penalty=1.5), 30)
    for ids in ([30], [-1, 2]):
        with pytest.raises(SamplerError, match="expected 0 to 29"):
            sampler.read(ids)


@pytest.mark.parametrize(("last_n", "expected"), [(0, 5.0), (-1, -95.0)])
def test_penalties_last_n_zero_is_off_and_minus_one_is_everything(last_n, expected):
    step = Penalties(last_n=last_n, freq=1.0)
    for _ in range(100):
        step.accept(0)
    assert step.apply(from_logits(5, 5)).logits.tolist() == [expected, 5]


def test_penalties_find_their_tokens_in_any_order_of_candidates():
    step = Penalties(present=1.0)
    step.accept(3)
    step.accept(7)  # dropped by an earlier step
    c = Candidates(np.array([3, 0, 2], np.int32), np.array([5, 5, 5], np.float32), sorted=True)
    assert step.apply(c).logits.tolist() == [4, 5, 5]


def test_logit_bias_is_added_and_minus_infinity_forbids():
    out = LogitBias({0: 1.5, 2: -math.inf}).apply(from_logits(1, 1, 1))
    assert out.logits.tolist() == [2.5, 1, -math.inf]
    assert Sampler.chain([LogitBias({0: -math.inf}), Greedy()], 2).sample(logits_of(0.9, 0.1)) == 1


def test_temperature_divides_the_logits_and_sharpens():
    c = Temp(0.5).apply(given(0.6, 0.3, 0.1))  # squares: 0.36, 0.09, 0.01 of 0.46
    np.testing.assert_allclose(c.probs(), np.array([0.36, 0.09, 0.01]) / 0.46, rtol=1e-12)


@pytest.mark.parametrize("temp", [0.0, -1.0, 1e-40])
def test_temperature_zero_and_its_limit_leave_the_best_token(temp):
    assert ids(Temp(temp).apply(given(0.3, 0.6, 0.1))) == [1]


def test_dynamic_temperature_runs_from_low_to_high_with_the_entropy():
    # Uniform: H = log n, so T = temp + range; nearly certain: H ~ 0, so T = temp - range.
    flat = from_logits(2, 2, 2, 2)
    np.testing.assert_allclose(DynaTemp(1.0, 0.5).apply(flat).logits, 2 / 1.5)
    sure = from_logits(60, 0, 0, 0)
    np.testing.assert_allclose(DynaTemp(1.0, 0.5).apply(sure).logits[0], 60 / 0.5, rtol=1e-9)


def test_dynamic_temperature_between_follows_the_exponent():
    # Two of four equally likely: H / log 4 = 1/2, T = 0.5 + 1.0 * 0.5^2 = 0.75.
    c = from_logits(3, 3, -math.inf, -math.inf)
    np.testing.assert_allclose(DynaTemp(1.0, 0.5, exponent=2.0).apply(c).logits[:2], 3 / 0.75)


def test_dynamic_temperature_leaves_a_single_candidate():
    c = from_logits(3)
    assert DynaTemp(0.0, 1.0).apply(c) is c


# --- dry --------------------------------------------------------------------------------------


def dry(history, **options) -> list[float]:
    """What is taken off the tokens 0..5 after `history`."""
    step = Dry(multiplier=1.0, base=2.0, **options)
    for token_id in history:
        step.accept(token_id)
    return (-step.apply(from_logits(0, 0, 0, 0, 0, 0)).logits + 0.0).tolist()


def test_dry_penalises_what_would_go_on_with_a_repetition():
    # "0 1 2 3 . 0 1 2" would go on with 3: three tokens repeated, allowed two: 2^(3-2).
    assert dry([0, 1, 2, 3, 5, 0, 1, 2]) == [0, 0, 0, 2.0, 0, 0]


@pytest.mark.parametrize(("allowed", "penalty"), [(1, 4.0), (3, 1.0), (4, 0.0)])
def test_dry_grows_with_the_length_beyond_the_allowed(allowed, penalty):
    assert dry([0, 1, 2, 3, 5, 0, 1, 2], allowed_length=allowed)[3] == penalty


def test_dry_takes_the_longest_of_several_repetitions_of_a_token():
    # "1 2 3" (two tokens match) and "0 1 2 3" (three match) both go on with 3.
    assert dry([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2])[3] == 2.0


def test_dry_counts_overlapping_repetitions():
    # 0 0 0 0: its last three tokens also end one earlier and would go on with 0: 2^(3-2).
    assert dry([0, 0, 0, 0]) == [2.0, 0, 0, 0, 0, 0]


def test_dry_does_not_look_across_a_breaker():
    history = [0, 1, 2, 3, 5, 0, 1, 2]
    assert dry(history, breakers=[[0]])[3] == 1.0  # only "1 2" is repeated after the breaker
    assert dry(history, breakers=[[1]])[3] == 0.0
    assert dry(history, breakers=[[0, 1]])[3] == 0.0  # one token after a breaker of two
    assert dry(history, breakers=[[0, 2]])[3] == 2.0  # never stood there


@pytest.mark.parametrize(
    ("n", "length"), [(40, 40), (127, 127), (128, 128), (129, 129), (140, 129)]
)
def test_dry_finds_a_breaker_as_far_back_as_penalties_grow(n, length):
    """With base 2 a penalty grows up to 2^127, that of a repetition of 129 tokens."""
    block = [0, 2, 4] + [1] * n
    assert dry([*block, 5, *block], breakers=[[0, 2, 4]])[5] == 2.0 ** (length - 2)


def test_dry_never_penalises_a_breaker_of_one_token():
    assert dry([0, 1, 2, 3, 5, 0, 1, 2], breakers=[[3]])[3] == 0.0


def test_dry_sees_only_the_last_n_tokens():
    history = [0, 1, 2, 3, 5, 0, 1, 2]
    assert dry(history, last_n=7)[3] == 1.0  # "1 2 3 5 0 1 2"
    assert dry(history, last_n=4)[3] == 0.0
    assert dry(history, last_n=0)[3] == 0.0


@pytest.mark.parametrize("last_n", [1, 2, 7, 20])
def test_dry_looks_back_as_far_however_long_the_answer(last_n):
    """Old tokens are dropped now and then: never one too many, and never kept for good."""
    h = np.random.default_rng(last_n).integers(0, 3, 400).tolist()
    step = Dry(multiplier=1.0, base=2.0, last_n=last_n)
    for i, token_id in enumerate(h, 1):
        step.accept(token_id)
        recent = h[max(0, i - last_n) : i]
        penalties = -step.apply(from_logits(0, 0, 0, 0, 0, 0)).logits + 0.0
        assert penalties.tolist() == dry(recent)
        assert step.get_state() == {"history": recent}
        assert len(step._history) <= 2 * last_n + 64
    assert Dry(multiplier=1.0, last_n=0).get_state() == {"history": []}


def test_dry_has_no_breaker_of_no_tokens():
    with pytest.raises(SamplerError, match="dry_breakers has an empty sequence"):
        Dry(multiplier=1.0, breakers=[[3], []])


def test_dry_agrees_with_a_plain_search_for_the_longest_repetition():
    rng = np.random.default_rng(3)
    for _ in range(50):
        h = rng.integers(0, 3, 30).tolist()
        expected = [0.0] * 6
        for i in range(len(h) - 1):
            n = 0
            while n <= i and h[i - n] == h[-1 - n]:
                n += 1
            if n >= 2:
                expected[h[i + 1]] = max(expected[h[i + 1]], 2.0 ** (n - 2))
        assert dry(h) == expected


def test_dry_penalty_stops_growing_before_it_overflows():
    step = Dry(multiplier=1.0, base=1.75)
    for _ in range(1000):
        step.accept(0)
    out = step.apply(from_logits(0, 0)).logits
    assert -3.5e38 < out[0] < -1e38


def test_breaker_sequences_find_breakers_in_and_across_tokens():
    pieces = [b"a", b'."', b"x<", b"<", b"/s>", b"s>", b"\n"]

    def encode(text):
        return {"/s>": [4], "s>": [5]}[text]

    assert breaker_sequences(['"', "\n"], pieces, encode) == ((1,), (6,))
    assert breaker_sequences(["</s>"], pieces, encode) == ((2, 4), (3, 4))


def test_breaker_sequences_do_not_split_a_character():
    assert breaker_sequences(["é"], [b"\xc3", b"\xa9", "é".encode()], lambda text: []) == ((2,),)


# --- choosing ---------------------------------------------------------------------------------


def test_greedy_takes_the_best_and_of_equals_the_lowest_id():
    assert ids(Greedy().apply(from_logits(1, 3, 3, 2))) == [1]


def test_dist_draws_with_the_frequencies_of_the_probabilities():
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    step, n = Dist(seed=42), 20_000
    drawn = [ids(step.apply(given(*probs)))[0] for _ in range(n)]
    counts = np.bincount(drawn, minlength=4)
    chi2 = float(np.sum((counts - n * probs) ** 2 / (n * probs)))
    # 99.9 % of chi-square values with three degrees of freedom are below 16.27; the seed is fixed,
    # so the test cannot flicker.
    assert chi2 < 16.27


def test_dist_never_draws_a_token_of_probability_zero():
    step = Dist(seed=7)
    assert {ids(step.apply(given(0.0, 1.0, 0.0)))[0] for _ in range(200)} == {1}


def test_dist_and_xtc_of_one_seed_draw_different_numbers():
    assert Dist(seed=3)._random.uniform() != Xtc(0.5, seed=3)._random.uniform()


def test_the_random_stream_is_fixed_for_all_time():
    # A changed stream would change every seeded text: these are PCG64's, seeded with [1, 0].
    reference = np.random.PCG64(np.random.SeedSequence([1, 0]))
    expected = [(int(reference.random_raw()) >> 11) / 2**53 for _ in range(3)]
    stream = Dist(seed=1)._random
    assert [stream.uniform() for _ in range(3)] == expected


def test_mirostat_v2_drops_what_is_more_surprising_than_mu():
    step = MirostatV2(tau=1.0, eta=0.1, seed=1)  # mu = 2: keeps p >= 1/4
    assert ids(step.kept(given(0.1, 0.3, 0.2, 0.4))) == [3, 1]
    step.mu = -5.0
    assert ids(step.kept(given(0.1, 0.3, 0.2, 0.4))) == [3]  # one always stays


def test_mirostat_moves_mu_by_the_error_once_the_token_is_accepted():
    step = MirostatV2(tau=2.0, eta=0.5, seed=1)
    token_id = ids(step.apply(from_logits(0, 0)))[0]  # one of two: surprise 1 bit
    assert step.mu == 4.0
    step.accept(token_id)
    assert step.mu == pytest.approx(4.0 - 0.5 * (1.0 - 2.0))
    step.accept(token_id)  # not drawn again, as a token of a prompt is not
    assert step.mu == pytest.approx(4.5)


@pytest.mark.parametrize("kind", [Mirostat, MirostatV2])
def test_mirostat_brings_the_mean_surprise_to_tau(kind):
    # Zipf's law over 500 tokens has far more than 3 bits of entropy: mu must come down.
    zipf = from_logits(*-np.log(np.arange(1, 501)))
    step, seen = kind(tau=3.0, eta=0.1, seed=4), []
    for _ in range(600):
        token_id = ids(step.apply(zipf))[0]
        seen.append(step._pending[1])
        step.accept(token_id)
    # Surprise has a deviation of about 1.5 bits: 0.1 for the mean of 400; mu is still moving, too.
    assert np.mean(seen[200:]) == pytest.approx(3.0, abs=0.3)


def test_mirostat_v1_follows_its_formula():
    # Zipf with s = 2 exactly: k = ((1 * 2^mu) / (1 - n^-1))^(1/2), mu = 4, n = 100: 4.02.
    zipf = from_logits(*-2 * np.log(np.arange(1, 101)), dtype=np.float64)
    assert ids(Mirostat(tau=2.0, seed=1).kept(zipf)) == [0, 1, 2, 3]
    least = Mirostat(tau=2.0, seed=1)
    least.mu = -20.0
    assert ids(least.kept(zipf)) == [0]


@pytest.mark.parametrize("logits", [[0.0], [0.0] * 5, [0.0, -math.inf], [5.0, 0.0, -900.0]])
@pytest.mark.parametrize("kind", [Mirostat, MirostatV2])
def test_mirostat_copes_with_distributions_at_the_edge(kind, logits):
    assert ids(kind(seed=1).apply(from_logits(*logits)))[0] in range(len(logits))


# --- the chain --------------------------------------------------------------------------------


def test_a_chain_has_the_seed_of_what_chooses_and_one_token_at_least():
    steps = [Xtc(0.5, 0.1, seed=3), Dist(4)]
    assert Sampler.chain(steps, 1).seed == 4
    assert Sampler.chain([Greedy()], 1).seed is None
    with pytest.raises(SamplerError, match="n_vocab is 0, expected at least 1"):
        Sampler.chain(steps, 0)


def test_the_defaults_are_those_of_llama_cpp():
    p = SamplerParams()
    assert (p.seed, p.temp, p.top_k, p.top_p, p.min_p) == (-1, 0.8, 40, 0.95, 0.05)
    assert (p.typical_p, p.top_n_sigma, p.min_keep) == (1.0, -1.0, 0)
    assert (p.xtc_probability, p.xtc_threshold) == (0.0, 0.1)
    assert (p.repeat_last_n, p.repeat_penalty) == (64, 1.0)
    assert (p.frequency_penalty, p.presence_penalty) == (0.0, 0.0)
    assert (p.dry_multiplier, p.dry_base, p.dry_allowed_length) == (0.0, 1.75, 2)
    assert (p.dry_penalty_last_n, p.dry_sequence_breakers) == (-1, ("\n", ":", '"', "*"))
    assert (p.dynatemp_range, p.dynatemp_exponent) == (0.0, 1.0)
    assert (p.mirostat, p.mirostat_tau, p.mirostat_eta) == (0, 5.0, 0.1)


EVERYTHING = SamplerParams(
    seed=1,
    logit_bias={0: 1.0},
    repeat_penalty=1.1,
    dry_multiplier=0.8,
    top_n_sigma=2.0,
    typical_p=0.9,
    xtc_probability=0.5,
    dynatemp_range=0.2,
)


def test_the_order_of_the_chain_is_llama_cpps():
    assert names(build_chain(EVERYTHING, 8)) == [
        "LogitBias",
        "Penalties",
        "Dry",
        "TopNSigma",
        "TopK",
        "Typical",
        "TopP",
        "MinP",
        "Xtc",
        "DynaTemp",
        "Dist",
    ]


def test_steps_that_would_do_nothing_are_left_out():
    assert names(build_chain(SamplerParams(), 8)) == ["TopK", "TopP", "MinP", "Temp", "Dist"]
    assert names(build_chain(SamplerParams(top_k=0, top_p=1, min_p=0, temp=1), 8)) == ["Dist"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mirostat": 1}, ["Temp", "Mirostat"]),
        ({"mirostat": 2, "repeat_penalty": 1.1, "top_k": 5}, ["Temp", "MirostatV2"]),
        ({"mirostat": 2, "logit_bias": {0: 1}}, ["LogitBias", "Temp", "MirostatV2"]),
        ({"mirostat": 2, "temp": 0}, ["Greedy"]),
        ({"temp": 0}, ["Greedy"]),
        ({"temp": 0, "repeat_penalty": 1.1}, ["Penalties", "Greedy"]),
        ({"temp": 0, "xtc_probability": 1}, ["TopK", "TopP", "MinP", "Xtc", "Greedy"]),
        (
            {"temp": 0, "dynatemp_range": 0.5},
            ["TopK", "TopP", "MinP", "DynaTemp", "Dist"],
        ),
    ],
)
def test_mirostat_and_greedy_replace_the_truncations(options, expected):
    assert names(build_chain(SamplerParams(**options), 8)) == expected


def test_top_k_works_on_penalised_logits():
    sampler = Sampler.chain([Penalties(present=5.0), TopK(1), Dist(seed=1)], 3)
    sampler.accept(0)
    assert sampler.sample(logits_of(0.8, 0.15, 0.05)) == 1


def test_ignore_eos_forbids_the_tokens_that_end_a_text():
    params = SamplerParams(temp=0, ignore_eos=True)
    assert Sampler(params, 3, eog={0, 2}).sample(logits_of(0.8, 0.05, 0.15)) == 1
    assert Sampler(SamplerParams(temp=0), 3, eog={0, 2}).sample(logits_of(0.8, 0.05, 0.15)) == 0


@pytest.mark.parametrize("steps", [[], [TopK(4)], [Greedy(), TopK(4)], [Greedy(), Dist(seed=1)]])
def test_a_chain_ends_in_the_one_step_that_chooses(steps):
    with pytest.raises(SamplerError, match="at its end"):
        Sampler.chain(steps, 4)


def test_a_step_of_ones_own_takes_part():
    class OnlyEven(Step):
        def apply(self, c):
            return Candidates(c.ids, np.where(c.ids % 2 == 0, c.logits, -np.inf), c.sorted)

    assert Sampler.chain([OnlyEven(), Greedy()], 3).sample(logits_of(0.2, 0.7, 0.1)) == 0


def test_sampling_leaves_the_logits_as_they_are():
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    before = logits.copy()
    sampler = Sampler(EVERYTHING, 50, dry_breakers=[[1]])
    for _ in range(20):
        sampler.accept(sampler.sample(logits))
    np.testing.assert_array_equal(logits, before)


# --- seeds and state --------------------------------------------------------------------------

LOGITS = np.random.default_rng(9).standard_normal((40, 30)).astype(np.float32)


def text(sampler: Sampler, rows=LOGITS) -> list[int]:
    out = []
    for logits in rows:
        out.append(sampler.sample(logits))
        sampler.accept(out[-1])
    return out


STATEFUL = [
    SamplerParams(seed=3),
    SamplerParams(seed=3, repeat_penalty=1.5, dry_multiplier=1.0, xtc_probability=0.5),
    SamplerParams(seed=3, mirostat=1),
    SamplerParams(seed=3, mirostat=2),
]


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    assert text(Sampler(SamplerParams(seed=3), 30)) == text(Sampler(SamplerParams(seed=3), 30))
    assert text(Sampler(SamplerParams(seed=3), 30)) != text(Sampler(SamplerParams(seed=4), 30))


@pytest.mark.parametrize("seed", [-1, None, 0xFFFFFFFF])
def test_a_random_seed_is_drawn_and_recorded(seed):
    first = Sampler(SamplerParams(seed=seed), 30)
    assert text(Sampler(SamplerParams(seed=first.seed), 30)) == text(first)
    assert first.seed != Sampler(SamplerParams(seed=seed), 30).seed  # equal once in 2^32 runs


def test_greedy_has_no_seed():
    assert Sampler(SamplerParams(temp=0), 30).seed is None


@pytest.mark.parametrize("params", STATEFUL)
def test_saved_state_goes_on_with_the_same_text(params):
    first = Sampler(params, 30, dry_breakers=[[1]])
    text(first, LOGITS[:20])
    saved = json.loads(json.dumps(first.get_state()))
    second = Sampler(SamplerParams(**{**vars(params), "seed": 99}), 30, dry_breakers=[[1]])
    second.set_state(saved)
    assert second.seed == first.seed
    assert text(second, LOGITS[20:]) == text(first, LOGITS[20:])


@pytest.mark.parametrize("params", STATEFUL)
def test_a_clone_goes_on_alone(params):
    first = Sampler(params, 30, dry_breakers=[[1]])
    text(first, LOGITS[:20])
    second = first.clone()
    expected = text(second, LOGITS[20:])
    assert text(first, LOGITS[20:]) == expected


@pytest.mark.parametrize("params", STATEFUL)
def test_reset_starts_over(params):
    sampler = Sampler(params, 30, dry_breakers=[[1]])
    first = text(sampler)
    sampler.reset()
    assert text(sampler) == first


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("steps"),
        lambda s: s.update(version=2),
        lambda s: s.update(n_vocab=31),
        lambda s: s["steps"].pop(),
        lambda s: s["steps"][0].update(step="TopK"),
        lambda s: s["steps"][0].update(state={}),
        lambda s: s["steps"][0]["state"].update(window=["x"]),
        lambda s: s["steps"][-1]["state"]["random"].update(state=-1),
    ],
)
def test_unusable_state_is_refused_and_changes_nothing(damage):
    sampler = Sampler(SamplerParams(seed=3, repeat_penalty=1.5), 30)
    text(sampler, LOGITS[:20])
    before = sampler.get_state()
    saved = json.loads(json.dumps(before))
    damage(saved)
    with pytest.raises(SamplerError):
        sampler.set_state(saved)
    assert sampler.get_state() == before


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", math.nan),
        ("temp", math.inf),
        ("temp", "0.8"),
        ("temp", None),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 2),
        ("typical_p", -1),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -0.1),
        ("repeat_last_n", -2),
        ("repeat_penalty", 0),
        ("repeat_penalty", -1),
        ("frequency_penalty", math.nan),
        ("dry_multiplier", -1),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("dynatemp_range", -0.1),
        ("mirostat", 3),
        ("mirostat_tau", math.nan),
        ("min_keep", -1),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("logit_bias", {0: math.nan}),
        ("logit_bias", {0: math.inf}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("dry_sequence_breakers", "abc"),
        ("dry_sequence_breakers", ("",)),
        ("dry_sequence_breakers", ("x" * 41,)),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(SamplerError, match=f"{name} .*expected"):
        SamplerParams(**{name: value})


def test_a_refusal_has_value_expectation_and_remedy():
    with pytest.raises(SamplerError) as error:
        SamplerParams(top_p=1.5)
    assert str(error.value) == (
        "top_p is 1.5, expected a finite number from 0.0 to 1.0: "
        "1 switches it off, the default is 0.95"
    )


@pytest.mark.parametrize("params", [SamplerParams(), SamplerParams(temp=0)])
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0, math.nan, 1], "logit of token 1 is nan"),
        ([0, 1, math.inf], "logit of token 2 is inf"),
        ([-math.inf] * 3, "all logits are -inf"),
        ([0, 1], r"shape \(2,\), expected \(3,\)"),
    ],
)
def test_unusable_logits_are_refused(params, logits, message):
    sampler = Sampler(params, 3)
    with pytest.raises(SamplerError, match=message):
        sampler.sample(np.array(logits, dtype=np.float32))
    with pytest.raises(SamplerError, match=message):
        sampler.logprobs(np.array(logits, dtype=np.float32), 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temp": 0},
        {"top_k": 0},
        {"top_k": 0, "typical_p": 0.5},
        {"top_k": 0, "top_n_sigma": 1.0},
        {"xtc_probability": 1.0},
        {"dynatemp_range": 0.5},
        {"mirostat": 1},
        {"mirostat": 2},
    ],
)
def test_forbidding_every_token_is_an_error_in_every_chain(options):
    params = SamplerParams(logit_bias={0: -math.inf, 1: -math.inf}, **options)
    with pytest.raises(SamplerError, match="every token has logit -inf"):
        Sampler(params, 2).sample(logits_of(0.5, 0.5))


def test_token_ids_outside_the_vocabulary_are_refused():
    sampler = Sampler(SamplerParams(), 3)
    for token_id in (-1, 3):
        with pytest.raises(SamplerError, match="expected 0 to 2"):
            sampler.accept(token_id)
    with pytest.raises(SamplerError, match="logit_bias has token id 3"):
        Sampler(SamplerParams(logit_bias={3: 1.0}), 3)


def test_dry_asks_for_its_breakers_as_token_ids():
    with pytest.raises(SamplerError, match="breaker_sequences"):
        Sampler(SamplerParams(dry_multiplier=0.8), 3)
    Sampler(SamplerParams(dry_multiplier=0.8, dry_sequence_breakers=()), 3)


# --- logprobs ---------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits_best_first():
    sampler = Sampler(SamplerParams(temp=0.1, logit_bias={0: -math.inf}), 4)
    logits = logits_of(0.4, 0.1, 0.2, 0.3)
    top = sampler.logprobs(logits, 2)
    assert [i for i, _ in top] == [0, 3]
    # The logits are float32: 1e-7 relative.
    np.testing.assert_allclose([p for _, p in top], np.log([0.4, 0.3]), rtol=1e-6)
    assert sampler.logprob(logits, 3) == top[1][1]
    assert len(sampler.logprobs(logits, 99)) == 4
    assert sampler.logprobs(logits, 0) == [], "the token's own is asked for apart"


def test_importing_the_sampler_does_not_import_numba():
    code = "import tamis.sampling.chain, sys; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- properties -------------------------------------------------------------------------------

some_logits = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12).map(
    lambda x: np.array(x, dtype=np.float32)
)
some_params = st.builds(
    SamplerParams,
    seed=st.integers(0, 1000),
    temp=st.floats(0.0, 3.0),
    dynatemp_range=st.sampled_from([0.0, 0.5]),
    top_k=st.integers(-1, 6),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    typical_p=st.floats(0.0, 1.0),
    top_n_sigma=st.floats(-1.0, 3.0),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    repeat_penalty=st.floats(0.5, 2.0),
    mirostat=st.integers(0, 2),
    min_keep=st.integers(0, 3),
)


@settings(max_examples=150, deadline=None)
@for_all(some_logits, some_params)
def test_the_chosen_token_survives_every_step_and_probabilities_sum_to_one(logits, params):
    c = Candidates(np.arange(len(logits), dtype=np.int32), logits)
    sampler = Sampler(params, len(logits))
    twin = sampler.clone()
    chosen = sampler.sample(logits)
    for step in twin.steps:
        c = step.apply(c)
        assert chosen in ids(c)
        assert c.probs().sum() == pytest.approx(1.0, abs=1e-12)
        if c.sorted:
            assert (np.diff(c.logits) <= 0).all()
    assert ids(c) == [chosen]


@settings(max_examples=50, deadline=None)
@for_all(some_logits, st.integers(0, 1000))
def test_top_k_of_one_equals_greedy(logits, seed):
    greedy = Sampler(SamplerParams(temp=0), len(logits))
    assert Sampler(SamplerParams(top_k=1, seed=seed), len(logits)).sample(logits) == greedy.sample(
        logits
    )


@settings(max_examples=50, deadline=None)
@for_all(some_logits, st.integers(1, 14), st.integers(0, 3))
def test_cutting_to_k_equals_sorting_everything_first(logits, k, decimals):
    c = from_logits(*np.round(logits, decimals))  # rounding makes ties
    assert ids(c.head(k)) == ids(c.all_sorted())[:k]


@pytest.mark.parametrize(
    ("params", "n_best"),
    [
        ({"temp": 0}, 1),
        ({"temp": 0, "typical_p": 0.9, "top_k": 7}, 7),
        ({"top_k": 7}, 7),
        ({"top_k": 7, "dynatemp_range": 0.3, "xtc_probability": 0.5}, 7),
        ({"top_k": 0}, None),
        ({"top_k": 7, "top_n_sigma": 1.0}, None),  # the deviation is of all logits
        ({"top_k": 7, "repeat_penalty": 1.1}, None),
        ({"top_k": 7, "logit_bias": {3: 1.0}}, None),
        ({"mirostat": 2}, None),
    ],
    ids=str,
)
def test_the_best_few_are_enough_where_it_says_so(params, n_best):
    given_all, given_few = (Sampler(SamplerParams(seed=1, **params), 500) for _ in range(2))
    assert given_all.n_best == n_best
    rng = np.random.default_rng(0)
    for _ in range(20 if n_best else 0):
        logits = (rng.standard_normal(500) * 3).round(1).astype(np.float32)  # with equal ones
        ids = np.lexsort((np.arange(500), -logits))[:n_best].astype(np.int32)
        row = given_few.sample_best(ids, logits[ids])
        assert ids[row] == given_all.sample(logits)


# --- where rules begin ---------------------------------------------------------------------------


def test_a_breaker_may_have_forty_characters():
    assert SamplerParams(dry_sequence_breakers=("x" * 40,)).dry_sequence_breakers == ("x" * 40,)
    for wrong in ("x" * 41, ""):
        with pytest.raises(SamplerError, match="1 to 40 characters"):
            SamplerParams(dry_sequence_breakers=(wrong,))


def test_top_p_of_one_looks_at_nothing():
    c = given(0.1, 0.5, 0.4)
    assert TopP(1.0).apply(c) is c
    assert Typical(1.0).apply(c) is c
    assert TopP(math.nextafter(1.0, 0.0)).apply(c).sorted


def test_the_best_come_sorted_and_say_so():
    c = given(0.1, 0.2, 0.3, 0.4)
    assert [(c.head(k).sorted, ids(c.head(k))) for k in (1, 2, 4, 5)] == [
        (True, [3]),
        (True, [3, 2]),
        (True, [3, 2, 1, 0]),
        (True, [3, 2, 1, 0]),
    ]


def test_no_top_k_and_no_probabilities_are_none():
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    chain = Sampler.chain([TopK(0), Dist(0)], 3)
    assert chain.n_best is None
    assert Sampler.chain([TopK(2), Dist(0)], 3).n_best == 2
    assert chain.after_steps(logits, -1, 2)[0] == []
    assert chain.after_steps(logits, 0, 2)[0] == []
    assert [i for i, _ in chain.after_steps(logits, 2, 2)[0]] == [2, 1]


def test_a_window_of_one_token_has_the_last_of_a_prompt():
    step = Penalties(last_n=1, present=1.0)
    step.read([1, 2])
    np.testing.assert_array_equal(step.apply(from_logits(0, 0, 0, 0)).logits, [0, 0, -1, 0])
    step = Penalties(last_n=0, present=1.0)
    step.read([1, 2])
    np.testing.assert_array_equal(step.apply(from_logits(0, 0, 0, 0)).logits, [0, 0, 0, 0])


@pytest.mark.parametrize("tokens", [[0], [3], [0, 3], [2, 9], [0, 1, 2, 3], [9], []])
def test_tokens_are_found_among_candidates_in_any_order(tokens):
    c = from_logits(0, 1, 2, 3).take(np.array([3, 0, 2]), sorted=False)
    rows, which = c.find(np.array(tokens, np.int64))
    found = [(ids(c)[row], tokens[at]) for row, at in zip(rows, which, strict=True)]
    assert sorted(found) == [(t, t) for t in sorted(tokens) if t in (0, 2, 3)]
