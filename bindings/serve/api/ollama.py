"""Ollama's chats and completions: options, NDJSON streams, durations in nanoseconds."""

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from tamis.bindings.drop_in import chat
from tamis.bindings.drop_in.completion import Piece
from tamis.bindings.serve.api.anthropic import arguments
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError, invalid
from tamis.bindings.serve.media import part_of_base64
from tamis.bindings.serve.replies import About, Reply, as_json
from tamis.bindings.serve.requests import MAX_MESSAGES, MOST_TOKENS, Reader, parts_of
from tamis.bindings.serve.tasks import Inputs, Task
from tamis.text.tool_calls import Delta

# Options about how a model is run; they are fixed when the server starts.
_OF_THE_SERVER = {
    "f16_kv", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_keep", "num_thread", "numa",
    "use_mlock", "use_mmap", "vocab_only", "logits_all", "embedding_only",
}  # fmt: skip
_RENAMED = {"num_predict": "max_tokens"}
_EFFORTS = ("low", "medium", "high")


def read_chat(reader: Reader, body: Body) -> Task:
    """The task of a request to /api/chat. Raises ApiError."""
    fields = _options(body, reader)
    messages = [_message(m) for m in body.records("messages", MAX_MESSAGES)]
    fields |= {"messages": messages} | _format(body)
    fields.setdefault("add_generation_prompt", None)
    return reader.chat_task(Body(fields | _thinking(body)))


def read_generate(reader: Reader, body: Body) -> Task:
    """The task of /api/generate: a prompt in the model's template, or raw. Raises ApiError."""
    fields = _options(body, reader)
    prompt, system = body.text("prompt") or "", body.text("system")
    for name in ("template", "context"):
        if body.get(name):
            raise invalid(f"{name} is not supported: leave it out", name)
    taken = ("raw", "system", "context", "images", "template")
    fields = {k: v for k, v in fields.items() if k not in taken}
    images = _images(body.get("images"), "images")
    if body.flag("raw") or body.get("suffix"):
        if images:
            raise invalid("images go with a template: leave out raw and suffix", "images")
        form = _format(body)
        logprobs = fields.pop("top_logprobs", None) or 0
        wanted = fields.pop("logprobs", None)
        fields |= {"logprobs": logprobs if wanted else None}
        fields.setdefault("max_tokens", -1)
        return reader.completion_task(Body(fields | {"prompt": prompt} | form))
    fields.pop("prompt", None)
    system_message = [{"role": "system", "content": system}] if system else []
    content = [*images, {"type": "text", "text": prompt}] if images else prompt
    messages = [*system_message, {"role": "user", "content": content}]
    fields |= {"messages": messages} | _format(body)
    return reader.chat_task(Body(fields | _thinking(body)))


def read_embed(reader: Reader, body: Body) -> Inputs:
    """The texts of /api/embed or /api/embeddings.

    `truncate` cuts texts that are too long, as in ollama.

    Raises ApiError.
    """
    given = body.get("input") if body.get("input") is not None else body.get("prompt")
    if given in ([], ""):
        return Inputs([])
    found = reader.prompts(given, "input", truncate=body.switch("truncate") is not False)
    options = parts_of("options", body.record("options") or {}, tuple(_OF_THE_SERVER))
    wanted = reader.vectors_wanted(body, [ids for _, ids in found])
    return wanted._replace(ignored=(*wanted.ignored, *options))


def _options(body: Body, reader: Reader) -> dict[str, Any]:
    """A request's options as fields of OpenAI's API and llama.cpp's."""
    taken = ("options", "format", "think", "messages", "truncate", "shift", "prompt")
    fields = {k: v for k, v in body.fields.items() if k not in taken}
    fields["stream"] = body.switch("stream") is not False
    if body.switch("shift"):
        fields["context_shift"] = True
    for name, value in (body.record("options") or {}).items():
        if name == "num_ctx":
            wanted = Body({name: value}).integer(name, 0, MOST_TOKENS)
            if wanted is not None and wanted > reader.limits.n_ctx:
                fields["options.num_ctx"] = value  # reported among the fields without effect
        elif name == "num_predict":
            fields["max_tokens"] = -1 if value == -2 else value
        elif name not in _OF_THE_SERVER:
            fields[_RENAMED.get(name, name)] = value
    return fields


def _format(body: Body) -> dict[str, Any]:
    form = body.get("format")
    if form in (None, ""):
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(form, dict):
        raise invalid("format is no JSON schema, expected one, or json", "format")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form}}}


def _thinking(body: Body) -> dict[str, Any]:
    think = body.get("think")
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"enable_thinking": think}
    if think not in _EFFORTS:
        raise invalid("think is none of true, false, low, medium, high", "think")
    return {"enable_thinking": True, "reasoning_effort": think}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    kept = ("role", "content", "name", "tool_call_id")
    found = {k: message[k] for k in kept if message.get(k) is not None}
    found.setdefault("content", "")
    if images := _images(message.get("images"), "messages"):
        found["content"] = [*images, {"type": "text", "text": found["content"]}]
    if message.get("thinking"):
        found["reasoning_content"] = str(message["thinking"])
    if message.get("tool_name"):
        found["name"] = str(message["tool_name"])
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        found["tool_calls"] = [_call(call, i) for i, call in enumerate(calls)]
    return found


