"""Which pages a browser lets ask the server and read its replies."""

import argparse

import pytest
from serving import local_server
from starlette.testclient import TestClient

from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.guard import Access
from tamis.cli.commands import serve
from tamis.cli.options.errors import UsageError

ALLOWED = "access-control-allow-origin"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
TEXT = {"content": "a"}


@pytest.fixture(scope="module")
def served(engine):
    """The server for origins and a key, one after another."""
    open_ones = []

    def serve_for(*origins, key=""):
        settings = Settings(access=Access(key=key, origins=origins))
        server = local_server(engine, [engine.session(n_ctx=64)], settings)
        open_ones.append(server)
        return TestClient(server.app, base_url="http://localhost")

    yield serve_for
    for server in open_ones:
        server.stop()
        server.close()


@pytest.mark.parametrize(
    ("origins", "origin", "granted"),
    [
        ((), "http://localhost:3000", False),
        ((), "https://chat.example", False),
        (("localhost",), "http://localhost:3000", True),
        (("localhost",), "https://127.0.0.1", True),
        (("localhost",), "http://[::1]:3000", True),
        (("localhost",), "http://localhost.chat.example", False),
        (("localhost",), "http://notlocalhost", False),
        (("localhost",), "null", False),
        (("localhost",), "http://[other", False),
        (("https://chat.example",), "https://chat.example", True),
        (("https://chat.example",), "https://CHAT.example", True),
        (("https://chat.example",), "http://chat.example", False),
        (("https://chat.example",), "https://chat.example:444", False),
        (("https://chat.example",), "https://a.chat.example", False),
        (("app://obsidian.md",), "app://obsidian.md", True),
        (("app://obsidian.md",), "app://other", False),
        (("*",), "https://chat.example", True),
    ],
)
def test_only_pages_that_are_named_are_let_in(served, origins, origin, granted):
    with served(*origins) as client:
        asked = client.options("/v1/chat/completions", headers=ASKS | {"Origin": origin})
        assert (asked.status_code, asked.content) == (200, b"")
        replies = [asked, client.get("/v1/models", headers={"Origin": origin})]
        replies.append(client.post("/tokenize", json=TEXT, headers={"Origin": origin}))
        for reply in replies:
            assert reply.headers.get_list(ALLOWED) == ([origin] if granted else [])
            assert ("Origin" in reply.headers.get("vary", "")) == granted
        if granted:
            assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
            assert replies[2].status_code == 200


def test_a_browser_asks_without_a_key_and_the_page_needs_one(served):
    origin = {"Origin": "https://chat.example"}
    with served("https://chat.example", key="secret") as client:
        assert client.options("/tokenize", headers=ASKS | origin).status_code == 200
        refused = client.post("/tokenize", json=TEXT, headers=origin)
        assert refused.status_code == 401
        assert refused.headers[ALLOWED] == origin["Origin"], "so that the page sees why"
        key = origin | {"Authorization": "Bearer secret"}
        assert client.post("/tokenize", json=TEXT, headers=key).status_code == 200
        assert client.options("/tokenize").status_code == 401, "that asks for nothing"
        other = client.post("/tokenize", json=TEXT, headers=key | {"Origin": "https://other"})
        assert other.status_code == 403


def test_a_page_that_is_let_in_sends_json_all_the_same(served):
    with served("https://chat.example") as client:
        plain = {"Origin": "https://chat.example", "Content-Type": "text/plain"}
        assert client.post("/tokenize", content=b"{}", headers=plain).status_code == 415


def access(*flags):
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve._access(parser.parse_args(flags))


def test_any_page_wants_a_key():
    with pytest.raises(UsageError, match="--api-key-file"):
        access("--cors-origins", "*")
    assert access("--cors-origins", "*", "--api-key", "x").grants("https://chat.example")
    found = access("--cors-origins", "https://Chat.example/, app://obsidian.md")
    assert found.grants("https://chat.example")
    assert found.grants("app://obsidian.md")
    assert not found.grants("")
