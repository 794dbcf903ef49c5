"""Scores as RULER defines them, and the intervals that stand beside them."""

import sys

import pytest

from tamis.evals.scoring import match_all, match_part, paired, rouge, wilson


@pytest.mark.parametrize(
    ("answer", "everything", "part"),
    [
        ("They are 12 and 34.", 1.0, 1.0),
        ("12", 0.5, 1.0),
        ("None of them", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_all_is_the_share_found_and_part_is_any(answer, everything, part):
    assert match_all(answer, ("12", "34")) == everything
    assert match_part(answer, ("12", "34")) == part


def test_case_does_not_count():
    assert match_all("the answer is PLUM BREAD", ("Plum bread",)) == 1


@pytest.mark.parametrize(
    ("mean", "n", "low", "high"),
    [
        # Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_agrees_with_published_intervals(mean, n, low, high):
    found = wilson(mean, n)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_a_perfect_score_of_few_samples_is_not_certain():
    assert wilson(1.0, 3).high == 1
    assert wilson(1.0, 3).low == pytest.approx(0.4385, abs=1e-4)


def test_equal_differences_have_an_interval_without_width():
    assert paired([[-0.5, -0.5, -0.5]]) == (-0.5, -0.5, -0.5)


def test_tasks_weigh_alike_however_many_samples_they_have():
    found = paired([[1.0], [0.0] * 9])
    assert found.mean == 0.5
    # One sample of the first task: there is nothing to resample.
    assert (found.low, found.high) == (0.5, 0.5)


def test_a_bootstrap_is_near_the_normal_interval_of_many_samples():
    values = [0.0, 1.0] * 200  # mean 0.5, standard error 0.025
    found = paired([values])
    assert found.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)
    assert paired([values]) == found  # drawn from a seed


def test_rouge_of_a_summary():
    pytest.importorskip("rouge_score")
    found = rouge("The cat sits here", "the cat sat there")
    # Stems: the, cat are shared of four and four words; one of three pairs.
    assert found == pytest.approx({"rouge1": 0.5, "rouge2": 1 / 3, "rougeL": 0.5})


def test_rouge_without_its_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(ImportError, match=r'pip install "tamis\[eval\]"'):
        rouge("a", "b")