def _images(given: Any, param: str) -> list[dict[str, Any]]:
    """Pictures in base64, as parts of OpenAI's messages. Raises ApiError."""
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise invalid(f"{param}: images is no list of texts in base64", param)
    return [part_of_base64(each) for each in given]


def _call(call: Any, i: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid("a call has no function with a name", "messages")
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    name = str(call.get("id") or f"call_{i}")
    return {
        "id": name,
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


class _Ollama(Reply):
    """What both replies share: lines of JSON, and the statistics at the end."""

    media = "application/x-ndjson"
    closing = ""

    def _line(self, **fields: Any) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {"model": self.about.model, "created_at": now, **fields}

    def _end(self, piece: Piece) -> dict[str, Any]:
        c = piece.counts
        read, answered = int(1e9 * c.read_seconds), int(1e9 * c.answer_seconds)
        return {
            "done": True,
            "done_reason": piece.finish,
            "total_duration": read + answered,
            "load_duration": 0,
            "prompt_eval_count": self.task.prompt_tokens,
            "prompt_eval_duration": read,
            "eval_count": c.n_answer,
            "eval_duration": answered,
        }

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        if self.task.requests[0].logprobs is None:
            return {}
        tokens = [token for piece in pieces for token in piece.tokens]
        return {"logprobs": chat.logprobs_of(tokens)["content"]}

    def frame(self, event: Any, write: Callable[[Any], str] = as_json) -> str:
        """An event as a line of JSON."""
        return write(event) + "\n"

    def error(self, error: ApiError, path: str) -> str:
        """An error as a line of JSON."""
        return self.frame({"error": error.message})


class Chat(_Ollama):
    """/api/chat."""

    def alive(self) -> str:
        """A line without text, as NDJSON has no comments."""
        return self.frame(self._line(message=_spoken(), done=False))

    def __init__(self, task: Task, about: About) -> None:
        super().__init__(task, about)
        assert task.wanted is not None
        self._parser = chat.Parser(task.wanted, about.format())
        self._call: dict[str, str] | None = None  # the call that is not complete yet

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """Lines with thoughts and text; a call is sent when it is complete."""
        found = []
        for delta in self._parser.push(piece):
            found += self._of(delta)
        if piece.finish is not None:
            found += self._called()
        logprobs = self._logprobs([piece])
        for message in found:
            yield self._line(message=_spoken(**message), done=False, **logprobs)
            logprobs = {}
        if piece.finish is not None:
            yield self._line(message=_spoken(), **self._end(piece))

    def _of(self, delta: Delta) -> list[dict[str, Any]]:
        found = self._called() if delta.name or delta.index is None else []
        if delta.name:
            self._call = {"id": delta.id, "name": delta.name, "arguments": ""}
        if delta.arguments and self._call is not None:
            self._call["arguments"] += delta.arguments
        if delta.reasoning:
            found.append({"thinking": delta.reasoning})
        if delta.content:
            found.append({"content": delta.content})
        return found

    def _called(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        call, self._call = self._call, None
        return [{"tool_calls": [_as_call(call["id"], call["name"], call["arguments"])]}]

    def whole(self, found: list[list[Piece]]) -> Any:
        """One object."""
        message = chat.Message()
        for piece in found[0]:
            message.add(self._parser.push(piece))
        more: dict[str, Any] = {"thinking": message.reasoning} if message.reasoning else {}
        if message.calls:
            pairs = [(call["id"], call["function"]) for call in message.calls]
            more["tool_calls"] = [_as_call(i, f["name"], f["arguments"]) for i, f in pairs]
        spoken = _spoken(content=message.content, **more)
        logprobs = self._logprobs(found[0])
        return self._line(message=spoken, **self._end(found[0][-1]), **logprobs)


def _spoken(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def _as_call(call_id: str, name: str, text: str) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments(text)}}


class Generate(_Ollama):
    """/api/generate."""

    def alive(self) -> str:
        """A line without text, as NDJSON has no comments."""
        return self.frame(self._line(response="", done=False))

    def __init__(self, task: Task, about: About) -> None:
        super().__init__(task, about)
        self._parser = None
        if task.wanted is not None:
            self._parser = chat.Parser(task.wanted, about.format())

    def _said(self, pieces: list[Piece]) -> dict[str, str]:
        message = chat.Message()
        for piece in pieces:
            deltas = [Delta(content=piece.text)]
            message.add(deltas if self._parser is None else self._parser.push(piece))
        found = {"response": message.content}
        return found | ({"thinking": message.reasoning} if message.reasoning else {})

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """A line with the piece's text."""
        said = self._said([piece])
        if any(said.values()):
            yield self._line(**said, done=False, **self._logprobs([piece]))
        if piece.finish is not None:
            yield self._line(response="", **self._end(piece))

    def whole(self, found: list[list[Piece]]) -> Any:
        """One object."""
        said, last = self._said(found[0]), found[0][-1]
        return self._line(**said, **self._end(last), **self._logprobs(found[0]))
