"""Chat completions: messages to tokens, and a completion as the message of an assistant."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from tamis.bindings.drop_in.completion import Budget, Chunk, Piece, Request, TokenInfo
from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.sampling import StoppingCriteriaList
from tamis.bindings.drop_in.tools import (
    BARE,
    HERMES,
    allowed,
    as_tools,
    call_schema,
    forced,
    plain_messages,
)
from tamis.bindings.flat.named_formats import NAMED, OF_THE_FILE
from tamis.formats.vocab import Vocab
from tamis.text import chat_format
from tamis.text.chat_template import (
    ChatTemplate,
    ChatTokenizer,
    chat_ids,
    chat_parts,
)
from tamis.text.tool_calls import Delta, OutputParser

PICTURE = "picture"  # the type of a part of a message whose text is a picture's mark
_TAIL = 256  # characters of a prompt that are searched for the marks of thoughts
# Formats in which an answer is a series of messages: without their marks it would have no text.
_MESSAGES = ("harmony", "recipient")


class Tokens(ChatTokenizer, Protocol):
    """What chats need of a tokenizer: a Protocol."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Ids of a text."""


class TextModel(Protocol):
    """What makes tokens of conversations: an Engine, or its vocabulary and template alone."""

    @property
    def vocab(self) -> Vocab:
        """The tokens."""

    @property
    def tokenizer(self) -> "Tokens":
        """The tokenizer."""

    @property
    def chat_template(self) -> ChatTemplate:
        """The model file's own, or the usual one for its tokens. Raises PromptError."""


class Thinking(NamedTuple):
    """What a caller asks for about thoughts. None: the template decides."""

    on: bool | None = None
    budget: int | None = None  # tokens
    # thoughts are separate from the text; False: they are part of it, as written
    shown: bool = True


AS_EVER = Thinking()


class Prompt(NamedTuple):
    """A conversation as tokens that an answer follows, and what its parser needs."""

    ids: list[int]
    text: str
    tail: str  # the template's text after the last message that is not an assistant's
    shown: frozenset[int]  # control tokens that the parser needs to see
    budget: Budget | None
    stop: tuple[str, ...] = ()  # texts that end this answer
    criteria: StoppingCriteriaList | None = None


