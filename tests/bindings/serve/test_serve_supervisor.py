"""The model's process, a real one: crashes, files that are cut off, and requests then."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import threading
import time

import pytest
from serve_process import ServeProcess
from tiny_models import TinySpec, write_tiny_model

TEXT = "/v1/completions"


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


# --- crashes of real processes --------------------------------------------------------------------


def asked(i, **how):
    return {"prompt": list(range(5 + i, 60 + i)), "max_tokens": 150, "temperature": 0} | how


def stream(server, body):
    """The text of a stream, and the error that it ended with."""
    text, error = "", None
    with server.open(TEXT, body | {"stream": True}) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                error = event.get("error", error)
                text += "".join(choice["text"] for choice in event.get("choices", []))
    return text, error


def test_a_crash_under_load_loses_no_other_request(path, tmp_path):
    """SIGSEGV of the model's process: replies that are whole begin anew, streams end cleanly."""
    with ServeProcess(path, tmp_path, "-c", "512", "--parallel", "2", "--metrics") as server:
        front = server.process.pid
        alone = [server.post(asked(i), TEXT)[1]["choices"][0]["text"] for i in range(6)]
        grammar = {"grammar": "root ::= [a-z ]*", "max_tokens": 60}
        with_grammar = server.post(asked(0, **grammar), TEXT)[1]["choices"][0]["text"]
        found, streams, seconds = {}, {}, {}

        def ask(i):
            found[i] = server.post(asked(i % 6), TEXT)

        def ask_grammar():
            found["grammar"] = server.post(asked(0, **grammar), TEXT)

        def ask_stream(i):
            streams[i] = stream(server, asked(i))

        threads = [threading.Thread(target=ask, args=[i]) for i in range(12)]
        threads += [threading.Thread(target=ask_stream, args=[i]) for i in range(6)]
        threads.append(threading.Thread(target=ask_grammar))
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        begin = time.monotonic()
        os.kill(server.model_pid(), signal.SIGSEGV)
        until(lambda: server.get("/ready")[0] == 503)
        assert server.get("/health")[0] == 200
        until(lambda: server.get("/ready")[0] == 200, 60)
        seconds["restart"] = time.monotonic() - begin
        for thread in threads:
            thread.join(120)
        assert {status for status, _ in found.values()} == {200}
        for i in range(12):
            assert found[i][1]["choices"][0]["text"] == alone[i % 6]
        assert found["grammar"][1]["choices"][0]["text"] == with_grammar
        for i, (text, error) in streams.items():
            assert alone[i].startswith(text)
            assert text == alone[i] if error is None else error["code"] == "process_ended"
        assert server.process.pid == front
        assert "SIGSEGV" in server.log.read_text()
        assert "Traceback" not in server.log.read_text()


def test_a_model_file_that_is_cut_off_ends_no_server(path, tmp_path):
    """Noticed and said between steps; within one it is SIGBUS, a crash of the model's process."""
    mine = tmp_path / "mine.gguf"
    shutil.copy(path, mine)
    with ServeProcess(mine, tmp_path, "-c", "512", "--parallel", "1") as server:
        text, error = stream(server, asked(0, max_tokens=2))
        assert text
        assert error is None
        os.truncate(mine, 1 << 16)
        status, reply = server.post(asked(1, max_tokens=2), TEXT)
        assert (status, reply["error"]["code"]) == (503, "not_loaded")
        assert "changed" in reply["error"]["message"]
        assert str(tmp_path) not in reply["error"]["message"]
        assert "was cut off" in server.log.read_text()
        status, reply = server.post(asked(1, max_tokens=2), TEXT)
        assert (status, reply["error"]["code"]) == (503, "not_loaded")
        assert "incomplete" in reply["error"]["message"]
        assert server.get("/health")[0] == 200
        assert server.get("/ready")[0] == 503
        shutil.copy(path, mine)  # whole again: the next request loads it
        assert stream(server, asked(0, max_tokens=2)) == (text, None)
        os.kill(server.model_pid(), signal.SIGBUS)
        until(lambda: "SIGBUS" in server.log.read_text())
        assert stream(server, asked(0, max_tokens=2)) == (text, None)


