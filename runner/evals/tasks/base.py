"""The definition of a task, and the search for the prompt that fits a length in tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from tamis.evals.tasks import words

MATCH_ALL, MATCH_PART, ROUGE = "match_all", "match_part", "rouge"
F1, EXACT, EDIT = "f1", "exact", "edit"
RULER = "ruler"  # the name of the group of the 13 tasks


class LengthError(ValueError):
    """The length leaves no room for the task; the message has the least length."""


class Draft(NamedTuple):
    """A prompt and its expected answer."""

    context: str  # what is read; in fair mode before the question is known
    question: str
    prefix: str  # the given beginning of the answer; it does not count as answered
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A kind of prompt, of any length."""

    name: str
    summary: str
    n_predict: int  # tokens of the longest answer; they count towards the length
    # (seed, units of filler) -> Draft; more units extend the filler
    make: Callable[[str, int], Draft]
    score: str = MATCH_ALL
    group: str = RULER


class Sample(NamedTuple):
    """A draft that fits: n_tokens of prompt and task.n_predict of answer are at most length."""

    draft: Draft
    n_unit: int
    n_tokens: int


def fit(task: Task, length: int, seed: str, count: Callable[[Draft], int]) -> Sample:
    """The longest prompt of the task that leaves room for its answer.

    count(draft): its tokens. One more unit of filler (a sentence, a word, a paragraph) would not
    fit. Raises LengthError.
    """
    room = length - task.n_predict
    sizes: dict[int, int] = {}

    def size(n: int) -> int:
        if n not in sizes:
            sizes[n] = count(task.make(seed, n))
        return sizes[n]

    low, high = 0, 8
    check_room(task, length, size(0))
    while size(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        # First where a straight line through both ends meets the room, then bisection.
        share = (room - size(low)) / max(1, size(high) - size(low))
        guess = low + int(share * (high - low)) if len(sizes) % 3 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    return Sample(task.make(seed, low), low, size(low))


def check_room(task: Task, length: int, n_token: int) -> None:
    """Raise LengthError if a prompt of n_token without any filler is too long already."""
    if n_token + task.n_predict > length:
        raise LengthError(
            f"--length is {length}, {task.name} takes {n_token + task.n_predict} tokens without "
            f"any filler, {task.n_predict} of them for the answer: raise --length"
        )


def check_units(n: int, most: int, what: str) -> None:
    """Raise LengthError if n units of a task exceed the `most` different ones that it has."""
    if n > most:
        raise LengthError(f"there are {most} different {what}: --length is too long for the task")


def stream(seed: str, part: str) -> Random:
    """A random generator for one part of a prompt; parts stay the same when another one grows."""
    return Random(f"{seed}/{part}")


def prose(seed: str, n: int) -> list[str]:
    """The first n sentences of this seed's prose."""
    text = words.sentences(stream(seed, "prose"))
    return [next(text) for _ in range(n)]


def hide(needles: Sequence[str], hay: Sequence[str], rng: Random) -> list[str]:
    """The hay with each needle at a random depth, which does not depend on the hay's size."""
    depths = [rng.random() for _ in needles]
    placed = sorted(zip(depths, needles, strict=True))
    found, at = [], 0
    for depth, needle in placed:
        end = round(depth * len(hay))
        found += [*hay[at:end], needle]
        at = end
    return [*found, *hay[at:]]


def joined(items: Sequence[str]) -> str:
    """A list of items in the form `a, b and c`."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last
