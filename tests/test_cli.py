"""The command line on a stand-in engine: exit codes, what goes where, the chat's commands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_engine import N_VOCAB, FakeEngine, FakeTokenizer
from tiny_models import TinySpec, write_tiny_model

from tamis import models
from tamis.cli import bench, common, main, perplexity
from tamis.sampler import SamplerParams


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr("tamis.engine.Engine.load", lambda *_args, **_options: fake)
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))
    return fake


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
