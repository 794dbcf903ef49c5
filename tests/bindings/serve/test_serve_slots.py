"""llamacpp's paths beside a server that only notes what it is asked for: slots, ranks, tokens."""

import json
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http import llamacpp_routes
from tamis.bindings.serve.http.app import Settings, on_error
from tamis.bindings.serve.http.json_reply import JsonReply
from tamis.bindings.serve.jobs import Kept, SlotState
from tamis.bindings.serve.replies import About
from tamis.bindings.serve.tasks import Inputs

IDLE, BUSY = SlotState(), SlotState(True, 7, 3, 4, 5)


class Vocab:
    bos, eos, unk, pad, tokens, model = 1, None, 0, None, ["<unk>", "<s>"], "gpt2"

    def __len__(self):
        return len(self.tokens)


class Server:
    """Stands in for app.Server: two slots, three documents' scores."""

    n_slots, ranks, pooling, model_file = 2, True, "mean", "a/model.gguf"
    scores = (0.5, 2.0, 0.5)
    about = About("tiny", "b7", 512, None)

    def __init__(self, folder):
        self.settings = Settings(slot_folder=folder, slots=True, loras=(("a.gguf", 1.0),))
        self.worker = SimpleNamespace(slots=[], asleep=False)
        self.lora_scales, self.kept, self.asked = (1.0,), [], []
        self.usual_settings = dict
        vocab = Vocab()
        tokenizer = SimpleNamespace(add_bos=True, add_eos=False)
        self.text = SimpleNamespace(vocab=vocab, unbounded=tokenizer, template_source="{{x}}")
        self.load_inputs = object()

    async def body(self, request):
        return await request.body()

    async def fields(self, request):
        return llamacpp_routes.small_fields(await request.body())

    async def read(self, request, name, *rest):
        self.asked.append((name, *rest))
        return Inputs([[5], [6, 7], [8]], False, None, None, ["odd"]) if name == "rerank" else name

    async def relayed(self, request, name):
        return JsonReply({"relayed": name})

    async def vectors(self, request, inputs, kind):
        assert kind == "rank"
        return [[score] for score in self.scores]

    async def embedded(self, request, name, *, pooled):
        self.asked.append((name, pooled))
        return Inputs([[5]], False, None, None, ["odd"]), [[1.0, 2.0]]

    async def written(self, work, headers):
        return JsonReply(work(), headers=headers)

    async def aside(self, work):
        return work()

    def scales_of(self, given):
        return tuple(each["scale"] for each in given)

    async def run_kept(self, request, job):
        self.kept.append(job(None))
        return Kept(12, 345, 0.5)


@pytest.fixture
def folder(tmp_path):
    """A folder of slots beside one that is nobody's."""
    (tmp_path / "slots").mkdir()
    (tmp_path / "outside.bin").write_bytes(b"x")
    (tmp_path / "slots" / "one.bin").write_bytes(b"x")
    (tmp_path / "slots" / "inner").mkdir()
    return tmp_path / "slots"


@pytest.fixture
def server(folder):
    return Server(folder)


@pytest.fixture
def client(server):
    handlers = {ApiError: on_error, HTTPException: on_error}
    app = Starlette(routes=llamacpp_routes.routes(server), exception_handlers=handlers)
    with TestClient(app, base_url="http://localhost") as found:
        yield found


def slot(client, where, body=None):
    found = client.post(f"/slots/{where}", json=body or {})
    return found.status_code, found.json()


def refused(client, server, where, body=None):
    """The message of a refusal, after which nothing was done."""
    status, reply = slot(client, where, body)
    assert status == 400
    assert server.kept == []
    return reply["error"]["message"]


# --- slots ----------------------------------------------------------------------------------------


def test_what_a_slot_gets_and_gives(client, server, folder):
    body = {"filename": "one.bin"}
    both = {"id_slot": 1, "filename": "one.bin"}
    assert slot(client, "1?action=save", body) == (
        200,
        both | {"n_saved": 12, "n_written": 345, "timings": {"save_ms": 500.0}},
    )
    assert slot(client, "1?action=restore", body) == (
        200,
        both | {"n_restored": 12, "n_read": 345, "timings": {"restore_ms": 500.0}},
    )
    assert slot(client, "0?action=erase") == (200, {"id_slot": 0, "n_erased": 12})
    found = [(job.action, job.path, job.slot, job.prompt) for job in server.kept]
    file = str(folder / "one.bin")
    assert found == [("save", file, 1, []), ("restore", file, 1, []), ("erase", str(folder), 0, [])]


