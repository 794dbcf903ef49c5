"""Requests to an application in this process: no socket, otherwise the same as over HTTP."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message


async def ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer to a POST of JSON."""
    headers = {"host": "localhost", "content-type": "application/json"}
    headers["content-length"] = str(len(body))
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 0),
    }
    sent, status, found = False, 0, bytearray()

    async def receive() -> Message:
        nonlocal sent
        if sent:  # the client stays connected; a task that waits for its end is cancelled
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            found.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, bytes(found)
