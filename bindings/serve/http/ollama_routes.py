"""Ollama's paths except chats and completions: models, their facts, embeddings."""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tamis.bindings.drop_in.chat import ChatFormat
from tamis.bindings.serve.api import ollama
from tamis.bindings.serve.body import Body, parse, seconds_of
from tamis.bindings.serve.errors import ApiError, invalid
from tamis.bindings.serve.http.app import ModelFile, Server
from tamis.bindings.serve.http.json_reply import JsonReply, told
from tamis.bindings.serve.replies import as_json
from tamis.bindings.serve.text import TextModel
from tamis.fetch import registry
from tamis.fetch.hub import HubSpec

API_VERSION = "0.13.0"  # of ollama, whose API this is: clients require a minimum
NDJSON = "application/x-ndjson"
MOST_PULLS = 4  # at once
LONGEST_NAME = 512  # characters of a model's name
_pulls = threading.BoundedSemaphore(MOST_PULLS)


def routes(server: Server) -> list[Route]:
    """All of these routes."""

    def post(path: str, handler: Any, method: str = "POST") -> Route:
        return Route(path, partial(handler, server), methods=[method])

    def get(path: str, handler: Any) -> Route:
        return Route(path, partial(handler, server))

    return [
        post("/api/chat", _chat),
        post("/api/generate", _generate),
        post("/api/embed", _embed),
        post("/api/embeddings", _embeddings),
        post("/api/show", _show),
        post("/api/pull", pull),
        post("/api/delete", delete, "DELETE"),
        get("/api/tags", _tags),
        get("/api/version", version),
    ]


async def _chat(server: Server, request: Request) -> Response:
    data = await server.body(request)
    body = _small(data)
    if body is not None and not body.get("messages"):
        return _loaded(server, body, {"message": {"role": "assistant", "content": ""}})
    return await server.complete("ollama chat", ollama.Chat, request, data)


async def _generate(server: Server, request: Request) -> Response:
    data = await server.body(request)
    body = _small(data)
    if body is not None and not body.get("prompt") and not body.get("suffix"):
        return _loaded(server, body, {"response": ""})
    return await server.complete("ollama generate", ollama.Generate, request, data)


def _small(data: bytes) -> Body | None:
    """The body of a request that may only load a model.

    None for others, which are read elsewhere.
    """
    return parse(data) if len(data) <= 1024 else None


def _loaded(server: Server, body: Body, empty: dict[str, Any]) -> Response:
    """Handle a request without a prompt: it loads the model, or unloads it with keep_alive 0."""
    keep = body.get("keep_alive")
    try:
        reason = "unload" if keep is not None and seconds_of(keep) == 0 else "load"
    except ValueError as error:
        raise invalid(str(error), "keep_alive") from None
    head = {"model": server.about.model, "created_at": datetime.now(UTC).isoformat()}
    return JsonReply(head | empty | {"done": True, "done_reason": reason})


async def _embed(server: Server, request: Request) -> Response:
    begin = time.monotonic()
    inputs, rows = await server.embedded(request, "ollama embed")
    took = int(1e9 * (time.monotonic() - begin))
    found = {
        "model": server.about.model,
        "embeddings": rows,
        "total_duration": took,
        "load_duration": 0,
        "prompt_eval_count": sum(map(len, inputs.texts)),
    }
    return await server.written(lambda: found, told(inputs.ignored))


async def _embeddings(server: Server, request: Request) -> Response:
    inputs, rows = await server.embedded(request, "ollama embed")
    found = {"embedding": rows[0] if rows else []}
    return JsonReply(found, headers=told(inputs.ignored))


class Bodies(Protocol):
    """What these routes need of any server, of one model or of several."""

    async def fields(self, request: Request) -> Body:
        """The fields of a small request. Raises ApiError."""

    def serves(self, path: str) -> bool:
        """Whether a model's file is in use."""


async def version(_server: Any, _request: Request) -> Response:
    """The version of ollama, whose API this is."""
    return JsonReply({"version": API_VERSION})


async def _tags(server: Server, request: Request) -> Response:
    return JsonReply({"models": [entry(server.about.model, await server.aside(server.facts))]})


def entry(name: str, model: ModelFile) -> dict[str, Any]:
    """A model as an entry of a list."""
    digest = hashlib.sha256(f"{name} {model.n_byte} {model.modified}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(model.modified, UTC).isoformat(),
        "size": model.n_byte,
        "digest": digest,
        "details": _details(model),
    }


def _details(model: ModelFile) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": model.arch,
        "families": [model.arch],
        "parameter_size": _billions(model.n_param),
        "quantization_level": model.kind,
    }


def _billions(n: int) -> str:
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"


