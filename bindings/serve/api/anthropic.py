"""Anthropic's messages: a request is read as a chat, an answer is written as content blocks."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tamis.bindings.drop_in import chat
from tamis.bindings.drop_in.completion import Counts, Piece
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError, invalid
from tamis.bindings.serve.jobs import Progress
from tamis.bindings.serve.media import part_of_base64
from tamis.bindings.serve.replies import About, Reply, as_json
from tamis.bindings.serve.requests import MAX_MESSAGES, MAX_TOOLS, Reader, parts_of
from tamis.bindings.serve.tasks import Task
from tamis.text.tool_calls import Delta

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_TAKEN = (
    "system", "thinking", "output_config", "output_format", "context_management", "tool_choice",
    "stop_sequences",
)  # fmt: skip
# A line that Claude Code puts first and means for Anthropic's server, not for the model. It holds a
# value that differs in each request (cch), so that no two prompts would have a common prefix.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\n]*;)+\s*")


def read(reader: Reader, body: Body) -> Task:
    """The task of a request to /v1/messages. Raises ApiError."""
    return reader.chat_task(as_chat(body))


def count(reader: Reader, body: Body) -> int:
    """The prompt's tokens of a request to /v1/messages/count_tokens. Raises ApiError."""
    return len(reader.chat_prompt(as_chat(body))[1].ids)


