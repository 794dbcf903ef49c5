"""The command line on a stand-in engine: exit codes, what goes where, the chat's commands."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis import models
from tamis.cli import answer, bench, common, main, perplexity, repl
from tamis.engine import MemoryPlan
from tamis.sampler import SamplerParams
from tamis.session import Piece

N_VOCAB = 256


class FakeTokenizer:
    """A token a byte of UTF-8; BOS is 1 where asked for."""

    bos, eos, eog, n_vocab = 1, 0, frozenset({0}), N_VOCAB

    def __init__(self, add_bos: bool = False) -> None:
        self.add_bos = add_bos

    def encode(self, text: str, **_options: bool) -> list[int]:
        return [1] * self.add_bos + list(text.encode())


class FakeSession:
    """Answers "one two three"; an exception in `script` is raised in place of a piece."""

    def __init__(self, n_ctx: int, script: list[Any]) -> None:
        self.n_ctx, self.tokens, self.script, self.calls = n_ctx, [], script, []

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def truncate(self, n: int) -> None:
        del self.tokens[n:]

    def prefill(self, ids: Any, progress: Any = None) -> Any:
        self.tokens += [int(i) for i in ids]
        return np.zeros(N_VOCAB, np.float32)

    def decode(self, token_id: int) -> Any:
        return self.prefill([token_id])

    def logits(self, ids: Any) -> Iterator[Any]:
        self.prefill(ids)
        for start in range(0, len(ids), 3):
            yield np.zeros((min(3, len(ids) - start), N_VOCAB), np.float32)

    def generate(self, ids: Any, params: Any, **options: Any) -> Iterator[Piece]:
        self.calls.append((list(ids), params, options))
        script = self.script[: options["max_tokens"]]
        self.prefill(ids)
        for i, text in enumerate(script):
            if isinstance(text, BaseException):
                raise text
            last = i == len(script) - 1
            self.tokens.append(2)
            yield Piece(text, 2, -0.5, "stop" if last else None)

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps(self.tokens))

    def load(self, path: str) -> None:
        self.tokens = json.loads(Path(path).read_text())


class FakeEngine:
    """What the commands use of an Engine."""

    path, n_threads = Path("fake.gguf"), 2

    def __init__(self, script: list[Any] | None = None) -> None:
        self.script = ["one", " two", " three"] if script is None else script
        self.tokenizer, self.chats, self.sessions = FakeTokenizer(), [], []
        self.hp = SimpleNamespace(n_vocab=N_VOCAB, n_layer=2, n_head_kv=2, head_dim=4)
        self.file = SimpleNamespace(tensors={"output.weight": SimpleNamespace(n_bytes=1000)})

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.chats.append([dict(m) for m in messages])
        return [3, *"".join(m["content"] for m in messages).encode(), 4]

    def memory_plan(self, _n_ctx: int) -> MemoryPlan:
        return MemoryPlan(1 << 20, 2 << 20, 3 << 20, 4 << 20)

    def session(self, n_ctx: int | None = None, **_options: Any) -> FakeSession:
        self.sessions.append(FakeSession(n_ctx or 100, self.script))
        return self.sessions[-1]

    def close(self) -> None:
        pass


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


def spawn(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tamis", *arguments]
    return subprocess.run(command, capture_output=True, check=False, timeout=120, **options)


def tiny_file(folder: Path) -> Path:
    return write_tiny_model(folder / "tiny.gguf", TinySpec())


# Exit codes and error messages


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "run --no-such-flag",
        "run -p x -n 0",
        "run -p x -t none",
        "run -p x --top-p 7",
        "run -p x --attn nonsense",
        "run -p x --raw --system y",
        "run -p x -f y",
        "bench -p 0 -n 0",
        "bench -t 1,x",
        "bench -p 64 -c 8",
        "bench --json --csv",
        "perplexity",
        "perplexity -f x -c 2",
        "pull",
    ],
)
def test_a_wrong_command_line_is_exit_code_2_and_one_line(engine, capsys, line):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tamis: error: ")
    assert err.count("\n") == 1


def test_an_empty_prompt_and_an_empty_stop_string_are_usage_errors(engine, capsys):
    assert main(["run", "-p", ""]) == 2
    assert main(["run", "-p", "x", "--stop", ""]) == 2
    assert "empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\nlines"), "two lines"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "x.gguf: No such file"),
        (MemoryError(), "out of memory"),
        (TypeError("odd"), "TypeError: odd (a bug of tamis"),
    ],
)
def test_a_failure_is_exit_code_1_and_one_line(engine, monkeypatch, capsys, error, message):
    def fail(*_args: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr("tamis.engine.Engine.load", fail)
    assert main(["run", "-p", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"tamis: error: {message}")
    assert err.count("\n") == 1
    with pytest.raises(type(error)):
        main(["--traceback", "run", "-p", "x"])


def test_ctrl_c_is_exit_code_130(engine, capsys):
    engine.script[:] = ["one", KeyboardInterrupt()]
    assert main(["run", "-p", "x"]) == 130
    assert capsys.readouterr() == ("one", "tamis: interrupted\n")


def test_version_and_help_are_exit_code_0_and_import_nothing_heavy():
    heavy = "numpy numba llvmlite tamis.models tamis.engine"
    code = (
        "import sys; from tamis.cli import main; code = main(['--version']); "
        f"sys.exit(code or [m for m in {heavy.split()} if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"tamis ")
    assert main(["run", "--help"]) == 0


def test_a_closed_pipe_ends_quietly(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        command = [sys.executable, "-m", "tamis", "inspect", "-m", str(tiny_file(tmp_path))]
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, check=False, timeout=120
        )
    assert (done.returncode, done.stderr) == (0, b"")


# run


def test_run_writes_the_answer_alone_to_standard_output(engine, capsys):
    assert main(["run", "-p", "hi", "--system", "be brief", "-n", "2"]) == 0
    assert capsys.readouterr() == ("one two\n", "")
    assert [m["role"] for m in engine.chats[0]] == ["system", "user"]


def test_run_raw_uses_no_template_and_hands_the_settings_on(engine, capsys):
    flags = [
        "--temp",
        "0",
        "--top-k",
        "5",
        "--seed",
        "7",
        "--stop",
        "END",
        "--stop",
        "STOP",
        "-c",
        "50",
    ]
    assert main(["run", "--raw", "-p", "hi", *flags]) == 0
    ids, params, options = engine.sessions[0].calls[0]
    assert ids == list(b"hi")
    assert engine.chats == []
    assert (params.temp, params.top_k, params.seed) == (0.0, 5, 7)
    assert params.top_p == SamplerParams().top_p
    assert options["stop"] == ["END", "STOP"]
    assert engine.sessions[0].n_ctx == 50


@pytest.mark.parametrize("flags", [[], ["-f", "-"], ["-p", "-"]])
def test_run_reads_a_pipe(engine, monkeypatch, flags):
    piped = SimpleNamespace(
        buffer=SimpleNamespace(read=lambda: "grüß".encode()), isatty=lambda: False
    )
    monkeypatch.setattr(sys, "stdin", piped)
    assert main(["run", *flags]) == 0
    assert engine.chats[0][0]["content"] == "grüß"


def test_run_says_where_a_file_is_not_utf8(engine, tmp_path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    assert main(["run", "-f", str(tmp_path / "bad.txt")]) == 1
    assert "bad.txt is not UTF-8: byte 0xff at 3" in capsys.readouterr().err


def test_run_json_is_one_object_with_tokens(engine, capsys):
    assert main(["run", "-p", "hi", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == "one two three"
    assert report["finish"] == "stop"
    assert report["tokens"] == [{"id": 2, "logprob": -0.5}] * 3


# the default model


def test_without_a_model_the_default_one_is_fetched_after_saying_so(monkeypatch, capsys, tmp_path):
    def missing(_name: str) -> Path:
        raise models.ModelError("not here")

    monkeypatch.setattr(models, "resolve", missing)
    monkeypatch.setattr(models, "pull", lambda name, progress: tmp_path / name)
    assert common.model_file(None, common.Progress()) == tmp_path / models.DEFAULT
    assert f"fetching {models.DEFAULT}" in capsys.readouterr().err
    with pytest.raises(models.ModelError):
        common.model_file("other", common.Progress())


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


# bench and perplexity


def test_bench_has_a_row_for_each_test_depth_and_thread_count(engine, capsys):
    flags = ["-p", "4,8", "-n", "2", "-d", "0,5", "-t", "1,2", "-r", "2", "--json"]
    assert main(["bench", *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tests = ["pp4", "pp8", "tg2", "pp4 @ d5", "pp8 @ d5", "tg2 @ d5"]
    assert [row["test"] for row in rows] == tests * 2
    assert all(row["min"] <= row["tok_s"] <= row["max"] for row in rows)
    # 1000 bytes of weights; 2 x 2 x 2 x 2 x 4 = 64 bytes of K and V for each of the 1 tokens held
    assert bench._traffic(engine, 1, 1e6) == {"mb_per_token": 0.0, "gb_s": 1.06}


def test_bench_table_and_csv_have_a_line_a_row(engine, capsys):
    assert main(["bench", "-p", "4", "-n", "2", "-r", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert main(["bench", "-p", "4", "-n", "2", "-r", "1", "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model,threads,attn,test,tok_s")
    assert len(lines) == 3


def test_a_token_needs_its_experts_and_one_row_of_an_untied_table():
    hp = SimpleNamespace(n_vocab=10, n_expert=8, n_expert_used=2)
    sizes = {"token_embd.weight": 100, "blk.0.ffn_up_exps.weight": 80, "blk.0.attn_q.weight": 7}
    tensors = {name: SimpleNamespace(n_bytes=n) for name, n in sizes.items()}
    assert bench.token_weights(tensors, hp) == 100 + 20 + 7  # tied: the table is the output too
    tensors["output.weight"] = SimpleNamespace(n_bytes=100)
    assert bench.token_weights(tensors, hp) == 10 + 20 + 7 + 100


def test_perplexity_of_equal_logits_is_the_size_of_the_vocabulary(engine, tmp_path, capsys):
    (tmp_path / "text").write_text("x" * 35)
    assert main(["perplexity", "-f", str(tmp_path / "text"), "-c", "16", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["perplexity"] == pytest.approx(N_VOCAB)
    # two chunks of 16 in 35 tokens; predictions at positions 8 to 14 of each
    assert (report["chunks"], report["n"]) == (2, 14)
    assert err.splitlines() == ["[1/2] 256.0000", "[2/2] 256.0000"]


def test_perplexity_puts_bos_first_only_where_the_model_adds_it():
    assert perplexity.cut(FakeTokenizer(), "abcdef", 3).tolist() == [[97, 98, 99], [100, 101, 102]]
    cut = perplexity.cut(FakeTokenizer(add_bos=True), "abcdef", 3).tolist()
    assert cut == [[1, 97, 98], [1, 100, 101]]
    with pytest.raises(ValueError, match="6 tokens, expected at least 8"):
        perplexity.cut(FakeTokenizer(), "abcdef", 8)


def test_perplexity_losses_do_not_depend_on_the_slices():
    rng = np.random.default_rng(0)
    logits, chunk = rng.normal(size=(12, 9)).astype(np.float32), rng.integers(0, 9, 12)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    expected = [-np.log(p[i, chunk[i + 1]]) for i in range(6, 11)]
    for size in (1, 5, 7, 12):
        slices = [logits[i : i + size] for i in range(0, 12, size)]
        losses = np.concatenate(list(perplexity.chunk_losses(slices, chunk)))
        np.testing.assert_allclose(losses, expected, rtol=1e-6)  # logits are float32


# commands on a real file


def test_inspect_and_tokenize_on_a_file(tmp_path, capsys):
    path = str(tiny_file(tmp_path))
    assert main(["inspect", "-m", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metadata"]["general.architecture"] == "llama"
    assert report["memory"]["weights"] > 0
    assert main(["inspect", "-m", path, "--tensors"]) == 0
    assert "token_embd.weight" in capsys.readouterr().out
    assert main(["tokenize", "-m", path, "--no-bos", "--json", "hi"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_file_that_is_no_model_is_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    done = spawn("inspect", "-m", str(tmp_path / "x.gguf"))
    assert done.returncode == 1
    assert done.stderr.startswith(b"tamis: error: ")
    assert done.stderr.count(b"\n") == 1
