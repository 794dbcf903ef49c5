"""Passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300): five digits in a dull text."""

from tamis.evals.tasks import words
from tamis.evals.tasks.base import Draft, Task, hide, stream

_LINES = (
    "Rain falls on the hills and runs down to the sea.",
    "The clock in the hall strikes every hour.",
    "Somebody walks by, and then it is quiet again.",
)


def _make(seed: str, n: int) -> Draft:
    rng = stream(seed, "passkey")
    key = words.number(rng, 5)
    needle = f"The pass key is {key}. Remember it: {key} is the pass key."
    hay = [_LINES[i % len(_LINES)] for i in range(n)]
    return Draft(
        context="Somewhere in the dull text below there is one thing that matters. Find it and "
        f"keep it in mind.\n\n{' '.join(hide([needle], hay, rng))}",
        question="\n\nWhat is the pass key that the text above tells?",
        prefix="The pass key told in the text is",
        expected=(key,),
    )


TASKS = (Task("passkey", "five digits in lines that repeat", 16, _make, group="passkey"),)
