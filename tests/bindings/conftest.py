"""A tiny model, its engine and its server; a module that needs others has fixtures of its own."""

import pytest
from serving import local_server
from starlette.testclient import TestClient
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec())


@pytest.fixture(scope="module")
def engine(path):
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(engine):
    server = local_server(engine, [engine.session(n_ctx=512, n_ubatch=32)])
    with TestClient(server.app, base_url="http://localhost") as client:
        yield client
    server.stop()
    server.close()
