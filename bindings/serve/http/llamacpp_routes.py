"""llama.cpp's paths except completions: tokens, templates, slots, properties, embeddings."""

import asyncio
import math
import os
import re
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tamis.bindings.serve.api import llamacpp
from tamis.bindings.serve.body import parse, small_fields
from tamis.bindings.serve.errors import ApiError, invalid
from tamis.bindings.serve.http.app import Server
from tamis.bindings.serve.http.json_reply import JsonReply, told
from tamis.bindings.serve.jobs import Keeping, SlotState
from tamis.bindings.serve.media import MARKER
from tamis.bindings.serve.requests import MAX_ADAPTERS

_FILE = re.compile(r"[\w][\w.\-]*")  # neither a folder nor a hidden file
LONGEST_FILE = 200  # bytes of a file's name


def routes(server: Server) -> list[Route]:
    """All of these routes."""

    def post(path: str, handler: Any) -> Route:
        return Route(path, partial(handler, server), methods=["POST"])

    def get(path: str, handler: Any) -> Route:
        return Route(path, partial(handler, server))

    ranked = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
    return [
        post("/tokenize", _tokenize),
        post("/detokenize", _detokenize),
        post("/apply-template", _template),
        *(post(f"{prefix}/chat/completions/input_tokens", _count) for prefix in ("", "/v1")),
        post("/embedding", _embedding),
        post("/embeddings", _embedding),
        *(post(path, _rerank) for path in ranked),
        get("/props", _props),
        get("/tokenizer_info", _tokenizer_info),
        get("/slots", _slots),
        post("/slots/{slot}", _slot),
        get("/lora-adapters", _adapters),
        post("/lora-adapters", _set_adapters),
    ]


async def _tokenize(server: Server, request: Request) -> Response:
    """/tokenize: {"content": text} becomes {"tokens": ids}.

    The flags are add_special, parse_special and with_pieces. A request with a prompt or messages
    has vLLM's form.
    """
    return await server.relayed(request, "tokenize")


async def _detokenize(server: Server, request: Request) -> Response:
    text = await server.read(request, "detokenize")
    return JsonReply({"content": text, "prompt": text})  # llama.cpp's name, and vLLM's


async def _template(server: Server, request: Request) -> Response:
    return JsonReply({"prompt": await server.read(request, "template")})


async def _count(server: Server, request: Request) -> Response:
    n = await server.read(request, "count chat")
    return JsonReply({"object": "response.input_tokens", "input_tokens": n})


async def _embedding(server: Server, request: Request) -> Response:
    """A list of rows for each text: one row with pooling, else one per token."""
    pooled = server.pooling != "none"
    inputs, rows = await server.embedded(request, "embeddings", pooled=pooled)
    return await server.written(
        lambda: [{"index": i, "embedding": [row] if pooled else row} for i, row in enumerate(rows)],
        told(inputs.ignored),
    )


async def _rerank(server: Server, request: Request) -> Response:
    """Documents ranked by how well they answer a query, in Jina's form.

    With texts, in TEI's form.
    """
    if not server.ranks:
        raise ApiError(
            501,
            "this model ranks no documents: it has no head for that",
            code="unsupported",
            param="model",
        )
    data = await server.body(request)
    body = await asyncio.to_thread(parse, data)
    documents = llamacpp.documents(body)
    most = body.integer("top_n", 1, 1 << 30)
    inputs = await server.read(request, "rerank", server.load_inputs, data)
    found = await server.vectors(request, inputs, "rank")
    scores = [float(each[0]) for each in found]
    if not all(map(math.isfinite, scores)):
        raise ApiError(500, "the model failed: a score is no number", code="failed")
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:most]
    if body.get("texts") is not None:
        shown = body.flag("return_text")
        more = [{"text": documents[i]} if shown else {} for i in best]
        ranked = [
            {"index": i, "score": scores[i]} | each for i, each in zip(best, more, strict=True)
        ]
        return await server.written(lambda: ranked, told(inputs.ignored))
    shown = body.flag("return_documents")
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": documents[i]}} if shown else {})
        for i in best
    ]
    n = sum(map(len, inputs.texts))
    usage = {"prompt_tokens": n, "total_tokens": n}
    head = {"model": server.about.model, "object": "list", "usage": usage}
    return await server.written(lambda: head | {"results": results}, told(inputs.ignored))


async def _props(server: Server, request: Request) -> Response:
    usual = await server.aside(server.usual_settings)
    settings = {"id": 0, "n_ctx": server.about.n_ctx, "is_processing": False, "params": usual}
    return JsonReply(
        {
            "default_generation_settings": settings,
            "total_slots": server.n_slots,
            "model_alias": server.about.model,
            "model_path": server.model_file,
            "modalities": {"vision": bool(server.settings.media.mmproj), "audio": False},
            "media_marker": MARKER,
            "chat_template": server.text.template_source,
            "bos_token": _token(server, server.text.vocab.bos),
            "eos_token": _token(server, server.text.vocab.eos),
            "build_info": server.about.fingerprint,
            "is_sleeping": server.worker.asleep,
        }
    )


