"""A server of several models: each request goes to the application of the model it names.

If there is one model, it answers whatever name a request has.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from tamis.arch.load import arch_of
from tamis.bindings.serve.body import SMALL, Body, loads, seconds_of, small_fields
from tamis.bindings.serve.errors import ApiError, busy, invalid, loading, stopping
from tamis.bindings.serve.http import ollama_routes
from tamis.bindings.serve.http.app import (
    Settings,
    facts_of,
    front,
    listing,
    measured,
    modalities,
    model_entry,
    on_error,
    received,
    same_model,
    unless_gone,
)
from tamis.bindings.serve.http.guard import Guard, Log, Prefix
from tamis.bindings.serve.http.json_reply import JsonReply
from tamis.bindings.serve.http.model_events import ModelEvents
from tamis.bindings.serve.http.resumable import Resumable
from tamis.bindings.serve.models import Models, Offer, Running, named, unknown_model
from tamis.formats.gguf import GGUFError
from tamis.jit_kernels.backends import on_host
from tamis.version import __version__

FOR_EVER = timedelta(days=36500)  # shown in lists for a model that is never unloaded
_ASKED = ("model", "name", "keep_alive")
_TEXT = rb'"(?:[^"\\]++|\\.)*+"'
_WHOLE_TEXT = re.compile(_TEXT, re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_COLON = re.compile(rb"\s*+:\s*+")
_VALUE = re.compile(_TEXT + rb"|null|true|false|[-+.\dEe]{1,100}+", re.DOTALL)
_LONGEST_KEY = 100  # bytes, with escapes


class Asked(NamedTuple):
    """What a body says of its model: the name, and for how long to keep it loaded."""

    name: str | None
    keep: float | None


class Router:
    """The application of all models; `stop` ends every reply in progress."""

    def __init__(self, models: Models, settings: Settings, log: Log, only: Offer | None) -> None:
        """Make the router; only: the model that answers every request, or None."""
        self.models, self._settings, self._only = models, settings, only
        # Entries of ollama's lists and replies of /api/show, by the state of their files.
        self._entries: dict[tuple[str, float], dict[str, Any]] = {}
        self._shown: dict[tuple[str, float, bool], dict[str, Any]] = {}
        self._beside = ThreadPoolExecutor(1, "tamis-router")
        self._events = ModelEvents()
        models.changed = self._changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulled: dict[str, dict[str, Any]] = {}  # progress of models being fetched, by name
        self._routes_of_all = self._routes()
        self.app = Starlette(
            routes=self._routes_of_all,
            middleware=[
                Middleware(Prefix, prefix=settings.prefix),
                Middleware(Guard, access=settings.access, log=log, starts=self._starts),
                Middleware(Resumable, seconds=settings.timeout_request),
            ],
            exception_handlers={ApiError: on_error, HTTPException: on_error, Exception: on_error},
        )

    def _routes(self) -> list[Route]:
        ways = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]
        several = [
            Route("/v1/models", self.listed),
            Route("/models", self.listed),
            Route("/models", self.download, methods=["POST"]),
            Route("/models", self.delete, methods=["DELETE"]),
            Route("/models/sse", self.events),
            Route("/models/load", self.load, methods=["POST"]),
            Route("/models/unload", self.unload, methods=["POST"]),
            Route("/props", self.props),
            Route("/v1/models/{name:path}", self.one),
            Route("/api/tags", self.tags),
            Route("/api/version", partial(ollama_routes.version, self)),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/pull", partial(ollama_routes.pull, self), methods=["POST"]),
            Route("/api/delete", partial(ollama_routes.delete, self), methods=["DELETE"]),
            front(self._settings),
        ]
        own = [
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/ready", self.ready),
            Route("/api/ps", self.running),
            Route("/metrics", self.metrics),
            *([] if self._only else several),
        ]
        return [*own, Route("/{path:path}", self.forward, methods=ways)]

    def _starts(self, scope: Scope) -> bool:
        """Whether a request is for a model, so that models may have to be loaded and unloaded."""
        if self._only is not None:
            return False
        *own, _ = self._routes_of_all
        whole = any(route.matches(scope)[0] is Match.FULL for route in own)
        return not whole or (scope["path"] == "/props" and _asks_for_model(scope))

    def stop(self) -> None:
        """Fail all running and waiting jobs, so that connections end.

        May be called more than once.
        """
        self.models.stop()
        self._events.end()

    def _changed(self, name: str, state: str) -> None:
        """Tell clients the new state of a model."""
        self._events.tell("model_status", name, {"status": state})

    def close(self) -> None:
        """Wait after `stop` until nothing is running."""
        self._beside.shutdown(cancel_futures=True)
        self.models.close()

    # --- routes ----------------------------------------------------------------------------------

    async def forward(self, request: Request) -> Response:
        """Forward a request to its model, which is loaded if needed and stays until the end."""
        if self._only is not None:
            return _Forwarded(self.models, await self.models.take(self._only), None)
        body = await self.body(request)
        asked = await self._asked(body)
        offer = await self._offer(asked.name or request.query_params.get("model"))
        autoload = _switch(request.query_params.get("autoload"), "autoload")
        one = await unless_gone(request, self.models.take(offer, asked.keep, autoload))
        return _Forwarded(self.models, one, body)

    async def _asked(self, body: bytes) -> Asked:
        """The result of `asked_of`; large bodies are read one at a time, beside the loop.

        Raises ApiError.
        """
        if len(body) <= SMALL:
            return asked_of(body)
        return await asyncio.get_running_loop().run_in_executor(self._beside, asked_of, body)

    async def _offer(self, name: str | None) -> Offer:
        """The model of a name; without a name the last one used, or the only one.

        Raises ApiError.
        """
        offers = await self.models.offers()
        if name is not None:
            if (found := named(name, offers)) is None:
                raise unknown_model(name, offers)
            return found
        running = self.models.running
        if running or len(offers) == 1:
            return running[0].offer if running else offers[0]
        names = ", ".join(offer.name for offer in offers if not offer.hidden) or "none"
        raise invalid(f"the request names no model: there are {names}", "model")

    async def body(self, request: Request) -> bytes:
        """The bytes of a request. Raises ApiError."""
        return await received(request, self._settings)

    async def fields(self, request: Request) -> Body:
        """The fields of a small request. Raises ApiError."""
        return small_fields(await self.body(request))

    def serves(self, path: str) -> bool:
        """Whether a model's file is in use, under any path; reads the file system."""
        return any(same_model(path, used) for used in self.models.paths)

    async def running(self, _request: Request) -> Response:
        """/api/ps: the models that are loaded, with ollama's fields and some more."""
        found = [await self._ollama(one.offer) | _record(one) for one in self.models.running]
        return JsonReply({"models": found})

    async def tags(self, _request: Request) -> Response:
        """/api/tags: all models that can be loaded."""
        found = [await self._ollama(offer) for offer in await self._shown_offers()]
        return JsonReply({"models": found})

    async def _ollama(self, offer: Offer) -> dict[str, Any]:
        """A model in ollama's lists; only its name if its file cannot be read."""
        key = offer.path, offer.modified
        if key not in self._entries:
            try:
                facts = await asyncio.to_thread(facts_of, Path(offer.path))
                self._entries[key] = ollama_routes.entry(offer.name, facts)
            except (OSError, GGUFError):
                return {"name": offer.name, "model": offer.name}
        return self._entries[key]

    async def show(self, request: Request) -> Response:
        """/api/show: facts of a model from its file alone; nothing is loaded or unloaded."""
        offer = await self._named(request)
        sees = await asyncio.to_thread(self.models.sees, offer)
        key = offer.path, offer.modified, sees
        if key not in self._shown:
            try:
                self._shown[key] = await asyncio.to_thread(self._described, offer, sees)
            except (OSError, ValueError) as error:
                raise ApiError(503, f"the model's file: {error}", code="unavailable") from None
        return JsonReply(self._shown[key])

    def _described(self, offer: Offer, sees: bool) -> dict[str, Any]:
        """The reply of /api/show for a model.

        Raises OSError, GGUFError, TokenizerError, ArchError.
        """
        facts = facts_of(Path(offer.path))
        predicts = not arch_of(facts.arch).is_encoder
        return ollama_routes.described(facts, self.models.text(offer), predicts, sees)

    async def listed(self, request: Request) -> Response:
        """/v1/models: all models that can be loaded; with ?reload=1 after presets are read anew."""
        if request.query_params.get("reload"):
            try:
                await self.models.reload()
            except (ValueError, OSError) as error:
                raise ApiError(500, f"the presets stay as they were: {error}") from None
            self._events.tell("models_reload", "*")
        return JsonReply(listing(await self._listed(await self._shown_offers())))

    async def _shown_offers(self) -> list[Offer]:
        return [offer for offer in await self.models.offers() if not offer.hidden]

    async def events(self, _request: Request) -> Response:
        """/models/sse: what happens to models from now on, as server-sent events."""
        return StreamingResponse(self._events.stream(), media_type="text/event-stream")

    async def download(self, request: Request) -> Response:
        """POST /models: begin to fetch a model; /models/sse tells how far it is."""
        body = await self.fields(request)
        lines = ollama_routes.pulled(ollama_routes.to_pull(body))
        name = body.text("model") or body.text("name") or ""
        if named(name, await self.models.offers()) is not None:
            raise invalid(f"model {name} is installed already", "model")
        first = await anext(lines)
        if "error" in first:
            raise ApiError(429, first["error"], code="busy")
        task = asyncio.ensure_future(self._tell_pull(name, lines))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JsonReply({"success": True})

    async def _tell_pull(self, name: str, lines: AsyncIterator[dict[str, Any]]) -> None:
        """Tell clients how far a pull is, until its end."""
        last: dict[str, Any] = {}
        try:
            async for last in lines:
                if "total" in last:
                    self._pulled[name] = {name: {"done": last["completed"], "total": last["total"]}}
                    self._events.tell("download_progress", name, self._pulled[name])
        finally:
            self._pulled.pop(name, None)
        if "error" in last:
            self._events.tell("download_failed", name, {"error": last["error"]})
        else:
            self._events.tell("download_finished", name)

    async def delete(self, request: Request) -> Response:
        """DELETE /models?model=NAME: remove an installed model's files."""
        name = request.query_params.get("model")
        if not name:
            raise invalid("the request names no model", "model")
        found = named(name, await self.models.offers())
        await asyncio.to_thread(ollama_routes.remove, self, found.name if found else name)
        self._events.tell("model_remove", found.name if found else name)
        return JsonReply({"success": True})

    async def one(self, request: Request) -> Response:
        """/v1/models/NAME: the model of that name."""
        name, offers = request.path_params["name"], await self.models.offers()
        if (offer := named(name, offers)) is None:
            raise unknown_model(name, offers)
        return JsonReply((await self._listed([offer]))[0])

    async def load(self, request: Request) -> Response:
        """/models/load: begin to load a model."""
        self.models.load(await self._named(request))
        return JsonReply({"success": True})

    async def unload(self, request: Request) -> Response:
        """/models/unload: unload a model as soon as no request uses it."""
        offer = await self._named(request)
        if not self.models.unload(offer.name):
            raise invalid(f"model {offer.name} is not loaded", "model")
        return JsonReply({"success": True})

    async def _named(self, request: Request) -> Offer:
        name = (await self._asked(await self.body(request))).name
        if name is None:
            raise invalid("the request names no model", "model")
        return await self._offer(name)

    async def props(self, request: Request) -> Response:
        """/props: the server's properties, or with ?model=NAME those of a model."""
        if _asks_for_model(request.scope):
            return await self.forward(request)
        found = {
            "role": "router",
            "max_instances": self.models.n_model or 0,
            "models_autoload": self.models.autoload,
            "build_info": f"b{__version__}",
        }
        return JsonReply(found)

    async def _listed(self, offers: list[Offer]) -> list[dict[str, Any]]:
        """What lists have of these models; which of them take pictures is read beside the loop."""
        seen = await asyncio.to_thread(lambda: [self.models.sees(offer) for offer in offers])
        return [self._entry(offer, sees=sees) for offer, sees in zip(offers, seen, strict=True)]

    def _entry(self, offer: Offer, *, sees: bool) -> dict[str, Any]:
        state = self.models.state(offer.name)
        meta = {"n_bytes": offer.n_byte, "loaded": state == "loaded"}
        status: dict[str, Any] = {"value": state}
        status |= {"args": list(offer.args)} if offer.args else {}
        status |= {"failed": True} if offer.name in self.models.failed else {}
        words = {"aliases": list(offer.aliases), "tags": list(offer.tags)}
        head = model_entry(offer.name, offer.modified) | words | modalities(sees=sees)
        return head | {"meta": meta, "status": status}

    async def health(self, _request: Request) -> Response:
        """/health: whether the server is alive; it is not while it is stopping."""
        if self.models.stopped:
            raise stopping()
        return JsonReply({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """/ready: whether a request would be accepted now."""
        if self.models.stopped:
            raise stopping()
        if self.models.full:
            error = busy(self.models.n_waiting)
            error.status = 503
            raise error
        running = [one for one in self.models.running if one.worker.ready]
        if self._only is not None and not running:
            raise loading()
        return JsonReply({"status": "ready"})

    async def metrics(self, _request: Request) -> Response:
        """/metrics, of all models together."""
        return measured(self._settings, self.models)


class _Forwarded(Response):
    """The reply of a model's application; at its end the model is released."""

    def __init__(self, models: Models, one: Running, body: bytes | None) -> None:
        super().__init__()
        self._models, self._one, self._data = models, one, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = self._data

        async def again() -> Message:
            nonlocal data
            if data is None:
                return await receive()
            part, data = data, None
            return {"type": "http.request", "body": part, "more_body": False}

        try:
            assert self._one.served is not None
            await self._one.served.app(scope, again, send)
        finally:
            self._models.give_back(self._one)


def asked_of(body: bytes) -> Asked:
    """The model's name, and how long to keep it, from a request's JSON; None for those it lacks.

    A body that is not JSON is left for the model's application to refuse. Raises ApiError for a
    wrong value.
    """
    try:
        found = loads(body) if len(body) <= SMALL else _outer_fields(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return Asked(None, None)
    name, keep = found.get("model") or found.get("name"), found.get("keep_alive")
    if name is not None and not isinstance(name, str):
        raise invalid("model is no string", "model")
    try:
        return Asked(name, None if keep is None else seconds_of(keep))
    except ValueError as error:
        raise invalid(str(error), "keep_alive") from None


def _outer_fields(body: bytes) -> dict[str, Any]:
    """The fields in _ASKED of a large JSON object; a value that is not text or number is [None].

    It reads one string at a time, so that other threads run in between; json.loads of the whole
    would block them for seconds. Stretches without strings are counted in one step, which takes
    milliseconds for megabytes. Raises ValueError.
    """
    found: dict[str, bytes | None] = {}
    depth, at = 0, 0
    while (begin := body.find(b'"', at)) >= 0:
        if brackets := body[at:begin].translate(None, _NO_BRACKETS):
            opening = brackets.count(b"{") + brackets.count(b"[")
            depth += 2 * opening - len(brackets)
        if (text := _WHOLE_TEXT.match(body, begin)) is None:
            raise ValueError("a text without an end")
        at = text.end()
        colon = _COLON.match(body, at) if depth == 1 and at - begin <= _LONGEST_KEY else None
        if colon is None:
            continue
        key = json.loads(text[0]) if b"\\" in text[0] else text[0][1:-1].decode()
        if key in _ASKED:
            value = _VALUE.match(body, colon.end())
            found[key] = None if value is None else value[0]
            at = colon.end() if value is None else value.end()
    return {key: [None] if raw is None else loads(raw) for key, raw in found.items()}


def _switch(text: str | None, name: str) -> bool | None:
    """The switch of a query's parameter; None without one. Raises ApiError."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if text is not None and text not in words:
        raise invalid(f"{name} is {text[:40]!r}, expected true or false", name)
    return None if text is None else words[text]


def _asks_for_model(scope: Scope) -> bool:
    return "model" in QueryParams(scope["query_string"])


def _record(one: Running) -> dict[str, Any]:
    loaded = one.worker.loaded
    assert loaded is not None
    left = one.until - time.monotonic()
    kept = one.keep if one.users else left
    until = datetime.now(UTC) + (FOR_EVER if math.isinf(kept) else timedelta(seconds=max(0, kept)))
    return {
        "size": loaded.n_byte,
        "size_vram": 0 if on_host(loaded.device) else loaded.n_byte,
        "expires_at": until.isoformat(),
        "context_length": loaded.n_ctx,
        "device": loaded.device,
        "requests": one.users,
        "for_ever": math.isinf(one.keep),
    }
