"""The server's page in headless Chromium, as a person uses it."""

import base64
import contextlib
import io
import json
import re
import shutil
import socket
import threading
import time

import numpy as np
import pytest
import uvicorn
from PIL import Image
from serving import local_server
from small_pdf import pdf
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.guard import Access
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
    settings = Settings(access=Access(key="key"))

    def prepare(worker):
        step = worker._batch.step_best

        def slowly(tokens, n):
            time.sleep(0.1 if slow.is_set() else 0)
            return step(tokens, n)

        worker._batch.step_best = slowly

    server = local_server(engine, sessions, settings, prepare=prepare)
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


@contextlib.contextmanager
def browsing(expected=(), **view):
    """A page of a browser; at its end its console has had no errors but the expected ones."""
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(**view).new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on(
            "console",
            lambda said: problems.append(said.text) if said.type in ("error", "warning") else None,
        )
        yield page
        browser.close()
    assert [text for text in problems if not any(part in text for part in expected)] == []


def test_a_person_gives_the_key_chats_stops_and_begins_anew(url, slow):
    with browsing(["status of 400"]) as page:  # Chromium tells what is refused
        asked = []
        page.on("request", lambda request: asked.append(request.url))
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
        error = sync_api.expect(page.locator(".error"))
        error.to_contain_text("512")  # the server's own words: it does not fit the context
        assert page.input_value("#text").startswith("the hand over there")  # to be shortened
        page.fill("#text", "")
        page.click("#clear")
        assert page.locator(".message").count() == 0
        slow.set()
        page.fill("#text", "there")
        page.click("#send")
        speed = sync_api.expect(page.locator("#speed"))
        speed.to_have_text(re.compile(r"^\d+ tokens, \d+\.\d a second$"), timeout=60_000)
        page.click("#stop")
        state.to_have_text("stopped")
        assert page.locator(".message").count() == 2
        slow.clear()
        assert all(request.startswith((url, "data:")) for request in asked)


def test_another_conversation_goes_on_while_one_answers_and_a_reload_loses_nothing(url, slow):
    with browsing() as page:
        page.goto(url)
        page.fill("#key", "key")
        page.press("#key", "Enter")
        sync_api.expect(page.locator("#model")).to_have_attribute("title", re.compile("tiny"))
        slow.set()
        page.fill("#text", "the first")
        page.press("#text", "Enter")
        state, assistant = page.locator("#state"), page.locator(".assistant")
        sync_api.expect(assistant).not_to_be_empty(timeout=60_000)
        page.click("#clear")
        sync_api.expect(page.locator("#send")).to_be_visible()  # this one awaits nothing
        assert page.locator(".message").count() == 0
        sync_api.expect(page.locator("#list .answers")).to_have_text("the first")
        page.click("#list .answers")
        before = assistant.inner_text()
        page.wait_for_function(
            "old => document.querySelector('.assistant').innerText > old", arg=before
        )
        page.reload()
        slow.clear()
        assert page.locator(".user").inner_text() == "the first"
        assert assistant.inner_text().startswith(before)
        assert page.input_value("#key") == "key"
        page.click("text=Again")
        sync_api.expect(state).to_have_text(re.compile(r"\d+ \+ \d+ tokens"), timeout=60_000)
        assert assistant.count() == 1


def test_an_answer_that_breaks_off_is_kept_and_the_error_shown(url):
    with browsing(["ERR_CONNECTION_REFUSED", "status of 500"]) as page:
        page.goto(url)
        page.fill("#key", "key")
        begun = 'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=begun),
        )
        page.fill("#text", "a question")
        page.press("#text", "Enter")
        error = sync_api.expect(page.locator(".error"))
        error.to_contain_text("the server closed the connection")
        assert page.locator(".message").all_inner_texts()[:2] == ["a question", "Half"]
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
        page.fill("#text", "another one")
        page.press("#text", "Enter")
        error.to_have_text("no connection to the server: is it still running?")
        assert page.input_value("#text") == "another one"
        assert page.locator(".user").all_inner_texts() == ["a question"]
        page.unroute("**/v1/chat/completions")
        failed = {"error": {"message": "the model's process has ended"}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, json=failed))
        page.press("#text", "Enter")
        error.to_have_text("the model's process has ended")
        page.reload()
        assert page.locator(".message").all_inner_texts() == ["a question", "Half"]


