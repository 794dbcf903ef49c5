"""Drafts by a sparse method of the model itself leave dense attention's answers as they are."""

import io
import json
import pickle

import numpy as np
import pytest
from draft_cases import METHODS
from recurrent_models import write_recurrent_model
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.compat import Llama, LlamaAttentionDrafting
from tamis.cli import main
from tamis.engine.drafting import AttentionDraft, Drafting
from tamis.engine.engine import Engine
from tamis.sampling.chain import SamplerParams

N = 40
PROMPTS = [[(i * 7 + i * i // 3 + start) % 90 + 5 for i in range(90)] for start in (1, 8, 30)]
WINDOW = "window:recent=16"
SAMPLED = [{}, {"temp": 0.9, "seed": 4}, {"repeat_penalty": 1.5}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("drafts") / "m.gguf", TinySpec(n_ctx=512))


@pytest.fixture(scope="module")
def engine(path):
    with Engine.load(path, n_threads=1) as engine:
        yield engine


@pytest.fixture
def sure(monkeypatch):
    """Draft though the model is never sure: random weights never are."""
    monkeypatch.setattr("tamis.engine.drafting.LEAST", 0.0)


def answer(writer, prompt, n=N, stop=(), **params):
    sampling = SamplerParams(**({"temp": 0} | params))
    return [p.token_id for p in writer.generate(prompt, sampling, max_tokens=n, stop=stop)]


@pytest.mark.parametrize("method", METHODS)
def test_the_answer_is_dense_attentions(engine, sure, method):
    n_taken = n_drafted = 0
    with engine.session(n_ctx=256) as dense, engine.session(n_ctx=256, attn=method) as session:
        for i, prompt in enumerate(PROMPTS):
            dense.truncate(0)
            session.truncate(0)
            drafting = Drafting(session, AttentionDraft(session), (1, 4, 8)[i])
            plain = answer(dense, prompt, **SAMPLED[i])
            assert answer(drafting, prompt, **SAMPLED[i]) == plain
            assert session.tokens == dense.tokens, "drafts that were not chosen are gone"
            n_taken, n_drafted = n_taken + drafting.n_taken, n_drafted + drafting.n_drafted
    assert n_drafted > 10
    assert 0 <= n_taken <= n_drafted


@pytest.mark.parametrize("n_max", range(1, 9))
def test_drafts_of_any_length_leave_the_answer(engine, sure, n_max):
    with engine.session(n_ctx=256) as dense, engine.session(n_ctx=256, attn=METHODS[0]) as session:
        plain = answer(dense, PROMPTS[0])
        assert answer(Drafting(session, AttentionDraft(session), n_max), PROMPTS[0]) == plain


def test_the_checked_keys_are_dense_attentions(engine, sure):
    """What drafts wrote is gone: the next token's logits are those of a session without drafts."""
    with engine.session(n_ctx=256) as dense, engine.session(n_ctx=256, attn=WINDOW) as session:
        dense.prefill(PROMPTS[0])
        session.prefill(PROMPTS[0])
        draft = AttentionDraft(session)
        assert len(draft.propose([*PROMPTS[0], 9], 4)) == 4
        assert session.tokens == PROMPTS[0]
        np.testing.assert_array_equal(session.prefill([9, 11]), dense.prefill([9, 11]))


def test_drafts_by_what_reads_all_are_taken_and_grow(engine, sure):
    """A window that holds the context drafts what the model chooses, so drafts get longer."""
    with engine.session(n_ctx=256, attn="window:recent=256") as session:
        drafting = Drafting(session, AttentionDraft(session), 15)
        answer(drafting, PROMPTS[0], n=60)
        assert drafting.n_taken >= 50
        assert len(AttentionDraft(session).propose([*session.tokens, 7], 15)) == 4, "at first"


def test_a_draft_is_never_longer_than_decode_steps_rounding_reaches(engine, sure, monkeypatch):
    lengths, propose = [], AttentionDraft.propose

    def noted(*arguments):
        found = propose(*arguments)
        lengths.append(len(found))
        return found

    monkeypatch.setattr(AttentionDraft, "propose", noted)
    attn = "window:recent=256"
    with engine.session(n_ctx=256) as dense, engine.session(n_ctx=256, attn=attn) as session:
        plain = answer(dense, PROMPTS[0], n=120)
        drafting = Drafting(session, AttentionDraft(session), 64)
        assert answer(drafting, PROMPTS[0], n=120) == plain
    assert max(lengths) == 15


def test_a_draft_shrinks_to_what_was_taken(engine, sure):
    with engine.session(n_ctx=256, attn=WINDOW) as session:
        session.prefill(PROMPTS[0])
        draft, text = AttentionDraft(session), [*PROMPTS[0], 9]
        first = draft.propose(text, 8)
        wrong = (first[1] + 1) % 90
        session.prefill([9, first[0]])
        assert len(draft.propose([*text, first[0], wrong], 8)) == 2
        session.prefill([wrong])
        held = session.tokens
        assert len(draft.propose([*held, 30, 31, 32], 8)) <= 2, "of tokens that are not held, too"
        assert session.tokens == held


def test_the_context_ends_where_it_does_without_drafts(engine, sure):
    with engine.session(n_ctx=100) as dense, engine.session(n_ctx=100, attn=WINDOW) as session:
        plain = answer(dense, PROMPTS[1], n=None)
        assert answer(Drafting(session, AttentionDraft(session)), PROMPTS[1], n=None) == plain
        assert session.n_past == dense.n_past


def test_a_stop_string_ends_it_and_the_chat_goes_on(engine, sure):
    with engine.session(n_ctx=256) as dense, engine.session(n_ctx=256, attn=METHODS[0]) as session:
        plain = answer(dense, PROMPTS[0])
        dense.truncate(0)
        stop = [engine.tokenizer.piece(plain[20]).decode(errors="replace") or "\0"]
        drafting = Drafting(session, AttentionDraft(session))
        for prompt in PROMPTS[:2]:
            assert answer(drafting, prompt, stop=stop) == answer(dense, prompt, stop=stop)
            assert session.tokens == dense.tokens


def test_an_answer_that_is_left_early_holds_no_drafts(engine, sure):
    with engine.session(n_ctx=256, attn="window:recent=256") as session:
        drafting = Drafting(session, AttentionDraft(session))
        pieces = drafting.generate(PROMPTS[0], SamplerParams(temp=0), max_tokens=N)
        chosen = [next(pieces).token_id for _ in range(2)]
        pieces.close()
        assert session.tokens[: len(PROMPTS[0])] == PROMPTS[0]
        assert session.tokens[len(PROMPTS[0]) :] in (chosen, chosen[:1])


def test_a_hybrid_models_states_go_back(tmp_path, sure):
    path = write_recurrent_model(tmp_path / "m.gguf", "qwen35")
    with (
        Engine.load(path, n_threads=1) as engine,
        engine.session(n_ctx=256, n_ubatch=32) as dense,
        engine.session(n_ctx=256, n_ubatch=32, attn=WINDOW) as session,
    ):
        drafting = Drafting(session, AttentionDraft(session), 4)
        assert answer(drafting, PROMPTS[0]) == answer(dense, PROMPTS[0])
        assert drafting.n_drafted > 10


def test_keys_in_a_file_are_drafted_from(engine, sure, tmp_path):
    prompt = [(i * i // 7 + i) % 90 + 5 for i in range(1900)]
    how = {"n_ctx": 2048, "n_ubatch": 32}
    tier = {"kv_ram": engine.memory_plan(**how).kv * 9 // 10, "kv_dir": tmp_path}
    with engine.session(**how) as dense, engine.session(**how, **tier, attn=METHODS[0]) as session:
        assert session.kv_ram is not None
        drafting = Drafting(session, AttentionDraft(session), 4)
        assert answer(drafting, prompt, n=80) == answer(dense, prompt, n=80)
        assert drafting.n_drafted > 10


@pytest.mark.parametrize(
    ("attn", "said"),
    [
        ("dense", "not dense"),
        ("snapkv", "SnapKV.* evicts keys"),
        ("h2o", "H2O.* evicts keys"),
        ("h2o@0+window:recent=16@1", "evicts keys"),
        ("auto", "leave out auto"),
    ],
)
def test_what_cannot_draft_is_refused(engine, attn, said):
    with (
        engine.session(n_ctx=1 << 15, attn=attn) as session,
        pytest.raises(ValueError, match=said),
    ):
        AttentionDraft(session)


def test_a_sparse_prefill_would_not_check(engine):
    hip = METHODS[0]
    for prefill in (hip, "window:recent=32"):
        with (
            engine.session(n_ctx=256, attn=hip, prefill=prefill) as session,
            pytest.raises(ValueError, match="leave out prefill"),
        ):
            AttentionDraft(session)


def test_llama_and_the_command_write_the_same(path, sure, capsys):
    text = "the hand " * 20
    asked = {"max_tokens": N, "temperature": 0}
    how = {"n_ctx": 256, "n_threads": 1, "verbose": False}
    plain = Llama(str(path), **how)(text, **asked)
    drafting = LlamaAttentionDrafting(METHODS[0], num_pred_tokens=3)
    drafted = Llama(str(path), **how, draft_model=pickle.loads(pickle.dumps(drafting)))
    assert drafted(text, **asked)["choices"] == plain["choices"]
    with pytest.raises(ValueError, match="one method"):
        Llama(str(path), **how, draft_model=drafting, attn="hip")
    flags = ["run", "--json", "--raw", "--temp", "0", "-n", str(N), "-t", "1", "-c", "256"]
    texts = []
    for more in ([], ["--draft-attn", METHODS[0], "--draft-max", "3"]):
        assert main([*flags, "-m", str(path), *more, text]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft-attn", "hip", "--draft-mtp"], "--draft-mtp and --draft-attn are ways"),
        (["--draft-attn", "hip", "--attn", "quest"], "leave out --attn"),
        (["--draft-attn", "hip", "--prefill", "hip"], "leave out --attn and --prefill"),
        (["--draft-attn", "hip", "--min-mass", "0.9"], "--min-mass"),
        (["--draft-attn", "hpi"], "hpi"),
        (["--draft-attn", "snapkv"], "evicts keys"),
        (["--draft-attn", "dense"], "not dense"),
        (["--draft-attn", "hip", "--draft-max", "65"], "--draft-max is 65"),
    ],
)
def test_flags_that_do_not_go_together_are_named(path, capsys, flags, said):
    assert main(["run", "-m", str(path), "-t", "1", "-c", "128", "--raw", *flags, "x"]) != 0
    assert said in capsys.readouterr().err


def test_a_chat_drafts_by_the_method_that_it_changes_to(path, sure, monkeypatch, capsys):
    def chatted(*flags):
        lines = f"the hand\n/attn {METHODS[2] if flags else 'dense'}\nand so\n/model {path}\non\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        how = ["chat", "-m", str(path), "--temp", "0", "-n", "12", "-t", "1", "-c", "256"]
        assert main([*how, *flags]) == 0
        return capsys.readouterr().out

    n_proposed, propose = [], AttentionDraft.propose

    def counted(draft, tokens, n):
        n_proposed.append(draft._session)
        return propose(draft, tokens, n)

    monkeypatch.setattr(AttentionDraft, "propose", counted)
    assert chatted("--draft-attn", WINDOW) == chatted()
    assert len(set(map(id, n_proposed))) == 3, "a session each: at first, after /attn, after /model"


def test_a_chat_that_drafts_by_attention_refuses_dense(path, sure, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/attn dense\n/attn\n"))
    how = ["chat", "-m", str(path), "-t", "1", "-c", "256", "--draft-attn", WINDOW]
    assert main(how) == 1, "a command failed"
    said = capsys.readouterr().err
    assert "not dense" in said
    assert f"--attn {WINDOW}" in said, "the method is the one before"
