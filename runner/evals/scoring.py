"""The scores of an answer, and confidence intervals of mean scores."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import numpy as np

from tamis.evals.tasks.base import EDIT, EXACT, F1, MATCH_ALL, MATCH_PART, ROUGE

Z95 = 1.959963984540054
N_RESAMPLE = 2000


class Interval(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def match_all(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected strings that the answer contains (RULER's string_match_all)."""
    text = answer.lower()
    return sum(item.lower() in text for item in expected) / len(expected)


def match_part(answer: str, expected: Sequence[str]) -> float:
    """1 if the answer contains one of the expected strings (RULER's string_match_part), else 0."""
    text = answer.lower()
    return float(any(item.lower() in text for item in expected))


def f1(answer: str, expected: Sequence[str]) -> float:
    """The best F-measure of the answer's words and an expected text's (SQuAD's F1).

    Case, punctuation and English articles do not count.
    """
    own = Counter(_words(answer))

    def of(text: str) -> float:
        words = Counter(_words(text))
        common = (own & words).total()
        return 2 * common / (own.total() + words.total()) if common else 0.0

    return max(map(of, expected))


def exact(answer: str, expected: Sequence[str]) -> float:
    """1 if the answer's words equal those of an expected text, else 0."""
    own = _words(answer)
    return float(any(own == _words(text) for text in expected))


def edit(answer: str, expected: Sequence[str]) -> float:
    """The similarity of the answer's first line of code to an expected one: difflib's ratio.

    This is the metric of LongBench's code sets. Fences and comment lines are skipped. The ratio is
    rounded to hundredths, as in LongBench.
    """
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not re.search("`|#|//", line)), "")
    return max(round(SequenceMatcher(None, code, text).ratio(), 2) for text in expected)


def _words(text: str) -> list[str]:
    words = re.sub(r"[^\w\s]", "", text.lower()).split()
    return [word for word in words if word not in ("a", "an", "the")]


# The metrics, except ROUGE. More text can lower the scores of those in FINAL.
MATCHES = {MATCH_ALL: match_all, MATCH_PART: match_part, F1: f1, EXACT: exact, EDIT: edit}
FINAL = {F1, EXACT, EDIT, ROUGE}


def rouge(answer: str, reference: str) -> dict[str, float]:
    """F-measures of ROUGE-1, -2 and -L with stems. Raises an ImportError that names the extra."""
    scorer: Any = rouge_scorer().RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    return {name: found.fmeasure for name, found in scorer.score(reference, answer).items()}


def rouge_scorer() -> Any:
    """The module of rouge-score. Raises an ImportError that names the extra."""
    try:
        from rouge_score import rouge_scorer as module
    except ImportError as error:
        raise ImportError('ROUGE needs the extra: pip install "tamis[eval]"') from error
    return module


def wilson(mean: float, n: int) -> Interval:
    """Wilson's 95 % interval of the mean of n scores from 0 to 1.

    For intermediate scores (three needles of four) it is too wide, never too narrow: no
    distribution on [0, 1] varies more than the one on {0, 1} with the same mean.
    """
    centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n))
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


def paired(differences: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """The mean difference of pairs with its 95 % bootstrap percentile interval.

    differences: one list for each task; samples are redrawn within each task, and tasks have equal
    weight.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros(N_RESAMPLE)
    for items in differences:
        values = np.asarray(items, np.float64)
        means += rng.choice(values, (N_RESAMPLE, len(values))).mean(-1) / len(differences)
    low, high = np.percentile(means, [2.5, 97.5])
    mean = math.fsum(math.fsum(items) / len(items) for items in differences) / len(differences)
    return Interval(mean, float(low), float(high))
