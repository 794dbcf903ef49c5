"""Chat formats as functions: llama_cpp.llama_chat_format's formatters, handlers and registry."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tamis.bindings.drop_in.chat import AS_EVER, ChatFormat, Prompt, TextModel, Thinking
from tamis.bindings.drop_in.completion import Chunk
from tamis.bindings.drop_in.sampling import StoppingCriteriaList
from tamis.bindings.flat.named_formats import NAMED
from tamis.text.chat_template import ChatTemplate, PromptError, default_template

Messages = Sequence[Mapping[str, Any]]


@dataclass
class ChatFormatterResponse:
    """A conversation as a prompt. added_special: BOS is part of it.

    stop: texts that end the answer.
    """

    prompt: str
    stop: str | list[str] | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    added_special: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatFormatter(Protocol):
    """A Protocol of functions that make a prompt of messages."""

    def __call__(self, *, messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        """The prompt, and the texts that end its answer."""


class LlamaChatCompletionHandler(Protocol):
    """A Protocol of functions that answer a conversation.

    They take a Llama and create_chat_completion's arguments.
    """

    def __call__(self, *, llama: Any, **given: Any) -> Chunk | Iterator[Chunk]:
        """A chat completion, or an iterator of its chunks."""


class LlamaChatCompletionHandlerNotFoundException(Exception):
    """There is no chat format of that name."""


class LlamaChatCompletionHandlerRegistry:
    """The handlers that programs have registered, by the names of chat formats."""

    _handlers: dict[str, LlamaChatCompletionHandler] = {}  # noqa: RUF012 - one for all, as there

    def register_chat_completion_handler(
        self, name: str, chat_handler: LlamaChatCompletionHandler, overwrite: bool = False
    ) -> None:
        """Register a handler under a name. Raises ValueError for a name that is taken."""
        if not overwrite and name in self._handlers:
            raise ValueError(f"chat format {name!r} is registered already: set overwrite=True")
        self._handlers[name] = chat_handler

    def unregister_chat_handler(self, name: str) -> None:
        """Remove a handler. Raises ValueError if there is none of that name."""
        if self._handlers.pop(name, None) is None:
            raise ValueError(f"no chat format {name!r} is registered")

    def get_chat_completion_handler_by_name(self, name: str) -> LlamaChatCompletionHandler:
        """The handler of a name, registered or tamis's own."""
        if (found := self._handlers.get(name)) is not None:
            return found
        if name in NAMED:
            return _named_handler(name)
        known = ", ".join((*NAMED, *self._handlers))
        raise LlamaChatCompletionHandlerNotFoundException(
            f"chat format is {name!r}, expected one of {known}"
        )


def registered(name: str | None) -> LlamaChatCompletionHandler | None:
    """The handler that a program has registered by that name."""
    return LlamaChatCompletionHandlerRegistry._handlers.get(name or "")


def get_chat_completion_handler(name: str) -> LlamaChatCompletionHandler:
    """The handler of a chat format. Raises LlamaChatCompletionHandlerNotFoundException."""
    return LlamaChatCompletionHandlerRegistry().get_chat_completion_handler_by_name(name)


def register_chat_completion_handler(
    name: str,
) -> Callable[[LlamaChatCompletionHandler], LlamaChatCompletionHandler]:
    """A decorator that registers a handler under a name."""

    def register(handler: LlamaChatCompletionHandler) -> LlamaChatCompletionHandler:
        LlamaChatCompletionHandlerRegistry().register_chat_completion_handler(name, handler)
        return handler

    return register


def register_chat_format(name: str) -> Callable[[ChatFormatter], ChatFormatter]:
    """A decorator that registers a formatter under a name."""

    def register(formatter: ChatFormatter) -> ChatFormatter:
        handler = chat_formatter_to_chat_completion_handler(formatter)
        LlamaChatCompletionHandlerRegistry().register_chat_completion_handler(name, handler)
        return formatter

    return register


def chat_formatter_to_chat_completion_handler(
    chat_formatter: ChatFormatter,
) -> LlamaChatCompletionHandler:
    """A handler that answers a formatter's prompts."""

    def handler(*, llama: Any, **given: Any) -> Chunk | Iterator[Chunk]:
        return llama._chat(_whole(llama, given), _Formatted(llama.engine, chat_formatter))

    return handler


def _named_handler(name: str) -> LlamaChatCompletionHandler:
    def handler(*, llama: Any, **given: Any) -> Chunk | Iterator[Chunk]:
        return llama._chat(_whole(llama, given), ChatFormat(llama.engine, name))

    return handler


