"""The command line on a stand-in engine: exit codes, what goes where, the chat's commands."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_engine import N_VOCAB, FakeEngine, FakeTokenizer
from tiny_models import TinySpec, write_tiny_model

import tamis.cli
from tamis.cli import main
from tamis.cli.commands import bench, perplexity, serve
from tamis.cli.measure import profile
from tamis.cli.options import common
from tamis.cli.terminal import note
from tamis.fetch import registry as models
from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.backends.roofline import Ceiling
from tamis.jit_kernels.contract.program import OpCost
from tamis.kv.types import KVTypes
from tamis.sampling.chain import SamplerParams
from tamis.tools.record_chat import Screen


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr("tamis.engine.engine.Engine.load", lambda *_args, **_options: fake)
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))
    return fake


def spawn(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tamis", *arguments]
    return subprocess.run(command, capture_output=True, check=False, timeout=120, **options)


def tiny_file(folder: Path) -> Path:
    return write_tiny_model(folder / "tiny.gguf", TinySpec())


# Exit codes and error messages


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_file(tmp_path)
    data = path.read_bytes()
    evil = b"\x1b]0;evil\x07general.nam"
    name = b"general.architecture"
    assert data.count(name) == 1
    path.write_bytes(data.replace(name, evil[: len(name)].ljust(len(name), b"\x1b")))
    main(["inspect", "-m", str(path)])
    note("a path \x1b[2J of others")
    found = capsys.readouterr()
    assert "evil" in found.out
    for text in found:
        assert not [c for c in text if not c.isprintable() and c not in "\n\t"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "run --no-such-flag",
        "run -p x -n 0",
        "run -p x\udcff",
        "tokenize \udcff",
        "run -p x -t none",
        "run -p x --top-p 7",
        "run -p x --attn nonsense",
        "run -p x --prefill quest",
        "run -p x --raw --system y",
        "run x -p y",
        "run -p - -f -",
        "bench -p 0 -n 0",
        "bench -t 1,x",
        "bench -p 64 -c 8",
        "bench --json --csv",
        "bench --profile --csv",
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

    monkeypatch.setattr("tamis.engine.engine.Engine.load", fail)
    assert main(["run", "-p", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"tamis: error: {message}")
    assert err.count("\n") == 1
    with pytest.raises(type(error)):
        main(["--traceback", "run", "-p", "x"])


def test_traceback_may_stand_before_and_after_the_command(tmp_path):
    command = ["inspect", "-m", str(tmp_path / "nowhere.gguf")]
    for words in (["--traceback", *command], [*command, "--traceback"]):
        with pytest.raises(models.ModelError):
            main(words)


def test_ctrl_c_is_exit_code_130(engine, capsys):
    engine.script[:] = ["one", KeyboardInterrupt()]
    assert main(["run", "-p", "x"]) == 130
    assert capsys.readouterr() == ("one\n", "tamis: interrupted\n")


def test_ctrl_c_during_an_import_waits_for_its_end(tmp_path):
    # As NumPy does, the import makes an ImportError of it; while it lasts, Ctrl-C comes twice.
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.05)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('bad install')\n"
        "print('imported')\n"
    )
    code = (
        "import sys, time; from tamis import cli; from tamis.cli.commands import warmup\n"
        "def run(_):\n"
        "    import slow\n"
        "    time.sleep(10)\n"
        "warmup.run = run\n"
        f"sys.path.append({str(tmp_path)!r}); sys.argv = ['tamis', 'warmup']\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (130, b"imported\n")
    assert done.stderr == b"tamis: interrupted\n"


def test_a_command_that_cannot_be_imported_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tamis.cli.commands.inspect", None)
    assert main(["inspect"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_streams_that_the_caller_closed_are_no_error(tmp_path):
    command = f"{sys.executable} -m tamis inspect -m {tiny_file(tmp_path)}"
    for closed in ("<&-", ">&-", "2>&-"):
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), closed


def test_without_standard_input_run_asks_for_a_prompt_and_chat_ends(engine, monkeypatch, capsys):
    for line, code in (("run", 2), ("chat", 0)):
        monkeypatch.setattr(sys, "stdin", None)
        assert main([line]) == code
    assert "the prompt is empty" in capsys.readouterr().err


def test_version_and_help_are_exit_code_0_and_import_nothing_heavy():
    heavy = "numpy numba llvmlite tamis.fetch.registry tamis.engine.engine"
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


def test_what_the_locale_cannot_write_is_escaped(tmp_path):
    """The tokens of this vocabulary begin with U+0100, which Latin-1 has not: it was an error."""
    command = ["inspect", "-m", str(tiny_file(tmp_path))]
    done = spawn(*command, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"['\u0100', '\u0101'" in done.stdout


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


def test_run_says_that_an_answer_ended_with_the_context_and_not_that_n_was_reached(
    tmp_path, capsys
):
    command = ["run", "-m", str(tiny_file(tmp_path)), "--raw", "-p", "hi", "--temp", "0"]
    for flags, said in (
        (["-c", "8"], "[cut short: the context is used up; raise --ctx]\n"),
        (["-c", "8", "-n", "2"], ""),
    ):
        assert main([*command, *flags]) == 0
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("command", [["run", "-p", "hi"], ["chat"]])
def test_a_context_longer_than_the_training_is_said(engine, monkeypatch, capsys, command):
    """The stand-in was trained on 512 tokens."""
    monkeypatch.setattr(sys, "stdin", None)
    yarn = ["--rope-scaling", "yarn", "--rope-scale", "2"]
    for flags, said in (([], 0), (["-c", "513"], 1), (["-c", "1024", *yarn], 0)):
        assert main([*command, *flags]) == 0
        assert capsys.readouterr().err.count("the model was trained on 512 tokens") == said


# the default model


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["chat"]])
@pytest.mark.parametrize(
    ("memory", "name", "size"),
    [(8e9, "qwen2.5-coder-0.5b", "491 MB"), (9e8, "smollm2", "98 MB")],
)
def test_with_no_model_at_all_one_that_fits_is_fetched_after_saying_so(
    monkeypatch, capsys, tmp_path, command, memory, name, size
):
    monkeypatch.setattr(models, "available_bytes", lambda: memory)
    said = []

    def fetch(model: models.KnownModel, _partial: Path, target: Path, _say: Any) -> bool:
        said.append(capsys.readouterr().err)
        target.write_bytes(model.name.encode())
        return True

    loaded: list[Path] = []

    def load(path: Path, **_options: Any) -> FakeEngine:
        loaded.append(path)
        return FakeEngine()

    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    monkeypatch.setattr(models, "_from_hub", fetch)
    monkeypatch.setattr("tamis.engine.engine.Engine.load", load)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(command) == 0
    assert capsys.readouterr().out == "one two three\n"
    assert said == [f"no model named with -m: fetching {name} ({size}, Apache-2.0)\n"]
    assert [path.read_text() for path in loaded] == [name]


def test_a_model_that_is_named_is_not_fetched(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    assert main(["run", "-p", "x", "-m", "smollm2"]) == 1
    assert "run tamis pull smollm2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_only_model_there_is_serves_where_none_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    path = tiny_file(tmp_path)
    assert common.model_file(None, common.Progress()) == path
    assert capsys.readouterr().err == ""


# bench and perplexity


def test_bench_has_a_row_for_each_test_depth_and_thread_count(engine, capsys):
    flags = ["-p", "4,8", "-n", "2", "-d", "0,5", "-t", "1,2", "-r", "2", "--json"]
    assert main(["bench", *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tests = ["pp4", "pp8", "tg2", "pp4 @ d5", "pp8 @ d5", "tg2 @ d5"]
    assert [row["test"] for row in rows] == tests * 2
    assert all(row["min"] <= row["tok_s"] <= row["max"] for row in rows)
    # 1000 bytes of weights; 2 x 2 x 2 x 2 x 4 = 64 bytes of K and V for each of the 1 tokens held
    assert bench._traffic(engine, KVTypes("f16", "f16"), 1, 1e6) == {
        "mb_per_token": 0.0,
        "gb_s": 1.06,
    }


def test_bench_table_and_csv_have_a_line_a_row(engine, capsys):
    assert main(["bench", "-p", "4", "-n", "2", "-r", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert main(["bench", "-p", "4", "-n", "2", "-r", "1", "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model,threads,attn,prefill,test,tok_s")
    assert len(lines) == 3


def test_bench_of_several_sequences_is_llama_batched_benchs_table(tmp_path, capsys):
    words = ["bench", "-m", str(tiny_file(tmp_path)), "-p", "8,0", "-n", "2", "-t", "1", "-r", "1"]
    assert main([*words, "-np", "1,3", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["pp"], row["tg"], row["b"], row["n_kv"]) for row in rows]
    assert found == [(8, 2, 1, 10), (8, 2, 3, 30), (0, 2, 1, 2), (0, 2, 3, 6)]
    for row in rows:
        assert row["t"] == pytest.approx(row["t_pp"] + row["t_tg"], abs=2e-3)
    assert [row["s_pp"] > 0 for row in rows] == [True, True, False, False]
    assert main([*words, "-np", "2", "-d", "5", "--profile"]) == 2
    assert "leave out --profile, -d" in capsys.readouterr().err


def bench_rows(path, *rows):
    """A file of `tamis bench --json`; rows: test, median, minimum, maximum."""
    names = {"model": "m.gguf", "threads": 2, "attn": "dense", "prefill": "dense"}
    keys = ("test", "tok_s", "min", "max")
    text = [json.dumps(names | dict(zip(keys, row, strict=True))) for row in rows]
    path.write_text("\n".join(text) + "\n")
    return str(path)


def test_bench_sets_two_files_of_rows_beside_each_other(tmp_path, capsys):
    old = bench_rows(tmp_path / "a", ("pp4", 100, 90, 110), ("tg2", 50, 48, 52))
    # Two rounds of pp4, whose medians are 104 and 112; tg2 is slower in each run, pp4 in some.
    new = bench_rows(
        tmp_path / "b", ("pp4", 104, 88, 110), ("tg2", 40, 38, 47), ("pp4", 112, 99, 120)
    )
    assert main(["bench", "--compare", old, new, "--json"]) == 1
    told = capsys.readouterr()
    pp, tg = (json.loads(line) for line in told.out.splitlines())
    assert (pp["test"], pp["old"], pp["new"], pp["ratio"]) == ("pp4", 100, 108, 1.08)
    assert (pp["ratio_min"], pp["ratio_max"]) == (0.8, 1.333)  # 88 / 110, 120 / 90
    assert (tg["ratio"], tg["ratio_min"], tg["ratio_max"]) == (0.8, 0.731, 0.979)
    assert "slower in every run, and by 5 % or more: tg2" in told.err
    # The other way round nothing is slower: pp4's medians are, but not each run.
    assert main(["bench", "--compare", new, old]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert main(["bench", "--compare", old, old, "--csv"]) == 0
    assert capsys.readouterr().out.startswith("model,threads,attn,prefill,test,old,new,ratio")


def test_rows_of_several_sequences_compare_too(tmp_path, capsys):
    words = ["bench", "-m", str(tiny_file(tmp_path)), "-p", "8,0", "-n", "2", "-t", "1", "-r", "1"]
    assert main([*words, "-np", "1,3", "--json"]) == 0
    path = tmp_path / "rows"
    path.write_text(capsys.readouterr().out)
    assert main(["bench", "--compare", str(path), str(path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["test"] for row in rows} == {"pp8 x 1", "pp8 x 3", "tg2 x 1", "tg2 x 3"}
    assert {row["ratio"] for row in rows} == {1.0}


def test_files_that_do_not_compare_are_refused(tmp_path, capsys):
    old = bench_rows(tmp_path / "a", ("pp4", 100, 90, 110), ("tg2", 50, 48, 52))
    one = bench_rows(tmp_path / "b", ("pp4", 100, 90, 110))
    zero = bench_rows(tmp_path / "c", ("pp4", 0, 0, 1))
    for name, text in (("d", ""), ("e", "[1]\n"), ("f", "{\n"), ("g", '{"model": []}\n')):
        (tmp_path / name).write_text(text)
    (tmp_path / "h").write_bytes(b"\xff\xfe")
    for new, told in (
        (one, "b has no row of tg2, m.gguf, 2 threads, dense and dense: measure the same tests"),
        (zero, "c:1 is "),
        (tmp_path / "d", "d is empty"),
        (tmp_path / "e", "e:1 is '[1]': expected a row of tamis bench --json"),
        (tmp_path / "f", "f:1 is '{'"),
        (tmp_path / "g", "g:1 is "),
        (tmp_path / "h", "h is not text"),
        (tmp_path / "i", "No such file"),
    ):
        assert main(["bench", "--compare", old, str(new)]) != 0
        err = capsys.readouterr().err
        assert told in err
        assert len(err.splitlines()) == 1


def test_a_profile_adds_the_ops_of_one_label_and_says_how_near_the_ceiling_they_are(capsys):
    ceiling = Ceiling(read_bytes=10e9, flop=100e9, cycles=2e9)
    costs = [
        OpCost("matmul", sync=True, n_call=2, cycles=6000, n_bytes=10_000, n_flop=20_000),
        OpCost("gate", sync=True, n_call=2, cycles=1000, n_bytes=0, n_flop=0),
        OpCost("matmul", sync=True, n_call=2, cycles=2000, n_bytes=10_000, n_flop=20_000),
        OpCost("attend", sync=True, n_call=2, cycles=1000, n_bytes=100, n_flop=50_000),
    ]
    rows = profile.rows(costs, n_tok=2, ceiling=ceiling)
    # Two tokens: 8000 cycles are 4 us, in which 20 KB are 5 GB/s, half of what can be read.
    assert rows[0] == {
        "op": "matmul", "calls": 2, "share": 0.8, "us": 2.0, "bytes": 10_000, "gb_s": 5.0,
        "gflop_s": 10.0, "roof": 0.5,
    }  # fmt: skip
    assert {row["op"]: row["roof"] for row in rows} == {"matmul": 0.5, "gate": 0, "attend": 1}
    found = {"ceiling_gb_s": 10.0, "ceiling_gflop_s": 100.0, "ops": rows}
    profile.write_table("tg2", found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "tg2, a token: 2.5 us in kernels; ceilings: 10.0 GB/s, 100.0 GFLOP/s"
    assert lines[3].split() == [
        "matmul",
        "2",
        "80.0",
        "%",
        "2.0",
        "0.010",
        "5.00",
        "10.0",
        "50",
        "%",
    ]
    assert len({len(line) for line in lines[2:4]}) == 1


def test_ops_that_run_together_share_their_time_by_the_work_of_each():
    ceiling = Ceiling(read_bytes=1e9, flop=1e9, cycles=1e9)
    costs = [
        OpCost("a", sync=False, n_call=1, cycles=100, n_bytes=100, n_flop=0),
        OpCost("b", sync=True, n_call=1, cycles=700, n_bytes=0, n_flop=300),
        OpCost("c", sync=True, n_call=1, cycles=50, n_bytes=0, n_flop=0),
    ]
    rows = {row["op"]: row for row in profile.rows(costs, n_tok=1, ceiling=ceiling)}
    assert [rows[name]["us"] for name in "abc"] == [0.2, 0.6, 0.05]
    assert [rows[name]["roof"] for name in "abc"] == [0.5, 0.5, 0]


def test_bench_profiles_prefill_and_decode(tmp_path, capsys):
    words = ["bench", "-m", str(tiny_file(tmp_path)), "-p", "80", "-n", "3", "-d", "70"]
    begin = time.perf_counter()
    assert main([*words, "-r", "1", "-t", "2", "--profile", "--json"]) == 0
    spent = 1e6 * (time.perf_counter() - begin)
    prefill, decode = map(json.loads, capsys.readouterr().out.splitlines())
    for row, n_tok in ((prefill, 80), (decode, 3)):
        found = row["profile"]
        assert found["ceiling_gb_s"] > 0.1
        assert found["ceiling_gflop_s"] > 0.1
        assert sum(op["share"] for op in found["ops"]) == pytest.approx(1, abs=0.01)
        # Microseconds a token: all of them are a part of what the command took.
        assert 0 < n_tok * sum(op["us"] for op in found["ops"]) < spent
        for op in found["ops"]:
            if op["us"] > 1:  # the others have lost too much in rounding
                assert op["gb_s"] == pytest.approx(op["bytes"] / op["us"] / 1e3, rel=0.02, abs=0.01)
    ops = {op["op"]: op for op in decode["profile"]["ops"]}
    assert ops["attend"]["calls"] == 2  # layers
    spec = TinySpec()
    per_key = 2 * 2 * spec.n_head_kv * spec.head_dim * 2  # K and V, float16, layers
    assert ops["attend"]["bytes"] == 72 * per_key  # 71, 72 and 73 positions
    with GGUFFile(tmp_path / "tiny.gguf") as file:
        weights = file.tensors["blk.0.ffn_up.weight"].n_bytes
    assert ops["matmul F32 ffn_up"]["bytes"] == 2 * weights
    names = {op["op"] for op in prefill["profile"]["ops"]}
    assert names == {*ops} - {"attend_merge"}


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


def test_a_context_too_short_to_decode_after_is_refused_before_it_is_read(engine, tmp_path, capsys):
    (tmp_path / "text").write_text("x" * 90)
    command = ["perplexity", "-f", str(tmp_path / "text"), "-d", "40", "-n", "8", "-c"]
    assert main([*command, "47"]) == 2
    assert capsys.readouterr().err == "tamis: error: --ctx is 47, this needs 48: raise it\n"
    assert engine.sessions[-1].tokens == []
    assert main([*command, "48"]) == 0


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


@pytest.mark.model
def test_tokenize_shows_ids_and_pieces_and_parses_special_tokens_on_demand(model_path, capsys):
    model_path("smollm2")
    flags = ["tokenize", "-m", "smollm2", "<|im_end|> hi"]
    assert main([*flags, "--special", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0] == {"id": 2, "piece": "<|im_end|>"}
    assert main([*flags, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert len(plain) > len(rows)
    assert "".join(row["piece"] for row in plain) == "<|im_end|> hi"
    assert main(flags) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split() == [str(plain[0]["id"]), repr(plain[0]["piece"])]


def test_pull_reports_as_json(monkeypatch, tmp_path, capsys):
    (tmp_path / "model").write_bytes(b"1234")
    monkeypatch.setattr("tamis.cli.commands.pull.pull", lambda name, progress: tmp_path / name)
    assert main(["pull", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": f"{tmp_path}/model", "bytes": 4}
    assert main(["pull", "model"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/model\n"


def test_warmup_reports_as_json(engine, capsys):
    assert main(["warmup", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "fake.gguf"


# with smollm2, in a process of its own


@pytest.mark.model
def test_a_prompt_longer_than_the_context_is_one_line_with_both_numbers(model_path, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 100)
    path = str(model_path("smollm2"))
    done = spawn("run", "--raw", "-m", path, "-c", "64", "-f", str(tmp_path / "long.txt"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == (
        b"tamis: error: the prompt is 101 tokens, --ctx is 64: raise it to more than 101, "
        b"or leave it out\n"
    )


@pytest.mark.model
def test_a_reader_that_leaves_while_an_answer_is_written_ends_it_quietly(model_path):
    flags = ["-m", str(model_path("smollm2")), "--temp", "0", "-n", "100", "-p", "Tell a story."]
    with subprocess.Popen(
        [sys.executable, "-m", "tamis", "run", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


@pytest.mark.model
def test_ctrl_c_in_a_pipe_is_130_and_one_line(model_path):
    flags = ["-m", str(model_path("smollm2")), "--temp", "0", "-p", "Tell a long story."]
    with subprocess.Popen(
        [sys.executable, "-m", "tamis", "run", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"tamis: interrupted\n"
        assert process.wait(60) == 130


@pytest.mark.model
@pytest.mark.parametrize("stage", ["opening", "compiling", "reading"])
def test_ctrl_c_in_a_terminal_ends_each_stage_with_130(model_path, tmp_path, stage):
    # 1000 tokens take seconds on any machine, so that Ctrl-C comes before the answer.
    (tmp_path / "long.txt").write_text("word " * 1000)
    flags = ["-m", str(model_path("smollm2")), "-f", str(tmp_path / "long.txt")]
    cache = {"XDG_CACHE_HOME": str(tmp_path)} if stage == "compiling" else {}
    screen = Screen("run", *flags, home=tmp_path, **cache)
    screen.wait_for(lambda _: f"\x1b[K{stage} ".encode() in screen.output)
    screen.child.sendintr()
    assert screen.end() == 130
    assert screen.lines()[-1] == "tamis: interrupted"
    assert b"Traceback" not in screen.output


def test_methods_are_listed_with_their_defaults(capsys):
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    # The budget counts sinks and recent tokens, the paper's k does not.
    topk = (
        "topk:budget=580,sink=4,recent=64,rows=group\n    in the paper: budget is k\n    --attn: "
    )
    assert topk in text
    assert text.splitlines()[-2] == "FILE.py:NAME"
    assert text.endswith("in NumPy, or a class. The file is run.\n")
    assert main(["methods", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["window"]["parameters"]["recent"] == 1024
    assert listed["window"]["roles"] == ["decode", "prefill"]
    assert listed["quest"]["roles"] == ["decode"]
    assert listed["topk"]["parameters"]["k"] == 512
    assert listed["topk"]["names"] == {"budget": "k"}
    assert all(entry["summary"].endswith(".") for entry in listed.values())
    promises = {
        name: listed[name]["promise"] for name in ("dense", "tail", "topk", "lfps", "delta")
    }
    assert promises == {
        "dense": "exact", "tail": "epsilon-delta", "topk": "bracket", "lfps": "none", "delta": "",
    }  # fmt: skip
    assert main(["methods", "auto"]) == 0
    assert "Promised of decode steps: estimate, an estimate of the mass" in capsys.readouterr().out


def test_each_parameter_of_each_method_is_explained(capsys):
    assert main(["methods", "--json"]) == 0
    for entry in json.loads(capsys.readouterr().out):
        assert main(["methods", entry["name"], "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["explained"]
        assert found.keys() == entry["defaults"].keys()
        assert all(found.values()), (entry["name"], found)
    assert main(["methods", "tactic"]) == 0
    assert "  P=0.9              share of a head's attention to reach" in capsys.readouterr().out
    assert main(["methods", "tactik"]) == 2
    assert "did you mean tactic" in capsys.readouterr().err


INTERRUPTED_IN_A_FINALIZER = """
import argparse, signal, sys, time, weakref
from tamis import cli