def as_chat(body: Body) -> Body:
    """A request in the form of OpenAI's chat completions. Raises ApiError."""
    messages = []
    system = _BILLING.sub("", _joined(body.get("system"), "system"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in body.records("messages", MAX_MESSAGES):
        messages += _messages(message)
    tools, left_out = _tools(body.records("tools", MAX_TOOLS))
    fields = {k: v for k, v in body.fields.items() if k not in _TAKEN}
    fields |= {"messages": messages, "tools": tools, **left_out}
    choice = body.record("tool_choice")
    if choice is not None and tools:
        fields["tool_choice"] = _choice(choice)
        if choice.get("disable_parallel_tool_use") is True:
            fields["parallel_tool_calls"] = False
    if "stop_sequences" in body.fields:
        fields["stop"] = body.fields["stop_sequences"]
    return Body(fields | _thinking(body) | _formed(body) | _edits(body))


def _formed(body: Body) -> dict[str, Any]:
    """The form that output_config asks for (a JSON schema), and its unknown fields by name.

    output_format is the name of the form in Anthropic's beta.
    """
    config = body.record("output_config") or {}
    found = parts_of("output_config", config, ("effort", "format"))
    effort, form = config.get("effort"), config.get("format")
    if effort in _EFFORTS:
        found["reasoning_effort"] = effort
    elif effort is not None:
        found["output_config.effort"] = effort
    name, form = ("output_config.format", form) if form is not None else ("output_format", None)
    form = body.get("output_format") if form is None else form
    if form is None:
        return found
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise invalid(f"{name} is of no known type, expected json_schema", name)
    if not isinstance(form.get("schema"), dict):
        raise invalid(f"{name} has no schema, expected an object", name)
    schema = {"name": "output", "schema": form["schema"]}
    return found | {"response_format": {"type": "json_schema", "json_schema": schema}}


def _edits(body: Body) -> dict[str, Any]:
    """The edits of the context that a request asks for, by name: none is supported."""
    edits = (body.record("context_management") or {}).get("edits")
    found = {}
    for edit in edits if isinstance(edits, list) else ():
        if isinstance(edit, dict) and edit.get("keep") != "all":
            found[f"context_management.{str(edit.get('type'))[:64]}"] = True
    return found


def _thinking(body: Body) -> dict[str, Any]:
    thinking = body.record("thinking") or {}
    found = parts_of("thinking", thinking, ("type", "budget_tokens"))
    kind = thinking.get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise invalid("thinking is of no known type, expected enabled or disabled", "thinking")
    if kind is not None:
        found["enable_thinking"] = kind != "disabled"
    if kind == "enabled" and thinking.get("budget_tokens") is not None:
        found["thinking_budget"] = thinking["budget_tokens"]
    return found


def _choice(choice: dict[str, Any]) -> Any:
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid("tool_choice is of no known type, expected auto, any, tool or none")
    return _CHOICES[kind]


def _tools(given: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tools as functions, and the names of those left out, which run at Anthropic only."""
    found, left_out = [], {}
    for tool in given:
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(name, str):
            raise invalid("a tool has no name", "tools")
        if tool.get("type") not in (None, "custom") and schema is None:
            left_out[f"tools.{name[:64]}"] = True
            continue
        function: dict[str, Any] = {"name": name, "description": str(tool.get("description") or "")}
        function |= {"parameters": schema} if schema else {}
        found.append({"type": "function", "function": function})
    return found, left_out


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as one or more of OpenAI's: results of tools become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system") or not isinstance(role, str):
        raise invalid("a message has no role user or assistant", "messages")
    if not isinstance(content, list):
        return [{"role": role, "content": _joined(content, "messages")}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls, results = [], []
    pictures: list[tuple[int, dict[str, Any]]] = []  # after so many texts
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_joined([block], "messages"))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            said, seen = _split(block.get("content"))
            said = f"Error: {said}" if block.get("is_error") is True else said
            name = str(block.get("tool_use_id") or "")
            results.append({"role": "tool", "tool_call_id": name, "content": _with(said, seen)})
        elif kind == "image":
            pictures.append((len(texts), _picture(block)))
        elif kind != "redacted_thinking":  # the text of a document, or an error
            texts.append(_joined([block], "messages"))
    text = "\n".join(texts)  # joined in the way of the parts of OpenAI's messages
    found: dict[str, Any] = {"role": role, "content": text}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found |= {"tool_calls": calls, "content": text or None}
    if pictures:
        parts: list[dict[str, Any]] = [{"type": "text", "text": each} for each in texts]
        for at, part in reversed(pictures):
            parts.insert(at, part)
        found["content"] = parts
    says = texts or calls or thoughts or pictures or not results
    return [*results, *([found] if says else [])]


def _split(content: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of a tool's result, and its pictures as parts of OpenAI's messages."""
    if not isinstance(content, list):
        return _joined(content, "messages"), []
    is_picture = [isinstance(b, dict) and b.get("type") == "image" for b in content]
    texts = [b for b, seen in zip(content, is_picture, strict=True) if not seen]
    pictures = [_picture(b) for b, seen in zip(content, is_picture, strict=True) if seen]
    return _joined(texts, "messages"), pictures


def _with(text: str, pictures: list[dict[str, Any]]) -> Any:
    return [{"type": "text", "text": text}, *pictures] if pictures else text


def _picture(block: dict[str, Any]) -> dict[str, Any]:
    """An image block as a part of OpenAI's messages. Raises ApiError."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    kind, data, url = source.get("type"), source.get("data"), source.get("url")
    if kind == "base64" and isinstance(data, str):
        return part_of_base64(data, str(source.get("media_type") or "image/*"))
    if kind == "url" and isinstance(url, str):
        return {"type": "image_url", "image_url": {"url": url}}
    raise invalid("an image has no source of type base64 or url", "messages")


def _call(block: dict[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict | None):
        raise invalid("a tool_use block has no name and input", "messages")
    function = {"name": name, "arguments": json.dumps(given or {}, ensure_ascii=False)}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _joined(content: Any, param: str) -> str:
    """The text of a string or of blocks. Raises ApiError for blocks of other types."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{param} has content that is no text and no list of blocks", param)
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "document" and (text := _of_document(block)) is not None:
            texts.append(text)
            continue
        if kind in ("image", "document"):
            raise invalid(f"{kind} input is not supported: a block is no text", param)
        if kind != "text" or not isinstance(block.get("text"), str):
            raise invalid(f"{param} has a block that is no text", param)
        texts.append(block["text"])
    return "".join(texts)


def _of_document(block: dict[str, Any]) -> str | None:
    """The text of a document of plain text or blocks; None for other kinds."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    kind = source.get("type")
    found = source.get("data" if kind == "text" else "content")
    if kind == "content" and found is not None:
        found = _joined(found, "messages")
    if kind not in ("text", "content") or not isinstance(found, str):
        return None
    title = block.get("title")
    return f"{title}\n\n{found}\n" if isinstance(title, str) and title else f"{found}\n"


class Messages(Reply):
    """The reply of /v1/messages: a message, or the events that build one."""

    closing = ""

    def __init__(self, task: Task, about: About) -> None:
        super().__init__(task, about)
        assert task.wanted is not None
        self._parser = chat.Parser(task.wanted, about.format())
        self._id = "msg_" + task.requests[0].id.removeprefix("cmpl-").replace("-", "")
        self._begun = False
        # the number of complete blocks, and the kind of the open one
        self._n_block, self._kind = 0, ""

    def progress(self, i: int, event: Progress) -> Iterable[Any]:
        """The first event, with the prompt's tokens; later ones show that the server works."""
        if self._begun:
            return [{"type": "ping"}]
        return self._begin(Counts(event.cached))

    def _begin(self, counts: Counts) -> list[Any]:
        self._begun = True
        message = self._message([], None, None, counts)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """Events that begin, continue and end blocks."""
        if not self._begun:
            yield from self._begin(piece.counts)
        for delta in self._parser.push(piece):
            yield from self._of(delta)
        if piece.finish is not None:
            if not self._kind and not self._n_block:
                yield from self._open("text", {"type": "text", "text": ""})
            yield from self._close()
            reason, word = self._reason(piece)
            stop = {"stop_reason": reason, "stop_sequence": word}
            yield {"type": "message_delta", "delta": stop, "usage": self._usage(piece.counts)}
            yield {"type": "message_stop"}

    def _of(self, delta: Delta) -> Iterable[Any]:
        if delta.name:
            yield from self._close()
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            yield from self._open("tool_use", block)
        if delta.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        if delta.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[Any]:
        if self._kind != kind:
            yield from self._close()
            self._kind = kind
            yield {"type": "content_block_start", "index": self._n_block, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._n_block, "delta": delta}

    def _close(self) -> Iterable[Any]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._n_block}
            self._kind, self._n_block = "", self._n_block + 1

    def _reason(self, piece: Piece) -> tuple[str, str | None]:
        assert self.task.wanted is not None
        own = self.about.format().stop
        word = None if piece.word in own else piece.word
        must = self.task.wanted.tool is not None or self.task.wanted.required
        reason = self._parser.finish(piece.finish or "stop", must=must)
        if reason == "stop" and word is not None:
            return "stop_sequence", word
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn"), None

    def whole(self, found: list[list[Piece]]) -> Any:
        """The message."""
        message, blocks = chat.Message(), list[dict[str, Any]]()
        for piece in found[0]:
            message.add(self._parser.push(piece))
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not (message.calls or blocks):
            blocks.append({"type": "text", "text": message.content})
        for call in message.calls:
            block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
            blocks.append(block | {"input": arguments(call["function"]["arguments"])})
        return self._message(blocks, *self._reason(found[0][-1]), found[0][-1].counts)

    def _message(
        self, blocks: list[Any], reason: str | None, word: str | None, counts: Counts
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.about.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": word,
            "usage": self._usage(counts),
        }

    def _usage(self, counts: Counts) -> dict[str, Any]:
        return {
            "input_tokens": self.task.prompt_tokens - counts.n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.n_cached,
            "output_tokens": counts.n_answer,
            **counts.attention(),
        }

    def frame(self, event: Any, write: Callable[[Any], str] = as_json) -> str:
        """An event with its name."""
        return f"event: {event['type']}\ndata: {write(event)}\n\n"

    def alive(self) -> str:
        """Anthropic's event that shows that the server works."""
        return self.frame({"type": "ping"})

    def error(self, error: ApiError, path: str) -> str:
        """An error as an event of its own."""
        return self.frame(error.body_for("/v1/messages"))


def arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; {} if they were cut off."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
