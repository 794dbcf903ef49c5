"""What stands before every request, alone: each rule at both sides of where it begins."""

import asyncio
import json
import re
from dataclasses import FrozenInstanceError

import pytest

from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http.guard import Access, Guard, _refuse, is_local, keys_of

JSON = {"content-type": "application/json"}
KEY = Access(key="right\nother")
OPEN = Access()


def asked(headers=(), path="/v1/x", method="POST", access=OPEN, starts=None, app=None):
    """The status, headers and body of the reply, the request's owner, and the log's lines."""
    sent, log = [], []
    given = {"host": "localhost"} | dict(headers)
    raw = [(k.encode(), v.encode("latin-1")) for k, v in given.items() if v is not None]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "client": ("::9", 1)}

    async def answers(scope, receive, send):
        mine = [(b"referrer-policy", b"mine")]
        await send({"type": "http.response.start", "status": 204, "headers": mine})
        await send({"type": "http.response.body", "body": b"app"})

    async def send(message):
        sent.append(message)

    more = () if starts is None else (starts,)
    guard = Guard(app or answers, access, log.append, *more)
    try:
        asyncio.run(guard(scope, None, send))
    except ZeroDivisionError:
        return log
    head = [(k.decode(), v.decode("latin-1")) for k, v in sent[0]["headers"]]
    assert len(head) == len(dict(head)), "no header twice"
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    body = sent[1]["body"]
    return sent[0]["status"], dict(head), body, scope.get("tamis.owner"), log


def status(*args, **more):
    return asked(*args, **more)[0]


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("localhost", 204),
        ("LOCALHOST:8080", 204),
        ("127.0.0.1:1", 204),
        ("[::1]:8080", 204),
        ("[::1]", 204),
        ("::1", 204),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("localhost:80:80", 403),
        ("evil.example:localhost", 403),
        ("evil:x]:localhost", 403),
        ("", 403),
        (None, 403),
    ],
)
def test_a_host_is_one_that_the_server_is_called_by(host, found):
    for method, path in (("POST", "/v1/x"), ("GET", "/health"), ("OPTIONS", "/")):
        assert status(JSON | {"host": host}, path, method) == found


@pytest.mark.parametrize(
    ("headers", "found", "owner"),
    [
        ({"authorization": "Bearer right"}, 204, 0),
        ({"authorization": "bEARER other"}, 204, 1),
        ({"authorization": "Bearer  \tright\t "}, 204, 0),
        ({"x-api-key": "right"}, 204, 0),
        ({"authorization": "", "x-api-key": "other"}, 204, 1),
        ({"authorization": "Bearer wrong", "x-api-key": "right"}, 401, "::9"),
        ({"authorization": "Basic right"}, 401, "::9"),
        ({"authorization": "right"}, 401, "::9"),
        ({"authorization": "Bearer"}, 401, "::9"),
        ({"authorization": "Bearer right\xa0"}, 401, "::9"),
        ({"authorization": "Bearer righ"}, 401, "::9"),
        ({"authorization": "Bearer right\nother"}, 401, "::9"),
        ({"x-api-key": ""}, 401, "::9"),
        ({}, 401, "::9"),
    ],
)
def test_a_key_is_one_of_those_given_and_tells_whose_a_request_is(headers, found, owner):
    got, head, body, found_owner, _ = asked(JSON | headers, access=KEY)
    assert (got, found_owner) == (found, owner)
    if found == 401:
        assert head["www-authenticate"] == "Bearer"
        assert head["content-type"] == "application/json"
        assert int(head["content-length"]) == len(body)
        assert json.loads(body)["error"]["code"] == "invalid_api_key"


