"""Answers with the supporting passages of the document, numbered as footnotes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypedDict

from tamis.summary import evidence
from tamis.summary.attention import Attention
from tamis.summary.evidence import Point, Question
from tamis.summary.words import Index, Span, line_of

if TYPE_CHECKING:
    from tamis.formats.documents import Document

NOT_FOUND = "not found in the document"
DIFFER = "Parts of the document answer differently:"
NO_SOURCE = "[no source]"  # marks a sentence of a summary without a supporting passage
N_NEAREST = 3


class Source(TypedDict):
    """A passage of a document: characters start to end of its text, from 0.

    page: of a PDF, from 1; line: of the text of every other document, from 1. part: of those that
    the document was read in, from 1. attention: of the answer's tokens, with settings.audit.
    """

    file: str
    page: NotRequired[int]
    line: NotRequired[int]
    start: int
    end: int
    quote: str
    part: int
    attention: NotRequired[Attention]


@dataclass(frozen=True, slots=True)
class Sourced:
    """A text in which [1] marks what source 1 supports.

    found: whether the document has an answer.
    """

    text: str
    found: bool
    sources: list[Source]


class Evidence:
    """A document in the parts that were read, and the sources of statements about it."""

    def __init__(self, document: "Document", parts: Sequence[str]) -> None:
        self._document, self._parts = document, [Index(part) for part in parts]
        self._starts = [0]
        for part in parts[:-1]:
            self._starts.append(self._starts[-1] + len(part))
        self._lines = [0, *(i for i, letter in enumerate(document.text, 1) if letter == "\n")]
        self._sources: list[Source] = []

    def answer(self, question: str, answers: Sequence[str]) -> Sourced:
        """The sentences of the parts' answers that the text of the same part supports.

        Contradicting answers are listed one after the other below a line that says so.
        """
        asked = Question(question)
        pairs = zip(self._parts, answers, strict=True)
        found = [
            (part, evidence.points(text, asked, said)) for part, (text, said) in enumerate(pairs)
        ]
        found = [(part, points) for part, points in found if points]
        if not found:
            return self._nothing(asked)
        said: dict[str, str] = {}  # each sentence once, with all its marks
        for part, points in found:
            for point in points:
                mark = self._mark(part, point)
                marks = said.setdefault(point.text, "")
                said[point.text] = marks if mark in marks else marks + mark
        texts = [f"{text} {marks}" for text, marks in said.items()]
        if len(found) == 1:
            return Sourced(" ".join(texts), True, self._sources)
        apart = evidence.contradict(asked, [points for _, points in found])
        lines = [DIFFER] if apart else []
        return Sourced("\n".join(lines + _listed(texts)), True, self._sources)

    def cited(self, summary: str) -> Sourced:
        """A summary with the source of each sentence, or a mark that there is none."""
        text, end = "", 0
        for span in evidence.sentences(summary):
            said = summary[span.start : span.end]
            found = [(part, evidence.cited(index, said)) for part, index in enumerate(self._parts)]
            part, point = max(found, key=lambda each: (each[1].share, -each[0]))
            text += f"{summary[end : span.end]} {self._mark(part, point)}"
            end = span.end
        return Sourced(text + summary[end:], True, self._sources)

    def _nothing(self, asked: Question) -> Sourced:
        """The reply that nothing was found, with the passages nearest to the question."""
        near = [
            (-share, part, span)
            for part, index in enumerate(self._parts)
            for share, span in evidence.nearest(index, asked, N_NEAREST)
        ]
        near.sort(key=lambda each: (*each[:2], each[2].start))
        for _, part, span in near[:N_NEAREST]:
            self._number(part, span)
        return Sourced(NOT_FOUND, False, self._sources)

    def _mark(self, part: int, point: Point) -> str:
        if point.passage is None:
            return NO_SOURCE
        return f"[{self._number(part, point.passage.span)}]"

    def _number(self, part: int, span: Span) -> int:
        """The number of a source, from 1; equal passages share it."""
        start = self._starts[part] + span.start
        end = self._starts[part] + span.end
        for i, source in enumerate(self._sources, 1):
            if (source["start"], source["end"]) == (start, end):
                return i
        quote, pages = self._document.text[start:end], self._document.pages
        source = Source(file=self._document.name, start=start, end=end, quote=quote, part=part + 1)
        if pages:
            source["page"] = line_of(pages, start)
        else:
            source["line"] = line_of(self._lines, start)
        self._sources.append(source)
        return len(self._sources)


def _listed(texts: list[str]) -> list[str]:
    return [f"- {text}" for text in texts] if len(texts) > 1 else texts