@pytest.mark.parametrize("name", ["a", "é", "a.b-c_d", "a" * 200, "é" * 100, "1", "_"])
def test_a_file_of_the_folder_is_taken_whatever_it_is_called(client, server, folder, name):
    assert slot(client, "0?action=save", {"filename": name})[0] == 200
    assert server.kept[0].path == f"{folder}/{name}"


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", ".a", "-a", "../outside.bin", "a/../../outside.bin", "/etc/passwd", "a/b",
        "a\\b", "a\n", "\na", "a b", "a\0", "one.bin/../../outside.bin", "inner/", "a" * 201,
        "é" * 101, "~a", "a:b", "%2e%2e", "a\u2028",
    ],
)  # fmt: skip
def test_a_name_that_leaves_the_folder_reaches_nothing(client, server, name, action):
    body = {"filename": name}
    assert "filename is no short name of a file" in refused(
        client, server, f"0?action={action}", body
    )


@pytest.mark.parametrize("body", [{}, {"filename": None}, {"filename": 5}, {"filename": ["a"]}])
def test_no_name_is_none(client, server, body):
    assert "filename" in refused(client, server, "0?action=save", body)


@pytest.mark.parametrize("name", ["two.bin", "inner"])
def test_what_is_restored_is_a_file_that_is_there(client, server, name):
    assert "there is no such file" in refused(
        client, server, "0?action=restore", {"filename": name}
    )


@pytest.mark.parametrize(
    "number", ["2", "-1", "a", "", "1a", "a1", "1 ", "9" * 10, "٣", "0x1", "1.0", "+1"]
)
def test_a_number_of_no_slot_is_refused(client, server, number):
    if number:
        message = refused(client, server, f"{number}?action=erase")
        assert "there is no such slot, expected 0 to 1" in message
    assert llamacpp_routes._number(number) == (2 if number == "2" else -1) or number == "9" * 10


def test_numbers_have_up_to_nine_digits():
    assert llamacpp_routes._number("9" * 9) == 999_999_999
    assert llamacpp_routes._number("1" + "0" * 9) == -1


@pytest.mark.parametrize("action", ["burn", "", "SAVE", "x" * 5000])
def test_another_action_is_refused_in_few_words(client, server, action):
    message = refused(client, server, f"0?action={action}", {"filename": "one.bin"})
    assert message.startswith(f"action is {action!r}"[:50])
    assert len(message) <= 200
    assert "action is None" in refused(client, server, "0", {"filename": "one.bin"})


def test_a_server_without_a_folder_keeps_nothing(client, server):
    server.settings = Settings(slot_folder=None)
    for action in ("save", "restore", "erase"):
        status, reply = slot(client, f"0?action={action}", {"filename": "one.bin"})
        assert (status, reply["error"]["code"]) == (501, "unsupported")
    assert server.kept == []


def test_a_body_of_names_is_small(client, server):
    most = llamacpp_routes.small_fields.__globals__["SMALL"]
    fill = json.dumps({"filename": "one.bin", "x": ""})
    for n, status in ((most, 200), (most + 1, 413)):
        text = fill.replace('"x": ""', f'"x": "{"a" * (n - len(fill))}"')
        assert len(text) == n
        assert client.post("/slots/0?action=save", content=text).status_code == status
    assert len(server.kept) == 1


def test_slots_are_shown_where_that_is_allowed(client, server):
    server.worker.slots = [IDLE, BUSY]
    first, second = client.get("/slots").json()
    assert first == {
        "id": 0, "n_ctx": 512, "speculative": False, "is_processing": False, "n_past": 0,
        "n_prompt_tokens": 0, "next_token": [{"n_decoded": 0, "n_remain": -1}],
    }  # fmt: skip
    assert second == {
        "id": 1, "n_ctx": 512, "speculative": False, "is_processing": True, "n_past": 7,
        "n_prompt_tokens": 4, "next_token": [{"n_decoded": 3, "n_remain": 5}],
    }  # fmt: skip
    server.worker.slots = []
    assert [each["is_processing"] for each in client.get("/slots").json()] == [False, False]
    server.settings = Settings()
    assert client.get("/slots").status_code == (200 if Settings().slots else 501)
    server.settings = Settings(slots=False)
    assert client.get("/slots").json()["error"]["code"] == "unsupported"


@pytest.mark.parametrize(
    ("slots", "status"), [([IDLE, BUSY], 200), ([BUSY, BUSY], 503), ([IDLE, IDLE], 200)]
)
def test_no_free_slot_is_an_error_where_that_is_asked(client, server, slots, status):
    server.worker.slots = slots
    assert client.get("/slots?fail_on_no_slot=1").status_code == status
    assert client.get("/slots").status_code == 200


