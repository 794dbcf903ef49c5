"""Every task's prompts: the same from the same seed, never too long, answerable from the text."""

import hashlib
import itertools
import re
import uuid
from collections import Counter

import pytest

from tamis.evals.plan import GENERATION
from tamis.evals.tasks import tasks, words
from tamis.evals.tasks.base import RULER, Draft, LengthError, fit, hide, stream

TASKS = tasks()
SEED = "0/some task/3"


def count(draft: Draft) -> int:
    """A stand-in for a tokenizer: a token is a word, and every further sixth letter of it."""
    return sum(1 + len(word) // 6 for word in "".join(draft[:3]).split())


def made(name: str, n: int = 40) -> Draft:
    return TASKS[name].make(SEED, n)


def test_the_thirteen_tasks_of_ruler_are_there():
    niah = [f"single_{i}" for i in (1, 2, 3)] + [f"multikey_{i}" for i in (1, 2, 3)]
    expected = {f"niah_{kind}" for kind in [*niah, "multivalue", "multiquery"]}
    expected |= {"vt", "cwe", "fwe", "qa_1", "qa_2"}
    assert {name for name, task in TASKS.items() if task.group == RULER} == expected
    assert set(TASKS) - expected == {"passkey", "summary"}


@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_is_made_from_its_seed_alone(name):
    assert made(name) == made(name)
    assert made(name) != TASKS[name].make("0/some task/4", 40)


@pytest.mark.parametrize("length", [3000, 5000])
@pytest.mark.parametrize("name", TASKS)
def test_a_prompt_is_as_long_as_it_may_be_and_no_longer(name, length):
    task = TASKS[name]
    sample = fit(task, length, SEED, count)
    assert sample.n_tokens == count(sample.draft)
    assert sample.n_tokens + task.n_predict <= length
    assert count(task.make(SEED, sample.n_unit + 1)) + task.n_predict > length


def test_a_length_without_room_says_what_the_task_needs():
    task = TASKS["cwe"]
    least = count(task.make(SEED, 0)) + task.n_predict
    with pytest.raises(LengthError, match=f"--length is {least - 1}, cwe takes {least} tokens"):
        fit(task, least - 1, SEED, count)
    assert fit(task, least, SEED, count).n_unit == 0


def test_a_task_that_runs_out_of_names_says_so():
    with pytest.raises(LengthError, match="different towns"):
        TASKS["qa_2"].make(SEED, 2200)


def test_prompts_of_this_generation_do_not_change():
    """Results of one generation are comparable: who changes a prompt counts GENERATION up."""
    texts = [repr(made(name, n)) for name in sorted(TASKS) for n in (0, 7)]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    assert (GENERATION, digest) == (1, "17041a99bf330e59")


# Needles


def needles(text: str) -> list[tuple[str, str]]:
    return re.findall(r"The secret (?:number|code) for (\S+) is: (\S+)\.", text)


@pytest.mark.parametrize(
    ("name", "n_needle", "n_expected"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multikey_2", 41, 1),
        ("niah_multikey_3", 41, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_say_what_is_expected_once_and_nowhere_else(name, n_needle, n_expected):
    draft = made(name)
    found = needles(draft.context)
    assert len(found) == n_needle
    asked = [value for key, value in found if key in draft.question]
    assert Counter(asked) == Counter(draft.expected)
    assert len(draft.expected) == n_expected
    for value in draft.expected:
        assert draft.context.count(value) == 1
        assert value not in draft.question + draft.prefix
    keys = {key for key, _ in found}
    assert len(keys) == (1 if name == "niah_multivalue" else n_needle)


def test_needles_are_seven_digits_or_uuids():
    for (_, number), (key, code) in zip(
        needles(made("niah_multikey_2").context),
        needles(made("niah_multikey_3").context),
        strict=True,
    ):
        assert re.fullmatch(r"[1-9]\d{6}", number)
        assert str(uuid.UUID(code)) == code
        assert uuid.UUID(key).version == 4


def test_more_hay_moves_no_needle_relative_to_it():
    """Depths are drawn before the hay is known: 0.5 of 10 lines is line 5, of 20 line 10."""
    hay = [str(i) for i in range(20)]
    short, long = (hide(["x"], hay[:n], stream("s", "n")).index("x") / n for n in (10, 20))
    assert abs(short - long) <= 0.1
    assert made("niah_single_2", 10).context.split(". ")[1] in made("niah_single_2", 400).context


def test_the_hay_of_prose_has_no_numbers_that_could_be_taken_for_a_needle():
    text = words.sentences(stream(SEED, "prose"))
    assert not any(re.search(r"\d", next(text)) for _ in range(500))


def test_passkey_stands_twice_in_one_sentence():
    draft = made("passkey")
    assert draft.context.count(f"The pass key is {draft.expected[0]}.") == 1
    assert draft.context.count(draft.expected[0]) == 2


# Variables


def test_the_variables_expected_are_those_that_the_assignments_give():
    draft = made("vt", 60)
    text = draft.context.rpartition("Text: ")[2]
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        values[name] = values.get(source, source)
    (asked,) = re.findall(r"value (\d+)", draft.question)
    assert [name for name, value in values.items() if value == asked] == list(draft.expected)
    assert len(draft.expected) == 5
    example = draft.context.rpartition("Text: ")[0]
    assert not any(name in example for name in draft.expected)


# Words


def test_common_words_come_thirty_times_and_the_others_three_times():
    draft = made("cwe", 25)
    words_of = re.findall(r"\d+\. (\w+)", draft.context.partition("\n\nList: ")[2])
    counts = Counter(words_of)
    assert {word for word, times in counts.items() if times == 30} == set(draft.expected)
    assert sorted(counts.values()) == [3] * 25 + [30] * 10
    example = draft.context.partition("\n\nList: ")[0]
    assert not any(word in example for word in draft.expected)


@pytest.mark.parametrize("n", [0, 3, 40, 400])
def test_frequent_words_are_the_three_after_the_dots(n):
    draft = made("fwe", n)
    ranked = Counter(draft.context.partition("\n\n")[2].split()).most_common(5)
    assert [word for word, _ in ranked[:4]] == ["...", *draft.expected]
    assert all(a[1] > b[1] for a, b in itertools.pairwise(ranked))


# Questions


def records(draft: Draft) -> list[str]:
    return re.split(r"\n*Record \d+:\n", draft.context)[1:]


def test_one_record_has_the_answer_to_a_question_of_one_fact():
    draft = made("qa_1")
    (who,) = re.findall(r"dish of (.+?)\?", draft.question)
    (record,) = [record for record in records(draft) if record.startswith(f"{who} ")]
    assert re.findall(r"dish is (.+)\.", record) == list(draft.expected)
    assert len(records(draft)) == 41


def test_two_records_have_to_be_put_together_for_the_other_question():
    draft = made("qa_2")
    (who,) = re.findall(r"where (.+?) was born", draft.question)
    (birth,) = [record for record in records(draft) if record.startswith(f"{who} ")]
    (town,) = re.findall(r"was born in (.+?) in ", birth)
    (place,) = [record for record in records(draft) if record.startswith(f"{town} has")]
    assert re.findall(r"mayor is (.+)\.", place) == list(draft.expected)
    assert draft.expected[0] not in birth


def test_a_chronicle_begins_every_chapter_with_what_its_summary_says():
    draft = made("summary")
    chapters = re.split(r"\n\nChapter \d\n", draft.context)[1:]
    facts = [re.split(r"(?<=\.) ", chapter)[0] for chapter in chapters]
    assert " ".join(facts) == draft.expected[0]
    assert len(facts) == 5
