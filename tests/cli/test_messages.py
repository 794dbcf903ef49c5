"""Errors and help: they name what the user typed, what is expected, and what to do."""

import json
from pathlib import Path

import pytest
from stand_in_engine import FakeEngine

from tamis.cli import main
from tamis.cli.commands import config
from tamis.cli.options import common

METHOD = "run hi --attn"
MESSAGES = {
    "nosuch": "there is no command 'nosuch': expected chat, run, ",
    "run --nosuch hi": "unrecognized arguments: --nosuch (see tamis run --help)",
    "run --tmep 1 hi": "--tmep; did you mean --temp",
    "run --seed x hi": "argument -s/--seed: 'x' is not a whole number",
    "run --min-p nan hi": "argument --min-p: 'nan' is not a number",
    "run --top-p 7 hi": "--top-p is 7.0, expected a finite number from 0.0 to 1.0",
    "run --mirostat 3 hi": "--mirostat is 3, expected an integer from 0 to 2",
    "run -l 5 hi": "'5' is no bias such as 42+1.5",
    "run -n -7 hi": "'-7' is not a whole number of at least 1, or -1 for no limit",
    "run -c -5 hi": "'-5' is not a whole number of at least 0, or auto",
    "run --audit -1 hi": "argument --audit: '-1' is not a whole number of at least 0",
    "run hi --audit": "--audit N: the value is missing; also compute dense attention on every N-th",
    "run hi -s": "-s, --seed N: the value is missing; seed of the random numbers",
    "run -ctk q5_1 hi": "-ctk/--cache-type-k takes no 'q5_1': expected f16, q8_0, q4_0",
    "run --kv-unit 5 hi": "--kv-unit takes no '5': expected 1, 16, 64",
    "run --kv-ram 5XB hi": "'5XB' is not a size such as 512MiB",
    "run --min-mass 2 hi": "'2' is not a number from 0 to 1",
    "run --draft-max 99 --draft-attn quest hi": "--draft-max is 99, expected 1 to 64",
    "run --draft-attn nosuch hi": "'nosuch' is not known; --draft-attn takes auto, bigbird",
    f"{METHOD} nosuch": "'nosuch' is not known; --attn takes auto, bigbird",
    f"{METHOD} dense,tactic": "tactic, tail, topk, twilight, window; name one method at a time",
    f"{METHOD} dense,own.py:f": "there is no file dense,own.py, expected one with f; name one meth",
    f"{METHOD} delta(window)": "'delta' is no method of --attn: it goes with --prefill",
    f"{METHOD} tactic:P=3": "'tactic:P=3': P is 3.0, expected 0 < P <= 1",
    f"{METHOD} tactic:recent=0": "'tactic:recent=0': recent is 0, expected recent >= 1",
    f"{METHOD} quest:budgt=5": "'budgt=5' in 'quest:budgt=5': quest takes budget=..., page=...",
    f"{METHOD} quest:budget=1": "budget is 1, expected at least 48, which sinks and window take",
    f"{METHOD} topk:budget=1": "budget is 1, expected at least 68, which sinks and recent tokens",
    f"{METHOD} topk:rows=x": "'topk:rows=x': rows is 'x', expected group or head",
    f"{METHOD} cpe:rows=x": "'cpe:rows=x': rows is 'x', expected head, union or group",
    f"{METHOD} tactic:rows=joint": "sample is 0, expected at least 1 where rows is joint",
    f"{METHOD} metered": "metered works over another method, as in metered(window)",
    "serve --port 99999": "argument --port: '99999' is no TCP port: expected 0 to 65535",
    "eval --metric edt": "--metric takes no 'edt'; did you mean edit?",
    "perplexity": "the following arguments are required: -f/--file",
}  # fmt: skip


@pytest.fixture
def engine(monkeypatch):
    """Commands that get as far as loading a model have one without weights."""
    monkeypatch.setattr("tamis.engine.engine.Engine.load", lambda *_args, **_options: FakeEngine())
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))


@pytest.mark.parametrize(("words", "message"), MESSAGES.items(), ids=MESSAGES)
def test_errors_name_what_was_typed(words, message, engine, capsys):
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("run -f https://example.org/a.txt hi", "a.txt"),
        ("run -m https://example.org/b.gguf?c=d hi", "b.gguf"),
        ("summarize -m smollm2 https://example.org/c/", "page.html"),
        ("perplexity -f http://example.org/$(d).txt", "page.html"),
    ],
)
def test_an_address_in_place_of_any_file_is_answered_with_how_to_fetch_it(
    words, name, capsys, monkeypatch
):
    monkeypatch.setattr("tamis.fetch.registry.resolve", lambda _name: Path("fake.gguf"))
    monkeypatch.setattr("tamis.engine.engine.Engine.load", lambda *_args, **_options: FakeEngine())
    assert main(words.split()) in (1, 2)
    shown = capsys.readouterr().err
    assert f" is an address, files are read: curl -Lo {name} 'http" in shown


def test_a_default_that_all_requests_would_be_refused_for_is_an_error(engine, capsys, tmp_path):
    pytest.importorskip("starlette")
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request))
    words = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    assert main([*words, "--set", "temperature=warm"]) == 2
    assert "--set: temperature is a string, expected 0 to 100" in capsys.readouterr().err


def test_help_of_run_begins_with_the_prompt_and_ends_with_adapters():
    titles = [g.title for g in config.parser_of("run")._action_groups if g._group_actions]
    assert titles[:3] == ["options", "prompt", "model and device"]
    assert titles[-1] == "adapters"