# --- what else there is ---------------------------------------------------------------------------


def ranked(client, **more):
    found = client.post("/rerank", json={"query": "q", "documents": ["a", "b", "c"]} | more)
    assert found.status_code == 200
    return found


def test_documents_are_ranked_ties_in_their_order(client):
    found = ranked(client)
    assert found.headers["x-tamis-ignored"] == "odd"
    assert found.json() == {
        "model": "tiny",
        "object": "list",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
        "results": [
            {"index": 1, "relevance_score": 2.0},
            {"index": 0, "relevance_score": 0.5},
            {"index": 2, "relevance_score": 0.5},
        ],
    }
    best = ranked(client, top_n=1, return_documents=True).json()["results"]
    assert best == [{"index": 1, "relevance_score": 2.0, "document": {"text": "b"}}]
    assert len(ranked(client, top_n=1 << 30).json()["results"]) == 3
    for n in (0, (1 << 30) + 1):
        body = {"query": "q", "documents": ["a", "b", "c"], "top_n": n}
        assert client.post("/rerank", json=body).status_code == 400


def test_texts_are_ranked_as_tei_does(client):
    body = {"query": "q", "texts": ["a", "b", "c"], "top_n": 2}
    found = client.post("/rerank", json=body)
    assert found.headers["x-tamis-ignored"] == "odd"
    assert found.json() == [{"index": 1, "score": 2.0}, {"index": 0, "score": 0.5}]
    shown = client.post("/rerank", json=body | {"return_text": True}).json()
    assert shown == [
        {"index": 1, "score": 2.0, "text": "b"},
        {"index": 0, "score": 0.5, "text": "a"},
    ]


def test_a_score_that_is_no_number_is_an_error(client, server):
    server.scores = (0.5, float("nan"), 0.5)
    found = client.post("/rerank", json={"query": "q", "documents": ["a", "b", "c"]})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "failed")
    server.ranks = False
    found = client.post("/rerank", json={"query": "q", "documents": ["a", "b", "c"]})
    assert (found.status_code, found.json()["error"]["code"]) == (501, "unsupported")


def test_one_row_of_pooled_vectors_all_rows_of_others(client, server):
    found = client.post("/embedding", json={"content": "a"})
    assert found.json() == [{"index": 0, "embedding": [[1.0, 2.0]]}]
    assert found.headers["x-tamis-ignored"] == "odd"
    server.pooling = "none"
    assert client.post("/embeddings", json={}).json() == [{"index": 0, "embedding": [1.0, 2.0]}]
    assert server.asked == [("embeddings", True), ("embeddings", False)]


def test_what_the_server_and_its_tokenizer_are(client, server):
    found = client.get("/props").json()
    settings = {"id": 0, "n_ctx": 512, "is_processing": False, "params": {}}
    assert found.pop("default_generation_settings") == settings
    assert found == {
        "total_slots": 2, "model_alias": "tiny", "model_path": "a/model.gguf",
        "modalities": {"vision": False, "audio": False}, "media_marker": "<__media__>",
        "chat_template": "{{x}}",
        "bos_token": "<s>", "eos_token": "", "build_info": "b7", "is_sleeping": False,
    }  # fmt: skip
    assert client.get("/tokenizer_info").json() == {
        "tokenizer_class": "GGUF", "tokenizer_model": "gpt2", "bos_token": "<s>",
        "eos_token": None, "unk_token": "<unk>", "pad_token": None, "add_bos_token": True,
        "add_eos_token": False, "vocab_size": 2, "model_max_length": 512, "chat_template": "{{x}}",
    }  # fmt: skip
    assert client.post("/detokenize", json={}).json() == {
        "content": "detokenize", "prompt": "detokenize",
    }  # fmt: skip
    assert client.post("/tokenize", json={}).json() == {"relayed": "tokenize"}
    assert client.post("/apply-template", json={}).json() == {"prompt": "template"}
    counted = client.post("/v1/chat/completions/input_tokens", json={}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": "count chat"}


def test_scales_of_adapters_are_shown_and_set(client, server):
    shown = {"id": 0, "path": "a.gguf", "scale": 1.0, "task_name": "", "prompt_prefix": ""}
    assert client.get("/lora-adapters").json() == [shown]
    found = client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
    assert found.json() == {"success": True}
    assert client.get("/lora-adapters").json() == [shown | {"scale": 0.5}]
    server.lora_scales = (1.0, 2.0)
    with pytest.raises(ValueError, match="zip"):
        client.get("/lora-adapters")
