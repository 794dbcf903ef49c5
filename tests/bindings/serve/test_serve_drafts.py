"""A server whose slots are drafted for answers as one without drafts, alone and beside others."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import local_server
from starlette.testclient import TestClient

from tamis.bindings.serve.process import _drafting
from tamis.bindings.serve.supervisor import Start
from tamis.engine.drafting import Draft, Drafting

ASKED = {"prompt": [5, 9, 30, 12, 8], "n_predict": 24, "ignore_eos": True, "return_tokens": True}


class Told(Draft):
    """Drafts a text that is known, wrong at every third place."""

    def __init__(self, text):
        self.text = text

    def propose(self, tokens, n):
        known = self.text[: len(tokens)] == list(tokens)
        found = self.text[len(tokens) : len(tokens) + n] if known else []
        return [i if k % 3 < 2 else i ^ 1 for k, i in enumerate(found)]


@pytest.mark.parametrize("sampled", [{"temperature": 0}, {"temperature": 1.1, "seed": 7}])
def test_answers_are_those_without_drafts(engine, client, sampled):
    body = ASKED | sampled
    plain = client.post("/completion", json=body).json()["tokens"]
    other = body | {"prompt": [7, 7, 40]}
    beside = client.post("/completion", json=other).json()["tokens"]
    draft = Told(ASKED["prompt"] + plain)
    sessions = [engine.session(n_ctx=512, n_ubatch=32) for _ in range(2)]
    drafting = [Drafting(session, draft, 4) for session in sessions]

    def prepare(worker):
        for slot, own in zip(worker._slots, drafting, strict=True):
            slot.drafting = own

    server = local_server(engine, sessions, prepare=prepare)
    with TestClient(server.app, base_url="http://localhost") as drafted:
        for _ in range(2):  # the second time much of the prompt is held
            found = drafted.post("/completion", json=body).json()
            assert found["tokens"] == plain
            assert found["timings"]["draft_n"] > found["timings"]["draft_n_accepted"] > 5
        assert "draft_n" not in client.post("/completion", json=body).json()["timings"]
        assert sum(own.n_taken for own in drafting) > 10
        for own, session in zip(drafting, sessions, strict=True):
            assert own.n_past == session.n_past
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda b: drafted.post("/completion", json=b).json(), (body, other))
        assert [each["tokens"] for each in found] == [plain, beside]
    server.stop()
    server.close()


def test_one_slot_is_drafted_for_by_its_own_sparse_attention(engine, client, monkeypatch):
    monkeypatch.setattr("tamis.engine.drafting.LEAST", 0.0)  # random weights are never sure
    session = engine.session(n_ctx=512, n_ubatch=32, attn="window:recent=512")
    start = Start("", [], 1, None, {}, {}, 1, draft=["attn", 4])
    (drafting,) = _drafting(start, engine, [session])

    def prepare(worker):
        worker._slots[0].drafting = drafting

    server = local_server(engine, [session], prepare=prepare)
    with TestClient(server.app, base_url="http://localhost") as drafted:
        for body in (ASKED | {"temperature": 0}, ASKED | {"prompt": [7, 7, 40], "temperature": 0}):
            plain = client.post("/completion", json=body).json()["tokens"]
            found = drafted.post("/completion", json=body).json()
            assert found["tokens"] == plain
            assert found["timings"]["draft_n_accepted"] > 10
    server.stop()
    server.close()
