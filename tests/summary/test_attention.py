"""The attention of an answer's tokens to the passages that support it, on small models."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis import NumpySelector
from tamis.cli import main
from tamis.cli.commands.summarize import _sources
from tamis.engine.engine import Engine
from tamis.formats.documents import Document
from tamis.summary.attention import attention, positions
from tamis.summary.cache import Cache
from tamis.summary.plan import Settings
from tamis.summary.prompts import Task
from tamis.summary.reader import Answer, Reader
from tamis.summary.summarize import Summarizer, silent
from tamis.summary.words import Span

TEXT = (
    "The café opens at nine in the morning. The lighthouse was built in 1874 by Anna Tollner. "
    "The harbour is deep."
)
IDS = [5 + i % 40 for i in range(150)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec(layers=1))
    with Engine.load(path, n_threads=1) as engine:
        yield engine


def test_attention_to_a_span_is_the_mass_that_an_audit_finds_there(engine):
    """With one layer: what the method chooses cannot change a later layer's queries."""
    span = range(40, 60)
    held = engine.session(n_ctx=256)
    held.prefill(IDS)
    (found,) = attention(engine, held, [7], [span])
    chosen = NumpySelector(lambda q, k: np.arange(span.start, span.stop))
    session = engine.session(n_ctx=256, attn=chosen, audit=1)
    session.copy(held)
    session.decode(7)
    heads = session.audit.samples[0, 0, :, :]
    assert found["mass"] == pytest.approx(session.audit.total().mass, abs=1e-4)
    assert found["even"] == pytest.approx(20 / 151, abs=1e-5)
    assert found["layer"] == 0
    assert 0 <= found["head"] < len(heads)
    assert found["head_mass"] >= found["mass"]
    assert held.tokens == IDS, "it stays as it is"


def test_weights_sum_to_one_over_all_tokens_of_several_steps(engine):
    held = engine.session(n_ctx=256)
    held.prefill(IDS)
    first, rest = attention(engine, held, [7, 8, 9], [range(75), range(75, 153)])
    # The query of the k-th step sees 150 + k tokens; the last span has all that follow the first.
    assert first["mass"] + rest["mass"] == pytest.approx(1, abs=1e-4)
    assert first["even"] == pytest.approx(75 / 152, abs=1e-3)


@pytest.mark.parametrize("vocab", ["bpe", "spm"])
def test_positions_are_of_the_tokens_that_spell_a_passage(tmp_path, vocab):
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(vocab=vocab))
    with Engine.load(path, n_threads=1) as engine:
        ids = engine.encode(f"before\n{TEXT}\nafter")
        at = TEXT.index("built in 1874")
        spans = [Span(at, at + 13), Span(0, len(TEXT))]
        some, whole = positions(engine.tokenizer, ids, TEXT, spans) or ()
        pieces = [engine.tokenizer.piece(i, special=True) for i in ids]
    joined = b"".join(pieces[some.start : some.stop]).decode()
    assert "built in 1874" in joined
    assert "built in 1874" not in b"".join(pieces[some.start + 1 : some.stop]).decode()
    assert "built in 1874" not in b"".join(pieces[some.start : some.stop - 1]).decode()
    assert whole.start <= some.start < some.stop <= whole.stop


def test_a_text_that_the_prompt_does_not_spell_has_no_positions(engine):
    ids = engine.encode("another text")
    assert positions(engine.tokenizer, ids, TEXT, [Span(0, 3)]) is None


@pytest.fixture
def answers(monkeypatch):
    """The model answers with the text's words."""
    said = Answer("The lighthouse was built in 1874.", "stop", 100, 0, 8)
    monkeypatch.setattr(Reader, "answer", lambda *_args, **_options: said)


SETTINGS = Settings(Task(20, question="When was the lighthouse built?"), audit=True)


@pytest.mark.parametrize("cached", [True, False])
def test_sources_have_the_attention_of_the_answers_tokens(engine, answers, tmp_path, cached):
    cache = Cache(tmp_path / "cache") if cached else None
    found = Summarizer(engine, SETTINGS, cache).summarize(Document("a.txt", TEXT), silent("a.txt"))
    (source,) = found.sources
    assert source["quote"] == "The lighthouse was built in 1874 by Anna Tollner."
    measured = source["attention"]
    assert 0 < measured["mass"] < 1
    assert 0 < measured["even"] < 1
    lines = _sources({"found": True, "sources": [source]}).splitlines()
    assert lines[3].startswith(f"    attention {measured['mass']:.4f}, ")
    assert lines[3].endswith(f"head {measured['head']}: {measured['head_mass']:.2f}")
    without = replace(SETTINGS, audit=False)
    plain = Summarizer(engine, without, cache).summarize(Document("a.txt", TEXT), silent("a.txt"))
    assert "attention" not in plain.sources[0]


def test_keys_that_numpy_cannot_read_are_a_line_for_the_user(engine, answers):
    said: list[str] = []
    watch = replace(silent("a.txt"), say=said.append)
    settings = replace(SETTINGS, type_k="q8_0", type_v="q8_0")
    found = Summarizer(engine, settings, None).summarize(Document("a.txt", TEXT), watch)
    assert found.found
    assert "attention" not in found.sources[0]
    assert said[-1].startswith("a.txt: attention is not measured: that takes a CPU, f16 keys")


def test_an_audit_without_a_question_is_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT)
    assert main(["summarize", str(tmp_path / "a.txt"), "--audit"]) == 2
    assert "--audit is of the passages of an answer: give --ask" in capsys.readouterr().err
