"""Drafts by n-grams: what they propose, when they rest, and that answers are those without."""

import json
import random

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.engine.drafting import Draft, Drafting, FirstDraft
from tamis.engine.engine import Engine
from tamis.engine.ngram_draft import (
    ANY,
    FIRST,
    LONGEST_PAUSE,
    NGramDraft,
    NGrams,
    dense_until,
    suits,
    with_ngrams,
)
from tamis.sampling.chain import SamplerParams

N = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tiny model, whose greedy answers soon repeat themselves."""
    return write_tiny_model(tmp_path_factory.mktemp("ngrams") / "m.gguf", TinySpec(n_ctx=1024))


@pytest.fixture(scope="module")
def engine(path):
    with Engine.load(path, n_threads=1) as engine:
        yield engine


def test_a_draft_is_as_long_as_the_last_one_was_right_and_one_more():
    draft, tokens = NGramDraft(2, 8), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert draft.propose(tokens, 9) == [3, 4, 5, 6]
    tokens += [3, 90, 1, 2]
    assert draft.propose(tokens, 9) == [3, 90], "one of four was right"
    tokens += [3, 90, 1, 2]
    assert draft.propose(tokens, 9) == [3, 90, 1, 2], "both were"


def test_what_followed_the_last_tokens_is_proposed():
    draft = NGramDraft(2, 4)
    assert draft.propose([1, 2, 3, 4, 5, 6], 9) == []
    assert draft.propose([1, 2, 3, 4, 5, 6, 1, 2], 9) == [3, 4, 5, 6]
    assert draft.propose([1, 2, 3, 4, 5, 6, 1, 2], 2) == [3, 4]
    # Where they stood more than once, the last place counts.
    assert NGramDraft(2, 4).propose([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 2) == [4, 9]
    # A text that repeats itself right here goes on doing so.
    assert NGramDraft(2, 6).propose([7, 5, 6, 5, 6], 9) == [5, 6, 5, 6]


def test_another_text_is_not_taken_for_the_first_one():
    draft = NGramDraft(2, 4)
    draft.propose([1, 2, 3, 4, 5, 6, 1], 9)
    assert draft.propose([9, 9, 9, 1, 2], 9) == []
    assert draft.propose([9, 9, 9, 1, 2, 9, 9], 1) == [1]


def proposals(draft, text, n_prompt):
    """The drafts of a text as it is written, each with its position."""
    found, at = [], n_prompt
    while at < len(text):
        drafted = draft.propose(text[:at], 15)
        same = 0
        while same < len(drafted) and text[at + same : at + same + 1] == drafted[same : same + 1]:
            same += 1
        found += [(at, drafted)] if drafted else []
        at += same + 1
    return found


def test_drafts_grow_while_they_are_taken():
    part = list(range(100))
    found = proposals(NGramDraft(3, 15), part * 2, len(part) + 3)
    assert [len(drafted) for _, drafted in found][:3] == [FIRST, 8, 15]
    assert sum(len(drafted) for _, drafted in found) > 80


def test_drafts_rest_where_none_is_taken():
    """An n-gram that is followed by another token every time: few are tried."""
    draw = random.Random(1)
    text = [t for _ in range(200) for t in (1, 2, draw.randrange(10, 1000))]
    found = proposals(NGramDraft(2, 15), text, 30)
    assert 0 < len(found) < len(text) / LONGEST_PAUSE + 8
    assert all(len(drafted) <= FIRST for _, drafted in found)


@pytest.mark.parametrize("params", [{"temp": 0}, {"temp": 1.2, "seed": 4}])
@pytest.mark.parametrize("how", [{}, {"attn": "auto"}, {"attn": "auto:least=150"}])
def test_the_answer_is_the_one_without_drafts(engine, params, how):
    prompts = [[random.Random(i).randrange(5, 85) for _ in range(9 + 7 * i)] * 3 for i in range(6)]
    session, n_taken = engine.session(n_ctx=512, n_ubatch=64, **how), 0
    for prompt in prompts:
        answers = []
        for draft in (None, NGramDraft(2)):
            session.truncate(0)
            writer = session if draft is None else Drafting(session, draft)
            pieces = writer.generate(prompt, SamplerParams(**params), max_tokens=N)
            answers.append([piece.token_id for piece in pieces])
            n_taken += 0 if draft is None else writer.n_taken
            assert session.n_past == len(prompt) + N
        assert answers[0] == answers[1]
    assert n_taken > 0 or params["temp"]


def test_beyond_what_a_session_reads_densely_nothing_is_drafted(engine):
    """Steps are the method's there, so that answers are those without drafts."""
    session = engine.session(n_ctx=512, n_ubatch=64, attn="auto:least=60")
    asked = []

    class Asked(NGramDraft):
        def propose(self, tokens, n):
            asked.append(len(tokens) + n)
            return super().propose(tokens, n)

    writer = Drafting(session, Asked(2))
    list(writer.generate([5, 9] * 10, SamplerParams(temp=0), max_tokens=80))
    assert asked
    assert max(asked) <= 61


