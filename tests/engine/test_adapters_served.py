"""LoRA adapters of requests, each sequence with its own, and the list of them."""

import json
import threading

import pytest
from lora_files import write_control, write_lora
from serve_process import ServeProcess
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.adapters import Adapters, ControlVector, Lora
from tamis.engine.engine import Engine

PROMPT, N = [5 + 7 * i % 90 for i in range(40)], 12
SHAPES = {f"blk.{il}.{name}": (64, 64) for il in range(2) for name in ("attn_q", "attn_output")}
SCALES = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, -1.0)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, two adapters, and the greedy answers that the engine gives with each of SCALES."""
    folder = tmp_path_factory.mktemp("lora")
    path = write_tiny_model(folder / "tiny.gguf", TinySpec())
    for i in range(2):
        write_lora(folder / f"{i}.gguf", "llama", SHAPES, alpha=40.0, seed=i)
    write_control(folder / "c.gguf", 64, [1])
    loras = [Lora.load(folder / f"{i}.gguf") for i in range(2)]
    answers = {}
    with Engine.load(path) as engine:
        for scales in SCALES:
            adapters = Adapters(tuple(zip(loras, scales, strict=True)))
            answers[scales] = greedy(engine, adapters)
        control = ControlVector.load(folder / "c.gguf")
        answers["control"] = greedy(engine, Adapters(control=((control, 2.0),)))
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)
    return folder, answers


def greedy(engine, adapters):
    with engine.session(n_ctx=128, adapters=adapters) as session:
        row, found = session.prefill(PROMPT), []
        for _ in range(N):
            found.append(int(row.argmax()))
            row = session.decode(found[-1])
        return found


def by_id(scales):
    return [{"id": i, "scale": scale} for i, scale in enumerate(scales)]


def test_requests_at_once_have_each_their_own_adapters(made):
    folder, answers = made
    flags = ["--lora", f"{folder / '0.gguf'}", "--lora", f"{folder / '1.gguf'}:0"]
    with ServeProcess(folder / "tiny.gguf", folder, "-c", "128", "--parallel", "3", *flags) as s:
        body = {"prompt": PROMPT, "n_predict": N, "temperature": 0, "return_tokens": True}

        def ask(**how):
            status, reply = s.post(body | how, "/completion")
            assert status == 200, reply
            return reply["tokens"]

        assert ask() == answers[1.0, 0.0], "as it was started"
        found, threads = {}, []
        for i in range(12):
            scales = SCALES[i % 4]

            def one(i=i, scales=scales):
                found[i] = ask(lora=by_id(scales))

            threads.append(threading.Thread(target=one))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i: answers[SCALES[i % 4]] for i in range(12)}

        listed = s.get("/lora-adapters")[1]
        assert [one["scale"] for one in json.loads(listed)] == [1.0, 0.0]
        assert json.loads(listed)[1]["path"].endswith("1.gguf")
        assert s.post(by_id((0.5, -1.0)), "/lora-adapters") == (200, {"success": True})
        assert ask() == answers[0.5, -1.0]
        assert s.post([{"id": 1, "scale": 1.0}], "/lora-adapters")[0] == 200
        assert ask() == answers[0.0, 1.0], "the other one is off"
        assert ask(lora=[]) == answers[0.0, 0.0]
        for wrong in ([{"id": 2, "scale": 1}], [{"id": 0}], [{"id": 0, "scale": "1"}]):
            assert s.post(body | {"lora": wrong}, "/completion")[0] == 400
            assert s.post(wrong, "/lora-adapters")[0] == 400
        assert s.post({"id": 0}, "/lora-adapters")[0] == 400


def test_a_control_vector_is_every_requests(made):
    folder, answers = made
    flags = ["--control-vector-scaled", f"{folder / 'c.gguf'}:2"]
    with ServeProcess(folder / "tiny.gguf", folder, "-c", "128", "--parallel", "1", *flags) as s:
        body = {"prompt": PROMPT, "n_predict": N, "temperature": 0, "return_tokens": True}
        assert s.post(body, "/completion")[1]["tokens"] == answers["control"]
        assert s.get("/lora-adapters")[1] == b"[]"
