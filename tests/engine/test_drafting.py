"""Drafts change how an answer is computed, and nothing of the answer."""

import json

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.compat import Llama, LlamaModelDrafting
from tamis.cli import main
from tamis.engine import drafting
from tamis.engine.drafting import Draft, Drafting, ModelDraft
from tamis.engine.engine import Engine
from tamis.sampling.chain import SamplerParams

PROMPT = [5, 9, 30, 12, 8, 70, 33]
N = 24


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A model, a smaller one that agrees with it on nothing, one with other tokens."""
    folder = tmp_path_factory.mktemp("drafts")
    specs = TinySpec(), TinySpec(layers=1, seed=3), TinySpec(vocab="spm", arch="gemma3")
    return [write_tiny_model(folder / f"{i}.gguf", spec) for i, spec in enumerate(specs)]


@pytest.fixture(scope="module")
def engines(paths):
    found = [Engine.load(path, n_threads=1) for path in paths[:2]]
    yield found
    for engine in found:
        engine.close()


class Told(Draft):
    """Drafts a text that is known, wrong at every third place."""

    def __init__(self, text):
        self.text = text

    def propose(self, tokens, n):
        known = self.text[: len(tokens)] == list(tokens)
        found = self.text[len(tokens) : len(tokens) + n] if known else []
        return [i if k % 3 < 2 else i ^ 1 for k, i in enumerate(found)]


def answer(writer, **params):
    sampling = SamplerParams(**({"temp": 0} | params))
    return [piece.token_id for piece in writer.generate(PROMPT, sampling, max_tokens=N)]


@pytest.mark.parametrize("params", [{}, {"temp": 1.2, "seed": 4}, {"repeat_penalty": 1.5}])
def test_the_answer_is_the_one_without_drafts(engines, params):
    main, small = engines
    with main.session(n_ctx=128) as session:
        plain = answer(session, **params)
        held = session.tokens
        drafts = [Told(PROMPT + plain), *(ModelDraft(each, main, 128) for each in (small, main))]
        for draft in drafts:
            session.truncate(0)
            drafting = Drafting(session, draft, 5)
            assert answer(drafting, **params) == plain
            assert session.tokens == held, "drafts that were not chosen are gone"
            assert 0 <= drafting.n_taken <= drafting.n_drafted


@pytest.mark.parametrize("draft", [-1, 0, 1])
def test_a_token_that_the_model_lacks_is_not_drafted(engines, monkeypatch, draft):
    """A draft model may have more tokens at its end; the first of them is one too many."""
    main, small = engines
    token = main.hp.n_vocab + draft
    monkeypatch.setattr(drafting, "_likeliest", lambda best: (token, 1.0))
    found = ModelDraft(small, main, 128).propose(PROMPT, 1)
    assert found == ([token] if draft < 0 else [])


def test_drafts_that_are_right_are_taken(engines):
    main, _ = engines
    with main.session(n_ctx=128) as session:
        plain = answer(session)
        session.truncate(0)
        drafting = Drafting(session, Told(PROMPT + plain), 2)
        answer(drafting)
        assert drafting.n_taken == drafting.n_drafted > N // 2


def test_an_answer_that_is_left_early_holds_no_drafts(engines):
    main, _ = engines
    with main.session(n_ctx=128) as session:
        plain = answer(session)
        session.truncate(0)
        drafting = Drafting(session, Told(PROMPT + plain), 8)
        pieces = drafting.generate(PROMPT, SamplerParams(temp=0), max_tokens=N)
        for _ in range(3):
            next(pieces)
        assert session.n_past > drafting.n_past
        pieces.close()
        assert session.tokens == PROMPT + plain[:2] or session.tokens == PROMPT + plain[:3]


def test_what_cannot_draft_is_refused(engines, paths):
    main, _ = engines
    other = Engine.load(paths[2], n_threads=1)
    with other, pytest.raises(ValueError, match="other tokens"):
        ModelDraft(other, main, 64)
    sparse = main.session(n_ctx=64, attn="window:recent=16")
    with sparse, pytest.raises(ValueError, match="leave out attn"):
        Drafting(sparse, Told([]))
    with main.session(n_ctx=64) as session, pytest.raises(ValueError, match="draft_max is 0"):
        Drafting(session, Told([]), 0)


def test_llama_and_the_command_write_the_same_with_a_draft_model(paths, capsys):
    main_path, small, _ = map(str, paths)
    asked = {"max_tokens": N, "temperature": 0}
    plain = Llama(main_path, n_ctx=128, n_threads=1, verbose=False)("the hand", **asked)
    drafting = LlamaModelDrafting(small, n_threads=1)
    drafted = Llama(main_path, n_ctx=128, n_threads=1, verbose=False, draft_model=drafting)
    assert drafted("the hand", **asked)["choices"] == plain["choices"]
    flags = ["run", "--json", "--raw", "--temp", "0", "-n", str(N), "-t", "1", "-c", "128"]
    texts = []
    for more in ([], ["--model-draft", small, "--draft-max", "3"]):
        assert main([*flags, "-m", main_path, *more, "the hand"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    assert main([*flags, "-m", main_path, "-md", small, "--attn", "tactic", "x"]) == 2
    assert "leave out --attn" in capsys.readouterr().err
