"""The server of one model: the routes of OpenAI's API, and how requests are run.

Routes of other APIs are passed in: `application.application` makes a server with all of them.
"""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Hashable,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tamis.bindings.serve import replies, tasks
from tamis.bindings.serve.api import anthropic, document, llamacpp, openai, responses
from tamis.bindings.serve.api.readers import APART, read
from tamis.bindings.serve.body import SMALL, Body, small_fields
from tamis.bindings.serve.errors import (
    ApiError,
    busy,
    gone,
    invalid,
    loading,
    no_helper,
    slow_client,
    stopping,
)
from tamis.bindings.serve.helpers import Follower, Helpers
from tamis.bindings.serve.http.guard import Access, Guard, Log
from tamis.bindings.serve.http.json_reply import JsonBytes, JsonReply, told
from tamis.bindings.serve.http.metrics import Worker, exposition
from tamis.bindings.serve.jobs import SHARED, Choice, Embedding, Emit, Emitter, Job, Keeping, Kept
from tamis.bindings.serve.json_text import in_parts
from tamis.bindings.serve.media import NONE, Media, NeedsHelper, Rules
from tamis.bindings.serve.models import Model
from tamis.bindings.serve.replies import About, Events, Mailbox, Reply
from tamis.bindings.serve.requests import Limits, Reader
from tamis.bindings.serve.supervisor import sampler_of
from tamis.bindings.serve.tasks import Inputs, Task
from tamis.bindings.serve.text import TextModel
from tamis.bindings.serve.wire import Config, identity
from tamis.engine.adapters import scales
from tamis.fetch.hub import groups
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.version import __version__

T = TypeVar("T")
EXTRACT = "/extract"
MAX_BODY = 4 << 20  # bytes of a request, by default
ANSWERS: tuple[tuple[str, str, type[Reply]], ...] = (
    ("/v1/chat/completions", "chat", openai.Chat),
    ("/chat/completions", "chat", openai.Chat),
    ("/v1/completions", "completion", openai.Text),
    ("/v1/responses", "responses", responses.Responses),
    ("/responses", "responses", responses.Responses),
    ("/v1/messages", "messages", anthropic.Messages),
    ("/completion", "llama completion", llamacpp.Completion),
    ("/completions", "llama completion", llamacpp.Completion),
    ("/infill", "infill", llamacpp.Completion),
)
COUNTS = (
    ("/v1/messages/count_tokens", "count messages"),
    ("/v1/responses/input_tokens", "count responses"),
    ("/responses/input_tokens", "count responses"),
)


class ModelFile(NamedTuple):
    """Facts of a model's file that lists of models show."""

    name: str
    n_byte: int
    modified: float  # seconds since 1970
    arch: str
    n_param: int
    kind: str  # the type of most of its matrices
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """The settings that a server is started with."""

    n_queue: int = 64
    n_choices: int = 8
    max_body: int = MAX_BODY  # bytes; the usual one is larger where there are pictures
    metrics: bool = False
    access: Access = field(default_factory=Access)
    isolate: bool = False  # whether prompts of different requests never share pages
    timeout_request: float = 60  # seconds within which a body must arrive and be prepared
    timeout_prepare: int = 20  # seconds of processor time that preparing a request may take
    helper_bytes: int = 1 << 30  # bytes of memory that it may take
    usual: Mapping[str, Any] = field(default_factory=dict)  # default fields of requests
    page: bool = True  # whether / is the built-in chat page
    slots: bool = True  # shown at /slots
    slot_folder: Path | None = None  # the folder of files to which slots are saved
    # pooling of embeddings, as in Heads.pooled; None: the model's, or mean
    pooling: str | None = None
    loras: tuple[tuple[str, float], ...] = ()  # files of LoRA adapters, and their initial scales
    aliases: tuple[str, ...] = ()  # all names of the model that lists show
    tags: tuple[str, ...] = ()  # words about it that lists show
    prefix: str = ""  # of all paths
    media: Rules = NONE  # of pictures