class Thing: ...

def run(arguments):
    thing = Thing()
    weakref.finalize(thing, signal.raise_signal, signal.SIGINT)
    del thing  # Python drops what is raised there
    time.sleep(30)
    return 0

def parser(words):
    found = argparse.ArgumentParser()
    found.set_defaults(run=run)
    return found

cli._parser = parser
sys.exit(cli.main())
"""


def test_ctrl_c_in_a_finalizer_is_not_lost():
    line = [sys.executable, "-c", INTERRUPTED_IN_A_FINALIZER]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (130, "tamis: interrupted\n")


def test_a_model_with_a_short_name_is_fetched_for_somebody_at_a_terminal(monkeypatch, tmp_path):
    pulled = []
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    monkeypatch.setattr(models, "pull", lambda name, progress: pulled.append(name) or tmp_path)
    for at_terminal in (False, True):
        terminal = SimpleNamespace(isatty=lambda on=at_terminal: on, write=str, flush=str)
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        if at_terminal:
            common.model_file("qwen2.5-coder-0.5b", common.Progress())
        else:
            with pytest.raises(models.ModelError, match="run tamis pull"):
                common.model_file("qwen2.5-coder-0.5b", common.Progress())
        with pytest.raises(models.ModelError, match="did you mean"):
            common.model_file("qwen2.5-coder-0.5", common.Progress())
    assert pulled == ["qwen2.5-coder-0.5b"]


@pytest.mark.parametrize(("argv", "ended"), [(None, [3]), (["serve"], [])])
def test_a_server_ends_without_freeing_what_it_holds(monkeypatch, argv, ended):
    """On a busy machine that took longer than all else between SIGTERM and its end."""
    codes = []
    monkeypatch.setattr(serve, "run", lambda arguments: 3)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "argv", ["tamis", "serve"])
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # set no handlers
    for name in ("_open_streams", "_let_all_text_pass"):
        monkeypatch.setattr(tamis.cli, name, lambda: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces it
    assert main(argv) == 3
    assert codes == ended