def said_of_a_cut(folder, whole, share):
    """What a server says whose model file is cut off after a share of a step's time.

    None where that step had ended by then.
    """
    mine = folder / "mine.gguf"
    shutil.copy(whole, mine)
    bodies = [
        {"prompt": [first + i % 90 for i in range(480)], "max_tokens": 1, "temperature": 0}
        for first in (4, 5, 6)
    ]
    body = bodies[-1]
    with ServeProcess(mine, folder, "-c", "512", "--parallel", "1") as server:
        took = []
        for other in bodies[:-1]:  # the first may wait for what a first step prepares
            begin = time.monotonic()
            assert server.post(other, TEXT)[0] == 200
            took.append(time.monotonic() - begin)
        cut = threading.Timer(share * min(took), os.truncate, (mine, 1 << 16))
        cut.start()
        status, reply = server.post(body, TEXT)
        cut.join()
        if status == 200:
            return None
        assert (status, reply["error"]["code"]) in ((503, "not_loaded"), (503, "process_ended"))
        said = server.log.read_text()
        assert "Traceback" not in said
        assert server.get("/health")[0] == 200
        shutil.copy(whole, mine)
        assert server.post(body, TEXT)[0] == 200
    return said


def test_a_model_file_cut_off_within_a_step_ends_that_request_cleanly(tmp_path):
    """Pages of the mapping that are gone are SIGBUS: that request's error, and a new process.

    As a step begins, the file is looked at: a cut before that is said, and tried again later.
    """
    whole = tmp_path / "whole.gguf"
    write_tiny_model(whole, TinySpec("llama", "F16", embd=512, layers=12))
    for share in (0.5, 0.6, 0.5, 0.7, 0.6):
        said = said_of_a_cut(tmp_path, whole, share)
        if said is not None and "SIGBUS" in said:
            return
        assert said is None or "was cut off" in said
    pytest.fail("no cut fell into a step")


def test_no_process_is_left_behind(path, tmp_path):
    """Neither by SIGTERM, which ends it in a moment, nor where the server is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with ServeProcess(path, tmp_path, "-c", "512") as server:
            pid = server.model_pid()

            def ask(server=server):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    stream(server, asked(0, max_tokens=400))

            thread = threading.Thread(target=ask)
            thread.start()
            time.sleep(0.2)
            begin = time.monotonic()
            server.process.send_signal(number)
            code = server.process.wait(10)
            assert time.monotonic() - begin < 2
            assert code == (0 if number == signal.SIGTERM else -number)
            until(lambda: not os.path.exists(f"/proc/{pid}"), 5)  # noqa: B023
            thread.join(10)


@pytest.mark.slow  # 8 s: it sleeps after one, and starts twice
def test_a_model_without_requests_sleeps_and_the_next_one_wakes_it(path, tmp_path):
    cache = "--cache-dir", str(tmp_path / "c")
    flags = "-c", "512", "--sleep-idle-seconds", "3", "--metrics", *cache
    with ServeProcess(path, tmp_path, *flags) as server:

        def sleeps():
            return json.loads(server.get("/props")[1])["is_sleeping"]

        first = server.post(asked(0, max_tokens=90, ignore_eos=True), TEXT)[1]
        assert not sleeps()
        until(sleeps)
        until(lambda: "tamis.bindings.serve.process" not in server.children())
        assert server.get("/ready")[0] == 200
        counted = server.get("/metrics")[1]
        assert b"tamis_answer_tokens_total 90" in counted, counted
        assert sleeps()
        found = {}
        threads = [
            threading.Thread(
                target=lambda i=i: found.update({i: server.post(asked(0, ignore_eos=True), TEXT)})
            )
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found[i][0] for i in range(3)] == [200] * 3
        text = first["choices"][0]["text"]
        assert all(found[i][1]["choices"][0]["text"].startswith(text) for i in range(3))
        assert not sleeps()
        # what was read before is in files
        assert found[0][1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
