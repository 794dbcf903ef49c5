"""OpenAI's responses: a request is read as a chat, an answer is written as output items.

Nothing is stored.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from tamis.bindings.drop_in import chat
from tamis.bindings.drop_in.completion import Piece
from tamis.bindings.drop_in.tools import NO_PARAMETERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError, invalid
from tamis.bindings.serve.jobs import Progress
from tamis.bindings.serve.media import url_of
from tamis.bindings.serve.replies import About, Reply, as_json, timings
from tamis.bindings.serve.requests import MAX_MESSAGES, MAX_TOOLS, Reader, parts_of
from tamis.bindings.serve.tasks import Task
from tamis.text.tool_calls import Delta

_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_TAKEN = (
    "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "truncation",
    "reasoning", "include",
)  # fmt: skip
_SUMMARIES = ("summary", "generate_summary")  # thoughts are sent in full
# thoughts are not encrypted: clients send them back as they are
_INCLUDED = ("reasoning.encrypted_content",)
# Fields that the reply repeats, and their defaults.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 0.8,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 0.95,
    "top_logprobs": 0,
    "user": None,
}


def read(reader: Reader, body: Body) -> Task:
    """The task of a request to /v1/responses. Raises ApiError."""
    fields, kinds = as_chat(body)
    task = reader.chat_task(Body(fields))
    given = {k: v for k, v in body.fields.items() if v is not None}
    repeated = {name: given.get(name, usual) for name, usual in _REPEATED.items()}
    return task._replace(about={"repeated": repeated, "kinds": kinds})


def count(reader: Reader, body: Body) -> int:
    """The prompt's tokens of a request to /v1/responses/input_tokens. Raises ApiError."""
    return len(reader.chat_prompt(Body(as_chat(body)[0]))[1].ids)


