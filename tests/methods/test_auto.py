"""`--attn auto`: who is chosen, why, and that choosing changes nothing."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tiny_models import TinySpec, like_qwen2, write_tiny_model

from tamis.auto import auto
from tamis.auto.attention_mass import Weighed, Weight
from tamis.auto.auto import Auto, AutoError, Choice, candidates, choose, parse_auto
from tamis.cli import main
from tamis.engine.engine import Engine
from tamis.engine.session import Session
from tamis.jit_kernels.compile.workers import NoKernelError
from tamis.select.notation import of_layers, parse_method

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


METHODS = ("window:recent=32", "topk:k=64", "topk:k=160", "topk:k=384")


def chosen(engine: Engine, base: Session, **how: float) -> Choice:
    return choose(engine, base, Auto(**{"least": 64, **how}), METHODS)  # type: ignore[arg-type]


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.6, 0.7, 0.8])
def test_every_group_gets_the_first_method_that_keeps_enough_there(engine, base, mass):
    """And keeps it while others are tried elsewhere: here each group is a layer."""
    choice = chosen(engine, base, mass=mass, share=5)
    expected: dict[int, str] = {}
    for method, tried in zip(METHODS, choice.tried, strict=False):
        trial = [expected.get(layer, method) for layer in range(engine.hp.n_layer)]
        assert tried.attn == of_layers(trial)
        able = [layer for layer, w in enumerate(tried.groups) if w.mass >= mass]
        expected = {layer: trial[layer] for layer in able}
    assert choice.attn == of_layers([expected.get(i, "dense") for i in range(engine.hp.n_layer)])
    assert (len(expected) == engine.hp.n_layer) == (choice.attn.count("dense") == 0)
    assert len(choice.tried) == len(METHODS) or len(expected) == engine.hp.n_layer


def test_groups_may_differ_and_some_stay_dense(engine, base, monkeypatch):
    """What each method keeps in the two layers is made up."""
    kept = {"window:recent=32": (0.99, 0.2), "topk:k=64": (0.99, 0.9), "topk:k=160": (0.99, 0.96)}

    class Made(Weighed):
        def of(self, layers):
            named = (
                {
                    layer: name
                    for part in self._method.parts
                    for layer in part.layers
                    for name in kept
                    if part.method == parse_method(name)
                }
                if hasattr(self._method, "parts")
                else dict.fromkeys(range(2), None)
            )
            (layer,) = layers
            name = named[layer] or next(n for n in kept if parse_method(n) == self._method)
            return Weight(kept[name][layer], 0.1)

    monkeypatch.setattr(auto, "Weighed", Made)
    how = Auto(least=64, probe=1)
    choice = choose(engine, base, how, tuple(kept))
    assert choice.attn == "window:recent=32@0+topk:k=160@1"
    assert choice.reason == "keeps 0.975 of the attention with 0.10 of the bytes"
    choice = choose(engine, base, how, tuple(kept)[:2])
    assert choice.attn == "window:recent=32@0"
    assert choice.reason == "keeps 0.995 of the attention with 0.55 of the bytes"


def test_more_mass_asked_for_is_never_less_kept(engine, base):
    found = []
    for mass in (0.05, 0.6, 0.8):
        choice = chosen(engine, base, mass=mass, share=5)
        assert choice.attn != "dense"
        kept = re.match(r"keeps (\S+) of the attention", choice.reason)
        found.append(float(kept[1]))
        assert found[-1] >= mass
    assert found == sorted(found)


def test_dense_attention_stays_where_nobody_keeps_enough(engine, base):
    choice = chosen(engine, base, mass=1.0, share=0.5)
    assert choice.attn == "dense"
    assert "none keeps 1 of the attention with at most 0.5 of the bytes in any" in choice.reason


def test_dense_attention_stays_in_a_short_context(engine, base):
    choice = chosen(engine, base, least=N + 1)
    assert choice == Choice("dense", f"{N} tokens are fewer than {N + 1}")
    assert str(choice) == f"dense; {N} tokens are fewer than {N + 1}"


def test_choosing_leaves_the_session_as_it_was(engine, base):
    tokens = base.tokens
    before = base.decode(3)
    base.truncate(N)
    chosen(engine, base)
    assert base.tokens == tokens
    assert (base.decode(3) == before).all()


@pytest.mark.parametrize("n", [2, 8000, 32768])
def test_every_candidate_is_a_method(n):
    for text in candidates(n):
        parse_method(text)


def test_layers_with_a_window_of_their_own_are_in_no_group(tmp_path):
    path = write_tiny_model(tmp_path / "m.gguf", like_qwen2("gemma3"))
    engine = Engine.load(path, n_threads=1)
    full = [i for i in range(engine.hp.n_layer) if not engine.model.window(i)]
    assert 0 < len(full) < engine.hp.n_layer
    session = engine.session(n_ctx=512)
    session.prefill([i * 7 % 60 for i in range(N)])
    choice = choose(engine, session, Auto(least=64, mass=0.01, probe=2), ("window:recent=32",))
    engine.close()
    assert choice.attn == "window:recent=32"
    assert len(choice.tried[0].groups) == min(4, len(full))
    assert all(w.mass < 1 for w in choice.tried[0].groups)


def test_a_method_without_kernels_here_is_passed_over(engine, base, monkeypatch):
    def session(attn, **settings):
        if attn._method in map(parse_method, absent):
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
    assert "tokens are fewer than 7500" in err
    assert main([*line, "--temp", "0"]) == 0
    assert capsys.readouterr().out == out
    assert main([*line, "--temp", "0", "--attn", "auto:mass=0.01,least=64,share=9"]) == 0
    assert re.search(
        r"--attn auto: \S+; keeps [01]\.\d+ of .* \(chosen in \d+\.\d s\)", capsys.readouterr().err
    )
    assert main([*line, "--attn", "auto:x=1"]) == 2
    assert "auto takes mass=" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "serve", "bench"])
def test_commands_that_read_no_document_say_who_takes_auto(command, tmp_path, capsys):
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec("qwen2"))
    assert main([command, "-m", str(path), "--attn", "auto"]) != 0
    assert "run, summarize and eval take it" in capsys.readouterr().err


def test_how_many_tokens_are_worth_a_choice_depends_on_the_device(engine, base, monkeypatch):
    assert choose(engine, base, Auto()).reason == f"{N} tokens are fewer than 7500"
    gpu, cpu = SimpleNamespace(on_host=False), SimpleNamespace(on_host=True)
    monkeypatch.setattr("tamis.auto.auto.devices", lambda _places: {"cuda": gpu})
    assert choose(engine, base, Auto()).reason == f"{N} tokens are fewer than 131072"
    monkeypatch.setattr("tamis.auto.auto.devices", lambda _places: {"cuda": gpu, "cpu": cpu})
    assert choose(engine, base, Auto()).reason == f"{N} tokens are fewer than 7500"
