"""Chat completions: messages to tokens, and a completion as the message of an assistant."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tamis.bindings.drop_in.completion import Chunk
from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.tools import (
    ToolCall,
    as_tools,
    call_schema,
    find_calls,
    forced,
    plain_messages,
    template_messages,
)
from tamis.formats.vocab import Vocab
from tamis.text.chat_template import (
    ChatTemplate,
    ChatTokenizer,
    default_template,
    encode_chat,
)

_LLAMA2 = """\
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m['role'] == 'system' %}
{%- set ns.system = '<<SYS>>\\n' + m['content'] + '\\n<</SYS>>\\n\\n' %}
{%- elif m['role'] == 'assistant' %}
{{- ' ' + m['content'] + ' ' + eos_token }}
{%- else %}
{{- bos_token + '[INST] ' + ns.system + m['content'] + ' [/INST]' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}"""
# Of chat formats by name: the template, and the text that ends a message.
_NAMED = {
    "chatml": (default_template(["<|im_start|>"]), "<|im_end|>"),
    "chatml-function-calling": (default_template(["<|im_start|>"]), "<|im_end|>"),
    "gemma": (default_template(["<start_of_turn>"]), "<end_of_turn>"),
    "llama-3": (default_template(["<|start_header_id|>"]), "<|eot_id|>"),
    "llama-2": (_LLAMA2, "</s>"),
}


class TextModel(Protocol):
    """What turns conversations into tokens: an Engine, or its vocabulary and template alone."""

    @property
    def vocab(self) -> Vocab:
        """The tokens."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """From text to tokens."""

    @property
    def chat_template(self) -> ChatTemplate:
        """The model file's own, or the usual one for its tokens. Raises PromptError."""


class ChatFormat:
    """A template, and the stop strings that go with it."""

    def __init__(self, engine: TextModel, name: str | None) -> None:
        self._engine = engine
        self.stop: tuple[str, ...] = ()
        if name in (None, "chat_template.default"):
            self._template = engine.chat_template
            return
        if name not in _NAMED:
            known = ", ".join(_NAMED)
            raise ValueError(f"chat_format is {name!r}, expected None (the file's own) or {known}")
        source, end = _NAMED[name]
        self.stop = (end,)
        vocab = engine.vocab
        bos, eos = ("" if i is None else vocab.tokens[i] for i in (vocab.bos, vocab.eos))
        self._template = ChatTemplate(source, bos=bos, eos=eos)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]
    ) -> list[int]:
        """Token ids, ready for the assistant's answer; control tokens of messages stay text.

        Raises PromptError, ValueError for content that is no text.
        """
        plain = [{**m, "content": _text(m.get("content"))} for m in messages]
        extra: dict[str, Any] = {}
        if "tool" not in self._template.source:
            plain = plain_messages(plain, tools)
        else:
            plain = template_messages(plain)
            extra = {"tools": tools} if tools else {}
        return encode_chat(self._engine.tokenizer, self._template, plain, **extra)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"a message has a part of type {part.get('type')!r}, expected text")
        parts.append(part["text"])
    return "\n".join(parts)


def grammar_of(response_format: Mapping[str, Any] | None) -> LlamaGrammar | None:
    """The grammar of a response_format; None for text. Raises ValueError for other types."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema") or {"type": "object"}
    elif kind == "json_schema":
        schema = response_format["json_schema"]["schema"]
    else:
        raise ValueError(
            f"response_format is of type {kind!r}, expected text, json_object or json_schema"
        )
    return LlamaGrammar.from_json_schema(json.dumps(schema))


class Wanted(NamedTuple):
    """What a chat completion must be: which tools it may call, and the form of its text."""

    tools: list[dict[str, Any]]
    tool: str | None  # the one that must be called; the text is then its arguments
    grammar: LlamaGrammar | None

    def answer(self, completion: Chunk) -> Chunk:
        """The text completion as a chat completion, with its calls."""
        if self.tool is None:
            return tool_answer(completion, self.tools)
        call = ToolCall(self.tool, completion["choices"][0]["text"])
        return whole(completion, [call], "", forced=True)


def wanted(given: Mapping[str, Any]) -> Wanted:
    """What create_chat_completion's arguments on tools and form ask for. Raises ValueError."""
    tools = as_tools(given["tools"], given["functions"])
    choice = given["tool_choice"] or given["function_call"]
    tools = [] if choice == "none" else tools
    must = forced(tools, given["tool_choice"], given["function_call"])
    grammar = grammar_of(given["response_format"]) or given["grammar"]
    if must is not None:
        grammar = LlamaGrammar.from_json_schema(json.dumps(must[1]))
    elif choice == "required" and tools:
        grammar = LlamaGrammar.from_json_schema(json.dumps(call_schema(tools)))
    return Wanted(tools, None if must is None else must[0], grammar)