class ChatFormat:
    """A template, and the stop strings that go with it."""

    def __init__(self, engine: TextModel, name: str | None) -> None:
        self._engine = engine
        self.stop: tuple[str, ...] = ()
        if name is None or name in OF_THE_FILE:
            self._template = engine.chat_template
            return
        if name not in NAMED:
            known = ", ".join((*NAMED, *OF_THE_FILE))
            raise ValueError(f"chat_format is {name!r}, expected None (the file's own) or {known}")
        source, end = NAMED[name]
        self.stop = (end,)
        vocab = engine.vocab
        bos, eos = ("" if i is None else vocab.tokens[i] for i in (vocab.bos, vocab.eos))
        self._template = ChatTemplate(source, bos=bos, eos=eos)

    @cached_property
    def _found(self) -> chat_format.ChatFormat:
        """How the model writes thoughts and calls: as its template shows, or as the caller says."""
        found = chat_format.ChatFormat.of(self._template)
        return found if self._knows_tools else replace(found, tools=HERMES)

    @property
    def _knows_tools(self) -> bool:
        return "tool" in self._template.source

    def parsed(self, *, tools: bool, thoughts: bool = True) -> chat_format.ChatFormat:
        """The format of answers.

        Without tools calls are text, and without thoughts these are text.
        """
        found = self._found
        if not tools and not (found.tools and found.tools.style in _MESSAGES):
            found = replace(found, tools=None)
        return found if thoughts else replace(found, think=None)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]],
        *,
        thinking: Thinking = AS_EVER,
        variables: Mapping[str, Any] | None = None,
        continued: bool = False,
        generation: bool = True,
        ids_of: Callable[[int], Sequence[int]] | None = None,
    ) -> Prompt:
        """A conversation as tokens; control tokens written out in messages remain text.

        variables: further variables of the template. continued: the answer continues the last
        message, which is an assistant's. generation: if it is not continued, whether the prompt
        ends with the opening of an assistant's message. ids_of: the ids of a picture, by the number
        of its mark (see text.picture_marks). Raises PromptError, and ValueError for content that
        is not text.
        """
        found = self.parsed(tools=bool(tools), thoughts=thinking.shown)
        last = messages[-1] if continued else {}
        plain = [{**m, "content": _text(m.get("content"))} for m in messages]
        plain = plain[: len(plain) - continued]
        extra: dict[str, Any] = _usual_variables() | dict(variables or {})
        if thinking.on is not None:
            extra = {"thinking": thinking.on} | extra | {"enable_thinking": thinking.on}
        if self._knows_tools:
            extra |= {"tools": tools} if tools else {}
            if "functions" in self._template.source and "datetime" in self._template.source:
                # FireFunction's template takes them as text, and fails without them.
                extra.setdefault("functions", json.dumps(tools, indent=4) if tools else "")
        else:
            plain = plain_messages(plain, tools)
        plain = self._found.normalized(plain)
        tokenizer = self._engine.tokenizer
        parts = chat_parts(
            tokenizer, self._template, plain, add_generation_prompt=generation, **extra
        )
        parts += self._opening(_own_end(parts), thinking, last)
        marks = found.marks()
        budget = self._budget(found, thinking, _own_end(parts))
        return Prompt(
            chat_ids(tokenizer, parts, ids_of),
            "".join(text for text, _ in parts),
            _own_end(parts)[-_TAIL:],
            frozenset(i for mark in marks for i in self._control(mark)),
            budget,
        )

    def _opening(
        self, tail: str, thinking: Thinking, last: Mapping[str, Any]
    ) -> list[tuple[str, bool]]:
        """The text after the template's: the end of thoughts, and the beginning of the answer."""
        start, end = self._found.think or ("", "")
        is_open = bool(start) and tail.rfind(start) > tail.rfind(end)
        thought = str(last.get("reasoning_content") or last.get("reasoning") or "")
        text = _text(last.get("content"))
        parts = []
        if thought:
            parts += [] if is_open else [(start, True)]
            parts.append((thought, False))
            is_open = True
        if is_open and (text or thinking.on is False):
            parts.append((end, True))
        elif thinking.on is False and start[:1] in ("<", "[") and not tail.rstrip().endswith(end):
            parts.append((start + end, True))
        return [*parts, (text, False)] if text else parts

    def _budget(
        self, found: chat_format.ChatFormat, thinking: Thinking, tail: str
    ) -> Budget | None:
        start, end = found.think or ("", "")
        if thinking.budget is None or not end:
            return None
        is_open = bool(start) and tail.rfind(start) > tail.rfind(end)
        encode = self._engine.tokenizer.encode
        first, last = (encode(m, add_special=False, parse_special=True) for m in (start, end))
        return Budget(thinking.budget, first, last, is_open)

    def _control(self, mark: str) -> list[int]:
        """The token of a mark as a list of one; empty if the mark is not one token."""
        ids = self._engine.tokenizer.encode(mark, add_special=False, parse_special=True)
        return ids if len(ids) == 1 else []


def _usual_variables() -> dict[str, Any]:
    """Variables that templates read and llama.cpp sets: thinking is allowed, and today's date."""
    return {
        "enable_thinking": True,
        "date_string": time.strftime("%d %b %Y"),
        "datetime": time.strftime("%b %d %Y"),
    }


def _own_end(parts: Sequence[tuple[str, bool]]) -> str:
    """The template's text after the last message of others; all of it if there is none."""
    last = max((i for i, (_, own) in enumerate(parts) if not own), default=-1)
    return "".join(text for text, _ in parts[last + 1 :])


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    text, after_text = "", False
    for part in content:
        kind = part.get("type")
        if kind not in ("text", PICTURE):
            raise ValueError(f"a message has a part of type {kind!r:.60}, expected text")
        # As in llama.cpp, neighbouring texts are lines of their own, and pictures join them.
        text += "\n" + part["text"] if kind == "text" and after_text else part["text"]
        after_text = kind == "text"
    return text


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
            f"response_format is of type {kind!r:.60}, expected text, json_object or json_schema"
        )
    return LlamaGrammar.from_json_schema(json.dumps(schema))