MARKDOWN = """# Fruit\n\n1. **Apples**\n2. `pears`\n\n```python\nprint("<b>")\n```\n
| a | b |\n|---|---|\n| 1 | <img src=x onerror=alert(1)> |\n"""


def replied(route, text, thought="", **usage):
    """Answer a request in the server's place; usage: what it has beyond tokens."""
    deltas = [{"reasoning_content": thought}] * bool(thought)
    deltas += [{"content": text[i : i + 7]} for i in range(0, len(text), 7)]
    usage |= {"prompt_tokens": 30, "completion_tokens": 12}
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    chunks += [{"choices": [], "usage": usage, "timings": {"predicted_per_second": 41.5}}]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    lines.insert(0, ": still here\n\n")  # a comment, while a prompt is read
    route.fulfill(status=200, content_type="text/event-stream", body="".join(lines))


def test_answers_are_markdown_thoughts_are_folded_and_talks_are_kept(url, tmp_path):
    with browsing(viewport={"width": 1100, "height": 750}, color_scheme="dark") as page:
        bodies = []

        def chat(route):
            bodies.append(route.request.post_data_json)
            replied(route, MARKDOWN, "Let me see.", attention={"mass": 0.97, "mass_p5": 0.912})

        page.route("**/v1/chat/completions", chat)
        name = "A-Model-Of-A-Long-Name-0.5B-Instruct-Q4_K_M"
        models = {"data": [{"id": name, "meta": {"n_ctx": 512}}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        page.goto(url)
        page.fill("#key", "key")
        page.press("#key", "Enter")
        page.click("#settings")
        page.fill("#system", "Be brief.")
        page.fill("#temperature", "0.5")
        page.click("text=Done")
        page.fill("#text", "Which <b>fruit</b>?")
        page.press("#text", "Enter")
        state = sync_api.expect(page.locator("#state"))
        state.to_have_text("30 + 12 tokens, 41.5 a second")
        assert bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (bodies[0]["temperature"], bodies[0]["model"]) == (0.5, name)
        answer = page.locator(".assistant")
        assert answer.locator("ol li").all_inner_texts() == ["Apples", "pears"]
        assert answer.locator("pre code").inner_text() == 'print("<b>")'
        colours = [
            part.evaluate("e => getComputedStyle(e).color")
            for part in answer.locator("pre code, pre code span").all()
        ]
        assert len(set(colours)) == 3  # of the text, of the name that is called, of the string
        assert name in page.locator(".actions >> nth=1").inner_text()
        width = page.locator("#model").evaluate("box => box.clientWidth")
        assert width > 300  # all of the name
        assert answer.locator("td").all_inner_texts() == ["1", "<img src=x onerror=alert(1)>"]
        assert answer.locator("img").count() == 0
        thoughts = answer.locator("details")
        assert not thoughts.evaluate("box => box.open")
        assert "Let me see." in thoughts.text_content()
        assert page.locator("#used").evaluate("meter => meter.value") == 42 / 512
        assert page.locator("#mass").evaluate("meter => meter.value") == 0.97
        assert "97.0 %" in page.locator("#share").get_attribute("title")
        page.click("text=Again")
        sync_api.expect(page.locator(".assistant")).to_have_count(1)
        state.to_have_text("30 + 12 tokens, 41.5 a second")
        assert len(bodies) == 2
        assert bodies[1]["messages"] == bodies[0]["messages"]
        page.screenshot(path=tmp_path / "desktop.png")
        page.reload()
        assert page.locator(".user").inner_text() == "Which <b>fruit</b>?"
        page.click("text=Edit")
        assert page.input_value("#text") == "Which <b>fruit</b>?"
        assert page.locator(".message").count() == 0
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.press("#text", "Enter")
        state.to_have_text("30 + 12 tokens, 41.5 a second")
        page.screenshot(path=tmp_path / "phone.png")


def test_a_dropped_file_is_read_before_it_is_asked_about(url):
    with browsing(["status of 400", "status of 415"]) as page:  # a ZIP is refused
        bodies = []

        def chat(route):
            bodies.append(route.request.post_data_json)
            replied(route, "Yes.")

        page.route("**/v1/chat/completions", chat)
        page.goto(url)
        sync_api.expect(page.locator("#key")).to_be_visible()

        def drop(name, data):
            page.evaluate(
                """([name, text]) => {
                    const data = new DataTransfer();
                    const bytes = Uint8Array.from(atob(text), mark => mark.charCodeAt(0));
                    data.items.add(new File([bytes], name));
                    const drop = new DragEvent("drop", { dataTransfer: data, cancelable: true });
                    document.getElementById("chat").dispatchEvent(drop);
                }""",
                [name, base64.b64encode(data).decode()],
            )

        state = sync_api.expect(page.locator("#state"))
        page.fill("#key", "key")
        drop("a.zip", b"PK\x03\x04")
        state.to_contain_text("ZIP", timeout=60_000)
        drop("a.html", b"<p>No.</p>")
        state.to_have_text("a.html is read; ask about it", timeout=60_000)
        page.click("#clear")
        bodies.clear()
        drop("a.pdf", pdf("The text."))
        state.to_have_text("a.pdf is read; ask about it", timeout=60_000)
        page.fill("#text", "What?")
        page.press("#text", "Enter")
        sync_api.expect(page.locator(".assistant")).to_contain_text("Yes.")
        assert bodies[0]["max_tokens"] == 1
        assert bodies[0]["messages"][0]["content"] == "a.pdf:\n\nThe text."
        asked = bodies[1]["messages"]
        assert [m["content"] for m in asked] == ["a.pdf:\n\nThe text.\n\nWhat?"]


def test_pictures_are_added_dropped_left_out_and_sent(url, tmp_path):
    with browsing() as page:
        bodies = []

        def chat(route):
            bodies.append(route.request.post_data_json)
            replied(route, "A square.")

        entry = {"id": "m", "meta": {"n_ctx": 512}}
        entry["architecture"] = {"input_modalities": ["text", "image"]}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [entry]}))
        page.route("**/v1/chat/completions", chat)
        page.goto(url)
        page.fill("#key", "key")
        page.press("#key", "Enter")
        sync_api.expect(page.locator("#picture")).to_be_visible()
        files = []
        for i, color in enumerate(("red", "teal", "gold")):
            file = io.BytesIO()
            Image.new("RGB", (120, 90), color).save(file, "PNG")
            files.append({"name": f"{i}.png", "mimeType": "image/png", "buffer": file.getvalue()})
        page.set_input_files("#files", files[:2])
        sync_api.expect(page.locator("#shown img")).to_have_count(2)
        page.evaluate(
            """text => {
                const data = new DataTransfer();
                const bytes = Uint8Array.from(atob(text), mark => mark.charCodeAt(0));
                data.items.add(new File([bytes], "2.png", { type: "image/png" }));
                const drop = new DragEvent("drop", { dataTransfer: data, cancelable: true });
                document.getElementById("chat").dispatchEvent(drop);
            }""",
            base64.b64encode(files[2]["buffer"]).decode(),
        )
        sync_api.expect(page.locator("#shown img")).to_have_count(3)
        page.locator("#shown button").nth(1).click()
        sync_api.expect(page.locator("#shown img")).to_have_count(2)
        page.fill("#text", "What is this?")
        page.screenshot(path=tmp_path / "before.png")
        page.press("#text", "Enter")
        sync_api.expect(page.locator(".assistant")).to_contain_text("A square.")
        sync_api.expect(page.locator(".user img")).to_have_count(2)
        assert page.locator("#shown img").count() == 0
        page.screenshot(path=tmp_path / "picture.png")
        *shown, text = bodies[0]["messages"][0]["content"]
        assert text == {"type": "text", "text": "What is this?"}
        sent = [base64.b64decode(part["image_url"]["url"].split(",")[1]) for part in shown]
        assert sent == [files[0]["buffer"], files[2]["buffer"]]
        page.reload()
        sync_api.expect(page.locator(".user img")).to_have_count(2)
        page.click("text=Edit")
        sync_api.expect(page.locator("#shown img")).to_have_count(2)
        big = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (150, 2400, 3), np.uint8)
        Image.fromarray(noise).save(big, "PNG", compress_level=0)
        file = {"name": "big.png", "mimeType": "image/png", "buffer": big.getvalue()}
        page.set_input_files("#files", [file])
        page.wait_for_function("document.querySelectorAll('#shown img')[2]?.naturalWidth === 2048")
