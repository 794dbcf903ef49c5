"""Whether a text supports an answer about it, and where: by its words, not by a model.

An answer is supported if one to three consecutive sentences contain its words, all its numbers and
names, and they or nearby sentences contain the words of the question. Sentences without such a
passage are left out.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tamis.summary.words import Index, Span, find, sentences, words

ANSWER_SHARE = 0.5  # of the weight of the words that the answer adds to the question
QUESTION_SHARE = 0.5  # of the weight of the question's words, in the passage and around it
POINT_SHARE = 0.5  # of a summary's sentence, which condenses many sentences in its own words
NEAREST_SHARE = 0.25  # of the weight of the question's words, in a passage that is near
LONGEST = 3  # sentences of a passage
REACH = 2  # sentences on either side in which a question's words may be
LEAST_PHRASE = 4  # words of a quoted phrase that must occur literally

# Question words, and words that every question and answer contains. For languages other than
# English only question words are needed, as a text may lack them; the weights of articles are low
# because texts repeat them.
_ASKING = (
    "who whom whose what when where which why how does do did done is are was were be been has "
    "have had can could may must shall should will would there this that these those the a an of "
    "in on at to for by from with and or it its if as mean name document text use used using uses "
    "wer wen wem was wann wo welche welcher welches wie warum ist sind hat "
    "qui que quoi quand où quel quelle quels quelles comment pourquoi combien est sont "
    "quién qué cuándo dónde cuál cómo cuánto es son chi che cosa quando dove quale come quanto "
    "quem qual onde"
)
_COMMON = frozenset(words(_ASKING))
_YES_NO = re.compile(
    r"(?:is|are|was|were|do|does|did|has|have|had|can|could|may|must|shall|should|will|would)\b"
)
_NUMBER = re.compile(
    r"\bhow (?:many|much|long|old|large|far)\b|\b(?:which|what) (?:year|percentage|age|fee|price)\b"
)
_ONE = re.compile(r"\b(?:who|when|where|which|what (?:is|was)|how (?:many|much|long|old))\b")
_KIND = re.compile(r"\b(?:which|what|how many|how much)\s+([^\W\d_]+)")
_NO = re.compile(r"\b(?:no|not|never|none|cannot|neither|nor|without|unlike)\b|n't\b")
_REFUSAL = re.compile(
    r"\b(?:not (?:explicitly |specifically |directly )?(?:mention|state|specif|provid|say|contain|"
    r"given|found|includ|available|answer|defin|address)|no (?:information|mention|answer|specific)"
    r"|nothing\W*$)"
)
_QUOTED = re.compile(r'["“„«]([^"“”„«»]{1,2000})["”“»]')


@dataclass(frozen=True, slots=True)
class Passage:
    """Sentences that support a statement; shares are of the weight of words, from 0 to 1."""

    span: Span
    answer: float
    question: float


@dataclass(frozen=True, slots=True)
class Point:
    """A sentence of an answer, and its supporting passage; None: there is none."""

    text: str
    passage: Passage | None

    @property
    def share(self) -> float:
        """The share of the sentence's words that the passage has; 0 without a passage."""
        return 0.0 if self.passage is None else self.passage.answer


class Question:
    """What a question asks for, by its words."""

    def __init__(self, text: str) -> None:
        lower = text.lower().strip()
        self.all = frozenset(words(text))
        kind = _KIND.search(lower)
        kinds = set() if kind is None or kind[1] in _ASKING.split() else set(words(kind[1]))
        self.words = self.all - _COMMON - kinds or self.all - _COMMON or self.all
        self.yes_no = _YES_NO.match(lower) is not None
        self.one = self.yes_no or _ONE.search(lower) is not None
        self.number = _NUMBER.search(lower) is not None


def points(index: Index, asked: Question, answer: str) -> list[Point]:
    """The sentences of an answer, each with its passage; [] if the text has no answer.

    At least one sentence must be supported near the question's words; the others may be supported
    anywhere. Unsupported sentences are left out.
    """
    if _REFUSAL.search(answer.lower()):
        return []
    said = (answer[span.start : span.end] for span in sentences(answer))
    found = [Point(text, _best(index, asked, text)) for text in said]
    if not any(_answers(point) for point in found):
        return []
    return [point for point in found if point.passage is not None]


def cited(index: Index, text: str) -> Point:
    """A sentence of a summary with the passage that has most of its words, if it has enough."""
    return Point(text, _best(index, Question(""), text, POINT_SHARE))


def nearest(index: Index, asked: Question, n: int) -> list[tuple[float, Span]]:
    """(share, span) of the sentences with most of the question's words, at most n, best first.

    Those with less than NEAREST_SHARE of them are left out.
    """
    scored = [(index.share(asked.words, index.words[i]), -i) for i in index.having(asked.words)]
    best = sorted(scored, reverse=True)[:n]
    return [(share, index.spans[-i]) for share, i in best if share >= NEAREST_SHARE]


def contradict(asked: Question, answers: Sequence[Sequence[Point]]) -> bool:
    """Whether two of the answers exclude each other: their numbers or names are all different.

    Only a question for one thing (who, when, where, which, how many) has such answers.
    """
    facts = [found for points in answers if (found := _facts(points, asked))]
    return asked.one and any(not a & b for a, b in itertools.combinations(facts, 2))


def _answers(point: Point) -> bool:
    return point.passage is not None and point.passage.question >= QUESTION_SHARE


def _best(index: Index, asked: Question, text: str, least: float = ANSWER_SHARE) -> Passage | None:
    """The passage that supports a sentence best; among equals the shortest."""
    added = frozenset(words(text)) - asked.all - _COMMON - {"yes", "no", "not"}
    strict = frozenset(word for word in added if word[0].isdigit()) | _names(text) & added
    if asked.number and not any(word[0].isdigit() for word in added):
        return None
    if not added and not asked.yes_no:
        return None  # the sentence only repeats the question
    if any(find(index.text, phrase) is None for phrase in _phrases(text)):
        return None
    best: tuple[float, Passage] | None = None
    for first in index.having(added or asked.words):
        for last in range(first, min(first + LONGEST, len(index.spans))):
            inside = index.around(first, last)
            share = index.share(added, inside)
            if share < least or not strict <= inside:
                continue
            near = index.share(asked.words, index.around(first - REACH, last + REACH))
            here = index.share(asked.words, inside)
            span = index.quote(first, last)
            if asked.yes_no and not added and not _agrees(index, span, text):
                continue
            score = share + near + here / 2 - 0.05 * (last - first)
            if best is None or score > best[0]:
                best = score, Passage(span, share, near)
    return None if best is None else best[1]


def _agrees(index: Index, span: Span, text: str) -> bool:
    """Whether passage and answer agree in being negated or not, by words of negation."""
    passage = index.text[span.start : span.end].lower()
    return bool(_NO.search(passage)) == bool(_NO.search(text.lower()))


def _names(text: str) -> frozenset[str]:
    """The capitalised words, except the first one."""
    found = re.findall(r"(?<=[^\s.:!?]\s)[A-Z][^\W_]*+", text)
    return frozenset(word for name in found for word in words(name))


def _phrases(text: str) -> list[str]:
    """The phrases that an answer quotes and that are long enough to be the text's."""
    return [m[1] for m in _QUOTED.finditer(text) if len(words(m[1])) >= LEAST_PHRASE]


def _facts(answer: Sequence[Point], asked: Question) -> frozenset[str]:
    text = " ".join(point.text for point in answer)
    added = frozenset(words(text)) - asked.all
    numbers = frozenset(word for word in added if word[0].isdigit())
    return numbers or _names(text) & added
