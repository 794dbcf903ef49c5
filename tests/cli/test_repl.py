"""The conversation of `tamis chat`: on a stand-in engine, then with smollm2 in a terminal."""

import json
import os
import re
import select
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_in_engine import FakeEngine
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.cli.commands import chat as chats
from tamis.cli.commands import completion, config
from tamis.cli.conversation import lines, repl
from tamis.cli.options import common
from tamis.cli.terminal import answer, say
from tamis.fetch import registry as models
from tamis.fetch.registry import DEFAULT, KNOWN
from tamis.sampling.chain import SamplerParams
from tamis.tools import record_chat
from tamis.tools.record_chat import Screen


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr("tamis.engine.engine.Engine.load", lambda *_args, **_options: fake)
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))
    return fake


@pytest.fixture
def chat(engine: FakeEngine) -> repl.Chat:
    return repl.Chat(engine, engine.session(), SamplerParams(), arguments())


def arguments(*words: str) -> Namespace:
    """What `tamis chat` makes of a command line."""
    return config.parser_of("chat").parse_args(["--plain", "--prefill", "dense", *words])


def piped(monkeypatch: pytest.MonkeyPatch, *text: str) -> None:
    """Standard input that has these lines."""
    left = iter(text)
    stdin = SimpleNamespace(readline=lambda: next(left, ""), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_chat_reads_only_what_is_new(chat, engine):
    chat.handle("abc")
    session = engine.sessions[0]
    session.tokens[:] = [3, *b"abc"]
    chat.handle("d")
    assert session.calls[1][0] == [*b"one two threed", 4]
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2


def test_a_full_context_is_shifted_where_asked_for(engine, capsys):
    """Of 100 tokens: at most 75, and then 50 with the system message."""
    words = arguments("--system", "S", "--context-shift")
    chat = repl.Chat(engine, engine.session(100), SamplerParams(), words)
    session = engine.sessions[0]
    for line in ("A" * 16, "B" * 16):
        chat.handle(line)
        # What the stand-in was given and has answered, as a tokenizer would have it.
        session.tokens[:] = engine.encode_chat(chat.messages)[:-1]
    assert "context full" not in capsys.readouterr().err
    chat.handle("C" * 16)
    assert [m["content"][:1] for m in chat.messages] == ["S", "B", "o", "C", "o"]
    assert session.calls[-1][0] == [*b"C" * 16, 4], "what is left is not read again"
    assert "[context full: the oldest 2 messages are dropped" in capsys.readouterr().err
    chat.handle("D" * 80)
    assert [m["content"][:1] for m in chat.messages] == ["S", "D", "o"]


def test_ctrl_c_keeps_what_was_written_and_its_question(chat, engine, monkeypatch, capsys):
    monkeypatch.setattr(lines, "interactive", lambda: True)
    chat.handle("hi")
    engine.script[:] = ["one", " two", KeyboardInterrupt()]
    assert chat.handle("again")
    assert [m["content"] for m in chat.messages] == ["hi", "one two three", "again", "one two"]
    assert "[stopped; /retry answers again]" in capsys.readouterr().err
    engine.script[:] = ["more"]
    assert chat.handle("/retry")
    assert [m["content"] for m in chat.messages][2:] == ["again", "more"]


def test_ctrl_c_before_the_first_word_leaves_the_conversation(chat, engine, monkeypatch, capsys):
    monkeypatch.setattr(lines, "interactive", lambda: True)
    chat.handle("hi")
    before = chat.messages
    # What the stand-in was given for "hi" is what it is given again: nothing of it is dropped.
    engine.sessions[0].tokens[:] = tokens = [3, *b"hi"]
    engine.script[:] = [KeyboardInterrupt()]
    assert chat.handle("again")
    assert (chat.messages, engine.sessions[0].tokens) == (before, tokens)
    assert "[stopped: the conversation is as it was before]" in capsys.readouterr().err


def test_a_failed_answer_leaves_the_conversation_as_it_was(chat, engine, capsys):
    chat.handle("hi")
    before = chat.messages
    engine.script[:] = [ValueError("prompt is 9 tokens, n_ctx is 8: raise n_ctx")]
    for line in ("more", "/regen"):
        assert chat.handle(line)
        assert chat.messages == before
    error = "error: prompt is 9 tokens, --ctx is 8: raise --ctx; /clear empties the conversation\n"
    assert capsys.readouterr().err == error * 2


def test_in_a_pipe_a_failed_message_is_exit_code_1(engine, monkeypatch, capsys):
    piped(monkeypatch, "hi\n", "/nonsense\n", "hi\n")
    assert main(["chat"]) == 1
    assert capsys.readouterr().out == "one two three\n" * 2


def test_in_a_pipe_ctrl_c_ends_the_chat(engine, monkeypatch, capsys):
    """It was exit code 0 without that answer, and the next message was answered."""
    piped(monkeypatch, "hi\n", "hi\n")
    engine.script[:] = ["one", KeyboardInterrupt()]
    assert main(["chat"]) == 130
    assert capsys.readouterr().out == "one\n"


def test_a_pipe_that_ends_in_a_backslash_ends_in_a_message(engine, monkeypatch, capsys):
    piped(monkeypatch, "one\n", "two\\\n", "three\\")
    assert main(["chat"]) == 0
    assert [chat[-1]["content"] for chat in engine.chats] == ["one", "two\nthree\\"]


def test_a_message_that_is_no_utf8_is_refused_and_the_others_are_answered(tmp_path):
    """One read takes them all from the pipe: none was answered, or the byte became another text."""
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    command = [sys.executable, "-m", "tamis", "chat", "-m", str(model), "-n", "1"]
    for encoding in ("utf-8:strict", "utf-8:surrogateescape"):
        done = subprocess.run(
            command,
            input=b"a\nb\xc3\xa9\xff\nc\n/ctx\n",
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=False,
        )
        said = done.stderr.decode().splitlines()[1:]
        assert said.count("error: the message is not UTF-8: byte 0xff at 3; convert it first") == 1
        assert done.returncode == 1
        assert re.match(r"context [1-9]\d*/512 ", said[-1]), "the others are in it"


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


def test_a_kept_conversation_goes_on_with_its_settings(chat, engine, tmp_path):
    chat.handle("/set temp 0.25")
    chat.handle("hi")
    before, tokens = chat.messages, list(engine.sessions[0].tokens)
    chat.handle(f"/save {tmp_path / 'talk'}")
    chat.handle("/reset")
    chat.handle("/set temp 0.75")
    chat.handle(f"/load {tmp_path / 'talk'}")
    assert (chat.messages, engine.sessions[0].tokens) == (before, tokens)
    chat.handle("hi")
    assert engine.sessions[0].calls[-1][1] == SamplerParams(temp=0.25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talk", "talk.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: [kept],
        lambda kept: {**kept, "messages": [{}]},
        lambda kept: {**kept, "messages": [{"role": 1, "content": ""}]},
        lambda kept: {**kept, "settings": {**kept["settings"], "temp": "hot"}},
        lambda kept: {**kept, "settings": {**kept["settings"], "top_p": 7}},
        lambda kept: {**kept, "settings": {"temp": 0.5}},
        lambda kept: {**kept, "settings": None},
    ],
)
def test_a_damaged_conversation_is_refused_and_changes_nothing(chat, tmp_path, capsys, change):
    chat.handle("hi")
    before = chat.messages
    chat.handle(f"/save {tmp_path / 'talk'}")
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    chat.handle(f"/load {tmp_path / 'talk'}")
    assert chat.messages == before
    assert "is not a kept conversation" in capsys.readouterr().err


