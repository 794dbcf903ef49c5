"""A draft of n sentences of filler, dealt to the chapters one by one."""

from tamis.evals.tasks import words
from tamis.evals.tasks.base import ROUGE, Draft, Task, prose, stream

N_CHAPTER = 5


def _make(seed: str, n: int) -> Draft:
    """n: sentences of filler, dealt out to the chapters in turn."""
    rng, filler = stream(seed, "facts"), prose(seed, n)
    names, towns = words.people(rng, N_CHAPTER), words.towns(rng, N_CHAPTER)
    facts = [
        f"In {rng.randrange(1700, 1950)} {name} of {town} {rng.choice(_DEEDS)} the "
        f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)} of the {rng.choice(_OWNERS)}."
        for name, town in zip(names, towns, strict=True)
    ]
    chapters = [
        f"Chapter {i + 1}\n{' '.join([fact, *filler[i::N_CHAPTER]])}"
        for i, fact in enumerate(facts)
    ]
    return Draft(
        context="A chronicle of five chapters follows.\n\n" + "\n\n".join(chapters),
        question="\n\nSum up the chronicle in five sentences, one for each chapter: who did what, "
        "when and where.",
        prefix="",
        expected=(" ".join(facts),),
    )


_DEEDS = ("built", "sold", "stole", "restored", "discovered", "burned", "inherited", "painted")
_OWNERS = ("mayor", "bishop", "guild", "university", "queen", "monastery", "railway", "garrison")
TASKS = (
    Task("summary", "five facts in prose, by ROUGE-L", 192, _make, score=ROUGE, group="summary"),
)