class Server:
    """The application of one model; `stop` ends every reply in progress."""

    def __init__(
        self, model: Model, settings: Settings, log: Log, others: Sequence["Routes"]
    ) -> None:
        """Make the server.

        Each of others returns the routes of another API, which call this server.
        """
        self._model, self.settings, self.worker = model, settings, model.worker
        n_ctx, n_choices = model.loaded.n_ctx, settings.n_choices
        limits, media = Limits(n_ctx, n_choices), Media(settings.media)
        self.reader = Reader(model.text, model.name, limits, settings.usual, media)
        # Small requests are read in one thread beside the loop, all others by helper processes.
        self._beside = ThreadPoolExecutor(1, "tamis-reader")
        config = Config(
            model.path,
            identity(model.path),
            model.name,
            n_ctx,
            n_choices,
            settings.timeout_prepare,
            settings.helper_bytes,
            settings.usual,
            model.text.given_template,
            settings.media,
        )
        self.n_slots, self.model_file = model.loaded.n_slot, model.path
        # The scales of LoRA adapters for requests that name none.
        self.lora_scales = tuple(scale for _, scale in settings.loras)
        self._facts: ModelFile | None = None
        self.created = Path(model.path).stat().st_mtime
        seen = json.dumps([config.identity, __version__, model.name])
        fingerprint = "b" + hashlib.sha256(seen.encode()).hexdigest()[:12]
        self.about = About(model.name, fingerprint, n_ctx, lambda: self.reader.format)
        self._helpers = Helpers(config, settings.timeout_request, settings.n_queue)
        self._mailbox, self._requests = Mailbox(), itertools.count()
        self.app = Starlette(
            routes=self._routes(others),
            middleware=[Middleware(Guard, access=settings.access, log=log)],
            exception_handlers={
                ApiError: on_error,
                HTTPException: on_error,
                Exception: on_error,
            },
        )

    def _routes(self, others: Sequence["Routes"]) -> list[Route]:
        routes = [
            *(
                Route(path, partial(self.complete, name, form), methods=["POST"])
                for path, name, form in ANSWERS
            ),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *(Route(path, partial(self.count, name), methods=["POST"]) for path, name in COUNTS),
            Route(EXTRACT, self.extract, methods=["POST"]),
            *(route for routes_of in others for route in routes_of(self)),
            Route("/v1/models", self.models),
            Route("/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/ready", self.ready),
            front(self.settings),
        ]
        return [*routes, Route("/metrics", self.metrics)]

    def usual_settings(self) -> dict[str, Any]:
        """The default settings of a completion."""
        return llamacpp.usual_settings(self.reader)

    @property
    def pooling(self) -> str:
        """The pooling that makes one embedding of a text's rows."""
        return self.settings.pooling or self._model.loaded.pooling

    @property
    def ranks(self) -> bool:
        """Whether the model ranks documents."""
        return self._model.loaded.ranks

    @property
    def text(self) -> TextModel:
        """The model's vocabulary and template."""
        return self._model.text

    def facts(self) -> ModelFile:
        """Facts of the model for lists; reads its file once. Raises ApiError."""
        if self._facts is None:
            try:
                self._facts = facts_of(Path(self.model_file))
            except (OSError, GGUFError) as error:
                raise ApiError(503, f"the model's file: {error}", code="unavailable") from None
        return self._facts

    @property
    def predicts(self) -> bool:
        """Whether the model generates text."""
        return self._model.loaded.predicts

    def serves(self, path: str) -> bool:
        """Whether a model's file is in use, under any path; reads the file system."""
        return same_model(path, self.model_file)

    def stop(self) -> None:
        """Fail all running and waiting jobs, so that connections end.

        May be called more than once.
        """
        self.worker.stop()
        self._helpers.close()

    def close(self) -> None:
        """Wait after `stop` until nothing is running."""
        self._beside.shutdown(cancel_futures=True)
        self.worker.join()

    # --- routes ----------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        """/v1/embeddings: of unit length by default; texts run one after another."""
        if self.pooling == "none":
            raise invalid("this server pools no rows of a text into one: ask /embeddings for all")
        inputs, rows = await self.embedded(request, "embeddings")
        n = sum(map(len, inputs.texts))
        usage = {"prompt_tokens": n, "total_tokens": n}

        def reply() -> dict[str, Any]:
            found = [
                {"object": "embedding", "index": i, "embedding": _packed(r) if inputs.packed else r}
                for i, r in enumerate(rows)
            ]
            return {"object": "list", "data": found, "model": self._model.name, "usage": usage}

        return await self.written(reply, told(inputs.ignored))

    async def embedded(
        self, request: Request, name: str, *, pooled: bool = True
    ) -> tuple[Inputs, list[Any]]:
        """The texts of a request, as READERS[name] reads it, and their embeddings. Raises ApiError.

        pooled: one vector per text, of length 1 unless the request says otherwise; else one vector
        per token, unscaled.
        """
        if self.pooling == "rank":
            raise ApiError(
                501,
                "this server ranks documents: ask /v1/rerank, or start it with --pooling mean",
                code="unsupported",
            )
        n_embd = self._model.loaded.n_embd
        inputs = await self.read(request, name, self.load_inputs)
        if inputs.dimensions not in (None, n_embd):
            raise invalid(f"dimensions other than {n_embd} are not supported", "dimensions")
        found = await self.vectors(request, inputs, self.pooling if pooled else "none")
        norm = inputs.norm
        if not pooled and norm is not None:
            inputs = inputs._replace(ignored=(*inputs.ignored, "embd_normalize"))
        norm = -1 if not pooled else 2 if norm is None else norm
        return inputs, await asyncio.to_thread(lambda: [_vector(each, norm) for each in found])

    async def vectors(self, request: Request, inputs: Inputs, pooling: str) -> list[np.ndarray]:
        """The embedding of each text, computed one after another. Raises ApiError."""
        rows = []
        for ids in inputs.texts:
            events = Events(self._mailbox)
            job = Job(ids, events.emitter(0), owner=request.scope["tamis.owner"], pooling=pooling)
            job.tiles = inputs.tiles
            job.lora = self._other(self.lora_scales)
            found = await self._while_connected(request, [job], _one(events, Embedding))
            rows.append(found.vector)
        return rows

    async def count(self, name: str, request: Request) -> Response:
        """The reply with the number of tokens of a request's prompt."""
        n = await self.read(request, name)
        more = {} if name == "count messages" else {"object": "response.input_tokens"}
        return JsonReply(more | {"input_tokens": n})

    async def run_kept(self, request: Request, job: Callable[[Emit], Keeping]) -> Kept:
        """Save, restore or erase a slot's sequence. Raises ApiError."""
        events = Events(self._mailbox)
        made = job(events.emitter(0))
        made.owner = request.scope["tamis.owner"]
        made.scope = self._scope(made.owner, "", self.lora_scales)
        made.lora = self._other(self.lora_scales)
        return await self._while_connected(request, [made], _one(events, Kept))

    async def extract(self, request: Request) -> Response:
        """/extract: the text of a file."""
        return JsonBytes(await self.read(request, "document", bytes))

    async def models(self, _request: Request) -> Response:
        """/v1/models: the list of the one model."""
        return JsonReply(listing([self._described()]))

    async def model(self, request: Request) -> Response:
        """/v1/models/NAME: the model of that name."""
        if request.path_params["name"] not in (self._model.name, *self.settings.aliases):
            raise ApiError(404, "there is no such model here", code="model_not_found")
        return JsonReply(self._described())

    def _described(self) -> dict[str, Any]:
        m, s = self._model.loaded, self.settings
        meta = {"n_ctx": m.n_ctx, "n_ctx_train": m.n_ctx_train, "n_embd": m.n_embd}
        head = model_entry(self._model.name, self.created)
        head |= {"aliases": list(s.aliases), "tags": list(s.tags)}
        head |= modalities(sees=bool(s.media.mmproj))
        return head | {"meta": meta | {"n_vocab": m.n_vocab}}

    async def health(self, _request: Request) -> Response:
        """/health: whether the server is alive; it is not while it is stopping."""
        if self.worker.stopped:
            raise stopping()
        return JsonReply({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """/ready: whether a request would be accepted now."""
        if self.worker.stopped:
            raise stopping()
        if self.worker.n_waiting >= self.worker.n_queue:
            error = busy(self.worker.n_waiting)
            error.status = 503
            raise error
        if not self.worker.ready:
            raise loading()
        return JsonReply({"status": "ready"})

    async def metrics(self, _request: Request) -> Response:
        """/metrics, in Prometheus' text format."""
        return measured(self.settings, self.worker)

    # --- how they run ----------------------------------------------------------------------------

    async def complete(
        self, name: str, form: type[Reply], request: Request, body: bytes | None = None
    ) -> Response:
        """Answer a request, read by READERS[name], in the form of an API."""
        if not self.predicts:
            raise ApiError(
                501,
                "this model embeds texts, it writes none: ask /v1/embeddings or /v1/rerank",
                code="unsupported",
                param="model",
            )
        load = partial(tasks.from_json, n_vocab=self._model.loaded.n_vocab)
        task, masks = await self._prepared(request, name, load, body)
        events, owner = Events(self._mailbox), request.scope["tamis.owner"]
        begun = False
        try:
            reply = await self.aside(lambda: form(task, self.about))
            jobs = choices(task, events.emitter, self._model.loaded.n_vocab, masks)
            lora = self.lora_scales if task.lora is None else self.scales_of(task.lora)
            scope = self._scope(owner, task.salt, lora)
            for job in jobs:
                job.owner, job.scope, job.lora = owner, scope, self._other(lora)
                if job.slot is not None and job.slot >= self.n_slots:
                    raise invalid(f"id_slot is {job.slot}, expected 0 to {self.n_slots - 1}")
            headers = told(task.ignored)
            if not task.stream:
                whole = replies.whole(reply, events)
                pieces = await self._while_connected(request, jobs, whole)
                return await self.written(lambda: reply.whole(pieces), headers)
            self.worker.submit(jobs)
            begun = True
            text = replies.stream(reply, events, request.url.path)
            return _EventStream(text, reply.media, headers, partial(self._end, jobs, masks))
        finally:
            if masks is not None and not begun:
                masks.close()

    def _end(self, jobs: Sequence[Job], masks: Follower | None) -> None:
        """Cancel the jobs of a reply that nobody waits for any more."""
        self.worker.drop(jobs)
        if masks is not None:
            masks.close()

    def scales_of(self, given: Sequence[Any]) -> tuple[float, ...]:
        """The scale of each LoRA adapter in a list of {id, scale}. Raises ApiError."""
        try:
            return tuple(scales(given, len(self.lora_scales)))
        except ValueError as error:
            raise invalid(str(error), "lora") from None

    def _other(self, lora: tuple[float, ...]) -> tuple[float, ...] | None:
        """Scales for a job; None if they equal those with which the model's process started."""
        return None if lora == tuple(scale for _, scale in self.settings.loras) else lora

    def _scope(self, owner: Hashable, salt: str, lora: Sequence[float]) -> str:
        """The name of the scope within which prompts may share pages."""
        if self.settings.isolate:  # the scope is shared by the choices of one request only
            return f"request {next(self._requests)}"
        keys = self.settings.access.keys
        # The key and not its index: files of the prompt cache outlive this server.
        whose = SHARED
        if keys:
            assert isinstance(owner, int), "the guard lets nobody in without a key"
            whose = hashlib.sha256(keys[owner].encode()).hexdigest()
        return json.dumps([whose, salt, *lora])

    async def read(
        self,
        request: Request,
        name: str,
        load: Callable[[bytes], Any] = json.loads,
        body: bytes | None = None,
    ) -> Any:
        """Have READERS[name] read a request that has no grammar. Raises ApiError."""
        found, masks = await self._prepared(request, name, load, body)
        if masks is not None:
            masks.close()
        return found

    def load_inputs(self, data: bytes) -> Inputs:
        """The texts to embed that a helper's process has sent."""
        return tasks.inputs_from_json(data, self._model.loaded.n_vocab)

    async def _prepared(
        self, request: Request, name: str, load: Callable[[bytes], T], body: bytes | None
    ) -> tuple[T, Follower | None]:
        """The content of a request, read here if it is small, and the follower of its grammar."""
        body = await self.body(request) if body is None else body
        if len(body) <= SMALL and name not in APART:
            with contextlib.suppress(NeedsHelper):
                found = await self.aside(lambda: read(name, self.reader, body))
                if not isinstance(found, Task) or found.grammar is None:
                    return found, None
        preparing = self._helpers.prepare(name, body, request.scope["tamis.owner"])
        prepared = await unless_gone(request, preparing)
        try:  # a long list of tokens takes time
            return await asyncio.to_thread(load, prepared.result), prepared.masks
        except (ValueError, TypeError, KeyError):
            prepared.masks.close()
            raise no_helper("its process has sent what is no answer") from None

    async def _while_connected(
        self, request: Request, jobs: Sequence[Job], reply: Coroutine[Any, Any, T]
    ) -> T:
        """The reply to jobs; they are submitted now, and cancelled if the client disconnects."""
        try:
            self.worker.submit(jobs)
            return await unless_gone(request, reply)
        finally:
            reply.close()
            self.worker.drop(jobs)

    async def body(self, request: Request) -> bytes:
        """The bytes of a request. Raises ApiError."""
        return await received(request, self.settings)

    async def fields(self, request: Request) -> Body:
        """The fields of a small request. Raises ApiError."""
        return small_fields(await self.body(request))

    async def written(self, make: Callable[[], Any], headers: dict[str, str] | None = None) -> Any:
        """A JSON reply of the result of `make`; both run in a thread, as they may take long."""
        data = await asyncio.to_thread(lambda: in_parts(make()))
        return JsonBytes(data, headers=headers)

    async def relayed(self, request: Request, name: str) -> Response:
        """The reply of READERS[name], as the helper wrote it."""
        data = await self.read(request, name, bytes)
        return JsonBytes(data) if isinstance(data, bytes) else await self.written(lambda: data)

    async def aside(self, work: Callable[[], T]) -> T:
        """The result of work, which runs in a thread beside the loop, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)


Routes = Callable[[Server], list[Route]]  # of one API


def choices(task: Task, emit: Emitter, n_vocab: int, masks: Follower | None = None) -> list[Choice]:
    """The jobs of a task; masks: the follower of its grammar.

    Raises ApiError for parameters that a sampler refuses.
    """
    try:
        sampler_of(task.sampling, task.seed, n_vocab)
    except (ValueError, TypeError) as error:  # or SamplerError: a parameter out of range
        raise invalid(str(error)) from None
    return [
        Choice(
            request.prompt,
            emit(i),
            request=request,
            sampling=task.sampling,
            seed=task.seed_of(i),
            number=i,
            masks=masks if task.masked else None,
            slot=task.slot,
            cached=task.cached,
            reuse=task.reuse,
            tiles=task.tiles,
        )
        for i, request in enumerate(task.requests)
    ]


async def received(request: Request, settings: Settings) -> bytes:
    """The body of a request, within its limits of bytes and seconds. Raises ApiError."""
    most = settings.max_body
    if request.url.path == EXTRACT or (settings.media.mmproj and settings.max_body == MAX_BODY):
        most = max(most, document.MOST_BYTES)
    return await body_of(request, most, settings.timeout_request)


async def body_of(request: Request, most: int, seconds: float) -> bytes:
    """The body of a request, of at most so many bytes within so many seconds. Raises ApiError."""
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise ApiError(413, f"the body is above {most} bytes", code="body_too_large")
    except ClientDisconnect:
        raise gone() from None
    except TimeoutError:
        raise slow_client(seconds) from None
    return bytes(data)


E = TypeVar("E")


async def _one(events: Events, kind: type[E]) -> E:
    """The first event of a kind. Raises ApiError."""
    while True:
        _, event = await events.next()
        if isinstance(event, kind):
            return event


def _vector(found: np.ndarray, norm: int) -> list[Any]:
    """A vector or rows as a list, normalized as llama.cpp's embd_normalize says. Raises ApiError.

    norm: -1 leaves them unscaled; 0 scales the largest absolute element to 32760, the range of
    int16; p > 0 scales the p-norm to 1 (1: the sum of absolute elements, 2: Euclidean length).
    """
    if norm >= 0:
        most = float(np.abs(found).max(initial=0.0)) or 1.0
        scaled = found.astype(np.float64) / most  # within [-1, 1], so that no power overflows
        length = float((np.abs(scaled) ** norm).sum() ** (1 / norm)) if norm else 1 / 32760
        found = (scaled / (length or 1.0)).astype(np.float32)
    if not np.isfinite(found).all():
        raise ApiError(500, "the model failed: its vector is not of finite numbers", code="failed")
    if found.ndim == 1:
        values: list[Any] = found.tolist()
        return values
    return [row.tolist() for row in found]


def _packed(row: list[float]) -> str:
    return base64.b64encode(np.array(row, "<f4").tobytes()).decode()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled if the client disconnects."""
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
        # Until it has ended, a task owns its coroutine, and nothing else may close that.
        await asyncio.gather(working, left, return_exceptions=True)


class _EventStream(StreamingResponse):
    """The events of a stream; `end` is called when the client has stopped listening."""

    def __init__(
        self, text: AsyncIterator[str], media: str, headers: dict[str, str], end: Callable[[], None]
    ) -> None:
        super().__init__(text, media_type=media, headers=headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def on_error(request: Request, error: Exception) -> Response:
    """The reply to a request that failed with an error."""
    if isinstance(error, HTTPException):
        headers, status = dict(error.headers or {}), error.status_code
        error = ApiError(status, error.detail, code="not_found" if status == 404 else None)
        error.headers = headers
    if not isinstance(error, ApiError):
        error = ApiError(500, f"a bug of tamis: {type(error).__name__}", code="internal")
    return JsonReply(error.body_for(request.url.path), error.status, headers=error.headers)


def model_entry(name: str, created: float) -> dict[str, Any]:
    """A model in lists, with the fields that OpenAI's and Anthropic's clients read."""
    at = datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds")
    of_anthropic = {"type": "model", "display_name": name, "created_at": at}
    return {"id": name, "object": "model", "created": int(created), "owned_by": "tamis"} | (
        of_anthropic
    )


def modalities(*, sees: bool) -> dict[str, Any]:
    """What goes into a model and comes out, as llama.cpp's lists have it; sees: pictures go in."""
    inputs = ["text", "image"] if sees else ["text"]
    return {"architecture": {"input_modalities": inputs, "output_modalities": ["text"]}}


def listing(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A list of all models for both; it has one page."""
    first, last = (entries[i]["id"] if entries else None for i in (0, -1))
    pages = {"has_more": False, "first_id": first, "last_id": last}
    return {"object": "list", "data": list(entries)} | pages


def same_model(path: str, other: str) -> bool:
    """Whether two paths are the same file, or parts of the same model; reads the file system."""
    path, other = os.path.realpath(path), os.path.realpath(other)
    return path == other or len(groups([path, other])) == 1


def facts_of(path: Path) -> ModelFile:
    """Facts of a model's file for lists. Raises OSError, GGUFError."""
    stat, file = path.stat(), GGUFFile(path)
    tensors = list(file.tensors.values())
    kinds = Counter(tensor.type.name for tensor in tensors if len(tensor.shape) > 1)
    return ModelFile(
        path.name,
        stat.st_size,
        stat.st_mtime,
        str(file.metadata.get("general.architecture", "")),
        sum(math.prod(tensor.shape) for tensor in tensors),
        kinds.most_common(1)[0][0] if kinds else "",
        {k: v for k, v in file.metadata.items() if isinstance(v, str | int | float | bool)},
    )


STARTED = int(time.time())  # the time at which this process started


def measured(settings: Settings, worker: Worker) -> Response:
    """/metrics, in Prometheus' text format. Raises ApiError if metrics are switched off."""
    if not settings.metrics:
        why = "this server shows no metrics: start it with --metrics"
        raise ApiError(501, why, code="unsupported")
    headers = {"Process-Start-Time-Unix": str(STARTED)}
    kind = "text/plain; version=0.0.4"
    return PlainTextResponse(exposition(worker), headers=headers, media_type=kind)


def front(settings: Settings) -> Route:
    """/: the built-in page; it may run its own script and call this server, nothing else.

    The page has the attribute data-key where the server wants an API key. If the page is switched
    off, the reply is a line of text for clients that check whether there is a server.
    """
    data, policy = _page()
    if settings.access.keys:
        data = data.replace(b"<html ", b"<html data-key ", 1)
    headers = {"content-security-policy": policy, "x-frame-options": "DENY"}

    async def shown(_request: Request) -> Response:
        if not settings.page:
            return PlainTextResponse("tamis is running")
        return Response(data, media_type="text/html", headers=headers)

    return Route("/", shown)


def _page() -> tuple[bytes, str]:
    """The page, and a content security policy that allows its own script and style only."""
    data = (files("tamis.bindings.serve.http") / "page.html").read_bytes()

    def hashed(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), data, re.DOTALL)
        assert found is not None
        return "'sha256-" + base64.b64encode(hashlib.sha256(found[1]).digest()).decode() + "'"

    allowed = f"script-src {hashed('script')}; style-src {hashed('style')}"
    reached = "connect-src 'self'; img-src data:"  # its icon is in the page
    return data, f"default-src 'none'; {allowed}; {reached}; base-uri 'none'; form-action 'none'"
