"""Help, defaults from a file and from the environment, completion, and what is kept on disk."""

import argparse
import json
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_in_engine import FakeEngine
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.cli.commands import COMMANDS, completion, config, man
from tamis.cli.options import common, samplers, settings
from tamis.fetch.registry import KNOWN
from tamis.sampling.chain import SamplerParams


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr("tamis.engine.engine.Engine.load", lambda *_args, **_options: fake)
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))
    return fake


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TAMIS_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path / "config.toml"


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_sentence_and_one_with_a_value_its_default(command: str) -> None:
    parser = config.parser_of(command)
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        assert action.help, action.option_strings or action.dest
        text = formatter._expand_help(action)
        if action.option_strings and action.nargs != 0:
            assert ("(default: " in text) != ("(required" in text), action.option_strings


def test_help_of_samplers_has_the_defaults_that_hold() -> None:
    usual = SamplerParams()
    for flag in samplers.FLAGS:
        assert getattr(usual, flag.field) == flag.default, flag.names
        assert type(getattr(usual, flag.field)) is flag.type, flag.names


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["rum", "x"], "did you mean rm or run?"),
        (["run", "--tmep", "0", "x"], "did you mean --temp"),
        (["run", "--device", "cud", "x"], "did you mean cuda"),
    ],
)
def test_a_misspelt_word_is_corrected_in_the_error(words, meant, capsys):
    assert main(words) == 2
    assert meant in capsys.readouterr().err


def test_llama_cpp_names_are_known(engine):
    flags = "--predict 5 -s 7 --temperature 0.5 --typical 0.9 --mirostat-lr 0.2 -l 5+1.5 -l 6-inf"
    assert main(["run", "hi", *flags.split(), "--ctx-size", "64", "-r", "END", "-sys", "S"]) == 0
    _, params, options = engine.sessions[0].calls[0]
    assert (params.seed, params.temp, params.typical_p, params.mirostat_eta) == (7, 0.5, 0.9, 0.2)
    assert dict(params.logit_bias) == {5: 1.5, 6: float("-inf")}
    assert options["stop"] == ["END"]
    assert main(["run", "hi", "-l", "x"]) == 2


def test_a_schema_that_is_none_is_a_usage_error(engine, capsys):
    pytest.importorskip("llguidance")
    assert main(["run", "hi", "-j", "{"]) == 2
    assert "is no JSON" in capsys.readouterr().err
    assert main(["run", "hi", "--grammar", "root ::= ("]) == 2
    assert main(["run", "hi", "--grammar-file", "nowhere"]) == 1


def test_what_of_a_schema_is_not_enforced_is_noted(engine, capsys):
    pytest.importorskip("llguidance")
    schema = '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}'
    assert main(["run", "hi", "-j", schema]) == 0
    assert "the answer's form does not enforce #/uniqueItems" in capsys.readouterr().err
    assert main(["run", "hi", "-j", '{"type": "array"}']) == 0
    assert "does not enforce" not in capsys.readouterr().err


# Settings


def given(engine: FakeEngine, *words: str) -> SamplerParams:
    assert main(["run", "hi", *words]) == 0
    return engine.sessions[-1].calls[0][1]


def test_flags_come_before_variables_before_the_file(engine, file, monkeypatch):
    file.write_text('temp = 0.1\ntop-k = 1\n[run]\ntop-k = 2\n[model."m"]\ntop-k = 3\n')
    assert (given(engine).temp, given(engine).top_k) == (0.1, 2)
    assert given(engine, "-m", "m").top_k == 3
    assert given(engine, "-m", "/folder/m.gguf").top_k == 3
    monkeypatch.setenv("TAMIS_TOP_K", "4")
    assert given(engine, "-m", "m").top_k == 4
    assert given(engine, "-m", "m", "--top-k", "5").top_k == 5


