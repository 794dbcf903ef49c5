"""Evidence: what of an answer a text says, and where; worked examples, no model."""

import random
import time

import pytest

from tamis.formats.documents import Document, read_document
from tamis.summary import evidence
from tamis.summary.evidence import Question
from tamis.summary.sources import Evidence
from tamis.summary.words import Index, find, sentences, stem, words

TEXT = """# The lighthouse

The lighthouse of Kermadec was built by Anna Tollner in 1884. It is 31 metres
high and stands on a rock.

Heapsort is not stable. You are not required to accept the rules in order to
visit the tower.

The keeper has three days to report a broken lamp; a second report is due
within 14 days. The lamp was bought from Barbier in Paris.
"""


def said(question, answer, text=TEXT):
    return [point.text for point in evidence.points(Index(text), Question(question), answer)]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Who built the lighthouse?", "The lighthouse was built by Anna Tollner."),
        ("In which year was the lighthouse built?", "1884"),
        ("How high is the lighthouse?", "It is 31 metres high."),
        ("How many days does the keeper have to report a broken lamp?", "The keeper has 3 days."),
        ("Where was the lamp bought?", "The lamp was bought in Paris."),
        ("Is heapsort stable?", "No, heapsort is not stable."),
    ],
)
def test_an_answer_that_the_text_says_is_kept(question, answer):
    assert said(question, answer) == [answer]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Who built the lighthouse?", "The lighthouse was built by John Smeaton."),  # a name
        ("In which year was the lighthouse built?", "In 1834."),  # a number
        ("In which year was the lighthouse built?", "It was built by Anna Tollner."),  # no number
        ("Who owns the ferry company?", "Anna Tollner."),  # said, but not of what is asked
        ("How many visitors climb the mountain?", "14 visitors."),
        ("Who built the lighthouse?", "The lighthouse was built."),  # the question again
        ("Is heapsort stable?", "Yes, heapsort is stable."),  # the opposite
        ("Who built the lighthouse?", "The text does not mention who built the lighthouse."),
        ("Who built it?", 'The text says "Anna Tollner built the lighthouse alone in 1884".'),
        ("Who built the lighthouse?", ""),
    ],
)
def test_an_answer_that_the_text_does_not_say_is_dropped(question, answer):
    assert said(question, answer) == []


def test_of_several_sentences_those_that_the_text_says_stay():
    answer = "The lighthouse was built by Anna Tollner. Its sailors drank 40 barrels of rum."
    assert said("Who built the lighthouse?", answer) == [
        "The lighthouse was built by Anna Tollner."
    ]


def test_a_source_is_the_shortest_passage_and_its_place_that_of_the_document():
    parts = [TEXT[:170], TEXT[170:]]
    found = Evidence(Document("a.txt", TEXT), parts).answer(
        "How many days does the keeper have to report a broken lamp?", ["2 days.", "3 days."]
    )
    (source,) = found.sources
    assert found.text == "3 days. [1]"
    assert source["quote"].startswith("The keeper has three days")
    assert TEXT[source["start"] : source["end"]] == source["quote"]
    assert (source["line"], source["part"], "page" in source) == (9, 2, False)


def test_a_source_of_a_pdf_has_its_page_empty_pages_counted():
    pages = ["Nothing here.", "", TEXT]
    text = "\n\n".join(filter(None, pages))
    document = Document("a.pdf", text, "pdf", (0, 15, 15))
    found = Evidence(document, [text]).answer("Who built the lighthouse?", ["Anna Tollner."])
    assert found.sources[0]["page"] == 3
    assert "line" not in found.sources[0]


def test_the_pages_of_a_pdf_begin_where_their_text_does(monkeypatch):
    pypdf = pytest.importorskip("pypdf")

    class Page:
        def __init__(self, text):
            self.extract_text = lambda: text

    class Reader:
        is_encrypted, pages = False, [Page("one"), Page(" "), Page("two")]

        def __init__(self, file):
            pass

    monkeypatch.setattr(pypdf, "PdfReader", Reader)
    document = read_document("a.pdf", b"%PDF-1.7")
    assert (document.text, document.pages) == ("one\n\ntwo", (0, 5, 5))


def test_words_are_stems_digits_and_pairs_of_characters():
    assert words("It raises, raised, RAISING 30,000 in version 3.5") == [
        "it",
        "rais",
        "rais",
        "rais",
        "30000",
        "in",
        stem("version"),
        "3.5",
    ]
    assert words("three days") == ["3", "day"]
    assert words("灯台は高い") == ["灯台", "台は", "は高", "高い"]


def test_a_text_without_spaces_or_english_has_evidence_too():
    german = "Der Leuchtturm wurde 1884 von Anna Tollner gebaut. Er ist 31 Meter hoch."
    assert said("Wer hat den Leuchtturm gebaut?", "Anna Tollner", german) == ["Anna Tollner"]
    assert said("Wer hat den Leuchtturm gebaut?", "Karl Schinkel", german) == []
    japanese = "灯台は1884年に建てられた。高さは31メートルである。"
    assert said("灯台の高さは?", "31メートル", japanese) == ["31メートル"]
    assert said("灯台の高さは?", "45メートル", japanese) == []


def distance(a, b):
    """Edits from a to b, the textbook's table: the oracle."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row, before = [i], row
        for j, y in enumerate(b, 1):
            row.append(min(row[-1] + 1, before[j] + 1, before[j - 1] + (x != y)))
    return row[-1]


def test_find_is_the_oracles_nearest_place():
    rng = random.Random(7)
    for _ in range(60):
        text = "".join(rng.choice("abc") for _ in range(120))
        start = rng.randrange(60)
        needle = list(text[start : start + 50])
        for _ in range(rng.randrange(4)):
            needle[rng.randrange(len(needle))] = rng.choice("abcd")
        wanted = "".join(needle)
        span = find(text, wanted, share=0.06)
        errors = distance(text[start : start + 50], wanted)
        if errors <= 3:
            assert span is not None
            assert distance(text[span.start : span.end], wanted) <= errors
        elif span is not None:
            assert distance(text[span.start : span.end], wanted) <= 3


def test_find_takes_white_space_alike_and_two_percent_of_edits():
    text = (
        "so much\n  depends   upon\ta red wheel barrow glazed with rain water beside the chickens"
    )
    span = find(text, "depends upon a red wheel barrow")
    assert text[span.start : span.end] == "depends   upon\ta red wheel barrow"
    assert find(text, "depends on a red wheel barrow") is None  # two edits of 29 characters
    nearly = "depends upon a red wheel barow glazed with rain water beside the chickens"
    assert len(nearly) // 50 == 1
    span = find(text, nearly)
    assert text[span.start : span.end].startswith("depends")
    assert find(text, "") is None


def test_a_sentence_is_never_long_and_nothing_is_left_out():
    table = "cell one | cell two\n" * 200 + "x" * 3000
    spans = sentences(table)
    assert max(span.end - span.start for span in spans) <= 400
    assert "".join("".join(table[s.start : s.end].split()) for s in spans) == "".join(table.split())


def test_time_grows_with_the_text_alone():
    """A document of 1 MB and a hostile answer: seconds, and not hours."""
    text = TEXT * 2500
    start = time.perf_counter()
    index = Index(text)
    answer = "The lighthouse was " + "lighthouse " * 500 + '"' + "a" * 2000
    evidence.points(index, Question("Who built the lighthouse?"), answer)
    assert time.perf_counter() - start < 60