def as_chat(body: Body) -> tuple[dict[str, Any], dict[str, str]]:
    """A request in the form of OpenAI's chat completions, and the kinds of tools by name."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise invalid(f"{name} is not supported: no response is stored, send all items", name)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items or len(items) > MAX_MESSAGES:
        raise invalid(f"input has no text and no list of 1 to {MAX_MESSAGES} items", "input")
    messages = []
    instructions = body.text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        _add(messages, item)
    tools, kinds, left_out = _tools(body.records("tools", MAX_TOOLS))
    fields = {k: v for k, v in body.fields.items() if k not in _TAKEN}
    fields |= {"messages": messages, "tools": tools, "add_generation_prompt": True, **left_out}
    fields |= _named(body)
    fields |= {"max_tokens": body.get("max_output_tokens")}
    if tools:
        fields["tool_choice"] = _choice(body.get("tool_choice"))
    effort = (body.record("reasoning") or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    form = (body.record("text") or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    elif form is not None:
        fields["response_format"] = form
    return fields, kinds


def _named(body: Body) -> dict[str, Any]:
    """Fields whose value has no effect here, in a form that reports them by name."""
    found = parts_of("text", body.record("text") or {}, ("format",))
    found |= parts_of("reasoning", body.record("reasoning") or {}, ("effort", *_SUMMARIES))
    include = body.get("include")
    for each in include if isinstance(include, list) else ():
        if each not in _INCLUDED:
            found[f"include.{str(each)[:64]}"] = True
    if body.get("truncation") not in (None, "disabled"):
        found["truncation"] = body.get("truncation")
    return found


def _add(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item to the messages; an assistant's words, thoughts and calls make one message."""
    if not isinstance(item, dict):
        raise invalid("input has an item that is no object", "input")
    kind = item.get("type", "message")
    if kind in ("message", "agent_message") and isinstance(item.get("role", "assistant"), str):
        role = item.get("role", "assistant")
        if role == "assistant":
            last = _assistant(messages)
            last["content"] = (last["content"] or "") + _text(item.get("content"))
        else:
            messages.append({"role": role, "content": _content(item.get("content"))})
    elif kind == "reasoning":
        text = _text(item.get("content")) or _text(item.get("summary"))
        if text:
            last = _assistant(messages, fresh=True)
            last["reasoning_content"] = last.get("reasoning_content", "") + text
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        _assistant(messages).setdefault("tool_calls", []).append(_call(item, kind))
    elif isinstance(kind, str) and kind.endswith("_call_output"):
        name = str(item.get("call_id") or item.get("id") or "")
        output = _content(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": name, "content": output})
    elif kind not in ("web_search_call", "compaction", "ghost_snapshot"):
        raise invalid("input has an item of a type that is not supported", "input")


def _assistant(messages: list[dict[str, Any]], *, fresh: bool = False) -> dict[str, Any]:
    """The last message if it is an assistant's; a new one if it is not, or if it has calls."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (fresh and last.get("tool_calls")):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call(item: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
    elif kind == "custom_tool_call":
        name, arguments = item.get("name"), json.dumps({"input": str(item.get("input") or "")})
    else:
        action = item.get("action") if isinstance(item.get("action"), dict) else {}
        name = "local_shell"
        arguments = json.dumps({"command": (action or {}).get("command") or []})
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise invalid("input has a call without name and arguments", "input")
    found = {"id": str(item.get("call_id") or item.get("id") or ""), "type": "function"}
    return found | {"function": {"name": name, "arguments": arguments}}


def _content(content: Any) -> Any:
    """The text of a message, or its texts and pictures as parts of OpenAI's messages."""
    if not isinstance(content, list):
        return _text(content)
    pictures = [isinstance(p, dict) and p.get("type") == "input_image" for p in content]
    if not any(pictures):
        return _text(content)
    return [
        {"type": "image_url", "image_url": url_of(part, "input")}
        if seen
        else {"type": "text", "text": _text([part])}
        for part, seen in zip(content, pictures, strict=True)
    ]


def _text(content: Any) -> str:
    """The text of a string or of parts. Raises ApiError for parts of other types."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):  # some clients send the output of a tool like this
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list):
        raise invalid("input has content that is no text and no list of parts", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_image", "input_file", "input_audio"):
            word = kind.removeprefix("input_")
            raise invalid(f"{word} input is not supported: a part is no text", "input")
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(text, str):
            raise invalid("input has a part that is no text", "input")
        texts.append(text)
    return "".join(texts)


def _tools(
    given: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, Any]]:
    """The tools as functions, their kinds by name, and the names of those that are left out."""
    found: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    left_out: dict[str, Any] = {}
    for tool in given:
        kind, name = tool.get("type"), tool.get("name")
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            inner = _tools([each for each in tool["tools"] if isinstance(each, dict)])
            found, kinds, left_out = found + inner[0], kinds | inner[1], left_out | inner[2]
            continue
        schema: Any = {"custom": _INPUT, "local_shell": _SHELL}.get(str(kind))
        if kind == "local_shell":
            name = "local_shell"
        elif kind == "function":
            schema = tool.get("parameters") or NO_PARAMETERS
        if schema is None:  # a tool that OpenAI's server would run
            left_out[f"tools.{str(kind)[:64]}"] = True
            continue
        if not isinstance(name, str):
            raise invalid("a tool has no name", "tools")
        kinds[name] = str(kind)
        text = str(tool.get("description") or "")
        form = tool.get("format")
        if kind == "custom" and isinstance(form, dict) and form.get("definition"):
            text += f"\nThe input must match this {form.get('syntax')} grammar:\n"
            text += str(form["definition"])
        function = {"name": name, "description": text, "parameters": schema}
        found.append({"type": "function", "function": function})
    return found, kinds, left_out


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        if choice.get("type") in ("function", "custom"):
            return {"type": "function", "function": {"name": choice.get("name")}}
        if choice.get("type") == "local_shell":
            return {"type": "function", "function": {"name": "local_shell"}}
        if choice.get("type") == "allowed_tools":
            return choice
        raise invalid("tool_choice is of a type that is not supported", "tool_choice")
    return choice


class Responses(Reply):
    """A response, or the events that build one."""

    closing = ""

    def __init__(self, task: Task, about: About) -> None:
        super().__init__(task, about)
        assert task.wanted is not None
        self._parser = chat.Parser(task.wanted, about.format())
        self._name = task.requests[0].id.removeprefix("cmpl-").replace("-", "")
        self._output: list[dict[str, Any]] = []  # the items; the last one may be open
        self._arguments = ""  # the arguments of the open call
        self._open = False
        self._n_event = 0

    def _response(self, status: str, piece: Piece | None = None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = None
        if piece is not None:
            c, n_prompt = piece.counts, self.task.prompt_tokens
            usage = {
                "input_tokens": n_prompt,
                "input_tokens_details": {"cached_tokens": c.n_cached, "cache_write_tokens": 0},
                "output_tokens": c.n_answer,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": n_prompt + c.n_answer,
                **c.attention(),
            }
        return {
            "id": "resp_" + self._name,
            "object": "response",
            "created_at": self.task.requests[0].created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            "model": self.about.model,
            "output": list(self._output) if piece is not None else [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": usage,
            **self.task.about["repeated"],
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": f"response.{kind}", "sequence_number": self._n_event, **fields}
        self._n_event += 1
        return event

    def begin(self) -> Iterable[Any]:
        """The event that a response has begun."""
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def progress(self, i: int, event: Progress) -> Iterable[Any]:
        """The event of the prompt's progress, if the request asks for it."""
        if self.task.progress:
            response = self._response("in_progress")
            yield self._event("in_progress", response=response, **self.progress_of(event))

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """Events that begin, continue and end items.

        At the end, the event with the whole response.
        """
        for delta in self._parser.push(piece):
            for event in self._of(delta):
                if self.task.timings and event["type"].endswith("delta"):
                    event["timings"] = timings(piece.counts)
                yield event
        if piece.finish is not None:
            yield from self._close()
            status = self._status(piece)
            response = self._response(status, piece)
            yield self._event(status, response=response, timings=timings(piece.counts))

    def _status(self, piece: Piece) -> str:
        return "incomplete" if piece.finish == "length" else "completed"

    def whole(self, found: list[list[Piece]]) -> Any:
        """The response."""
        for piece in found[0]:
            for _ in self.piece(0, piece):
                pass
        last = found[0][-1]
        return self._response(self._status(last), last) | {"timings": timings(last.counts)}

    def _of(self, delta: Delta) -> Iterable[dict[str, Any]]:
        if delta.name:
            yield from self._begin_call(delta)
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if text:
                yield from self._begin_text(kind)
                part = self._output[-1]["content"][0]
                part["text"] += text
                name = "reasoning_text.delta" if kind == "reasoning" else "output_text.delta"
                more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
                yield self._event(name, **self._at(), content_index=0, delta=text, **more)
        if delta.arguments:
            self._arguments += delta.arguments
            if self._output[-1]["type"] == "function_call":
                name = "function_call_arguments.delta"
                yield self._event(name, **self._at(), delta=delta.arguments)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _begin_text(self, kind: str) -> Iterable[dict[str, Any]]:
        if self._open and self._output[-1]["type"] == kind:
            return
        yield from self._close()
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        item["id"] = f"{'msg' if kind == 'message' else 'rs'}_{self._name}{len(self._output)}"
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        yield from self._begin_item(item)
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [dict(part)]
        yield self._event("content_part.added", **self._at(), content_index=0, part=part)

    def _begin_call(self, delta: Delta) -> Iterable[dict[str, Any]]:
        yield from self._close()
        kind = self.task.about["kinds"].get(delta.name, "function")
        item: dict[str, Any] = {"call_id": delta.id, "status": "in_progress"}
        if kind == "local_shell":
            item |= {"type": "local_shell_call", "action": {"type": "exec", "command": []}}
        elif kind == "custom":
            item |= {"type": "custom_tool_call", "name": delta.name, "input": ""}
        else:
            item |= {"type": "function_call", "name": delta.name, "arguments": ""}
        item["id"] = f"fc_{self._name}{len(self._output)}"
        self._arguments = ""
        yield from self._begin_item(item)

    def _begin_item(self, item: dict[str, Any]) -> Iterable[dict[str, Any]]:
        self._output.append(item)
        self._open = True
        at = len(self._output) - 1
        yield self._event("output_item.added", output_index=at, item=json.loads(as_json(item)))

    def _close(self) -> Iterable[dict[str, Any]]:
        """Events that end the open item."""
        if not self._open:
            return
        self._open, item = False, self._output[-1]
        item["status"] = "completed"
        if item["type"] in ("message", "reasoning"):
            part = item["content"][0]
            text = "output_text" if item["type"] == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            at = self._at() | {"content_index": 0}
            yield self._event(f"{text}.done", **at, text=part["text"], **more)
            yield self._event("content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            item["arguments"] = self._arguments
            name = "function_call_arguments.done"
            called = {"name": item["name"], "arguments": self._arguments}
            yield self._event(name, **self._at(), **called)
        elif item["type"] == "custom_tool_call":
            item["input"] = str(self._given().get("input", ""))
            yield self._event("custom_tool_call_input.delta", **self._at(), delta=item["input"])
            yield self._event("custom_tool_call_input.done", **self._at(), input=item["input"])
        else:
            given = self._given()
            action: dict[str, Any] = {
                "command": given.get("command") or [],
                "env": {},
                "type": "exec",
            }
            action |= {k: given.get(v) for k, v in _SHELL_FIELDS.items()}
            item["action"] = action
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _given(self) -> dict[str, Any]:
        try:
            found = json.loads(self._arguments)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def frame(self, event: Any, write: Callable[[Any], str] = as_json) -> str:
        """An event with its name."""
        return f"event: {event['type']}\ndata: {write(event)}\n\n"

    def alive(self) -> str:
        """An event that shows progress: Codex waits for events and ignores comments."""
        return self.frame(self._event("in_progress", response=self._response("in_progress")))

    def error(self, error: ApiError, path: str) -> str:
        """The event that the response has failed."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self.frame(self._event("failed", response=response))


_SHELL_FIELDS = {"working_directory": "workdir", "timeout_ms": "timeout_ms"}