class Wanted(NamedTuple):
    """What a chat completion must be: the tools that it may call, and the form of its text."""

    tools: list[dict[str, Any]]
    tool: str | None  # the tool that must be called; the text is then its arguments
    grammar: LlamaGrammar | None
    # whether a call of any of the tools is a must, in the form of `call_schema`
    required: bool = False
    thoughts: bool = True  # whether thoughts are separate from the text
    old: bool = False  # whether calls are also reported as `function_call`
    tail: str = ""  # of the prompt
    parsed: bool = True  # False: calls remain text
    parallel: bool = True  # whether there may be more calls than one

    @property
    def formed(self) -> bool:
        """Whether a grammar constrains the answer, which then has no thoughts."""
        return self.grammar is not None or self.tool is not None or self.required


def wanted(given: Mapping[str, Any]) -> Wanted:
    """What create_chat_completion's arguments ask for in tools and form. Raises ValueError."""
    tools, tool_choice = allowed(as_tools(given["tools"], given["functions"]), given["tool_choice"])
    choice = tool_choice or given["function_call"]
    tools = [] if choice == "none" else tools
    must = forced(tools, tool_choice, given["function_call"])
    grammar = grammar_of(given["response_format"]) or given["grammar"]
    required = choice == "required" and bool(tools)
    if must is not None:
        grammar = LlamaGrammar.from_json_schema(json.dumps(must[1]))
    elif required:
        grammar = LlamaGrammar.from_json_schema(json.dumps(call_schema(tools)))
    old = must is not None or bool(given["functions"])
    return Wanted(tools, None if must is None else must[0], grammar, required, old=old)


class Parser:
    """Parses one answer while it is generated, into deltas of thoughts, text and calls."""

    def __init__(self, wanted: Wanted, format: ChatFormat) -> None:
        self.n_calls = 0
        self._tool, self._parallel = wanted.tool, wanted.parallel
        self._parser: OutputParser | None = None
        if wanted.required:
            bare = chat_format.ChatFormat(tools=BARE)
            self._parser = OutputParser(bare, tools=wanted.tools, forced=True)
        elif not wanted.formed or wanted.tools:
            tools = wanted.tools if wanted.parsed else None
            form = format.parsed(tools=bool(tools), thoughts=wanted.thoughts)
            self._parser = OutputParser(form, tools=tools or None, prompt=wanted.tail)

    def push(self, piece: Piece) -> list[Delta]:
        """The deltas that the next piece adds.

        The end of the last piece is the end of the answer.
        """
        if self._tool is not None:
            found = self._arguments(self._tool, piece)
        elif self._parser is None:
            found = [Delta(content=piece.text)] if piece.text else []
        else:
            found = self._parser.push(piece.text)
            if piece.finish is not None:
                found += self._parser.finish(cut=piece.finish == "length")
        if not self._parallel:  # the calls after the first are dropped
            found = [delta for delta in found if not delta.index]
        self.n_calls += sum(1 for delta in found if delta.name)
        return found

    def _arguments(self, tool: str, piece: Piece) -> list[Delta]:
        begin = Delta(index=0, id=new_call_id(), name=tool)
        text = [Delta(index=0, arguments=piece.text)] if piece.text else []
        return [*([] if self.n_calls else [begin]), *text]

    def finish(self, reason: str, *, must: bool) -> str:
        """The finish reason of the answer.

        must: a call was required, and it may have been cut off.
        """
        return "tool_calls" if self.n_calls and not (must and reason == "length") else reason


class Message:
    """The whole message of an assistant, put together from deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, arguments in parts

    def add(self, deltas: Iterable[Delta]) -> None:
        """Append the next deltas."""
        for delta in deltas:
            self._content.append(delta.content)
            self._reasoning.append(delta.reasoning)
            if delta.name:
                self._calls.append((delta.id, delta.name, []))
            if delta.index is not None:
                self._calls[delta.index][2].append(delta.arguments)

    @property
    def content(self) -> str:
        """The text."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The thoughts."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools, in OpenAI's shape."""
        return [
            {"id": i, "type": "function", "function": {"name": name, "arguments": "".join(parts)}}
            for i, name, parts in self._calls
        ]

    def fields(self, wanted: Wanted) -> dict[str, Any]:
        """The message in OpenAI's shape."""
        content, reasoning, calls = self.content, self.reasoning, self.calls
        found: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found |= {"content": content or None, "tool_calls": calls}
            found |= {"function_call": calls[0]["function"]} if wanted.old else {}
        return found


