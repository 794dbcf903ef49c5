"""Documents ranked by a tiny model with a head for that; what an encoder serves, and refuses."""

import numpy as np
import pytest
import tiny_models
from kit_models import golden, token_ids, write_kit_model
from serving import local_server
from starlette.testclient import TestClient
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve.http.app import Settings
from tamis.engine.engine import Engine
from tamis.formats.vocab import Vocab
from tamis.text.pair import encode_pair

QUERY = "the hand"
DOCUMENTS = ["a hand over the water", "the", "on the other hand there is an other end"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    shapes = tiny_models.tensor_shapes

    def ranking(spec, n_vocab):
        return shapes(spec, n_vocab) | {"cls.output.weight": (1, spec.n_embd)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "tensor_shapes", ranking)
        path = write_tiny_model(tmp_path_factory.mktemp("ranks") / "m.gguf", TinySpec())
    with Engine.load(path, n_threads=1) as engine:
        yield engine


def serving(engine, settings):
    server = local_server(engine, [engine.session(n_ctx=128)], settings)
    try:
        with TestClient(server.app, base_url="http://localhost") as client:
            yield client
    finally:
        server.stop()
        server.close()


@pytest.fixture(scope="module")
def client(engine):
    yield from serving(engine, Settings(pooling="rank"))


@pytest.fixture(scope="module")
def scores(engine):
    with engine.session(n_ctx=128) as session:
        pairs = [engine.encode_pair(QUERY, document) for document in DOCUMENTS]
        return [float(session.embed(pair, "rank")[0]) for pair in pairs]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/reranking", "/v1/reranking"])
def test_documents_are_ranked_in_jinas_form(client, engine, scores, path):
    asked = {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    found = client.post(path, json=asked).json()
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [each["index"] for each in found["results"]] == order
    for each in found["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], rel=1e-4)
        assert each["document"]["text"] == DOCUMENTS[each["index"]]
    n = sum(len(engine.encode_pair(QUERY, document)) for document in DOCUMENTS)
    assert found["usage"] == {"prompt_tokens": n, "total_tokens": n}


def test_texts_are_ranked_in_teis_form_and_the_best_alone_are_given(client, scores):
    asked = {"query": QUERY, "texts": DOCUMENTS, "return_text": True, "top_n": 2}
    found = client.post("/rerank", json=asked).json()
    assert [each["score"] for each in found] == pytest.approx(sorted(scores)[:0:-1], rel=1e-4)
    assert found[0]["text"] == DOCUMENTS[found[0]["index"]]
    assert len(client.post("/rerank", json=asked | {"top_n": 99}).json()) == 3


@pytest.mark.parametrize(
    "asked",
    [
        {"query": QUERY, "documents": []},
        {"query": QUERY, "documents": None},
        {"query": QUERY, "documents": 123},
        {"query": QUERY, "documents": [1, 2, 3]},
        {"documents": DOCUMENTS},
        {"query": QUERY, "documents": ["the hand " * 200]},
    ],
)
def test_what_cannot_be_ranked_is_refused(client, asked):
    response = client.post("/rerank", json=asked)
    assert response.status_code == 400
    assert "error" in response.json()


def test_a_server_that_ranks_gives_no_embeddings(client):
    response = client.post("/v1/embeddings", json={"input": "the hand"})
    assert response.status_code == 501
    assert "/v1/rerank" in response.json()["error"]["message"]


def test_an_encoder_serves_embeddings_and_refuses_to_write(tmp_path):
    name = "bert-dense"
    with Engine.load(write_kit_model(name, tmp_path / "m.gguf"), n_threads=1) as engine:
        for client in serving(engine, Settings()):
            for path in ("/v1/completions", "/completion", "/api/generate"):
                refused = client.post(path, json={"prompt": [5, 6], "model": "tiny"})
                assert refused.status_code == 501
            asked = {"input": [token_ids(name)]}
            (found,) = client.post("/v1/embeddings", json=asked).json()["data"]
            expected = golden(name).mean(axis=0)
            expected /= np.linalg.norm(expected)
            assert np.allclose(found["embedding"], expected, atol=1e-2)


class Words:
    """A tokenizer of words that are numbers."""

    bos, add_bos = 1, True

    def encode(self, text, *, add_special=True):
        return [int(word) for word in text.split()]

    def encode_parts(self, parts):
        return [int(word) + 1000 * special for text, special in parts for word in text.split()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [1, 10, 11, 20]),
        ({"model": "bert"}, [1, 10, 11, 3, 20]),
        ({"add_eos": True}, [1, 10, 11, 2, 20, 2]),
        ({"add_eos": True, "add_sep": True}, [1, 10, 11, 2, 3, 20, 2]),
        ({"pre": "jina-v1-en", "add_sep": False}, [1, 10, 11, 20]),
        ({"rank_template": "7 {query} 8 {document}"}, [1007, 10, 11, 1008, 20]),
    ],
)
def test_a_query_and_a_document_are_joined_as_the_vocabulary_says(engine, given, expected):
    from dataclasses import replace

    vocab: Vocab = replace(engine.vocab, **({"eos": 2, "sep": 3, "add_eos": None} | given))
    assert encode_pair(vocab, Words(), "10 11", "20") == expected