async def _show(server: Server, request: Request) -> Response:
    body = await server.fields(request)
    if not any(isinstance(body.get(name), str) for name in ("model", "name")):
        raise invalid("model is no name", "model")
    model = await server.aside(server.facts)
    predicts = server.predicts
    sees = bool(server.settings.media.mmproj)
    return JsonReply(await server.aside(lambda: described(model, server.text, predicts, sees)))


def described(
    model: ModelFile, text: TextModel, predicts: bool, sees: bool = False
) -> dict[str, Any]:
    """The reply of /api/show; predicts: whether the model generates text; sees: takes pictures."""
    return {
        "license": str(model.metadata.get("general.license", "")),
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": text.template_source,
        "details": _details(model),
        "model_info": dict(model.metadata),
        "capabilities": [*_capabilities(text), *["vision"] * sees] if predicts else ["embedding"],
        "modified_at": datetime.fromtimestamp(model.modified, UTC).isoformat(),
    }


def _capabilities(text: TextModel) -> list[str]:
    """The abilities of a model that generates text, in ollama's words."""
    found = ["completion"]
    with contextlib.suppress(ValueError):  # a template that cannot be used
        form = ChatFormat(text, None).parsed(tools=True)
        found += ["tools"] + (["thinking"] if form.think is not None else [])
    fills = {"pre", "suf", "mid"} <= text.vocab.fim.keys()
    return found + (["insert"] if fills else [])


async def pull(server: "Bodies", request: Request) -> Response:
    """Fetch a model into the folder of models, as `tamis pull` does."""
    body = await server.fields(request)
    lines = pulled(to_pull(body))
    if body.switch("stream") is not False:
        return StreamingResponse((as_json(each) + "\n" async for each in lines), media_type=NDJSON)
    last = [each async for each in lines][-1]
    if "error" in last:
        raise ApiError(500, last["error"], code="failed")
    return JsonReply(last)


def to_pull(body: Body) -> str:
    """The name of the model that a request wants to be pulled, as `registry.pull` takes it.

    Raises ApiError.
    """
    name = _model_name(body)
    if "/" in name.split(":")[0] and not name.startswith("hf:"):
        name = "hf:" + name.removeprefix("hf.co/").removeprefix("huggingface.co/")
    name = name.removesuffix(":latest")
    if name.startswith("hf:"):
        try:
            HubSpec.parse(name)
        except registry.ModelError as error:
            raise invalid(str(error), "model") from None
    elif name not in registry.KNOWN:
        raise ApiError(404, "there is no model of that name to pull", code="model_not_found")
    return name


async def pulled(name: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the progress of a pull, which continues if the client disconnects."""
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def say(stage: str, done: int, total: int | None) -> None:
        line: dict[str, Any] = {"status": stage}
        if total:
            line |= {"digest": name, "total": total, "completed": done}
        loop.call_soon_threadsafe(told.put_nowait, line)

    def pull() -> None:
        try:
            registry.pull(name, progress=say)
            last: dict[str, Any] = {"status": "success"}
        except (registry.ModelError, OSError, ValueError) as error:
            last = {"error": str(error)}
        # from a library: without an answer the client would wait for ever
        except Exception as error:
            last = {"error": f"a bug of tamis: {type(error).__name__}"}
        finally:
            _pulls.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(told.put_nowait, last)
            loop.call_soon_threadsafe(told.put_nowait, None)

    if not _pulls.acquire(blocking=False):
        yield {"error": f"{MOST_PULLS} models are being pulled already: try again later"}
        return
    # Not a thread of the loop's pool: the server's end must not wait for a download.
    threading.Thread(target=pull, name="tamis-pull", daemon=True).start()
    yield {"status": "pulling manifest"}
    shown = 0.0
    while (line := await told.get()) is not None:
        whole = line.get("completed") == line.get("total")
        if whole or time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            yield line


async def delete(server: "Bodies", request: Request) -> Response:
    """Remove a model's files from the folder of models; never one that is served."""
    name = _model_name(await server.fields(request)).removesuffix(":latest")
    await asyncio.to_thread(remove, server, name)
    return Response(status_code=200)


def remove(server: "Bodies", name: str) -> None:
    """Remove all parts of a model. Raises ApiError."""
    for model in registry.installed():
        if model.name == name:
            if any(server.serves(str(path)) for path in registry.model_files(model)):
                raise ApiError(409, "the model is being served: it stays", code="in_use")
            try:
                registry.remove(model)
            except OSError as error:
                why = error.strerror or "it cannot be removed"
                raise ApiError(500, f"the model's file: {why}", code="failed") from None
            return
    raise ApiError(404, "there is no model of that name", code="model_not_found")


def _model_name(body: Body) -> str:
    """The name of the model that a request names. Raises ApiError."""
    name = body.text("model") or body.text("name") or ""
    if len(name) > LONGEST_NAME:
        expected = f"expected at most {LONGEST_NAME}"
        raise invalid(f"model has {len(name)} characters, {expected}", "model")
    return name