def whole(request: Request, pieces: Sequence[Piece], wanted: Wanted, format: ChatFormat) -> Chunk:
    """The pieces of an answer as a chat completion.

    A required call may be cut off at max_tokens: then the finish reason is length, and its
    arguments are incomplete JSON.
    """
    parser, message = Parser(wanted, format), Message()
    for piece in pieces:
        message.add(parser.push(piece))
    tokens = [token for piece in pieces for token in piece.tokens]
    must = wanted.tool is not None or wanted.required
    reason = parser.finish(pieces[-1].finish or "stop", must=must)
    choice = {
        "index": 0,
        "message": message.fields(wanted),
        "logprobs": None if request.logprobs is None else logprobs_of(tokens),
        "finish_reason": reason,
    }
    n_prompt, n = len(request.prompt), pieces[-1].counts.n_answer
    usage = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
    return {
        "id": "chat" + request.id,
        "object": "chat.completion",
        "created": request.created,
        "model": request.model,
        "choices": [choice],
        "usage": usage,
    }


class Chunks:
    """Makes the chunks of a streamed chat completion; the last has the finish reason."""

    def __init__(self, request: Request, wanted: Wanted, format: ChatFormat) -> None:
        self._request, self._wanted = request, wanted
        self._parser = Parser(wanted, format)
        self._tokens: list[TokenInfo] = []  # tokens whose text has not been sent yet

    def begin(self) -> list[Chunk]:
        """The chunk before the answer, which names the role of the message."""
        return [self.chunk({"role": "assistant"})]

    def of(self, piece: Piece) -> list[Chunk]:
        """The chunks of the next piece."""
        self._tokens += piece.tokens
        found = []
        for delta in self._parser.push(piece):
            found.append(self.chunk(self._delta(delta), self._logprobs()))
        if piece.finish is not None:
            must = self._wanted.tool is not None or self._wanted.required
            reason = self._parser.finish(piece.finish, must=must)
            rest = self._logprobs() if self._tokens else None
            found.append(self.chunk({}, rest, reason))
        return found

    def _logprobs(self) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        tokens, self._tokens = self._tokens, []
        return logprobs_of(tokens)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.index is None:
            return {"reasoning_content" if delta.reasoning else "content": text_of(delta)}
        function = {"name": delta.name} if delta.name else {}
        function["arguments"] = delta.arguments
        call: dict[str, Any] = {"index": delta.index}
        call |= {"id": delta.id, "type": "function"} if delta.name else {}
        old = {"function_call": function} if self._wanted.old and delta.index == 0 else {}
        return {**old, "tool_calls": [{**call, "function": function}]}

    def chunk(
        self, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> Chunk:
        """A chunk with one choice."""
        r = self._request
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {
            "id": "chat" + r.id,
            "model": r.model,
            "created": r.created,
            "object": "chat.completion.chunk",
            "choices": [choice],
        }


def text_of(delta: Delta) -> str:
    """The text of a delta that is not part of a call."""
    return delta.reasoning or delta.content


def chunks(stream: Chunks, pieces: Iterator[Piece]) -> Iterator[Chunk]:
    """A chat completion as a stream."""
    yield from stream.begin()
    for piece in pieces:
        yield from stream.of(piece)


def new_call_id() -> str:
    """A fresh unique id of a call."""
    return "call_" + uuid.uuid4().hex[:24]


def logprobs_of(tokens: Sequence[TokenInfo]) -> dict[str, Any]:
    """The logprobs of an answer's tokens, in the form of chat completions."""
    content = [
        {
            **_token(token.data, token.logprob),
            "top_logprobs": [_token(each.data, each.logprob) for each in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}
