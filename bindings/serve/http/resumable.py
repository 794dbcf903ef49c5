"""Streams that outlive their connection, by llama-server's routes and its header.

A request with the header X-Conversation-Id is answered to the end though its client has gone; what
was sent is kept, and sent again from any byte on.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tamis.bindings.serve.errors import ApiError, invalid, loading
from tamis.bindings.serve.http.app import body_of
from tamis.bindings.serve.http.json_reply import JsonReply

ONE, LOOKUP, HEADER = "/v1/stream", "/v1/streams/lookup", "x-conversation-id"
MOST_BYTES = 4 << 20  # of a stream; its oldest ones are dropped first
MOST_STREAMS, MOST_ASKED, LONGEST_ID = 256, 1024, 512
KEPT_S = 300  # seconds for which a stream stays after its end

Key = tuple[Any, str]  # the client, as the guard knows it, and the id of its conversation


class KeptStream:
    """The bytes of one reply. `total` counts those that were dropped, too."""

    def __init__(self) -> None:
        self.started, self.ended = int(time.time()), 0
        self.status = 0  # of HTTP; 0: nothing was sent yet
        self.streams = False  # whether the reply is a stream of events
        self.cancelled = asyncio.Event()
        self.total = 0
        self._data, self._more = bytearray(), asyncio.Event()

    @property
    def first(self) -> int:
        """The offset of the first byte that is kept."""
        return self.total - len(self._data)

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._data += data
        self.total += len(data)
        del self._data[: max(0, len(self._data) - MOST_BYTES)]
        self._wake()

    def end(self) -> None:
        """End it; readers end after its last byte."""
        self.ended = self.ended or int(time.time())
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def read(self, offset: int) -> AsyncIterator[bytes]:
        """Yield the bytes from an offset on, and those to come; ends early if some were dropped."""
        while offset >= self.first:
            if offset < self.total:
                data = bytes(self._data[offset - self.first :])
                offset += len(data)
                yield data
            elif self.ended:
                return
            else:
                await self._more.wait()


class Resumable:
    """ASGI middleware, behind the guard: runs such requests, and answers the routes of streams."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        """Make it; seconds: for the body of a lookup to arrive."""
        self._app, self._seconds = app, seconds
        self._kept: dict[Key, KeptStream] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request here, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route, headers = (scope["method"], scope["path"]), Headers(scope=scope)
        reply: Response
        try:
            if route in (("GET", ONE), ("DELETE", ONE)):
                reply = self._one(scope)
            elif route == ("POST", LOOKUP):
                reply = await self._lookup(Request(scope, receive))
            elif scope["method"] == "POST" and headers.get(HEADER):
                await self._run(scope, receive, send, self._key(scope, headers[HEADER]))
                return
            else:
                await self._app(scope, receive, send)
                return
        except ApiError as error:
            reply = JsonReply(error.body_for(scope["path"]), error.status, headers=error.headers)
        await reply(scope, receive, send)

    def _key(self, scope: Scope, name: str) -> Key:
        """The key of a conversation: nobody reads a stream of another API key or address."""
        if not 0 < len(name) <= LONGEST_ID:
            raise invalid(f"conv_id has {len(name)} characters, expected 1 to {LONGEST_ID}")
        return scope["tamis.owner"], name

    def _one(self, scope: Scope) -> Response:
        """/v1/stream: a stream from a byte on, or its end."""
        query = QueryParams(scope["query_string"])
        key = self._key(scope, query.get("conv_id", ""))
        if scope["method"] == "DELETE":
            self._drop(key)
            return Response(status_code=204)
        kept = self._kept.get(key)
        if kept is not None and not kept.status:
            raise loading()
        if kept is None or not kept.streams:
            raise ApiError(404, "there is no such stream, or it has expired", code="not_found")
        given = query.get("from", "0")
        if not (given.isascii() and given.isdigit()) or len(given) > 18:
            raise invalid(f"from is {given[:40]!r}, expected a number of bytes", "from")
        if int(given) < kept.first:
            raise invalid(f"from is {given}, but bytes before {kept.first} are dropped", "from")
        return StreamingResponse(kept.read(int(given)), media_type="text/event-stream")

    async def _lookup(self, request: Request) -> Response:
        """/v1/streams/lookup: the state of the client's own streams that it names.

        An id also stands for those of it that have `::` and a model's name after it.
        """
        data = await body_of(request, MOST_ASKED * LONGEST_ID, self._seconds)
        try:
            asked = json.loads(data)["conversation_ids"]
        except (ValueError, TypeError, KeyError, RecursionError):
            asked = None
        if not isinstance(asked, list) or not all(isinstance(name, str) for name in asked):
            raise invalid("conversation_ids is no list of texts", "conversation_ids")
        names, owner = set(asked), request.scope["tamis.owner"]
        with_models = names - {""}
        found = [
            {
                "conversation_id": name,
                "is_done": bool(kept.ended),
                "total_bytes": kept.total,
                "started_at": kept.started,
                "completed_at": kept.ended,
            }
            for (whose, name), kept in self._kept.items()
            if whose == owner and (name in names or name.rpartition("::")[0] in with_models)
        ]
        return JsonReply(found)

    async def _run(self, scope: Scope, receive: Receive, send: Send, key: Key) -> None:
        """Run a request to its end; returns at the end, or when the client has gone."""
        kept = self._begin(key)
        attached, read = True, asyncio.Event()

        async def given() -> Message:
            """The request's body; then the end of the connection, once it is cancelled."""
            if not read.is_set():
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    read.set()
                return message
            await kept.cancelled.wait()
            return {"type": "http.disconnect"}

        async def sent(message: Message) -> None:
            for each in _noted(kept, message, scope["path"]):
                if attached:
                    await send(each)

        task = asyncio.create_task(self._answer(scope, given, sent, key, kept))
        self._running.add(task)
        task.add_done_callback(self._done)
        left = asyncio.create_task(_left(receive, read))
        try:
            await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            attached = False
            left.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # a client that is there gets it; nobody else waits for it

    def _begin(self, key: Key) -> KeptStream:
        """A new stream in place of the conversation's last one, which ends. Raises ApiError."""
        self._drop(key)
        if len(self._kept) >= MOST_STREAMS:
            done = next((k for k, kept in self._kept.items() if kept.ended), None)
            if done is None:
                raise ApiError(
                    429, f"{MOST_STREAMS} streams are kept: try again later", code="busy"
                )
            self._drop(done)
        self._kept[key] = KeptStream()
        return self._kept[key]

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.cancelled.set()

    async def _answer(
        self, scope: Scope, given: Receive, sent: Send, key: Key, kept: KeptStream
    ) -> None:
        try:
            await self._app(scope, given, sent)
        finally:
            kept.end()
            wait = KEPT_S if kept.streams else 0  # other replies are not kept
            asyncio.get_running_loop().call_later(wait, self._expire, key, kept)

    def _expire(self, key: Key, kept: KeptStream) -> None:
        if self._kept.get(key) is kept:
            self._drop(key)


def _noted(kept: KeptStream, message: Message, path: str) -> list[Message]:
    """What is sent for a message of the reply, which is kept.

    A request that was cancelled before its reply began gets an error in its place.
    """
    if message["type"] == "http.response.start":
        if kept.cancelled.is_set():
            error = invalid("the request was cancelled")
            data = json.dumps(error.body_for(path)).encode()
            kept.status = error.status
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
            return [
                {"type": "http.response.start", "status": error.status, "headers": head},
                {"type": "http.response.body", "body": data},
            ]
        kept.status = message["status"]
        kind = Headers(raw=list(message["headers"])).get("content-type", "")
        kept.streams = kind.startswith("text/event-stream")
    elif kept.cancelled.is_set() and not kept.streams:
        return []
    elif kept.streams:
        kept.add(message.get("body", b""))
    return [message]


async def _left(receive: Receive, read: asyncio.Event) -> None:
    """Wait until the client has gone, whose request was read."""
    await read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