def _whole(llama: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of create_chat_completion, with defaults for those that are not given."""
    parameters = inspect.signature(llama.create_chat_completion).parameters.values()
    return {p.name: given.get(p.name, p.default) for p in parameters}


class _Formatted(ChatFormat):
    """The chat format of a formatter: all of its prompt is trusted text, also what users say."""

    def __init__(self, engine: TextModel, formatter: ChatFormatter) -> None:
        self._engine, self._formatter = engine, formatter
        self.stop = ()
        try:  # the parser of answers is found by the template
            self._template = engine.chat_template
        except PromptError:
            self._template = ChatTemplate(default_template(["<|im_start|>"]))

    def prompt(
        self,
        messages: Messages,
        tools: list[dict[str, Any]],
        *,
        thinking: Thinking = AS_EVER,
        variables: Mapping[str, Any] | None = None,
        continued: bool = False,
        generation: bool = True,
        ids_of: Callable[[int], Sequence[int]] | None = None,
    ) -> Prompt:
        """A conversation as tokens; thinking and continued have no effect on a formatter."""
        found = self._formatter(messages=messages, tools=tools or None, **dict(variables or {}))
        tokenizer = self._engine.tokenizer
        ids = tokenizer.encode(
            found.prompt, add_special=not found.added_special, parse_special=True
        )
        shown = frozenset(
            i for m in self.parsed(tools=bool(tools)).marks() for i in self._control(m)
        )
        return Prompt(ids, found.prompt, "", shown, None, found.stops, found.stopping_criteria)


class Jinja2ChatFormatter:
    """A formatter of a template; the template is not trusted and runs in tamis's sandbox."""

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        self.template, self.eos_token, self.bos_token = template, eos_token, bos_token
        self.add_generation_prompt = add_generation_prompt
        self.stop_token_ids = None if stop_token_ids is None else set(stop_token_ids)
        self._compiled = ChatTemplate(template, bos=bos_token, eos=eos_token)

    def __call__(self, *, messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        """The prompt; the end of text ends its answer. Raises PromptError, a ValueError."""
        prompt = self._compiled.render(
            messages, add_generation_prompt=self.add_generation_prompt, **kwargs
        )
        ends, criteria = self.stop_token_ids, None
        if ends is not None:

            def ended(input_ids: np.ndarray, logits: np.ndarray) -> bool:
                return int(input_ids[-1]) in ends

            criteria = StoppingCriteriaList([ended])
        return ChatFormatterResponse(prompt, [self.eos_token], criteria, added_special=True)

    def to_chat_handler(self) -> LlamaChatCompletionHandler:
        """A handler that answers its prompts."""
        return chat_formatter_to_chat_completion_handler(self)


def hf_tokenizer_config_to_chat_formatter(
    tokenizer_config: Mapping[str, Any], add_generation_prompt: bool = True
) -> ChatFormatter:
    """A formatter of a tokenizer_config.json's content. Raises ValueError if it lacks something.

    An end of text follows the prompt if add_generation_prompt is true, as in llama_cpp.
    """
    names = ("chat_template", "bos_token", "eos_token")
    if missing := [name for name in names if not isinstance(tokenizer_config.get(name), str)]:
        raise ValueError(f"tokenizer_config has no text {missing[0]}, expected {', '.join(names)}")
    source, bos, eos = (tokenizer_config[name] for name in names)
    template = ChatTemplate(source, bos=bos, eos=eos)

    def formatter(*, messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        last = [{"role": "assistant", "content": ""}] if add_generation_prompt else []
        prompt = template.render([*messages, *last], add_generation_prompt=False)
        return ChatFormatterResponse(prompt, [eos, bos], added_special=True)

    return formatter


def hf_tokenizer_config_to_chat_completion_handler(
    tokenizer_config: Mapping[str, Any], add_generation_prompt: bool = True
) -> LlamaChatCompletionHandler:
    """A handler of a tokenizer_config.json's content. Raises ValueError if it lacks something."""
    formatter = hf_tokenizer_config_to_chat_formatter(tokenizer_config, add_generation_prompt)
    return chat_formatter_to_chat_completion_handler(formatter)


def guess_chat_format_from_gguf_metadata(metadata: Mapping[str, str]) -> str | None:
    """The name of the chat format whose template a file has.

    None for any other template, or none.
    """
    source = metadata.get("tokenizer.chat_template", "")
    marks = (("<|im_start|>", "chatml"), ("<|start_header_id|>", "llama-3"),
             ("[INST]", "mistral-instruct"))  # fmt: skip
    if "tools" in source or "<<SYS>>" in source:
        return None
    return next((name for mark, name in marks if mark in source), None)


def named_formatter(name: str) -> ChatFormatter:
    """The formatter of one of tamis's format names, without BOS."""
    source, stop = NAMED[name]
    template = ChatTemplate(source, eos="</s>")

    def formatter(*, messages: Messages, **kwargs: Any) -> ChatFormatterResponse:
        plain = [{**m, "content": m.get("content") or ""} for m in messages]
        with contextlib.suppress(TypeError):
            return ChatFormatterResponse(template.render(plain), stop)
        raise ValueError("messages have contents that are no text")

    return formatter