def test_lists_and_switches_have_defaults_too(engine, file):
    file.write_text('stop = ["A", "B"]\nignore-eos = true\n')
    assert given(engine).ignore_eos
    assert engine.sessions[-1].calls[0][2]["stop"] == ["A", "B"]
    given(engine, "--stop", "C")
    assert engine.sessions[-1].calls[0][2]["stop"] == ["C"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temp = 'hot'", "--temperature is 'hot'"),
        ("[run]\ntmep = 1", "there is no flag --tmep; did you mean temp"),
        ("temp = ", "is no TOML"),
        ("ignore-eos = 7", "expected true or false"),
        ("device = 'cud'", "--device is 'cud'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_reported_with_its_place(file, capsys, text, said):
    file.write_text(text)
    assert main(["run", "hi"]) == 2
    err = capsys.readouterr().err
    assert str(file) in err
    assert said.removeprefix("--temperature") in err


def test_a_variable_that_cannot_be_used_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("TAMIS_TEMP", "hot")
    assert main(["run", "hi"]) == 2
    assert "TAMIS_TEMP" in capsys.readouterr().err


def test_config_sets_one_key_and_leaves_the_rest(file, capsys):
    file.write_text("# mine\ntemp = 0.1 # low\n\n[run]\ntop-k = 2\n")
    for words in (
        ["temp", "0.2"], ["run.n-predict", "5"], ["chat.system", "Be brief."],
        ["model.smollm2.ctx", "4096"],
    ):  # fmt: skip
        assert main(["config", "set", *words]) == 0
    assert main(["config", "unset", "run.top-k"]) == 0
    assert file.read_text() == (
        '# mine\ntemp = 0.2\n\n[run]\nn-predict = 5\n\n[chat]\nsystem = "Be brief."\n\n'
        '[model."smollm2"]\nctx = 4096\n'
    )
    capsys.readouterr()
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "--system Be brief. (chat), from" in shown
    assert "with -m smollm2: --ctx 4096" in shown
    before = file.read_text()
    for words in (
        ["tmep", "1"],
        ["temp", "hot"],
        ["model.m.temp", "hot"],
        ["rum.temp", "1"],
        ["a.b.c", "1"],
    ):
        assert main(["config", "set", *words]) == 2
    assert main(["config", "set", "temp"]) == 2
    assert main(["config", "unset", "top-p"]) == 2
    assert file.read_text() == before


def test_config_makes_a_file_that_says_what_can_be_there(file, capsys):
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert main(["config", "init"]) == 0
    assert settings.read(file) == {"chat": {}}
    assert main(["config"]) == 0


# Completion and the manual page


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ru"], ["run"]),
        (["run", "--grammar"], ["--grammar", "--grammar-file"]),
        (["run", "--device", "cu"], ["cuda"]),
        (["run", "--attn", "tac"], ["tactic"]),
        (["methods", "hi"], ["hip"]),
        (["config", "se"], ["set"]),
        (["run", "-f", ""], []),
    ],
)
def test_words_are_completed(words, found):
    assert completion.candidates(words) == found


def test_models_are_completed(monkeypatch, tmp_path):
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    (tmp_path / "mine.gguf").write_bytes(b"")
    assert completion.candidates(["run", "-m", "mine"]) == ["mine.gguf"]
    assert completion.candidates(["show", "smol"]) == ["smollm2"]


def test_a_script_for_each_shell_and_the_manual_page(capsys):
    for shell in completion.SCRIPTS:
        assert main(["completion", shell]) == 0
        assert "tamis completion --words" in capsys.readouterr().out
    text = "\n".join(man.page())
    for command in COMMANDS:
        assert f'.SH "TAMIS {command.upper()}"' in text
    assert r"\fB\-\-top\-k\fR" in text


# Models and caches


def test_models_are_listed_shown_and_removed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    assert main(["list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["tiny.gguf"]
    assert main(["list", "--all"]) == 0
    assert "tamis pull smollm2" in capsys.readouterr().out
    assert main(["show", "tiny.gguf", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["architecture"], shown["context"]) == ("llama", 512)
    assert main(["rm", "tiny.gguf", "nothing"]) == 2
    assert path.exists(), "all or none"
    assert main(["rm", "tiny.gguf", "--yes"]) == 0
    assert not path.exists()


def test_a_terminal_is_asked_before_a_model_goes(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    for answer, there in (("\n", True), ("y\n", False)):
        stdin = SimpleNamespace(isatty=lambda: True, readline=lambda answer=answer: answer)
        monkeypatch.setattr("sys.stdin", stdin)
        main(["rm", "tiny.gguf"])
        assert path.exists() == there


def test_caches_are_shown_and_cleared(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, days in (("documents/old.json", 10), ("documents/new.json", 0), ("kernels/k.o", 0)):
        path = tmp_path / "tamis" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
        stamp = path.stat().st_mtime - days * 86400
        os.utime(path, (stamp, stamp))
    assert main(["cache", "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["documents"]["bytes"], rows["documents"]["files"]) == (8, 2)
    assert main(["cache", "clear", "documents", "--older", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"freed": 4}
    assert (tmp_path / "tamis/documents/new.json").exists()
    assert main(["cache", "clear", "all"]) == 0
    assert not (tmp_path / "tamis/kernels").exists()
    assert main(["cache"]) == 0
    for words in (["clear"], ["clear", "nonsense"], ["show", "kernels"]):
        assert main(["cache", *words]) == 2


def test_a_refused_value_is_reported_by_its_key(file, capsys):
    for key in ("temp", "run.temp"):
        assert main(["config", "set", key, "hot"]) == 2
        assert capsys.readouterr().err == f"tamis: error: {key} is 'hot': 'hot' is not a number\n"
    assert not file.exists()


def test_a_known_model_has_the_temperature_of_its_makers_unless_one_is_set():
    small, other = Path("x") / KNOWN["smollm2"].file, Path("x.gguf")
    usual = SamplerParams()
    assert samplers.for_model(usual, Namespace(), small).temp == 0.2
    assert samplers.for_model(usual, Namespace(), other).temp == 0.8
    assert samplers.for_model(usual, Namespace(temp=0.8), small).temp == 0.8
