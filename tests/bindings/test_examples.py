"""Each program of examples/ does what it shows, with a real model, where its packages install."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.compat import Llama
from tamis.engine.session import Session


def output(program, model, *folders):
    """What an example prints; folders: of modules that it imports."""
    done = subprocess.run(
        [sys.executable, str(program), str(model)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.model
def test_the_example_of_embedding_runs(model_path, root):
    pytest.importorskip("llguidance")
    lines = output(root / "examples" / "embed.py", model_path("smollm2")).splitlines()
    assert any(line in ("red", "green", "blue") for line in lines)
    assert "cat and dog" in lines[-1]


@pytest.mark.model
def test_the_example_of_an_own_method_runs(model_path, root):
    lines = output(root / "examples" / "own_method.py", model_path("smollm2")).splitlines()
    mass = [float(line.split()[-1]) for line in lines]
    assert mass[0] == 1
    assert all(0.3 < found < 1 for found in mass[1:])


@pytest.mark.model
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_example_of_a_pipe_runs(model_path, root, tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    for text in ("Answers come twice as fast", "Fix a crash at the end of a file"):
        subprocess.run(
            [*git, "commit", "-q", "--allow-empty", "-m", text], cwd=tmp_path, check=True
        )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [root / "examples" / "changelog.sh", model_path("smollm2")],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) > 10
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.model
def test_the_example_of_a_langchain_chain_runs(model_path, root):
    pytest.importorskip("langchain_community")
    program = root / "examples" / "langchain_chain.py"
    text = output(program, model_path("smollm2"), root / "bindings" / "tamis_llama_cpp")
    assert "Paris" in text


@pytest.fixture
def llama_index_llm(tmp_path):
    """A folder with LlamaIndex's llama.cpp class alone: it requires llama-cpp-python by name."""
    pytest.importorskip("llama_index.core")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run([*pip, "llama-index-llms-llama-cpp"], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("llama-index-llms-llama-cpp cannot be fetched")
    return tmp_path


@pytest.mark.model
def test_the_example_of_a_llama_index_query_runs(model_path, root, llama_index_llm):
    program = root / "examples" / "llamaindex_query.py"
    text = output(
        program, model_path("smollm2"), root / "bindings" / "tamis_llama_cpp", llama_index_llm
    )
    note, answer = text.split("\n", 1)
    assert note == "The spare key of the garden shed is under the blue flower pot."
    assert "flower pot" in answer


@pytest.mark.model
def test_the_example_of_an_app_chats(model_path, root, monkeypatch):
    pytest.importorskip("textual")
    monkeypatch.syspath_prepend(root / "examples")
    from chat_app import ChatApp

    llm = Llama(str(model_path("smollm2")), n_ctx=512, seed=1, verbose=False)
    app = ChatApp(llm, max_tokens=8)

    async def chat():
        async with app.run_test() as pilot:
            for n, question in ((2, "Hi!"), (4, "Why?")):
                await pilot.press(*question, "enter")
                await app.workers.wait_for_complete()
                await pilot.pause()
                assert len(app.messages) == n
            return [str(line.render()) for line in app.query("#conversation Static")]

    shown = asyncio.run(chat())
    llm.close()
    assert shown == ["> Hi!", app.messages[1]["content"], "> Why?", app.messages[3]["content"]]
    assert all(shown)


@pytest.fixture
def fastapi_app(root, tmp_path, monkeypatch):
    """The example over a small random model, which answers until it is stopped, slowly."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("MODEL", str(write_tiny_model(tmp_path / "tiny.gguf", TinySpec())))
    monkeypatch.syspath_prepend(root / "examples")
    decoded = []

    def slow(self, token_id, n):
        time.sleep(0.002)
        decoded.append(token_id)
        return decode_best(self, token_id, n)

    decode_best = Session.decode_best
    monkeypatch.setattr(Session, "decode_best", slow)
    import fastapi_app

    yield fastapi_app.app, decoded
    fastapi_app.engine.close()
    del sys.modules["fastapi_app"]


def test_the_example_of_a_web_app_ends_generation_when_the_client_goes(fastapi_app):
    import httpx
    import uvicorn

    app, decoded = fastapi_app
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/ask"
    with httpx.stream("GET", url, params={"question": "Why?"}, timeout=60) as reply:
        assert next(reply.iter_text())
    time.sleep(0.3)
    n = len(decoded)
    assert 0 < n < 1000  # of 4,096
    time.sleep(0.2)
    assert len(decoded) == n
    server.should_exit = True
    thread.join()
