"""Needles in a haystack: RULER's eight retrieval tasks (Hsieh et al. 2024, arXiv 2404.06654, 3.1).

A needle states the secret value of a key. Tasks differ in the hay (a repeated line, prose, or more
needles), in the number of needles and in the question.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from tamis.evals.tasks import words
from tamis.evals.tasks.base import Draft, Task, check_units, hide, joined, prose, stream

LINE, PROSE, NEEDLES = "line", "prose", "needles"
_LINE = "The river is wide. The road is long. The wind comes and goes. Here nothing else happens."


@dataclass(frozen=True)
class Needles:
    """RULER's parameters of what is hidden."""

    hay: str = PROSE
    value: str = "number"  # "number"; or "code", a UUID
    n_key: int = 1
    n_value: int = 1  # of each key
    n_asked: int = 1  # keys
    key: str = "word"  # or "code"


def _make(kind: Needles, seed: str, n: int) -> Draft:
    rng = stream(seed, "needles")
    keys, values = _drawn(kind.key, rng, kind.n_key), _drawing(kind.value)
    facts = [(key, values(rng)) for key in keys for _ in range(kind.n_value)]
    asked = keys[: kind.n_asked]
    expected = tuple(value for key, value in facts if key in asked)
    lines = hide([_line(kind, *fact) for fact in facts], _hay(kind, seed, n, keys), rng)
    what = f"secret {kind.value}{'s' if len(expected) > 1 else ''}"
    verb = "are" if len(expected) > 1 else "is"
    return Draft(
        context=f"In the text below, a secret {kind.value} is told for some things. Remember "
        f"each of them, you will be asked about them afterwards.\n\n{' '.join(lines)}",
        question=f"\n\nWhich {what} did the text above tell for {joined(asked)}?",
        prefix=f"The {what} for {joined(asked)} told in the text {verb}",
        expected=expected,
    )


def _hay(kind: Needles, seed: str, n: int, keys: list[str]) -> list[str]:
    if kind.hay == LINE:
        return [_LINE] * n
    if kind.hay == PROSE:
        return prose(seed, n)
    rng, draw = stream(seed, "hay"), _drawing(kind.value)
    check_units(n, len(words.ADJECTIVES) * len(words.NOUNS) // 2, "keys")
    seen = set(keys)
    lines: list[str] = []
    while len(lines) < n:  # one by one, so that a longer hay extends a shorter one
        (key,) = _drawn(kind.key, rng, 1)
        if key not in seen:
            seen.add(key)
            lines.append(_line(kind, key, draw(rng)))
    return lines


def _line(kind: Needles, key: str, value: str) -> str:
    return f"The secret {kind.value} for {key} is: {value}."


def _drawn(kind: str, rng: Random, n: int) -> list[str]:
    return [words.code(rng) for _ in range(n)] if kind == "code" else words.keys(rng, n)


def _drawing(kind: str) -> Callable[[Random], str]:
    return words.code if kind == "code" else words.number


_KINDS = {
    "niah_single_1": (Needles(hay=LINE), "one number in a line that repeats"),
    "niah_single_2": (Needles(), "one number in prose"),
    "niah_single_3": (Needles(value="code"), "one UUID in prose"),
    "niah_multikey_1": (Needles(n_key=4), "one of four numbers in prose"),
    "niah_multikey_2": (Needles(hay=NEEDLES), "one number among nothing but such numbers"),
    "niah_multikey_3": (
        Needles(hay=NEEDLES, key="code", value="code"),
        "one UUID, asked for by a UUID, among nothing but such pairs",
    ),
    "niah_multivalue": (Needles(n_value=4), "four numbers of one key in prose"),
    "niah_multiquery": (Needles(n_key=4, n_asked=4), "the numbers of four keys in prose"),
}
TASKS = tuple(
    Task(name, summary, n_predict=128, make=partial(_make, kind))
    for name, (kind, summary) in _KINDS.items()
)