def test_a_page_and_states_need_no_key_and_nothing_else_does():
    for path in ("/", "/health", "/v1/health", "/ready"):
        assert status({}, path, "GET", KEY) == 204
    for path in ("/health/", "/healthy", "//", "/v1/models", ""):
        assert status({}, path, "GET", KEY) == 401
    preflight = {"access-control-request-method": "POST"}
    got, head, body, _, _ = asked(preflight, method="OPTIONS", access=KEY)
    assert (got, head["content-length"], body) == (200, "0", b"")
    assert status(preflight, method="GET", access=KEY) == 401
    assert status({}, method="OPTIONS", access=KEY) == 401


def test_a_server_without_keys_lets_everyone_in_and_a_blank_key_is_none():
    assert status(JSON) == 204
    assert asked(JSON)[3] == "::9"
    for blank in (" ", "\t", "\n", " \r\n "):
        with pytest.raises(ValueError, match="the key is blank, expected one"):
            Access(key=blank)
    assert Access().keys == ()
    assert keys_of(" a \r\n\n\tb\t\n") == ("a", "b")
    assert keys_of("a\xa0\n") == ("a\xa0",), "a byte that HTTP has no space of"


@pytest.mark.parametrize(
    ("headers", "found", "code"),
    [
        ({"content-length": "5"}, 204, None),
        ({"transfer-encoding": "chunked"}, 204, None),
        ({"content-length": "5", "transfer-encoding": "chunked"}, 400, None),
        ({"content-encoding": "identity"}, 204, None),
        ({"content-encoding": "gzip"}, 415, "content_encoding"),
        ({"content-encoding": ""}, 415, "content_encoding"),
    ],
)
def test_a_body_has_one_length_and_comes_as_it_is(headers, found, code):
    for method in ("POST", "GET"):
        got, head, body, _, _ = asked(JSON | headers, method=method)
        assert got == found
        assert (head.get("connection") == "close") == (found == 400), "what follows is not read"
        if code:
            assert json.loads(body)["error"]["code"] == code
        if found == 415 and headers["content-encoding"]:
            assert "(gzip)" in json.loads(body)["error"]["message"]


PAGES = [
    # headers, status of a POST, of a POST to /api/x, of a GET that starts nothing
    ({}, 204, 204, 204),
    ({"content-length": "0"}, 204, 204, 204),
    ({"content-length": "1"}, 415, 204, 204),
    ({"transfer-encoding": "chunked"}, 415, 204, 204),
    ({"content-length": "1", "content-type": "text/plain"}, 415, 204, 204),
    ({"content-length": "1"} | JSON, 204, 204, 204),
    ({"content-length": "1", "content-type": " Application/JSON ; charset=utf-8"}, 204, 204, 204),
    ({"content-type": "text/plain; application/json", "content-length": "1"}, 415, 204, 204),
    ({"origin": "http://localhost:9"}, 415, 415, 204),
    ({"sec-fetch-site": "same-origin"}, 415, 415, 204),
    ({"sec-fetch-site": "cross-site"}, 415, 415, 204),
    ({"origin": "http://localhost:9"} | JSON, 204, 204, 204),
    ({"origin": "https://[::1]:9"} | JSON, 204, 204, 204),
    ({"origin": "http://evil.example"} | JSON, 403, 403, 204),
    ({"origin": "https://evil.example"}, 403, 403, 204),
    ({"origin": "http://[evil"} | JSON, 403, 403, 204),
    ({"origin": "app://obsidian.md"} | JSON, 204, 204, 204),
    ({"origin": "null"} | JSON, 204, 204, 204),
]


@pytest.mark.parametrize(("headers", "post", "api", "get"), PAGES)
def test_what_a_page_can_make_a_browser_send_starts_nothing(headers, post, api, get):
    assert status(headers) == post
    assert status(headers, "/api/x") == api
    for path in ("/x/api/", "/api", "/v1/api/"):
        assert status(headers, path) == post, "of other paths"
    for method in ("PUT", "DELETE", "PATCH", "get", "X"):
        assert status(headers, method=method) == post, "whatever is not known to read"
    for method in ("GET", "HEAD", "OPTIONS"):
        assert status(headers, method=method) == get
        assert status(headers, method=method, starts=lambda scope: True) == post, "as a POST"
        assert status(headers, method=method, starts=lambda scope: False) == get


