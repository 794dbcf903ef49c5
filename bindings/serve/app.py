"""The routes: OpenAI's API, and what runs them."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from tamis.bindings.flat.context import pool
from tamis.bindings.serve import replies, tasks
from tamis.bindings.serve.body import Body, parse
from tamis.bindings.serve.errors import (
    ApiError,
    busy,
    gone,
    invalid,
    no_helper,
    slow_client,
    stopping,
)
from tamis.bindings.serve.guard import Access, Guard, Log
from tamis.bindings.serve.helpers import Helpers
from tamis.bindings.serve.masks import Masks
from tamis.bindings.serve.metrics import exposition
from tamis.bindings.serve.replies import Events, Mailbox
from tamis.bindings.serve.requests import Limits, Reader
from tamis.bindings.serve.tasks import Inputs, Task
from tamis.bindings.serve.text import TextModel
from tamis.bindings.serve.wire import Config, identity
from tamis.bindings.serve.worker import SHARED, Embedding, Job, Scope, Worker, completions
from tamis.engine.engine import Engine
from tamis.engine.session import Session

T = TypeVar("T")
# Bodies up to here are read in this process, except those with a grammar: no native code sees more
# of a stranger than a text of so many bytes for its tokenizer.
SMALL = 16 << 10
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
    isolate: bool = False  # prompts of different requests share no pages
    timeout_request: float = 60  # seconds in which a body must come, and be prepared
    timeout_prepare: int = 20  # seconds of processor time that preparing a request may take
    helper_bytes: int = 1 << 30  # of memory that it may take


class Server:
    """The application of one engine and its sessions; `stop` ends every reply that is under way."""

    def __init__(
        self, engine: Engine, sessions: Sequence[Session], settings: Settings, log: Log
    ) -> None:
        self._engine, self._settings = engine, settings
        keys = settings.access.keys
        self._shared = len(keys) < 2 and not settings.isolate
        self.worker = Worker(engine, sessions, settings.n_queue, max(len(keys), 1))
        n_ctx, n_choices = sessions[0].n_ctx, settings.n_choices
        text = TextModel(engine.vocab, engine.tokenizer, n_ctx)
        self._reader = Reader(text, settings.model, Limits(n_ctx, n_choices))
        # Small requests are read beside the loop, one at a time; others by helper processes.
        self._beside = ThreadPoolExecutor(1, "tamis-reader")
        path = str(engine.path.absolute())
        config = Config(
            path,
            identity(path),
            settings.model,
            n_ctx,
            n_choices,
            settings.timeout_prepare,
            settings.helper_bytes,
        )
        self._helpers = Helpers(config, settings.timeout_request, settings.n_queue)
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
            Route("/ready", self.ready),
            Route("/", self.page),
        ]
        return [*routes, Route("/metrics", self.metrics)] if self._settings.metrics else routes

    def stop(self) -> None:
        """Fail what runs and waits, so that connections end; may be called more than once."""
        self.worker.stop()
        self._helpers.close()

    def abandon(self) -> None:
        """End all replies, also where the model is in a long step, after `stop`; in the loop."""
        self._mailbox.end_all(stopping())

    def close(self, seconds: float | None = None) -> bool:
        """Wait until nothing runs any more, after `stop`; whether that is so in time."""
        self._beside.shutdown(wait=seconds is None, cancel_futures=True)
        return self.worker.join(seconds)

    # --- routes ----------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        return await self._complete(request, "chat", self._reader.chat_task)

    async def completions(self, request: Request) -> Response:
        """/v1/completions."""
        return await self._complete(request, "completion", self._reader.completion_task)

    async def embeddings(self, request: Request) -> Response:
        """/v1/embeddings: of unit length; texts run one after another."""
        n_embd = self._engine.hp.n_embd
        load = partial(tasks.inputs_from_json, n_vocab=self._engine.hp.n_vocab)
        inputs, _ = await self._prepared(request, "embeddings", self._reader.inputs, load)
        if inputs.dimensions not in (None, n_embd):
            raise invalid(f"dimensions other than {n_embd} are not supported", "dimensions")
        found = [
            {"object": "embedding", "index": i, "embedding": await self._embed(request, inputs, i)}
            for i in range(len(inputs.texts))
        ]
        n = sum(map(len, inputs.texts))
        usage = {"prompt_tokens": n, "total_tokens": n}
        reply = {"object": "list", "data": found, "model": self._settings.model, "usage": usage}
        return JSONResponse(reply)

    async def _embed(self, request: Request, inputs: Inputs, i: int) -> str | list[float]:
        events = Events(self._mailbox)
        job = Job(inputs.texts[i], events.emitter(0), owner=request.scope["tamis.owner"])
        rows = await self._while_connected(request, [job], _embedding(events))
        vector = pool(rows, self._pooling)
        vector = (vector / (np.linalg.norm(vector) or 1)).astype(np.float32)
        if not np.isfinite(vector).all():
            raise ApiError(500, "the model failed: its rows are not finite numbers", code="failed")
        if inputs.packed:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        values: list[float] = vector.tolist()
        return values

    async def tokenize(self, request: Request) -> Response:
        """/tokenize: {"content": text} to {"tokens": ids}; add_special, parse_special: flags."""
        ids, _ = await self._prepared(request, "tokenize", self._reader.tokens, json.loads)
        return JSONResponse({"tokens": ids})

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
        """/health: whether the server lives; one that is stopping, or failed, does not."""
        if self.worker.stopped:
            raise stopping()
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """/ready: whether a request would be taken now."""
        if self.worker.stopped:
            raise stopping()
        if self.worker.n_waiting >= self.worker.n_queue:
            error = busy(self.worker.n_waiting)
            error.status = 503
            raise error
        return JSONResponse({"status": "ready"})

    async def metrics(self, _request: Request) -> Response:
        """/metrics, in Prometheus' text format."""
        return PlainTextResponse(exposition(self.worker), media_type="text/plain; version=0.0.4")

    async def page(self, _request: Request) -> Response:
        """The built-in page; it may run its own script and ask this server, nothing else."""
        headers = {"content-security-policy": self._policy, "x-frame-options": "DENY"}
        return Response(self._page, media_type="text/html", headers=headers)

    # --- how they run ----------------------------------------------------------------------------

    async def _complete(
        self, request: Request, name: str, read: Callable[[Body], Task]
    ) -> Response:
        n_vocab = self._engine.hp.n_vocab
        load = partial(tasks.from_json, n_vocab=n_vocab)
        task, masks = await self._prepared(request, name, read, load)
        events, owner = Events(self._mailbox), request.scope["tamis.owner"]
        begun = False
        try:
            jobs = completions(task, events.emitter, n_vocab, masks)
            for job in jobs:
                job.owner, job.scope = owner, self._scope(owner, task.salt, events)
            if not task.stream:
                reply = replies.whole(task, jobs, events)
                return JSONResponse(await self._while_connected(request, jobs, reply))
            self.worker.submit(jobs)
            begun = True
            return _EventStream(replies.chunks(task, jobs, events), jobs, masks)
        finally:
            if masks is not None and not begun:
                masks.close()

    def _scope(self, owner: Hashable, salt: str, request: Hashable) -> Scope:
        """Which other prompts a prompt may share pages with."""
        if self._settings.isolate:
            return request  # the choices of one
        return (SHARED if self._shared else owner, salt)

    async def _prepared(
        self,
        request: Request,
        name: str,
        small: Callable[[Body], T],
        load: Callable[[bytes], T],
    ) -> tuple[T, Masks | None]:
        """What a request asks for, read here where it is small, and the masks of its grammar."""
        body = await self._body(request)
        if len(body) <= SMALL:
            found = await self._aside(lambda: small(parse(body)))
            if not isinstance(found, Task) or found.grammar is None:
                return found, None
        preparing = self._helpers.prepare(name, body, request.scope["tamis.owner"])
        prepared = await _unless_gone(request, preparing)
        try:
            found = load(prepared.result)
        except (ValueError, TypeError, KeyError):
            prepared.masks.close()
            raise no_helper("its process has sent what is no answer") from None
        if isinstance(found, Task):
            return found, prepared.masks
        prepared.masks.close()
        return found, None

    async def _while_connected(
        self, request: Request, jobs: Sequence[Job], reply: Coroutine[Any, Any, T]
    ) -> T:
        """The reply to jobs, which are submitted now and cancelled where the client goes."""
        try:
            self.worker.submit(jobs)
            return await _unless_gone(request, reply)
        finally:
            reply.close()
            for job in jobs:
                job.cancelled = True

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            # A page of another site can send other types without asking: see docs/guides/server.md.
            raise ApiError(415, "the body must be application/json", code="content_type")
        data, most = bytearray(), self._settings.max_body
        try:
            async with asyncio.timeout(self._settings.timeout_request):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise ApiError(
                            413, f"the body is above {most} bytes", code="body_too_large"
                        )
        except ClientDisconnect:
            raise gone() from None
        except TimeoutError:
            raise slow_client(self._settings.timeout_request) from None
        return bytes(data)

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


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled where the client goes."""
    working = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, left], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise gone()
        return working.result()
    finally:
        working.cancel()
        left.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events; jobs end where nobody listens any more."""

    def __init__(
        self, chunks: AsyncIterator[Any], jobs: Sequence[Job], masks: Masks | None
    ) -> None:
        super().__init__(_events_of(chunks), media_type="text/event-stream")
        self._jobs, self._masks = jobs, masks

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for job in self._jobs:
                job.cancelled = True
            if self._masks is not None:
                self._masks.close()


async def _events_of(chunks: AsyncIterator[Any]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield f"data: {_json(chunk)}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield f"data: {_json(error.body)}\n\n"


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