async def _tokenizer_info(server: Server, request: Request) -> Response:
    """The tokenizer in terms of its HF configuration, as in vLLM."""
    vocab, tokenizer = server.text.vocab, server.text.unbounded
    names = {"bos": vocab.bos, "eos": vocab.eos, "unk": vocab.unk, "pad": vocab.pad}
    found = {f"{k}_token": None if i is None else vocab.tokens[i] for k, i in names.items()}
    return JsonReply(
        {
            "tokenizer_class": "GGUF",
            "tokenizer_model": vocab.model,
            **found,
            "add_bos_token": tokenizer.add_bos,
            "add_eos_token": tokenizer.add_eos,
            "vocab_size": len(vocab),
            "model_max_length": server.about.n_ctx,
            "chat_template": server.text.template_source,
        }
    )


def _token(server: Server, i: int | None) -> str:
    return "" if i is None else server.text.vocab.tokens[i]


async def _slots(server: Server, request: Request) -> Response:
    if not server.settings.slots:
        raise ApiError(
            501, "this server shows no slots: start it without --no-slots", code="unsupported"
        )
    found = [
        {
            "id": i,
            "n_ctx": server.about.n_ctx,
            "speculative": False,
            "is_processing": slot.busy,
            "n_past": slot.n_past,
            "n_prompt_tokens": slot.n_prompt,
            "next_token": [{"n_decoded": slot.n_answer, "n_remain": slot.n_left}],
        }
        for i, slot in enumerate(server.worker.slots or [SlotState()] * server.n_slots)
    ]
    if "fail_on_no_slot" in request.query_params and all(slot["is_processing"] for slot in found):
        raise ApiError(503, "no slot is free", code="unavailable")
    return JsonReply(found)


async def _slot(server: Server, request: Request) -> Response:
    """Save a slot's sequence to a file of the server's folder, or restore, erase or compress it."""
    slot, action = _number(request.path_params["slot"]), request.query_params.get("action")
    if action not in ("save", "restore", "erase", "compress"):
        expected = "expected save, restore, erase or compress"
        raise invalid(f"action is {action!r}, {expected}"[:200], "action")
    if not 0 <= slot < server.n_slots:
        raise invalid(f"there is no such slot, expected 0 to {server.n_slots - 1}", "id")
    if action == "compress":
        return await _compress(server, request, slot)
    folder = server.settings.slot_folder
    if folder is None:
        raise ApiError(
            501,
            "this server keeps no slots in files: start it with --slot-save-path",
            code="unsupported",
        )
    path = folder
    if action != "erase":
        name = (await server.fields(request)).text("filename") or ""
        if not _FILE.fullmatch(name) or len(name.encode()) > LONGEST_FILE:
            raise invalid("filename is no short name of a file without a folder", "filename")
        path = folder / name
        if action == "restore" and not os.path.isfile(path):
            raise invalid("there is no such file", "filename")

    def job(emit: Any) -> Keeping:
        return Keeping([], emit, action=action, path=str(path), slot=slot)

    kept = await server.run_kept(request, job)
    ms, n = 1000 * kept.seconds, kept.n_token
    found: dict[str, Any] = {"id_slot": slot}
    if action == "save":
        found |= {"filename": path.name, "n_saved": n, "n_written": kept.n_byte}
        found |= {"timings": {"save_ms": ms}}
    elif action == "restore":
        found |= {"filename": path.name, "n_restored": n, "n_read": kept.n_byte}
        found |= {"timings": {"restore_ms": ms}}
    else:
        found |= {"n_erased": n}
    return JsonReply(found)


async def _compress(server: Server, request: Request, slot: int) -> Response:
    """Compress the KV cache of a slot to the share `keep` of its positions."""
    keep = (await server.fields(request)).number("keep", 1 / 3, 0.01, 1)

    def job(emit: Any) -> Keeping:
        return Keeping([], emit, action="compress", path=str(keep), slot=slot)

    kept = await server.run_kept(request, job)
    found = {"id_slot": slot, "n_tokens": kept.n_byte, "n_kept": kept.n_token}
    return JsonReply(found | {"timings": {"compress_ms": 1000 * kept.seconds}})


def _number(text: str) -> int:
    """The number of a slot; -1 for a text that is not one."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


async def _adapters(server: Server, request: Request) -> Response:
    """The LoRA adapters, and the scales of requests that name none."""
    found = [
        {"id": i, "path": path, "scale": scale, "task_name": "", "prompt_prefix": ""}
        for i, ((path, _), scale) in enumerate(
            zip(server.settings.loras, server.lora_scales, strict=True)
        )
    ]
    return JsonReply(found)


async def _set_adapters(server: Server, request: Request) -> Response:
    """Set those scales by a list of {id, scale}; adapters that are not in it are switched off."""
    data = await server.body(request)
    body = small_fields(b'{"lora":' + data + b"}")
    server.lora_scales = server.scales_of(body.records("lora", MAX_ADAPTERS))
    return JsonReply({"success": True})