def test_a_preflight_is_answered_where_the_request_would_start_a_model():
    """ggml-org/llama.cpp's tests of its router: pages of this machine could not ask ours."""
    asks = {"access-control-request-method": "POST"}
    local = Access(origins=("localhost",))
    for origin, granted in (("http://localhost:3000", True), ("http://evil.example", False)):
        found = asked(
            asks | {"origin": origin}, method="OPTIONS", access=local, starts=lambda scope: True
        )
        assert found[0] == 200
        assert found[2] == b"", "the application is not asked"
        assert found[1].get("access-control-allow-origin") == (origin if granted else None)


def test_origins_that_are_granted_may_ask_and_read():
    access = Access(origins=("https://chat.example",))
    origin = {"origin": "https://CHAT.example"}
    got, head, *_ = asked(JSON | origin | {"access-control-request-headers": "a,b"}, access=access)
    assert got == 204
    granted = {k: v for k, v in head.items() if k.startswith("access-control")}
    assert granted == {
        "access-control-allow-origin": "https://CHAT.example",
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": "a,b",
        "access-control-expose-headers": "*",
        "access-control-max-age": "600",
    }
    assert head["vary"] == "Origin"
    assert asked(JSON | origin, access=access)[1]["access-control-allow-headers"] == "*"
    assert "vary" not in asked(JSON, access=access)[1]
    assert "vary" not in asked(JSON | {"origin": "http://localhost"}, access=access)[1]
    assert not Access(origins=("*",)).grants("")
    assert Access(origins=("*",)).grants("null")
    local = Access(origins=("localhost",))
    found = [local.grants(of) for of in ("ftp://localhost", "http://localhost", "http://[")]
    assert found == [False, True, False]


def test_every_reply_says_what_browsers_must_not_do_and_keeps_an_apps_own():
    _, head, body, _, _ = asked(JSON)
    assert body == b"app"
    assert head == {
        "referrer-policy": "mine",
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }
    refused = asked({"host": "evil"})[1]
    assert refused["referrer-policy"] == "no-referrer"


def test_each_request_is_a_line_of_the_log():
    path = "/" + "é" * 100 + "\n"
    (line,) = asked(JSON, path, "P" * 30)[-1]
    assert re.fullmatch(f"{'P' * 20} '/{r'(.{1,2}xe9)' * 79}' 204 0\\.\\d\\d s", line), line
    (line,) = asked(JSON | {"host": "evil"}, "/a\nb")[-1]
    assert re.fullmatch(r"POST '/a\\nb' 403 0\.\d\d s", line)

    async def fails(scope, receive, send):
        raise ZeroDivisionError

    (line,) = asked(JSON, app=fails)
    assert " cut off 0." in line

    async def late(scope, receive, send):
        await asyncio.sleep(0.06)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert float(asked(JSON, app=late)[-1][0].split()[-2]) >= 0.05


def test_what_is_no_request_is_passed_on():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope, receive, send))

    asyncio.run(Guard(app, Access(), print)({"type": "lifespan"}, "receive", "send"))
    assert seen == [({"type": "lifespan"}, "receive", "send")]


def test_a_refusal_has_its_headers_once():
    sent = []

    async def send(message):
        sent.append(message)

    error = ApiError(429, "later")
    error.headers = {"Retry-After": "3", "content-type": "application/json"}
    asyncio.run(_refuse(error, "/v1/x", send))
    assert dict(sent[0]["headers"])[b"retry-after"] == b"3"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_an_address_of_this_machine_alone(host, local):
    assert is_local(host) == local


def test_rules_of_access_stay_as_they_were_checked():
    with pytest.raises(FrozenInstanceError):
        Access(key="secret").key = ""
