"""`--attn auto`: who is chosen, why, and that choosing changes nothing."""

import re
from collections.abc import Iterator

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.auto import CANDIDATES, Auto, AutoError, Choice, choose, parse_auto
from tamis.cli import main
from tamis.engine import Engine
from tamis.jit_kernels.workers import NoKernelError
from tamis.select.notation import parse_method
from tamis.session import Session

N = 400


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


@pytest.fixture
def base(engine: Engine) -> Session:
    session = engine.session(n_ctx=512)
    session.prefill([i * 7 % 250 for i in range(N)])
    return session


def chosen(engine: Engine, base: Session, **how: float) -> Choice:
    candidates = ("window:recent=32", "topk:k=64", "topk:k=160", "topk:k=384")
    return choose(engine, base, Auto(**{"least": 64, **how}), candidates)  # type: ignore[arg-type]


def test_the_cheapest_of_those_that_keep_enough_is_chosen(engine, base):
    choice = chosen(engine, base, mass=0.6, share=5)
    able = [t for t in choice.tried if t.mass >= 0.6]
    assert choice.attn == min(able, key=lambda t: t.share).attn
    assert [t.attn for t in choice.tried] == [
        "window:recent=32",
        "topk:k=64",
        "topk:k=160",
        "topk:k=384",
    ]
    window, *tops = choice.tried
    assert window.mass < 0.5
    assert tops[0].mass < tops[1].mass < tops[2].mass
    assert window.share < tops[0].share


def test_more_mass_asked_for_is_never_less_read(engine, base):
    shares = []
    for mass in (0.05, 0.6, 0.8):
        choice = chosen(engine, base, mass=mass, share=5)
        (own,) = [t for t in choice.tried if t.attn == choice.attn]
        assert own.mass >= mass
        shares.append(own.share)
    assert shares == sorted(shares)


def test_dense_attention_stays_where_nobody_keeps_enough(engine, base):
    choice = chosen(engine, base, mass=1.0, share=0.5)
    assert choice.attn == "dense"
    assert "none keeps 1 of the attention with at most 0.5 of the bytes" in choice.reason


def test_dense_attention_stays_in_a_short_context(engine, base):
    choice = chosen(engine, base, least=N + 1)
    assert choice == Choice("dense", f"{N} tokens are fewer than {N + 1}", ())


def test_choosing_leaves_the_session_as_it_was(engine, base):
    tokens = base.tokens
    before = base.decode(3)
    base.truncate(N)
    chosen(engine, base)
    assert base.tokens == tokens
    assert (base.decode(3) == before).all()


def test_a_candidate_is_measured_as_an_audit_measures_it(engine, base):
    choice = chosen(engine, base, probe=4, share=5)
    session = engine.session(n_ctx=512, attn="topk:k=64", audit=1)
    session.prefill(base.tokens[:-4])
    for token in base.tokens[-4:]:
        session.decode(token)
    assert session.audit is not None
    assert choice.tried[1].mass == pytest.approx(session.audit.total().mass, abs=1e-6)


def test_every_candidate_is_a_method():
    for text in CANDIDATES:
        parse_method(text)


def test_a_method_without_kernels_here_is_passed_over(engine, base, monkeypatch):
    def session(attn="dense", **settings):
        if attn in absent:
            raise NoKernelError(attn)
        return real(attn=attn, **settings)

    real, how = engine.session, Auto(mass=0.01, probe=2, least=100, share=1)
    monkeypatch.setattr(engine, "session", session)
    absent = ["hip"]
    assert [t.attn for t in choose(engine, base, how, ("hip", "window")).tried] == ["window"]
    absent = ["hip", "window"]
    assert choose(engine, base, how, ("hip", "window")).attn == "dense"


def test_the_notation():
    assert parse_auto("topk") is None
    assert parse_auto("auto") == Auto()
    assert parse_auto("auto:mass=0.9,probe=4,least=100,share=1") == Auto(0.9, 4, 100, 1)


@pytest.mark.parametrize("text", ["auto:x=1", "auto:mass", "auto:mass=2", "auto:probe=0"])
def test_a_wrong_parameter_is_named(text):
    with pytest.raises(AutoError, match=r"auto takes mass=|mass is 2|probe is 0"):
        parse_auto(text)


def test_run_says_what_it_chose_and_answers_as_that_method_does(engine, capsys):
    prompt = "the cat and the other thing in the water. " * 4
    line = ["run", "-m", str(engine.path), "-t", "1", "--raw", "-p", prompt, "-n", "6", "-c", "400"]
    assert main([*line, "--temp", "0", "--attn", "auto"]) == 0
    out, err = capsys.readouterr()
    assert "--attn auto: dense; " in err
    assert "tokens are fewer than 8192" in err
    assert main([*line, "--temp", "0"]) == 0
    assert capsys.readouterr().out == out
    assert main([*line, "--temp", "0", "--attn", "auto:mass=0.01,least=64,share=9"]) == 0
    assert re.search(r"--attn auto: \w+; keeps [01]\.\d+ of", capsys.readouterr().err)
    assert main([*line, "--attn", "auto:x=1"]) == 2
    assert "auto takes mass=" in capsys.readouterr().err
