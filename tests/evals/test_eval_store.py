"""Results on disk: whole lines only, none lost, none twice, whatever kills the process."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.evals.store import FILE, Store, StoreError, key_of, read_results


def test_results_are_there_for_the_next_process(tmp_path):
    store = Store(tmp_path / "new" / "folder")
    store.add("a", {"score": 1.0, "answer": "line\nbreak é \u2028"})
    store.close()
    store = Store(tmp_path / "new" / "folder")
    assert "a" in store
    assert "b" not in store
    assert store.rows == [{"key": "a", "score": 1.0, "answer": "line\nbreak é \u2028"}]
    store.add("b", {"score": 0.0})
    store.close()
    assert [row["key"] for row in read_results(tmp_path / "new" / "folder")] == ["a", "b"]


@pytest.mark.parametrize("torn", [b'{"key": "b", "sc', b"\0\0\0\0", b"{", b'{"key": "b"}'])
def test_a_torn_last_line_is_cut_off(tmp_path, torn):
    """A line counts when its line break is there: what looks whole may be a shorter number."""
    whole = b'{"key": "a", "score": 1}\n'
    (tmp_path / FILE).write_bytes(whole + torn)
    assert [row["key"] for row in read_results(tmp_path)] == ["a"]
    store = Store(tmp_path)
    store.add("c", {})
    store.close()
    assert (tmp_path / FILE).read_bytes() == whole + b'{"key": "c"}\n'


@pytest.mark.parametrize(
    "data", [b"{", b"a text", b'{"a": 1}', b"one line\nand half", b'{"key": "a"}\nhalf']
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path, data):
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(StoreError, match="no result"):
        Store(tmp_path)
    assert (tmp_path / FILE).read_bytes() == data


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"score": 1}', b'"key"', b'{"key": [1]}'])
def test_a_damaged_line_inside_is_an_error_and_stays(tmp_path, line):
    data = b'{"key": "a"}\n' + line + b'\n{"key": "b"}\n'
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(StoreError, match="line 2 is no result"):
        Store(tmp_path)
    assert (tmp_path / FILE).read_bytes() == data


def test_a_result_that_is_there_twice_is_an_error(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"key": "a"}\n{"key": "a"}\n')
    with pytest.raises(StoreError, match="line 2 has a result that was there before"):
        read_results(tmp_path)


def test_two_processes_cannot_write_to_one_folder(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="another process"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.add("a", {})
    write = os.write

    def fail(file: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return write(file, bytes(data[:5]))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space"):
        store.add("b", {"x": 1})
    monkeypatch.undo()
    assert "b" not in store
    store.add("c", {})
    store.close()
    assert [row["key"] for row in read_results(tmp_path)] == ["a", "c"]


@pytest.mark.parametrize(("at", "there"), [("write", False), ("fsync", True)])
def test_an_interrupt_leaves_a_whole_line_or_none(tmp_path, monkeypatch, at, there):
    store = Store(tmp_path)
    store.add("a", {})
    write = os.write

    def interrupted(file: int, data: bytes | None = None) -> int:
        if data is not None:
            write(file, bytes(data[:5]))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.add("b", {"x": 1})
    monkeypatch.undo()
    assert ("b" in store) == there
    store.add("c", {})
    store.close()
    assert [row["key"] for row in read_results(tmp_path)] == ["a", *(["b"] * there), "c"]


def test_a_key_depends_on_every_setting_and_not_on_their_order():
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
    assert key_of({"a": 1}) != key_of({"b": 1})


# The whole command, killed at random moments

COMMAND = [
    *("eval", "--task", "niah_single_1,passkey,text", "--samples", "4", "--length", "496"),
    *("--predict", "16", "--raw", "--attn", "window:recent=64", "--attn", "topk:k=32", "--text"),
]
N_RESULT = 3 * 4 * 3


def start(model: Path, out: Path, text: Path, *more: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "tamis", *COMMAND, str(text), "-m", str(model), "-o", str(out)]
    return subprocess.Popen([*line, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def results(out: Path) -> Sequence[dict]:
    return read_results(out) if (out / FILE).exists() else []


def test_a_run_that_is_killed_ten_times_loses_nothing_and_doubles_nothing(tmp_path):
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    text = tmp_path / "text.txt"
    text.write_text("the cat and the other thing in the water. " * 60)
    out, rng, known = tmp_path / "out", random.Random(5), []
    for _ in range(10):
        process = start(model, out, text)
        # After a result or a few: sometimes between two, sometimes while one is made or written.
        wanted = min(len(known) + rng.randrange(4), N_RESULT - 1)
        while len(results(out)) < wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.communicate()
        found = results(out)
        assert list(found[: len(known)]) == list(known)
        known = found
    process = start(model, out, text)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found = results(out)
    assert list(found[: len(known)]) == list(known)
    cells = {(row["task"], row["sample"], row["label"]) for row in found}
    assert len(found) == len(cells) == N_RESULT
    # And the answers are those of a run that nobody killed.
    process = start(model, tmp_path / "calm", text)
    process.communicate(timeout=240)
    assert answers(found) == answers(results(tmp_path / "calm"))


def answers(rows: Sequence[dict]) -> dict[str, list]:
    return {row["key"]: [row.get("answer"), row.get("score"), row.get("kl")] for row in rows}


def test_ctrl_c_keeps_what_is_done(tmp_path):
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    text = tmp_path / "text.txt"
    text.write_text("the cat and the other thing in the water. " * 60)
    process = start(model, tmp_path / "out", text, "--samples", "100")  # seconds of work
    while len(results(tmp_path / "out")) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert 2 <= len(results(tmp_path / "out")) < 25 * N_RESULT
