"""Variable tracking: the names that got one value by a chain of assignments (RULER, 3.2)."""

from random import Random
from string import ascii_uppercase

from tamis.evals.tasks import words
from tamis.evals.tasks.base import Draft, Task, joined, stream

N_HOP = 4
N_PREDICT = 48  # RULER's 30 are too few for five names of five tokens each
_LINE = "The river is wide. The road is long. The wind comes and goes. Here nothing else happens."


def _make(seed: str, n: int) -> Draft:
    rng = stream(seed, "chain")
    names = _names(rng, 2 * (N_HOP + 1))
    value, other = words.number(rng, 5), words.number(rng, 5)
    while other == value:
        other = words.number(rng, 5)
    # A worked example with a chain of its own: it shows the form of the answer, not its content.
    example = _chain(names[N_HOP + 1 :], other)
    ask = "Which variables have the value {}? There are {}. Name all of them."
    tell = "By assignments, the variables that have the value {} are"
    return Draft(
        context="Follow the variables that are assigned in the text, through every copy.\n\n"
        f"Example text: {' '.join(example)}\nQuestion: {ask.format(other, N_HOP + 1)}\n"
        f"Answer: {tell.format(other)} {joined(names[N_HOP + 1 :])}.\n\n"
        f"Text: {' '.join(_hidden(_chain(names[: N_HOP + 1], value), n, rng))}",
        question=f"\nQuestion: {ask.format(value, N_HOP + 1)}",
        prefix=tell.format(value),
        expected=tuple(names[: N_HOP + 1]),
    )


def _names(rng: Random, n: int) -> list[str]:
    """N different names of five letters."""
    names: list[str] = []
    while len(names) < n:
        name = "".join(rng.choices(ascii_uppercase, k=5))
        names += [name] * (name not in names)
    return names


def _chain(names: list[str], value: str) -> list[str]:
    sources = [value, *(f"VAR {name}" for name in names)]
    return [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]


def _hidden(chain: list[str], n: int, rng: Random) -> list[str]:
    """The assignments in order, at random positions among n dull lines."""
    depths = sorted(rng.random() for _ in chain)
    ends = [round(depth * n) for depth in depths]
    lines, at = [], 0
    for end, assignment in zip(ends, chain, strict=True):
        lines += [_LINE] * (end - at) + [assignment]
        at = end
    return lines + [_LINE] * (n - at)


TASKS = (Task("vt", "names that one value was passed on to, in four steps", N_PREDICT, _make),)
