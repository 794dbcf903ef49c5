"""What is known of a peer's suite after its run, however that ended."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.formats.gguf import GGUFFile
from tamis.model.heads import load_heads
from tamis.tools import peer_models, peer_plugin, peer_server, peer_suites
from tamis.tools.peer_suites import Outcome, collected, finished, outcomes

TESTS = ["test_passes", "test_fails", "test_skips", "test_fetches", "test_hangs", "test_waits"]


@pytest.fixture
def events(tmp_path, monkeypatch):
    """The plugin writes where the runner reads."""
    path = tmp_path / "test_a.py.jsonl"
    monkeypatch.setenv(peer_plugin.EVENTS, str(path))
    return path


def ended(name, when, outcome, longrepr=None):
    """What pytest reports of a part of a test."""
    peer_plugin.pytest_runtest_logreport(
        SimpleNamespace(
            nodeid=f"test_a.py::{name}",
            when=when,
            outcome=outcome,
            passed=outcome == "passed",
            longrepr=longrepr,
        )
    )


def run(*_arguments):
    """A run that is cut off in its fifth test."""
    for name, outcome, longrepr in (
        ("test_passes", "passed", None),
        ("test_fails", "failed", "def test_fails():\n>   assert 1 == 2\nE   assert 1 == 2\n"),
        ("test_skips", "skipped", ("file", 3, "Skipped: no GPU")),
        ("test_fetches", "failed", "E   huggingface_hub.errors.LocalEntryNotFoundError: no"),
    ):
        peer_plugin.pytest_runtest_logstart(f"test_a.py::{name}")
        ended(name, "setup", "passed")
        ended(name, "call", outcome, longrepr)
        ended(name, "teardown", "passed")
    peer_plugin.pytest_runtest_logstart("test_a.py::test_hangs")
    raise subprocess.TimeoutExpired("pytest", peer_suites.FILE_SECONDS)


@pytest.mark.usefixtures("events")
def test_what_ended_before_the_time_was_over_keeps_its_state(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_suites, "_pytest", run)
    found = {each.name: each for each in outcomes(tmp_path, "test_a.py", TESTS)}
    over = f"the file's {peer_suites.FILE_SECONDS} s were over"
    assert [found[name][2:] for name in TESTS] == [
        ("passed", ""),
        ("failed", "assert 1 == 2"),
        ("left out", "Skipped: no GPU"),
        ("left out", peer_suites.OUT_OF_REACH),
        ("failed", f"has begun and not ended: {over}"),
        ("failed", f"not begun: {over}"),
    ]


@pytest.mark.usefixtures("events")
def test_a_fault_after_a_test_fails_it(tmp_path, monkeypatch):
    def one(*_arguments):
        peer_plugin.pytest_runtest_logstart("test_a.py::test_x")
        ended("test_x", "call", "passed")
        ended("test_x", "teardown", "failed", "E   OSError: left open")
        return SimpleNamespace(stdout="1 passed, 1 error", stderr="")

    monkeypatch.setattr(peer_suites, "_pytest", one)
    assert outcomes(tmp_path, "test_a.py", ["test_x"]) == [
        Outcome("test_a.py", "test_x", "failed", "OSError: left open")
    ]


def test_a_run_that_could_not_begin_says_why(tmp_path, monkeypatch):
    done = SimpleNamespace(stdout="", stderr="INTERNALERROR\nno module named requests\n")
    monkeypatch.setattr(peer_suites, "_pytest", lambda *_arguments: done)
    (found,) = outcomes(tmp_path, "test_a.py", ["test_x"])
    assert found.why == "not begun: pytest ended with no module named requests"


def test_a_file_that_cannot_be_read_is_one_of_the_table(tmp_path, monkeypatch):
    """Without scipy the tests of a whole file were missing in the table."""

    def collect(_suite, _arguments, events):
        monkeypatch.setenv(peer_plugin.EVENTS, str(events))
        why = "E   ModuleNotFoundError: No module named 'scipy'"
        for failed, nodeid in ((True, "test_b.py"), (False, "test_a.py")):
            peer_plugin.pytest_collectreport(
                SimpleNamespace(failed=failed, passed=not failed, nodeid=nodeid, longrepr=why)
            )
        return SimpleNamespace(stdout="test_a.py::test_x\n", stderr="")

    monkeypatch.setattr(peer_suites, "_pytest", collect)
    names, bad = collected(tmp_path, ["test_a.py", "test_b.py"])
    assert names == {"test_a.py": ["test_x"]}
    why = "cannot be read: ModuleNotFoundError: No module named 'scipy'"
    assert bad == [Outcome("test_b.py", "all", "failed", why)]
    assert why in peer_suites.report_of(bad)


def test_the_stand_in_that_ranks_has_a_head_and_the_words_of_the_suite(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_models, "FOLDER", tmp_path / "peers")
    path = peer_server.stand_in("ggml-org/models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf")
    assert path == str(peer_models.ranker())  # written once
    with GGUFFile(path) as file:
        heads = load_heads(file, peer_models.N_EMBD, is_encoder=True)
        assert heads.out is not None
        assert heads.out.w.shape == (1, peer_models.N_EMBD)


def test_the_adapter_has_a_pair_of_matrices_for_each_projection_of_its_model(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_models, "FOLDER", tmp_path / "peers")
    base = write_tiny_model(tmp_path / "m.gguf", TinySpec())
    with GGUFFile(base) as file, GGUFFile(peer_models.adapter(base)) as adapter:
        names = [name for name in file.tensors if name.endswith("attn_q.weight")]
        assert names
        for name in names:
            n_in, n_out = file.tensors[name].shape
            assert adapter.tensors[f"{name}.lora_a"].shape == (n_in, peer_models.RANK)
            assert adapter.tensors[f"{name}.lora_b"].shape == (peer_models.RANK, n_out)


def test_any_site_is_let_in_only_where_a_key_is_asked_for():
    asked = peer_server.translated(["--api-key", "k"])
    assert asked[asked.index("--cors-origins") + 1] == "*"
    assert "--cors-origins" not in peer_server.translated(["--port", "1"])
    own = peer_server.translated(["--api-key", "k", "--cors-origins", "localhost"])
    assert own.count("--cors-origins") == 1


def test_lines_of_the_suite_are_adjusted_where_the_stand_ins_differ(tmp_path):
    (tmp_path / "from/unit").mkdir(parents=True)
    lines = {
        'most_relevant["index"] == 2': 'most_relevant["index"] in range(4)',
        "is_sleeping(server) == False": "is_sleeping(server) in (True, False)",
        'res.body["is_sleeping"] == False': 'res.body["is_sleeping"] == False',
        'res.body["index"] == 2': 'res.body["index"] == 2',
    }
    (tmp_path / "from/unit/test_a.py").write_text("\n".join(lines))
    peer_suites.adjusted(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to/unit/test_a.py").read_text().split("\n") == list(lines.values())


def test_nothing_that_a_suite_started_outlives_it(tmp_path):
    """A server that a test left behind holds the pipes: only its end ends the wait for them."""
    code = (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(left.pid, flush=True)\n"
        "{}\n"
    )
    for last in ("", "left.wait()"):
        with pytest.raises(subprocess.TimeoutExpired) as error:
            finished([sys.executable, "-c", code.format(last)], tmp_path, os.environ, 1)
        left = int(error.value.output)
        for _ in range(100):
            if not is_running(left):
                break
            time.sleep(0.02)
        assert not is_running(left)
    done = finished([sys.executable, "-c", "print('a')"], tmp_path, os.environ, 30)
    assert done == ("a\n", "")


def is_running(pid):
    """Whether a process runs; one that has ended and not been waited for does not."""
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
