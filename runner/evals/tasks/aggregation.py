"""Aggregation: the most frequent words, which no single part of a context shows (RULER, 3.3).

Common words: ten occur 30 times, the others three times. Frequent words: the number of occurrences
of the k-th word follows a zeta distribution; the first of all is dots and does not count.
"""

from random import Random

from tamis.evals.tasks import words
from tamis.evals.tasks.base import Draft, Task, joined, stream

N_COMMON, OFTEN, SELDOM = 10, 30, 3
N_FREQUENT, ALPHA = 3, 2.0


def _common(seed: str, n: int) -> Draft:
    """A draft of common words; n: the number of uncommon ones."""
    rng = stream(seed, "words")
    vocabulary = words.compounds(stream(seed, "vocabulary"), N_COMMON + 14 + n)
    common, shown, others = vocabulary[:10], vocabulary[10:24], vocabulary[24:]
    ask = "Which are the {} words that come most often in the list above?"
    tell = "The words that come most often in the list are"
    few = _list(shown[:4] * 4 + shown[4:], rng)
    return Draft(
        context="Below is a numbered list of words. Some come much more often than the others. "
        f"Remember those.\n\nExample list: {few}\nQuestion: {ask.format(4)}\n"
        f"Answer: {tell} {joined(shown[:4])}.\n\n"
        f"List: {_list(common * OFTEN + others * SELDOM, rng)}",
        question=f"\nQuestion: {ask.format(N_COMMON)}",
        prefix=tell,
        expected=tuple(common),
    )


def _list(items: list[str], rng: Random) -> str:
    order = rng.sample(items, len(items))
    return " ".join(f"{i}. {word}" for i, word in enumerate(order, 1))


def _frequent(seed: str, n: int) -> Draft:
    """A draft of frequent words; n: words of the text, in tens."""
    n_word = 10 * n + 40
    rng = stream(seed, "coded")
    coded: list[str] = []
    while len(coded) < max(8, n_word // 50):
        word = "".join(rng.choices("bcdfghklmnprstvwz", k=3))
        word = "".join(c + rng.choice("aeiou") for c in word)
        coded += [word] * (word not in coded)
    counts = zeta_counts(n_word, len(coded))
    text = [
        word for word, times in zip(["...", *coded], counts, strict=False) for _ in range(times)
    ]
    stream(seed, "order").shuffle(text)
    return Draft(
        context="Read the coded text below and count how often each coded word comes. The dots "
        f"are no word.\n\n{' '.join(text)}",
        question=f"\n\nWhich are the {N_FREQUENT} coded words that come most often?",
        prefix=f"The {N_FREQUENT} coded words that come most often are",
        expected=tuple(coded[:N_FREQUENT]),
    )


def zeta_counts(n_word: int, n_kind: int) -> list[int]:
    """The counts of n_kind words among about n_word: n_word k^-alpha / zeta(alpha)."""
    weights = [k**-ALPHA for k in range(1, n_kind + 1)]
    return [max(1, round(n_word * weight / sum(weights))) for weight in weights]


TASKS = (
    Task(
        "cwe", "the ten words that come 30 times, among words that come three times", 120, _common
    ),
    Task("fwe", "the three words of a zeta distribution that come most often", 50, _frequent),
)
