"""The server's page in headless Chromium, as a person uses it."""

import re
import shutil
import socket
import threading
import time

import pytest
import uvicorn
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve.app import Server, Settings
from tamis.bindings.serve.guard import Access
from tamis.engine.engine import Engine

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no chromium: apt-get install chromium", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def slow():
    """Set: a token takes a tenth of a second, so that there is time to stop."""
    return threading.Event()


@pytest.fixture(scope="module")
def url(tmp_path_factory, slow):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    engine.tokenizer.eog = frozenset()  # no answer of random weights ends before it is stopped
    sessions = [engine.session(n_ctx=512, n_ubatch=32)]
    settings = Settings("tiny model", access=Access(key="key"))
    server = Server(engine, sessions, settings, lambda line: None)
    step = server.worker._batch.step

    def slowly(tokens):
        time.sleep(0.1 if slow.is_set() else 0)
        return step(tokens)

    server.worker._batch.step = slowly
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(server.app, log_config=None, lifespan="off")
        inner = uvicorn.Server(config)
        thread = threading.Thread(target=inner.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        inner.should_exit = True
        server.stop()
        server.close()
        thread.join()
    engine.close()


def test_a_person_gives_the_key_chats_stops_and_begins_anew(url, slow):
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked, problems = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        state = sync_api.expect(page.locator("#state"))
        state.to_contain_text("API key")
        page.fill("#key", "key")  # shown only where it is needed
        page.fill("#text", "the <b>hand</b> over")
        page.press("#text", "Enter")
        state.to_have_text(re.compile(r"\d+ \+ \d+ tokens"), timeout=60_000)
        first, second = page.locator(".message").all()
        assert first.inner_text() == "the <b>hand</b> over"  # as text, not as markup
        assert second.inner_text()
        page.fill("#text", "the hand over there " * 300)
        page.click("#send")
        state.to_contain_text("512")  # the server's own words: it does not fit the context
        page.click("#clear")
        assert page.locator(".message").count() == 0
        slow.set()
        page.fill("#text", "there")
        page.click("#send")
        page.click("#stop")
        state.to_have_text("stopped")
        assert page.locator(".message").count() == 2
        assert all(request.startswith((url, "data:")) for request in asked)
        assert not problems
        browser.close()