def whole(completion: Chunk, calls: list[ToolCall], text: str, *, forced: bool) -> Chunk:
    """A text completion as a chat completion with this content and these calls.

    forced: the caller chose the tool, and gets it in the old field `function_call` too. Its
    arguments may be cut off at max_tokens: then the reason is length, and they are no JSON.
    """
    choice = completion["choices"][0]
    cut = forced and choice["finish_reason"] == "length"
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = _calls(completion["id"], calls)
        if forced:
            message["function_call"] = message["tool_calls"][0]["function"]
    return {
        "id": "chat" + completion["id"],
        "object": "chat.completion",
        "created": completion["created"],
        "model": completion["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": _logprobs(choice["logprobs"]),
                "finish_reason": "tool_calls" if calls and not cut else choice["finish_reason"],
            }
        ],
        "usage": completion["usage"],
    }


class Chunks:
    """Turns the chunks of a text completion into those of a chat completion."""

    def __init__(self) -> None:
        self._begun = False

    def of(self, chunk: Chunk) -> list[Chunk]:
        """The chunks of the next one; the first says whose message it is."""
        choice, found = chunk["choices"][0], []
        if not self._begun:
            found.append(_chunk(chunk, {"role": "assistant"}, None, None))
            self._begun = True
        delta = {"content": choice["text"]} if choice["finish_reason"] is None else {}
        found.append(_chunk(chunk, delta, choice["logprobs"], choice["finish_reason"]))
        return found


def chunks(completion: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks of a text completion as those of a chat completion."""
    stream = Chunks()
    for chunk in completion:
        yield from stream.of(chunk)


def chunks_of_whole(chat: Chunk) -> Iterator[Chunk]:
    """A chat completion with calls as a stream: they are known once the answer is."""
    choice = chat["choices"][0]
    message = choice["message"]
    yield _as_chunk(chat, {"role": "assistant"}, None)
    if message["content"]:
        yield _as_chunk(chat, {"content": message["content"]}, None, choice["logprobs"])
    old = {key: message[key] for key in ("function_call",) if key in message}
    for i, call in enumerate(message.get("tool_calls") or ()):
        yield _as_chunk(chat, {**old, "tool_calls": [{"index": i, **call}]}, None)
    yield _as_chunk(chat, {}, choice["finish_reason"])


def tool_answer(completion: Chunk, tools: list[dict[str, Any]]) -> Chunk:
    """A chat completion of an answer that may call tools."""
    names = [tool["function"]["name"] for tool in tools]
    text, calls = find_calls(completion["choices"][0]["text"], names)
    return whole(completion, calls, text, forced=False)


def _calls(completion_id: str, calls: list[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call__{i}_{call.name}_{completion_id}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(calls)
    ]


def _chunk(chunk: Chunk, delta: dict[str, Any], logprobs: Any, finish: str | None) -> Chunk:
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": _logprobs(logprobs),
        "finish_reason": finish,
    }
    return {
        "id": "chat" + chunk["id"],
        "model": chunk["model"],
        "created": chunk["created"],
        "object": "chat.completion.chunk",
        "choices": [choice],
    }


def _as_chunk(
    chat: Chunk, delta: dict[str, Any], finish: str | None, logprobs: Any = None
) -> Chunk:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    head = {key: chat[key] for key in ("id", "model", "created")}
    return {**head, "object": "chat.completion.chunk", "choices": [choice]}


def _logprobs(found: dict[str, list[Any]] | None) -> dict[str, Any] | None:
    """Logprobs of a completion in the chat's shape."""
    if found is None:
        return None
    content = [
        {
            **_token(text, logprob),
            "top_logprobs": [_token(t, p) for t, p in (top or {}).items()],
        }
        for text, logprob, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        )
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None}