def test_sessions_that_read_all_keys_are_known(engine):
    def until(**how):
        return dense_until(engine.session(n_ctx=512, n_ubatch=64, **how))

    assert until() == until(attn="auto") == ANY
    assert until(attn="auto:least=99") == 99
    assert until(prefill="beyond(window):least=70") == 70
    assert until(attn="hip") == until(prefill="window") == until(attn="hip", min_mass=0.5) == 0
    with pytest.raises(ValueError, match="leave out attn"):
        Drafting(engine.session(n_ctx=64, attn="hip"), NGramDraft())
    assert not suits(engine.session(n_ctx=64, attn="hip"))
    assert not suits(engine.session(n_ctx=64, audit=2))
    assert suits(engine.session(n_ctx=64))


class Told(Draft):
    """Proposes the same token again and again."""

    def propose(self, tokens, n):
        return [n] * n


def test_ngrams_come_before_another_draft_where_they_are_asked_for(engine):
    session = engine.session(n_ctx=64)
    assert with_ngrams(None, session, None, 8) is None
    assert isinstance(with_ngrams(None, session, NGrams(), 8), NGramDraft)
    own = Told()
    assert with_ngrams(own, session, NGrams(), 8) is own
    both = with_ngrams(own, session, NGrams(2, 6, asked=True), 3)
    assert isinstance(both, FirstDraft)
    assert both.n_max == 6
    assert both.propose([1, 2, 3, 4, 1, 2], 6) == [3, 4, 1, 2]
    assert both.propose([9, 9, 1], 6) == [3, 3, 3]


def test_sizes_out_of_range_are_refused():
    for sizes in ((0, 4), (65, 4), (2, 0), (2, 16)):
        with pytest.raises(ValueError, match="expected 1 to 64 and 1 to 15"):
            NGramDraft(*sizes)


def test_the_commands_write_the_same_and_refuse_what_does_not_go_together(path, capsys):
    how = ["run", "-m", str(path), "--temp", "0", "-n", "60", "-c", "256", "-t", "1", "--json"]
    texts = []
    for more in (["--spec-type", "none"], [], ["--spec-type", "ngram-simple"]):
        assert main([*how, *more, "--raw", "the hand the hand the hand"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] == texts[2]
    given = ["--spec-type", "ngram-simple"]
    for more, said in (
        ([*given, "--audit", "2"], "--audit do not go together"),
        ([*given, "--attn", "quest"], "leave out --attn"),
        (["--spec-ngram-simple-size-m", "16"], "size-m is 16, expected 1 to 15"),
        (["--spec-ngram-simple-size-n", "65"], "size-n is 65, expected 1 to 64"),
    ):
        assert main([*how, *more, "--raw", "x"]) != 0
        assert said in capsys.readouterr().err
