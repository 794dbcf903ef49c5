"""Questions on fictional records among others like them (RULER, 3.4, with texts of our own).

RULER takes SQuAD and HotpotQA and adds paragraphs; a model may know their answers by heart. These
people and towns do not exist: qa_1 asks for one fact of one record, qa_2 for one that needs two
records.
"""

from random import Random

from tamis.evals.tasks import words
from tamis.evals.tasks.base import MATCH_PART, Draft, Task, check_units, stream

_MOST = 4400  # people; there are half as many towns
_THINGS = ("bridge", "town hall", "cathedral", "harbor", "library", "windmill")
_TRADES = (
    *("a botanist", "a cellist", "a chemist", "a composer", "a dentist", "a geologist"),
    *("a historian", "a lawyer", "a pianist", "a pilot", "a sculptor", "a surgeon", "a translator"),
    *("an architect", "an astronomer", "an engineer"),
)
_FRUITS = ("apple", "barley", "cherry", "fennel", "hazelnut", "lentil", "mushroom", "onion", "pear")
_FORMS = ("bread", "cake", "dumplings", "pie", "soup", "stew")
_DISHES = tuple(f"{fruit} {form}" for fruit in _FRUITS for form in _FORMS)


def _one(seed: str, n: int) -> Draft:
    check_units(n + 1, _MOST, "people")
    people, rng = words.people(stream(seed, "people"), _MOST), stream(seed, "asked")
    who = people[0]
    dishes, records = [], []
    for i, name in enumerate(people[: n + 1]):
        facts = stream(seed, f"person {i}")
        dishes.append(facts.choice(_DISHES))
        records.append(_person(name, words.town(facts), dishes[i], facts))
    return _draft(
        _mixed(records, rng),
        f"What is the favorite dish of {who}?",
        f"The favorite dish of {who} is",
        dishes[0],
    )


def _two(seed: str, n: int) -> Draft:
    check_units(n + 1, _MOST // 2, "towns")
    people = words.people(stream(seed, "people"), _MOST)
    towns = words.towns(stream(seed, "towns"), _MOST // 2)
    rng, records = stream(seed, "asked"), []
    for i in range(n + 1):
        facts = stream(seed, f"pair {i}")
        records.append(_person(people[2 * i], towns[i], facts.choice(_DISHES), facts))
        records.append(
            f"{towns[i]} has {facts.randrange(2, 90)} thousand inhabitants and a "
            f"{facts.choice(_THINGS)} of {facts.randrange(1500, 1950)}. Its mayor is "
            f"{people[2 * i + 1]}."
        )
    ask = f"the mayor of the town where {people[0]} was born"
    return _draft(
        _mixed(records, rng), f"Who is {ask}?", f"{ask[0].upper()}{ask[1:]} is", people[1]
    )


def _person(name: str, town: str, dish: str, facts: Random) -> str:
    return (
        f"{name} was born in {town} in {facts.randrange(1900, 2000)} and works as "
        f"{facts.choice(_TRADES)}. {name.split()[0]}'s favorite dish is {dish}."
    )


def _mixed(records: list[str], rng: Random) -> str:
    # The position of each record is drawn in order, so that a further record moves no other.
    places = [rng.random() for _ in records]
    order = sorted(range(len(records)), key=places.__getitem__)
    return "\n\n".join(f"Record {i}:\n{records[at]}" for i, at in enumerate(order, 1))


def _draft(records: str, question: str, prefix: str, expected: str) -> Draft:
    return Draft(
        context=f"Answer a question by the records below.\n\n{records}",
        question=f"\n\nQuestion: {question} Answer with the name alone.",
        prefix=prefix,
        expected=(expected,),
    )


TASKS = (
    Task("qa_1", "one fact of one record", 32, _one, MATCH_PART),
    Task("qa_2", "a fact that two records have to be put together for", 32, _two, MATCH_PART),
)