def test_set_checks_names_types_and_ranges(chat, engine, capsys):
    for line in ("/set temp 0.25", "/set top_k 3", "/set ignore_eos on"):
        chat.handle(line)
    capsys.readouterr()
    wrong = ("/set nonsense 1", "/set temp -3", "/set temp x", "/set top_k 1.5", "/set top_p 7")
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
    assert all(len(line) <= 90 for line in text.splitlines())
    for line in ("/stats", "/ctx", "/set"):
        chat.handle(line)
    assert "error" not in capsys.readouterr().err
    chat.handle("/nonsense")
    assert "/nonsense is not a command" in capsys.readouterr().err
    chat.handle("/retri")
    assert "did you mean /retry?" in capsys.readouterr().err
    assert not chat.handle("/exit")


def test_chat_from_a_pipe_answers_each_line(engine, monkeypatch, capsys):
    piped(monkeypatch, "one \\\n", "more\n", "\n", "/exit\n", "never\n")
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "one two three\n"
    assert engine.chats == [[{"role": "user", "content": "one \nmore"}]]


THINKING = """\
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'].split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def test_thoughts_are_folded_and_shown_on_demand(engine, capsys):
    from tamis.text.chat_format import ChatFormat
    from tamis.text.chat_template import ChatTemplate

    engine.chat_template = ChatTemplate(THINKING)
    engine.script[:] = ["Let me", " see.\n", "</think>", "\n\nBlue", "."]
    chat = repl.Chat(engine, engine.session(), SamplerParams(), arguments())
    chat._format = ChatFormat(think=("<think>", "</think>"))
    monkey = [*b"assistant\n<think>\n"]
    engine.encode_chat = lambda messages: monkey
    chat.handle("Which colour?")
    out, err = capsys.readouterr()
    assert out == "Blue.\n"
    assert "Let me see." not in err
    assert re.search(r"\[thought for [\d.]+ s; /think shows it\]", err)
    assert chat.messages[-1]["content"] == "Blue."
    chat.handle("/think")
    assert capsys.readouterr().err == "Let me see.\n"
    chat.handle("/think on")
    chat.handle("Again?")
    out, err = capsys.readouterr()
    assert (out, "Let me see." in err) == ("Blue.\n", True)


def test_a_file_is_read_before_it_is_asked_about(chat, engine, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("The text.\n")
    chat.handle(f"/read {tmp_path / 'book.txt'}")
    session = engine.sessions[0]
    assert session.tokens == [3, *b"The text.\n\n"]
    assert "12 tokens read; ask about it" in capsys.readouterr().err
    chat.handle("What?")
    assert session.calls[0][0] == [*b"What?", 4], "the text is not read again"
    assert chat.messages[0]["content"] == "The text.\n\nWhat?"
    chat.handle("And?")
    assert chat.messages[2]["content"] == "And?"
    chat.handle("/read nowhere")
    assert "nowhere" in capsys.readouterr().err


def test_a_question_is_asked_anew(chat, engine, monkeypatch, capsys):
    chat.handle("/edit x")
    assert "there is no question" in capsys.readouterr().err
    chat.handle("hi")
    chat.handle("/edit hello")
    assert [m["content"] for m in chat.messages] == ["hello", "one two three"]
    chat.handle("/edit")
    assert "write /edit TEXT" in capsys.readouterr().err
    monkeypatch.setattr(lines, "interactive", lambda: True)
    chat.handle("/edit")
    assert chat.take_draft() == "hello"
    assert chat.take_draft() == ""
    assert len(chat.messages) == 2, "nothing is lost before the new question is asked"
    chat.handle("hey")
    assert [m["content"] for m in chat.messages] == ["hey", "one two three"]


def test_method_and_model_change_and_the_conversation_goes_on(chat, engine, capsys):
    chat.handle("hi")
    chat.handle("/attn tactic")
    assert engine.sessions[1].tokens == engine.sessions[0].tokens
    chat.handle("/attn")
    assert "--attn tactic" in capsys.readouterr().err
    chat.handle("/attn nonsense")
    assert "nonsense" in capsys.readouterr().err
    chat.handle("/model other")
    assert "the conversation goes on" in capsys.readouterr().err
    chat.handle("more")
    assert [m["content"] for m in chat.messages][::2] == ["hi", "more"]
    assert engine.sessions[2].calls[0][0] == engine.encode_chat(chat.messages[:3])


def test_another_model_has_its_own_temperature_unless_one_is_set(chat, engine, capsys):
    engine.path = Path(KNOWN["smollm2"].file)
    chat.handle("/model smollm2")
    assert "temperature 0.2; the conversation" in capsys.readouterr().err
    engine.path = Path("another.gguf")
    chat.handle("/model other")
    assert "temperature 0.8; the conversation" in capsys.readouterr().err
    chat.handle("/set temp 0.5")
    engine.path = Path(KNOWN["smollm2"].file)
    chat.handle("/model smollm2")
    assert "temperature 0.5; the conversation" in capsys.readouterr().err


def test_an_answer_is_copied_by_the_terminal(chat, monkeypatch, capsys):
    chat.handle("/copy")
    assert "there is no answer" in capsys.readouterr().err
    chat.handle("hi")
    chat.handle("/copy")
    assert "there is no terminal" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    chat.handle("/copy")
    assert capsys.readouterr().out == "\x1b]52;c;b25lIHR3byB0aHJlZQ==\x07"


def test_settings_are_a_table(chat, capsys, monkeypatch):
    monkeypatch.setattr(repl, "columns", lambda: 200)
    chat.handle("/set temp 0.25")
    chat.handle("/set")
    rows = [line.split("|") for line in capsys.readouterr().err.splitlines()]
    found = {row[1].strip(): [cell.strip() for cell in row[2:5]] for row in rows[1:] if row[1:]}
    assert found["temp"] == [
        "0.25",
        "0.8",
        "temperature: divides the logits; 0: always take the most likely token",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/re", ["/retry", "/read"]),
        ("/set top_", ["top_k", "top_p", "top_n_sigma"]),
        ("/attn hi", ["hip"]),
        ("/think o", ["on", "off"]),
        ("hello", []),
    ],
)
def test_tab_completes_commands_and_what_they_take(text, found):
    assert [word for word, _ in completion.of_message(text)] == found


def test_tab_completes_file_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").touch()
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one").touch()
    assert [word for word, _ in completion.of_message("/read bo")] == ["book.txt", "books/"]
    assert completion.of_message("/read books/o") == [("books/one", len("books/o"))]


def test_an_answer_cannot_steer_the_terminal():
    assert answer.visible("a\x1b[2Jb\n\tc\r\x9b") == "a\u241b[2Jb\n\tc\u240d\ufffd"


# with smollm2


def chat_in_a_pipe(folder: Path, *lines: str, flags: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """The answers, one a line, and standard error."""
    command = [sys.executable, "-m", "tamis", "chat", "-m", "smollm2", "-n", "24", *flags]
    text = "".join(line + "\n" for line in lines)
    done = subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.splitlines(), done.stderr


@pytest.mark.model
@pytest.mark.parametrize("flags", [("--temp", "0"), ("--temp", "0.8", "--seed", "7")])
def test_a_conversation_kept_and_loaded_in_a_new_process_goes_on_with_the_same_text(
    model_path, tmp_path, flags
):
    model_path("smollm2")
    first, second = "My name is Zoe and I like boats.", "What do I like?"
    whole, _ = chat_in_a_pipe(tmp_path, first, "/save talk", second, flags=flags)
    # The settings come with the conversation: no flags here.
    rest, err = chat_in_a_pipe(tmp_path, "/load talk", second, "/stats")
    alone, _ = chat_in_a_pipe(tmp_path, second, flags=flags)
    assert whole[-len(rest) :] == rest
    assert rest != alone
    reused = re.search(r"(\d+) reused", err)
    assert reused
    assert int(reused[1]) > 40, "the loaded tokens were computed again"


def has_begun(below: str) -> bool:
    """Whether an answer is on the screen, not only the status line or the progress line."""
    return bool(below) and not below.startswith(("context", "reading"))


@pytest.mark.model
def test_an_answer_is_seen_while_it_is_made(model_path, tmp_path):
    model_path("smollm2")
    story = "Write a very long story about the sea."
    screen = Screen("chat", "-m", "smollm2", "--temp", "0", "-n", "150", home=tmp_path)
    screen.wait_for_prompt()
    screen.say(story)
    screen.wait_for_prompt()
    status = re.compile(r"context \d+/8192 \(\d+ %\), [\d.]+ tok/s")
    screen.wait_for(lambda lines: any(status.match(line) for line in lines))
    screen.say("/exit")
    assert screen.end() == 0
    # A second of work or more, painted eight times a second.
    words = {len(record_chat.after(lines, f"> {story}").split()) for lines in screen.seen}
    assert len(words) > 4


@pytest.mark.model
def test_in_a_terminal_ctrl_c_stops_the_answer_and_the_chat_goes_on(model_path, tmp_path):
    model_path("smollm2")
    story = "Write a very long story about the sea."
    screen = Screen("chat", "-m", "smollm2", "--temp", "0", "-n", "150", home=tmp_path)
    screen.wait_for_prompt()
    screen.say(story)
    screen.wait_for(lambda lines: has_begun(record_chat.after(lines, f"> {story}").strip()))
    screen.child.sendintr()
    for line in ("/ctx", "What is the story about?", "/exit"):
        screen.wait_for_prompt()
        screen.say(line)
    assert screen.end() == 0
    text = "\n".join(screen.lines())
    assert "[stopped; /retry answers again]" in text
    assert "Traceback" not in text
    used = re.search(r"^context (\d+)/", text, re.M)
    assert used
    assert int(used[1]) > 40, "the question and what was written stay"


@pytest.mark.model
def test_in_a_terminal_a_message_may_have_lines_and_is_found_again(model_path, tmp_path):
    model_path("smollm2")
    flags = ("-m", "smollm2", "--temp", "0", "-n", "2")
    alt_enter, up = "\x1b\r", "\x1b[A"
    first = Screen("chat", *flags, home=tmp_path)
    for line in (f"one{alt_enter}two", "/exit"):
        first.wait_for_prompt()
        first.say(line)
    assert first.end() == 0
    lines = first.lines()
    assert lines[lines.index("> one") + 1] == ". two"
    assert (tmp_path / ".local/state/tamis/history").stat().st_mode & 0o077 == 0
    later = Screen("chat", *flags, home=tmp_path)
    later.wait_for_prompt()
    later.child.send(up + up)
    later.wait_for(lambda lines: "> one" in lines and ". two" in lines)
    later.child.sendcontrol("c")
    later.wait_for(lambda lines: "(Ctrl-D or /exit leaves)" in lines and lines.count(">") == 1)
    later.child.sendcontrol("d")
    assert later.end() == 0


@pytest.mark.model
def test_the_recorded_chat_is_the_picture_in_the_readme(model_path, tmp_path, root):
    model_path(DEFAULT)
    screen = record_chat.record(tmp_path)
    lines = screen.lines()
    said = [line for line in lines if line.startswith("> ")]
    assert said == [f"> {line}" for line in record_chat.LINES]
    answer_lines = lines[lines.index(said[0]) + 1 : lines.index(said[1])]
    assert re.findall(r"^\d\.", "\n".join(answer_lines), re.M) == ["1.", "2.", "3.", "4.", "5."]
    assert re.search(r"answer: \d+ tokens at [\d.]+ tok/s", "\n".join(lines))
    assert (tmp_path / "talk").stat().st_size > 0
    assert (tmp_path / "talk.json").exists()
    shown = record_chat.picture_lines((root / "docs/cast.svg").read_text())
    recorded = record_chat.picture_lines(record_chat.picture(lines))
    assert recorded[1:] == lines
    assert record_chat.form(shown) == record_chat.form(recorded), (
        "the picture shows another chat: python -m tamis.tools.record_chat docs/cast.svg"
    )


def test_set_confirms_and_says_what_a_setting_does(chat, capsys):
    said = {}
    for line in (
        "/set temp 0.25",
        "/set temp",
        "/set tmp 1",
        "/set temperature 1",
        "/set top_n_sigma -1",
        "/set seed -2",
    ):
        chat.handle(line)
        said[line] = capsys.readouterr().err
    assert said["/set temp 0.25"] == "temp 0.25 (was 0.8)\n"
    assert said["/set temp"].startswith("temp 0.25: temperature: divides the logits")
    assert said["/set tmp 1"].startswith("error: tmp is no setting; /set lists them")
    assert said["/set tmp 1"].endswith("; did you mean temp?\n")
    assert "did you mean temp?" in said["/set temperature 1"]
    assert said["/set top_n_sigma -1"] == "top_n_sigma -1 (was -1)\n"
    assert said["/set seed -2"] == "error: seed is -2, expected a whole number of at least -1\n"


@pytest.mark.parametrize("width", [60, 200])
def test_the_table_of_settings_fits_the_terminal(chat, capsys, monkeypatch, width):
    monkeypatch.setattr(repl, "columns", lambda: width)
    chat.handle("/set temp 0.5")
    capsys.readouterr()
    chat.handle("/set")
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= width
    assert ("divides the logits" in shown) == (width > 60)
    (temp,) = [line.split()[1:6] for line in shown.splitlines() if line.startswith("| temp ")]
    assert temp == ["temp", "|", "0.5", "|", "0.8"]  # what it is, and was when the chat began
    chat.handle("/help")
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) < width


def test_lines_of_a_chat_are_broken_between_words_on_a_terminal_alone(monkeypatch, capsys):
    text = "error: no model 'x' here: give the path of a .gguf file, or\n| a | table | stays |"
    say(text)
    assert capsys.readouterr().err == text + "\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tamis.cli.terminal.columns", lambda: 30)
    say(text)
    assert capsys.readouterr().err.splitlines() == [
        "error: no model 'x' here: give", "the path of a .gguf file, or", "| a | table | stays |"
    ]  # fmt: skip


def test_an_address_is_no_file(chat, capsys):
    chat.handle("/read https://example.org/a")
    text = "https://example.org/a is an address, files are read: curl -Lo page.html"
    assert text in capsys.readouterr().err


def test_what_is_typed_during_an_answer_is_not_shown_and_is_the_next_message(monkeypatch):
    leader, follower = os.openpty()
    with os.fdopen(follower, "r+b", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with lines.without_echo():
            os.write(leader, b"typed ahead\n")
            assert not select.select([leader], [], [], 0.2)[0]
        assert terminal.readline() == b"typed ahead\n"
        os.write(leader, b"x")
        assert os.read(leader, 1) == b"x"
    os.close(leader)


def test_an_answer_that_goes_round_in_a_circle_is_noticed():
    def pieces(tokens):
        return [SimpleNamespace(token_id=token) for token in tokens]

    circle = [*range(100, 130), *[1, 2, 3, 4, 5] * 8]
    assert "repeats itself" in answer.repetition(pieces(circle), 0)
    assert answer.repetition(pieces(circle), 0.8) == ""
    assert answer.repetition(pieces(range(200)), 0) == ""
    assert answer.repetition(pieces([7] * 20), 0) == ""  # too short to tell


def test_a_cycle_is_found_once_it_is_long_and_there_four_times():
    assert answer.circle([*range(100, 130), *[*range(20)] * 4]) == 20
    assert answer.circle([*range(100, 130), *[*range(20)] * 3]) == 0
    assert answer.circle([7] * 64) == 1
    assert answer.circle([5, *[7] * 63]) == 0, "too short to tell"
    assert answer.circle([*range(answer.LONGEST + 1)] * 5) == 0, "too long a cycle"
    assert answer.circle([*[*range(20)] * 4, 99]) == 0, "it was left"
    assert answer.circle([]) == 0


def test_a_cycle_ends_the_answer_and_is_reported(chat, engine, capsys):
    engine.script[:] = ["x"] * 200
    chat.handle("hi")
    assert chat.messages[1]["content"] == "x" * 64
    assert "[ended: it wrote the same 1 tokens again and again; /retry" in capsys.readouterr().err
    engine.script[:] = ["x"] * 60
    chat.handle("hi")
    assert chat.messages[3]["content"] == "x" * 60
    assert "ended" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("free", "here", "named"),
    [
        (9e9, False, "qwen2.5-coder-1.5b (1117 MB)"),
        (2e9, False, "qwen2.5-coder-0.5b (491 MB)"),
        (5e8, False, ""),
        (5e8, True, "qwen2.5-coder-0.5b (491 MB)"),
    ],
)
def test_a_small_model_names_the_best_one_that_there_is_room_for(
    monkeypatch, tmp_path, free, here, named
):
    if here:
        (tmp_path / KNOWN["qwen2.5-coder-0.5b"].file).touch()
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(models, "available_bytes", lambda: 8e9)
    line = chats._better_model(KNOWN["smollm2"].file)
    assert named in line
    assert bool(line) == bool(named)
    best = chats._better_model(KNOWN["qwen2.5-coder-0.5b"].file)
    assert ("1117 MB" in best) == bool(best) == ("1117 MB" in named)
    for file in ("other.gguf", KNOWN["qwen2.5-coder-1.5b"].file):
        assert chats._better_model(file) == ""
    monkeypatch.setattr(models, "available_bytes", lambda: 1e8)
    assert chats._better_model(KNOWN["smollm2"].file) == ""
