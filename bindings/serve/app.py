"""The routes: OpenAI's API, and what runs them."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tamis.bindings.flat.context import pool
from tamis.bindings.serve import replies
from tamis.bindings.serve.body import Body, parse
from tamis.bindings.serve.errors import ApiError, gone, invalid, stopping
from tamis.bindings.serve.guard import Access, Guard, Log
from tamis.bindings.serve.metrics import exposition
from tamis.bindings.serve.replies import Events, Mailbox
from tamis.bindings.serve.requests import Limits, Reader, Task
from tamis.bindings.serve.worker import Completion, Embedding, Job, Worker
from tamis.engine.engine import Engine
from tamis.engine.session import Session

T = TypeVar("T")
MEAN = 1  # llama.h's number of the pooling that a model without one of its own gets


@dataclass(frozen=True)
class Settings:
    """What a server is started with."""

    model: str  # its name in replies
    n_queue: int = 64
    n_choices: int = 8
    max_body: int = 4 << 20  # bytes
    metrics: bool = False
    access: Access = field(default_factory=Access)


class Server:
    """The application of one engine and its sessions; `stop` ends every reply that is under way."""

    def __init__(
        self, engine: Engine, sessions: Sequence[Session], settings: Settings, log: Log
    ) -> None:
        self._engine, self._settings = engine, settings
        self.worker = Worker(engine, sessions, settings.n_queue)
        limits = Limits(sessions[0].n_ctx, settings.n_choices)
        self._reader = Reader(engine, settings.model, limits)
        # Templates and tokenizers run beside the loop, one request at a time.
        self._beside = ThreadPoolExecutor(1, "tamis-reader")
        self._mailbox = Mailbox()
        self._page, self._policy = _page()
        self._pooling = engine.metadata.get(f"{engine.hp.arch}.pooling_type") or MEAN
        self.app = Starlette(
            routes=self._routes(),
            middleware=[Middleware(Guard, access=settings.access, log=log)],
            exception_handlers={
                ApiError: _on_error,
                HTTPException: _on_error,
                Exception: _on_error,
            },
        )

    def _routes(self) -> list[Route]:
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/", self.page),
        ]
        return [*routes, Route("/metrics", self.metrics)] if self._settings.metrics else routes

    def stop(self) -> None:
        """Fail what runs and waits, so that connections end; may be called more than once."""
        self.worker.stop()

    def close(self) -> None:
        """Wait until nothing runs any more, after `stop`."""
        self.worker.join()
        self._beside.shutdown()

    # --- routes ----------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        return await self._complete(request, self._reader.chat_task)

    async def completions(self, request: Request) -> Response:
        """/v1/completions."""
        return await self._complete(request, self._reader.completion_task)

    async def embeddings(self, request: Request) -> Response:
        """/v1/embeddings: of unit length; texts run one after another."""
        body = await self._body(request)
        packed = body.text("encoding_format") == "base64"
        n_embd = self._engine.hp.n_embd
        if body.integer("dimensions", 1, 1 << 20) not in (None, n_embd):
            raise invalid(f"dimensions other than {n_embd} are not supported", "dimensions")
        inputs, found = await self._aside(lambda: self._reader.inputs(body)), []
        for i, ids in enumerate(inputs):
            events = Events(self._mailbox)
            job = Job(ids, events.emitter(0))
            rows = await self._while_connected(request, [job], _embedding(events))
            vector = pool(rows, self._pooling)
            vector = (vector / (np.linalg.norm(vector) or 1)).astype(np.float32)
            value: Any = vector.tolist()
            if packed:
                value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            found.append({"object": "embedding", "index": i, "embedding": value})
        n = sum(map(len, inputs))
        usage = {"prompt_tokens": n, "total_tokens": n}
        reply = {"object": "list", "data": found, "model": self._settings.model, "usage": usage}
        return JSONResponse(reply)

    async def tokenize(self, request: Request) -> Response:
        """/tokenize: {"content": text} to {"tokens": ids}; add_special, parse_special: flags."""
        body = await self._body(request)
        text = body.text("content") or ""
        flags = {name: body.flag(name) for name in ("add_special", "parse_special")}
        encode = self._engine.tokenizer.encode
        return JSONResponse({"tokens": await self._aside(lambda: encode(text, **flags))})

    async def models(self, _request: Request) -> Response:
        """/v1/models: the one that there is."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """/v1/models/NAME."""
        if request.path_params["name"] != self._settings.model:
            raise ApiError(404, "there is no such model here", code="model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        hp, n_ctx = self._engine.hp, self._reader.limits.n_ctx
        meta = {"n_ctx": n_ctx, "n_ctx_train": hp.n_ctx_train, "n_embd": hp.n_embd}
        head = {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "tamis"}
        return head | {"meta": meta | {"n_vocab": hp.n_vocab}}

    async def health(self, _request: Request) -> Response:
        """/health: whether requests are taken."""
        if self.worker.stopped:
            raise stopping()
        return JSONResponse({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        """/metrics, in Prometheus' text format."""
        return PlainTextResponse(exposition(self.worker), media_type="text/plain; version=0.0.4")

    async def page(self, _request: Request) -> Response:
        """The built-in page; it may run its own script and ask this server, nothing else."""
        headers = {"content-security-policy": self._policy, "x-frame-options": "DENY"}
        return Response(self._page, media_type="text/html", headers=headers)

    # --- how they run ----------------------------------------------------------------------------

    async def _complete(self, request: Request, read: Callable[[Body], Task]) -> Response:
        body, events = await self._body(request), Events(self._mailbox)

        def prepared() -> tuple[Task, list[Completion]]:
            task = read(body)
            return task, self._reader.jobs(task, events.emitter)

        task, jobs = await self._aside(prepared)
        if not task.stream:
            reply = replies.whole(task, jobs, events)
            return JSONResponse(await self._while_connected(request, jobs, reply))
        self.worker.submit(jobs)
        stream = _events_of(replies.chunks(task, jobs, events), jobs)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _while_connected(
        self, request: Request, jobs: Sequence[Job], reply: Awaitable[T]
    ) -> T:
        """The reply to jobs, which are submitted now and cancelled where the client goes."""
        waiting = asyncio.ensure_future(reply)
        left = asyncio.ensure_future(_disconnected(request))
        try:
            self.worker.submit(jobs)
            await asyncio.wait([waiting, left], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise gone()
            return waiting.result()
        finally:
            waiting.cancel()
            left.cancel()
            for job in jobs:
                job.cancelled = True

    async def _body(self, request: Request) -> Body:
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            # A page of another site can send other types without asking: see docs/guides/server.md.
            raise ApiError(415, "the body must be application/json", code="content_type")
        data, most = bytearray(), self._settings.max_body
        try:
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise ApiError(413, f"the body is above {most} bytes", code="body_too_large")
        except ClientDisconnect:
            raise gone() from None
        return await self._aside(lambda: parse(bytes(data)))

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)


async def _embedding(events: Events) -> np.ndarray:
    while True:
        _, event = await events.next()
        if isinstance(event, Embedding):
            return event.rows


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events_of(chunks: AsyncIterator[Any], jobs: Sequence[Job]) -> AsyncIterator[str]:
    """Server-sent events; jobs end where nobody listens any more."""
    try:
        async for chunk in chunks:
            yield f"data: {_json(chunk)}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield f"data: {_json(error.body)}\n\n"
    finally:
        for job in jobs:
            job.cancelled = True


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def _on_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, code="not_found")
    if not isinstance(error, ApiError):
        error = ApiError(500, f"a bug of tamis: {type(error).__name__}", code="internal")
    return JSONResponse(error.body, error.status, headers=error.headers)


def _page() -> tuple[bytes, str]:
    """The page, and a policy that lets it load nothing but its own script and style."""
    data = (files("tamis.bindings.serve") / "page.html").read_bytes()

    def hashed(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), data, re.DOTALL)
        assert found is not None
        return "'sha256-" + base64.b64encode(hashlib.sha256(found[1]).digest()).decode() + "'"

    allowed = f"script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'"
    return data, f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
