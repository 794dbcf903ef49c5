"""The conversation of `tamis chat`: on a stand-in engine, then with smollm2 in a terminal."""

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_in_engine import FakeEngine

from tamis.cli import answer, common, main, repl
from tamis.sampler import SamplerParams


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr("tamis.engine.Engine.load", lambda *_args, **_options: fake)
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))
    return fake


@pytest.fixture
def chat(engine: FakeEngine) -> repl.Chat:
    arguments = Namespace(system=None, max_tokens=None, plain=True)
    return repl.Chat(engine, engine.session(), SamplerParams(), arguments)


# chat


def test_chat_reads_only_what_is_new(chat, engine):
    chat.handle("abc")
    session = engine.sessions[0]
    session.tokens[:] = [3, *b"abc"]
    chat.handle("d")
    assert session.calls[1][0] == [*b"one two threed", 4]
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(chat, engine, capsys):
    engine.script[:] = ["one", KeyboardInterrupt()]
    assert chat.handle("hi")
    assert chat.messages[-1] == {"role": "assistant", "content": "one"}
    engine.script[:] = [KeyboardInterrupt()]
    before = chat.messages
    assert chat.handle("again")
    assert chat.messages == before
    assert "[stopped]" in capsys.readouterr().err


def test_a_failed_answer_leaves_the_conversation_as_it_was(chat, engine, capsys):
    chat.handle("hi")
    before = chat.messages
    engine.script[:] = [ValueError("prompt is too long")]
    for line in ("more", "/regen"):
        assert chat.handle(line)
        assert chat.messages == before
    assert capsys.readouterr().err.count("error: prompt is too long") == 2


def test_regen_replaces_the_answer(chat, engine, capsys):
    assert chat.handle("/regen")
    assert "no answer to replace" in capsys.readouterr().err
    chat.handle("hi")
    engine.script[:] = ["other"]
    chat.handle("/regen")
    assert [m["content"] for m in chat.messages] == ["hi", "other"]


def test_system_and_reset_start_again(chat, engine):
    chat.handle("hi")
    chat.handle("/system be brief")
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    assert engine.sessions[0].n_past == 0
    chat.handle("hi")
    chat.handle("/reset")
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    chat.handle("/system")
    assert chat.messages == []


def test_a_kept_conversation_goes_on(chat, engine, tmp_path):
    chat.handle("hi")
    before, tokens = chat.messages, list(engine.sessions[0].tokens)
    chat.handle(f"/save {tmp_path / 'talk'}")
    chat.handle("/reset")
    chat.handle(f"/load {tmp_path / 'talk'}")
    assert (chat.messages, engine.sessions[0].tokens) == (before, tokens)


@pytest.mark.parametrize("text", ["[1]", "{}", "[{}]", "nonsense", '[{"role": 1, "content": ""}]'])
def test_a_damaged_conversation_is_refused_and_changes_nothing(chat, tmp_path, capsys, text):
    chat.handle("hi")
    before = chat.messages
    (tmp_path / "talk.json").write_text(text)
    chat.handle(f"/load {tmp_path / 'talk'}")
    assert chat.messages == before
    assert "is not a kept conversation" in capsys.readouterr().err


def test_set_checks_names_types_and_ranges(chat, engine, capsys):
    for line in ("/set temp 0.25", "/set top_k 3", "/set ignore_eos on"):
        chat.handle(line)
    wrong = ("/set nonsense 1", "/set temp", "/set temp x", "/set top_k 1.5", "/set top_p 7")
    for line in (*wrong, "/set ignore_eos 7", "/set logit_bias 1"):
        chat.handle(line)
        assert capsys.readouterr().err.startswith("error: "), line
    chat.handle("hi")
    params = engine.sessions[0].calls[0][1]
    assert (params.temp, params.top_k, params.ignore_eos) == (0.25, 3, True)


def test_help_names_every_command(chat, capsys):
    chat.handle("/help")
    text = capsys.readouterr().err
    for name in ["help", "system", "reset", "regen", "save", "load", "set", "stats", "ctx", "exit"]:
        assert f"/{name}" in text
    for line in ("/stats", "/ctx", "/set"):
        chat.handle(line)
    assert "error" not in capsys.readouterr().err
    chat.handle("/nonsense")
    assert "/nonsense is not a command" in capsys.readouterr().err
    assert not chat.handle("/exit")


def test_chat_from_a_pipe_answers_each_line(engine, monkeypatch, capsys):
    lines = iter(["one \\\n", "more\n", "\n", "/exit\n", "never\n"])
    piped = SimpleNamespace(readline=lambda: next(lines, ""), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", piped)
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "one two three\n"
    assert engine.chats == [[{"role": "user", "content": "one \nmore"}]]


def test_markdown_is_cut_between_blocks_never_in_a_fence():
    assert answer.split_blocks("a\n\nb") == ("a\n\n", "b")
    assert answer.split_blocks("a\nb") == ("", "a\nb")
    assert answer.split_blocks("```\nx\n\ny") == ("", "```\nx\n\ny")
    assert answer.split_blocks("```\nx\n\n```\n\nz") == ("```\nx\n\n```\n\n", "z")


def test_an_answer_cannot_steer_the_terminal():
    assert answer.visible("a\x1b[2Jb\n\tc\r\x9b") == "a\u241b[2Jb\n\tc\u240d\ufffd"
