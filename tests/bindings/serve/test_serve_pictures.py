"""Pictures in requests, with a tiny random encoder: every API's form, and what is refused."""

import base64
import functools
import http.server
import io
import json
import threading
import urllib.request
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.support.kit_models import write_kit_model
from tests.support.mmproj_files import write_mmproj
from tests.support.serve_process import ServeProcess

pytestmark = pytest.mark.slow
WIDTH = 256  # of the rows of the kit's models
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
USUAL = {"max_tokens": 2, "temperature": 0}


def png(seed=0, size=(56, 56), form="PNG"):
    squares = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(squares).resize(size, Image.Resampling.NEAREST).save(file, form)
    return file.getvalue()


def b64(data):
    return base64.b64encode(data).decode()


def data_url(data=None, kind="image/png"):
    return f"data:{kind};base64,{b64(png() if data is None else data)}"


def part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def said(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]} | USUAL


WORDS = {"type": "text", "text": "what"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_mmproj(folder / "mmproj-model.gguf", "gemma3", WIDTH)
    media = folder / "media"
    media.mkdir()
    (media / "a.png").write_bytes(png(5))
    (folder / "outside.png").write_bytes(png(5))
    (media / "link.png").symlink_to(folder / "outside.png")
    return write_kit_model("gemma3-dense", folder / "model.gguf"), media


@pytest.fixture(scope="module")
def host(files):
    """A server of pictures, and of a redirection to another one."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/away":
                self.send_response(302)
                self.send_header("Location", "http://localhost:1/a.png")
                self.end_headers()
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=files[1])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def server(files, host, tmp_path_factory):
    model, media = files
    folder = tmp_path_factory.mktemp("served")
    flags = ("--media-path", str(media), "--media-url", host, "--parallel", "1")
    with ServeProcess(model, folder, *flags, "--chat-template", TEMPLATE) as running:
        yield running


def test_a_picture_changes_the_answer_and_is_read_once(server):
    body = said(part(data_url(png(1))), WORDS) | {"logprobs": True, "top_logprobs": 3}
    status, first = server.post(body)
    assert status == 200, first
    details = "prompt_tokens_details"
    again = server.post(body)[1]
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    n = first["usage"]["prompt_tokens"]
    assert n > 4
    assert again["usage"][details]["cached_tokens"] == n - 1
    other = server.post(said(part(data_url(png(2))), WORDS) | {"logprobs": True})[1]
    assert other["usage"][details]["cached_tokens"] < n - 4
    assert other["choices"][0]["logprobs"] != first["choices"][0]["logprobs"]


def test_all_apis_read_the_same_picture(server):
    status, chat = server.post(said(part(data_url(png(3))), WORDS))
    assert status == 200, chat
    n, data = chat["usage"]["prompt_tokens"], b64(png(3))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    block = {"type": "image", "source": source}
    body = said(block, WORDS)
    status, found = server.post(body, "/v1/messages")
    assert status == 200, found
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n
    assert server.post(body, "/v1/messages/count_tokens")[1] == {"input_tokens": n}
    content = [{"type": "input_image", "image_url": data_url(png(3))}]
    content += [{"type": "input_text", "text": "what"}]
    asked = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    status, found = server.post(asked, "/v1/responses")
    assert status == 200, found
    assert found["usage"]["input_tokens"] == n
    message = {"role": "user", "content": "what", "images": [data]}
    asked = {"model": "m", "messages": [message], "stream": False, "options": {"num_predict": 2}}
    status, found = server.post(asked, "/api/chat")
    assert status == 200, found
    assert found["prompt_eval_count"] == n
    asked = {"model": "m", "prompt": "what", "images": [data], "stream": False}
    status, found = server.post(asked | {"options": {"num_predict": 2}}, "/api/generate")
    assert status == 200, found
    assert found["prompt_eval_count"] == n


def test_the_result_of_a_tool_may_be_a_picture(server):
    source = {"type": "base64", "media_type": "image/png", "data": b64(png(4))}
    result = [{"type": "text", "text": "seen"}, {"type": "image", "source": source}]
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "t"}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [answer]},
    ]
    n = []
    for content in (result, "seen"):
        answer["content"] = content
        status, found = server.post({"messages": messages}, "/v1/messages/count_tokens")
        assert status == 200, found
        n.append(found["input_tokens"])
    assert n[0] > n[1] + 3


def test_a_prompt_of_llama_cpp_marks_its_pictures(server):
    prompt = {"prompt_string": "a <__media__> b", "multimodal_data": [b64(png(6))]}
    status, found = server.post({"prompt": prompt, "n_predict": 2}, "/completion")
    assert status == 200, found
    assert found["prompt"].endswith("a <start_of_image><__media__><end_of_image> b") or (
        "<__media__>" in found["prompt"]
    )
    prompt["prompt_string"] = "no mark"
    status, found = server.post({"prompt": prompt, "n_predict": 2}, "/completion")
    assert status == 400
    assert "0 <__media__> and 1 pictures" in found["error"]["message"]


def test_embeddings_take_pictures(server):
    own = {"prompt_string": "a <__media__>", "multimodal_data": [b64(png(6))]}
    content = {"content": [{"type": "text", "text": "a "}, part(data_url(png(6)))]}
    status, found = server.post({"input": [own, content, "a "]}, "/v1/embeddings")
    assert status == 200, found
    a, b, plain = (each["embedding"] for each in found["data"])
    assert a == b != plain


def test_files_of_one_folder_may_be_named(server):
    for url in ("file://a.png", "file:////a.png", "file:///a.png"):
        assert server.post(said(part(url)))[0] == 200
    for url in ("file://b.png", "file://../outside.png", "file://link.png", "file:///etc/passwd"):
        status, found = server.post(said(part(url)))
        assert status == 400
        assert "no file in the folder of --media-path" in found["error"]["message"]


def test_allowed_hosts_are_asked_for_pictures(server, host):
    status, found = server.post(said(part(f"http://{host}/a.png"), WORDS))
    assert status == 200, found
    for url, what in (
        (f"http://{host}/b.png", "status 404"),
        (f"http://{host}/away", "a host that is not allowed"),
        ("http://localhost:1/a.png", "a host that is not allowed"),
        ("https://example.com/a.png", "a host that is not allowed"),
        (f"http://{host}@example.com/a.png", "a host that is not allowed"),
        ("ftp://example.com/a.png", "is not one of"),
    ):
        status, found = server.post(said(part(url)))
        assert status == 400
        assert what in found["error"]["message"]


def bomb():
    """A PNG of 60000 x 60000 pixels in a few bytes."""

    def chunk(kind, data):
        crc = zlib.crc32(kind + data)
        return len(data).to_bytes(4, "big") + kind + data + crc.to_bytes(4, "big")

    size = (60000).to_bytes(4, "big") * 2
    rows = zlib.compress(bytes(1 << 20), 9)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size + bytes([8, 2, 0, 0, 0]))
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("url", "what"),
    [
        (data_url(bomb()), "expected at most"),
        (data_url(png()[:60]), "damaged"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "SVG"),
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png;base64,", "no bytes"),
        ("data:image/png,abc", "not in base64"),
        ("data:text/html;base64,aGVsbG8=", "of type 'text/html'"),
        (data_url(b"hello"), "no picture of a known format"),
        ("malformed", "is not one of"),
        ("", "is not one of"),
    ],
)
def test_a_bad_picture_is_refused_alone(server, url, what):
    status, found = server.post(said(WORDS, part(url)))
    assert status == 400
    assert what in found["error"]["message"]
    assert server.post(said(part(data_url()), WORDS))[0] == 200


def test_a_request_has_not_too_many_pictures(server):
    status, found = server.post(said(*[part(data_url(png(1)))] * 1000))
    assert status == 400
    assert "more pictures than 256" in found["error"]["message"]


def test_a_list_of_models_says_what_they_take(server):
    entry = json.loads(server.get("/v1/models")[1])["data"][0]
    assert entry["architecture"]["input_modalities"] == ["text", "image"]
    props = json.loads(server.get("/props")[1])
    assert props["modalities"] == {"vision": True, "audio": False}
    assert props["media_marker"] == "<__media__>"


def test_no_process_decodes_but_the_helper(server):
    """A name written with escapes is found like any other."""
    body = json.dumps(said(part(data_url(png(7))))).replace("image_url", "image_\\u0075rl")
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        body.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["usage"]["prompt_tokens"] > 4


def test_a_server_without_an_encoder_says_what_it_lacks(files, tmp_path):
    model, _ = files
    prompt = {"prompt_string": "<__media__>", "multimodal_data": ["AA"]}
    with ServeProcess(model, tmp_path, "--no-mmproj") as server:
        for body, path in (
            (said(part(data_url())), "/v1/chat/completions"),
            ({"prompt": prompt}, "/completion"),
        ):
            status, found = server.post(body, path)
            assert status == 400
            assert "image input is not supported" in found["error"]["message"]
            assert "--mmproj FILE" in found["error"]["message"]
        assert not json.loads(server.get("/props")[1])["modalities"]["vision"]
