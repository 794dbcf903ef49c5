"""What `tamis run` reads, how long its context is, and what an empty or too long prompt gives."""

import io
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_engine import FakeEngine
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.cli.options import common, context
from tamis.cli.terminal.progress import Progress
from tamis.engine.engine import Engine
from tamis.engine.errors import ContextError
from tamis.engine.memory_plan import MemoryPlan
from tamis.engine.shifting import Shifting
from tamis.sampling.chain import SamplerParams


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr("tamis.engine.engine.Engine.load", lambda *_args, **_options: fake)
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))
    return fake


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinySpec())


def piped(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Standard input that is a file with this text."""
    (folder / "input").write_text(text)
    stdin = io.TextIOWrapper((folder / "input").open("rb"))
    monkeypatch.setattr(sys, "stdin", stdin)


# The prompt


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["-p", "Do it:"], "the text\n\nDo it:"),
        (["Do", "it:"], "the text\n\nDo it:"),
        (["-p", "-"], "the text"),
        (["-f", "-"], "the text"),
        (["-f", "-", "-p", "Do it:"], "the text\n\nDo it:"),
        ([], "the text"),
    ],
)
def test_an_instruction_and_a_piped_text_are_joined(engine, monkeypatch, tmp_path, words, read):
    piped(monkeypatch, tmp_path, "the text\n")
    assert main(["run", *words]) == 0
    assert engine.chats[0][0]["content"] == read


def test_an_instruction_and_a_file_are_joined_and_standard_input_is_left_alone(
    engine, monkeypatch, tmp_path
):
    piped(monkeypatch, tmp_path, "not read")
    (tmp_path / "text").write_text("the text\r\n\n")
    assert main(["run", "Do it:", "-f", str(tmp_path / "text")]) == 0
    assert engine.chats[0][0]["content"] == "the text\n\nDo it:"
    assert sys.stdin.read() == "not read"


def test_a_line_break_at_the_end_changes_nothing(model):
    """-p X and `echo X |` had different answers."""
    command = [sys.executable, "-m", "tamis", "run", "-m", str(model), "--temp", "0", "-n", "8"]
    command += ["--raw", "--json"]
    answers = []
    for words, text in ((["-p", "abc"], ""), ([], "abc\n"), ([], "abc")):
        done = subprocess.run([*command, *words], input=text, capture_output=True, text=True)
        report = json.loads(done.stdout)
        answers.append(
            (report["prompt_tokens"], report["text"], [t["id"] for t in report["tokens"]])
        )
    assert answers[0] == answers[1] == answers[2]


def test_an_empty_pipe_beside_an_instruction_is_no_text(engine, monkeypatch, tmp_path):
    piped(monkeypatch, tmp_path, "")
    assert main(["run", "hi"]) == 0
    assert engine.chats[0][0]["content"] == "hi"


# What becomes of the answer


@pytest.mark.parametrize("script", [[""], ["", " \n"]])
def test_an_empty_answer_is_exit_code_1_and_said(engine, capsys, script):
    engine.script[:] = script
    assert main(["run", "hi"]) == 1
    assert "there is no text" in capsys.readouterr().err


def test_a_model_without_a_chat_template_completes_and_says_so(engine, capsys):
    engine.vocab.chat_template = None
    assert main(["run", "Once upon"]) == 0
    assert engine.chats == []
    assert engine.sessions[0].calls[0][0] == list(b"Once upon")
    assert "has no chat template (a base model): it continues" in capsys.readouterr().err
    assert main(["run", "Once upon", "--raw"]) == 0
    assert capsys.readouterr().err == "", "who asks for it knows"
    assert main(["run", "Once upon", "--system", "Be brief."]) == 2


def test_stats_say_where_time_and_memory_went(engine, capsys):
    assert main(["run", "hi", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n"
    names = [line.split("  ")[0] for line in err.splitlines()]
    assert names == ["start", "prompt", "first token", "answer", "total", "context", "memory"]


def test_n_minus_1_is_no_limit(engine):
    assert main(["run", "hi", "-n", "-1"]) == 0
    assert engine.sessions[0].calls[0][2]["max_tokens"] is None


# The context


def arguments(**given: Any) -> Namespace:
    names = ("ctx", "cache_type_k", "cache_type_v", "kv_ram", "kv_vram", "rope_scale")
    usual = dict.fromkeys(names) | {"attn": "dense", "prefill": "dense", "context_shift": False}
    return Namespace(**usual | given)


def planned(n_train: int, free: int = 1 << 40) -> Any:
    """An engine whose KV cache takes 4 bytes a token in f16, 2 in q8_0, and no scratch."""

    def plan(n_ctx: int, type_k: str, **_: Any) -> MemoryPlan:
        return MemoryPlan(0, n_ctx * (4 if type_k == "f16" else 2), 0, free)

    hp = SimpleNamespace(n_ctx_train=n_train, head_dim=64)
    backend = SimpleNamespace(kv_types=("f16", "q8_0"))
    return SimpleNamespace(hp=hp, backend=backend, memory_plan=plan)


@pytest.mark.parametrize(
    ("n_prompt", "n_answer", "n_ctx"),
    [
        (10, None, 8192),  # as much as conversations usually need
        (20_000, None, 24_320),  # and 4,096 for the answer, rounded to 256
        (20_000, 100, 20_224),
        (30_000, None, 32_768),  # no more than the training
        (10, -1, 32_768),
        (None, None, 32_768),  # a conversation
    ],
)
def test_auto_takes_what_prompt_and_answer_need(n_prompt, n_answer, n_ctx):
    found = context.choose(planned(32_768), arguments(), n_prompt, n_answer)
    assert (found.n_ctx, found.type_k) == (n_ctx, "f16")


def test_auto_takes_8_bits_and_then_less_where_memory_ends(capsys):
    """90 % of 24,000 bytes: 8,192 tokens in f16 take 32,768, in q8_0 16,384."""
    found = context.choose(planned(32_768, 24_000), arguments(), 10)
    assert (found.n_ctx, found.type_k) == (8192, "q8_0")
    assert "memory has no room for f16" in capsys.readouterr().err
    found = context.choose(planned(32_768, 24_000), arguments(attn="tactic"), 10)
    assert (found.n_ctx, found.type_k) == (4096, "f16")
    assert "memory has no room for 8192 tokens" in capsys.readouterr().err


def test_a_context_and_types_that_are_named_are_taken():
    found = context.choose(planned(512), arguments(ctx=4096, cache_type_k="f16"), 10)
    assert (found.n_ctx, found.type_k) == (4096, "f16")
    assert context.choose(planned(512), arguments(ctx=0), 10).n_ctx == 512


def test_a_prompt_that_is_too_long_is_an_error_with_three_remedies():
    with pytest.raises(ContextError) as found:
        context.choose(planned(512), arguments(), 1000)
    text = str(found.value)
    assert text.startswith("the prompt is 1000 tokens, the model was trained on 512: ")
    for remedy in ("tamis summarize", "--context-shift", "--rope-scaling yarn --rope-scale 3"):
        assert remedy in text
    assert context.choose(planned(512), arguments(context_shift=True), 1000).n_ctx == 512
    assert context.choose(planned(512), arguments(rope_scale=3.0), 1000).n_ctx == 1536
    with pytest.raises(ContextError, match="raise it to more than 1000"):
        context.choose(planned(2048), arguments(ctx=600), 1000)


def test_the_length_is_known_before_the_model_is_loaded(model, tmp_path, monkeypatch, capsys):
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("tamis.engine.engine.Engine.load", load)
    (tmp_path / "book").write_text("abcdefgh" * 4096)
    assert main(["run", "-m", str(model), "-f", str(tmp_path / "book")]) == 1
    assert "tamis summarize FILE" in capsys.readouterr().err


def test_with_context_shift_a_prompt_and_an_answer_may_be_longer_than_the_context(model):
    engine = Engine.load(model)
    try:
        session = engine.session(n_ctx=64, n_ubatch=16)
        shifting = Shifting(session, 8)
        ids = [5 + i % 50 for i in range(200)]
        params = SamplerParams(temp=0, ignore_eos=True)
        pieces = list(shifting.generate(ids, params, max_tokens=100))
        assert len(pieces) == 100
        assert pieces[-1].finish == "length"
        assert session.tokens[:8] == ids[:8]
        assert session.n_past <= 64
        # 200 read and 99 held of what was written: what is not there any more was dropped.
        assert session.n_past + shifting.n_dropped == 300
        assert session.tokens[-10:] == [piece.token_id for piece in pieces[-10:]]
    finally:
        engine.close()


# Progress


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.rpartition("\x1b[K")[2]


def test_progress_is_for_terminals_and_has_words_that_people_know(monkeypatch, capsys):
    progress = Progress()
    progress("download", 1, 3)
    progress.reading(3)(1, 3)
    progress.clear()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress("compile", 1, 4)
    assert shown(capsys) == "compiling once per processor (ahead: tamis warmup):  25 %"
    monkeypatch.setattr("tamis.cli.terminal.progress.columns", lambda: 30)
    progress("compile", 1, 4)
    assert shown(capsys) == "compiling once per pro:  25 %"  # in 29 columns
    progress("compile", 4, 4)
    assert capsys.readouterr().err.endswith("\r\x1b[K")


def test_without_a_terminal_a_stage_that_is_long_is_reported_once(monkeypatch, capsys):
    now, told = [100.0], []
    monkeypatch.setattr("tamis.cli.terminal.progress.time.monotonic", lambda: now[0])
    progress = Progress()
    for second, stage in enumerate(["load"] * 20 + ["compile"] * 30 + ["repack"] * 9):
        now[0] += 1
        progress(stage, second, 100)
        if err := capsys.readouterr().err:
            told.append((second, err))
    assert told == [(30, "compiling once per processor (ahead: tamis warmup)\n")]


def test_the_remaining_time_is_shown_when_it_is_known(monkeypatch, capsys):
    """Each chunk takes a second longer than the one before; after the first it was "0 s left"."""
    now = [100.0]
    monkeypatch.setattr("tamis.cli.terminal.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    told = Progress().reading(800)
    lines = []
    for n in range(1, 8):
        now[0] += n
        told(100 * n, 800)
        lines.append(shown(capsys))
    assert lines[0] == "reading 800 tokens:  12 %"
    assert "left" not in lines[1]
    assert all(" left" in line for line in lines[2:])
    assert lines[6] == "reading 800 tokens:  87 %, 8 s left"


def test_stdin_that_is_a_device_is_not_read(engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    assert main(["run", "hi"]) == 0
    assert engine.chats[0][0]["content"] == "hi"


def test_a_pipe_that_stays_open_is_said_to_be_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(common, "PATIENCE", 0.05)
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "wb", buffering=0) as other:
        monkeypatch.setattr(sys, "stdin", pipe)
        timer = threading.Timer(0.3, lambda: (other.write(b"late"), other.close()))
        timer.start()
        assert common.read_text("-") == "late"
        timer.join()
    assert capsys.readouterr().err.startswith("waiting for standard input, an open pipe; < /dev/nu")


def test_a_pipe_with_text_is_not_said_to_be_waited_for(monkeypatch, capsys, tmp_path):
    (tmp_path / "a").write_text("text")
    with (tmp_path / "a").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert common.read_text("-") == "text"
    assert capsys.readouterr().err == ""
