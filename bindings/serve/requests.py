"""From the bodies of requests to tasks: prompts as tokens, sampling, limits.

It runs where a request may take time and memory: see `helper`. Grammars are left as texts.
"""

import secrets
from dataclasses import dataclass, replace
from typing import Any

from tamis.bindings.drop_in import chat
from tamis.bindings.drop_in.completion import Request
from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import invalid, too_long
from tamis.bindings.serve.tasks import SEEDS, Inputs, Task
from tamis.bindings.serve.text import TextModel, TooManyTokens

MAX_MESSAGES, MAX_TOOLS, MAX_INPUTS = 4096, 128, 256
MAX_STOP, MAX_STOP_LENGTH = 16, 256
MAX_LOGPROBS = 20
MAX_SALT = 1024


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    n_ctx: int
    n_choices: int  # n times the number of prompts


class Reader:
    """Makes tasks for one model. One call at a time."""

    def __init__(self, text: TextModel, model: str, limits: Limits) -> None:
        self._text, self._model, self.limits = text, model, limits
        self._n_vocab = len(text.vocab)
        self._format: chat.ChatFormat | None = None

    def chat_task(self, body: Body) -> Task:
        """A chat completion. Raises ApiError."""
        messages = body.records("messages", MAX_MESSAGES)
        if not messages:
            raise invalid("messages is empty, expected at least one", "messages")
        for message in messages:
            _check_message(message)
        wanted = self._wanted(body)
        if self._format is None:
            self._format = chat.ChatFormat(self._text, None)
        try:
            ids = self._format.encode(messages, wanted.tools)
        except TooManyTokens as error:
            raise too_long(error.n, self.limits.n_ctx, at_least=True) from None
        except RecursionError:
            raise invalid("the messages or tools are nested too deeply", "messages") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise invalid(
                f"the messages do not fit the chat template: {error}", "messages"
            ) from None
        n = body.integer("max_completion_tokens", 1, SEEDS) or body.integer("max_tokens", 1, SEEDS)
        logprobs = body.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
        task = self._task(body, [ids], n, self._format.stop)
        requests = [
            replace(
                request,
                logprobs=logprobs if body.flag("logprobs") else None,
                special=bool(wanted.tools),
            )
            for request in task.requests
        ]
        sampling = replace(task.sampling, grammar=wanted.grammar)
        return task._replace(requests=requests, wanted=wanted, sampling=sampling)

    def completion_task(self, body: Body) -> Task:
        """A text completion. Raises ApiError."""
        texts, n = self._prompts(body.get("prompt")), body.integer("max_tokens", 1, SEEDS)
        logprobs, echo = body.integer("logprobs", 0, MAX_LOGPROBS), body.flag("echo")
        if body.get("suffix"):
            raise invalid("suffix is not supported", "suffix")
        if echo and logprobs is not None:
            raise invalid("echo and logprobs together are not supported", "logprobs")
        task = self._task(body, [ids for _, ids in texts], n or 16, ())
        n_each = len(task.requests) // len(texts)
        requests = []
        for i, request in enumerate(task.requests):
            text = texts[i // n_each][0]
            one = replace(request, logprobs=logprobs, offset=0 if echo else len(text))
            requests.append(replace(one, echo=text if echo else None))
        sampling = replace(task.sampling, grammar=_grammar(body))
        return task._replace(requests=requests, sampling=sampling)

    def inputs(self, body: Body) -> Inputs:
        """The tokens of the texts of an embeddings request. Raises ApiError."""
        packed = body.text("encoding_format") == "base64"
        dimensions = body.integer("dimensions", 1, 1 << 20)
        found = [ids for _, ids in self._prompts(body.get("input"), "input")]
        for ids in found:
            if len(ids) > self.limits.n_ctx:
                raise too_long(len(ids), self.limits.n_ctx)
        return Inputs(found, packed=packed, dimensions=dimensions)

    def tokens(self, body: Body) -> list[int]:
        """The tokens of a text of any length. Raises ApiError."""
        flags = {name: body.flag(name) for name in ("add_special", "parse_special")}
        return self._text.unbounded.encode(body.text("content") or "", **flags)

    def _wanted(self, body: Body) -> chat.Wanted:
        tools = body.records("tools", MAX_TOOLS)
        given = {
            "tools": tools,
            "functions": None,
            "function_call": None,
            "tool_choice": body.get("tool_choice"),
            "response_format": None,
            "grammar": _grammar(body),
        }
        for tool in tools:
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise invalid("a tool has no function with a name", "tools")
        try:
            return chat.wanted(given)
        except RecursionError:
            raise invalid("tools are nested too deeply", "tools") from None
        except (ValueError, AttributeError, TypeError) as error:
            raise invalid(str(error), "tool_choice") from None

    def _task(
        self, body: Body, prompts: list[list[int]], n_most: int | None, stop: tuple[str, ...]
    ) -> Task:
        n_choices = body.integer("n", 1, self.limits.n_choices) or 1
        if n_choices * len(prompts) > self.limits.n_choices:
            most = self.limits.n_choices
            raise invalid(f"n times the number of prompts is above {most}", "n")
        model = self._model
        stop = (*stop, *body.texts("stop", MAX_STOP, MAX_STOP_LENGTH))
        first: Request | None = None
        requests = []
        for ids in prompts:
            room = self.limits.n_ctx - len(ids)
            if room < 1:
                raise too_long(len(ids), self.limits.n_ctx)
            request = Request(ids, min(n_most or room, room), model, stop)
            first = first or request
            requests += [replace(request, id=first.id)] * n_choices
        options = body.record("stream_options") or {}
        seed = body.integer("seed", -(SEEDS >> 1), SEEDS)
        return Task(
            requests=requests,
            sampling=_sampling(body, self._n_vocab),
            seed=secrets.randbelow(SEEDS) if seed is None or seed == -1 else seed % SEEDS,
            stream=body.flag("stream"),
            include_usage=options.get("include_usage") is True,
            progress=body.flag("return_progress"),
            wanted=None,
            prompt_tokens=sum(map(len, prompts)),
            salt=_salt(body),
        )

    def _prompts(self, given: Any, name: str = "prompt") -> list[tuple[str, list[int]]]:
        """Texts with their tokens: of a string, of tokens, or of a list of either."""
        of_tokens = isinstance(given, list) and bool(given) and isinstance(given[0], int)
        items = [given] if isinstance(given, str) or of_tokens else given
        if not isinstance(items, list) or not items:
            raise invalid(f"{name} is empty, expected a text or tokens", name)
        if len(items) > MAX_INPUTS:
            raise invalid(f"{name} has {len(items)} texts, expected at most {MAX_INPUTS}", name)
        return [self._prompt(item, name) for item in items]

    def _prompt(self, item: Any, name: str) -> tuple[str, list[int]]:
        tokenizer, n_vocab = self._text.tokenizer, self._n_vocab
        if isinstance(item, str):
            # JSON may write half a surrogate pair, which no reply could echo in UTF-8.
            item = item.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
            # A prompt is the client's own template, as llama.cpp's server has it; a text to embed
            # may come from anywhere.
            try:
                ids = tokenizer.encode(item, parse_special=name == "prompt")
            except TooManyTokens as error:
                raise too_long(error.n, self.limits.n_ctx, at_least=True) from None
            ids = ids or [i for i in [tokenizer.bos] if i is not None]
            if not ids:
                raise invalid(f"{name} has no tokens", name)
            return item, ids
        if not isinstance(item, list) or not item:
            raise invalid(f"{name} has an entry that is no text and no list of tokens", name)
        for i in item:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n_vocab:
                raise invalid(f"{name} has a token that is not one of 0 to {n_vocab - 1}", name)
        return self._text.unbounded.decode(item, special=True), item


def _check_message(message: dict[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise invalid("a message has no role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise invalid("a message has a part that is no text", "messages")
    elif content is not None and not isinstance(content, str):
        raise invalid("a message's content is no string and no list of parts", "messages")


def _grammar(body: Body) -> LlamaGrammar | None:
    """What an answer must look like: response_format's or else grammar's. Raises ApiError."""
    try:
        form = chat.grammar_of(body.record("response_format"))
    except RecursionError:
        raise invalid("response_format is nested too deeply", "response_format") from None
    except KeyError as error:
        raise invalid(f"response_format has no {error}", "response_format") from None
    except (ValueError, TypeError) as error:
        raise invalid(str(error), "response_format") from None
    text = body.text("grammar")
    return LlamaGrammar.from_string(text) if form is None and text is not None else form


def _salt(body: Body) -> str:
    """The text that tells prefixes apart, "" for none: vLLM's cache_salt."""
    salt = body.text("cache_salt")
    if salt is not None and not 1 <= len(salt) <= MAX_SALT:
        raise invalid(f"cache_salt has {len(salt)} characters, expected 1 to {MAX_SALT}")
    return salt or ""


def _sampling(body: Body, n_vocab: int) -> Sampling:
    usual = Sampling()
    bias = body.record("logit_bias") or {}
    try:
        logit_bias = {int(token): float(value) for token, value in bias.items()}
    except (TypeError, ValueError, OverflowError):
        raise invalid("logit_bias is not of token ids and numbers", "logit_bias") from None
    if not all(0 <= token < n_vocab for token in logit_bias):
        raise invalid(f"logit_bias has a token that is not one of 0 to {n_vocab - 1}", "logit_bias")
    top_k = body.integer("top_k", 0, 1 << 30)
    return Sampling(
        temp=body.number("temperature", usual.temp, 0, 100),
        top_k=usual.top_k if top_k is None else top_k,
        top_p=body.number("top_p", usual.top_p, 0, 1),
        min_p=body.number("min_p", usual.min_p, 0, 1),
        typical_p=body.number("typical_p", usual.typical_p, 0, 1),
        repeat_penalty=body.number("repeat_penalty", usual.repeat_penalty, 0.01, 100),
        frequency_penalty=body.number("frequency_penalty", 0.0, -2, 2),
        presence_penalty=body.number("presence_penalty", 0.0, -2, 2),
        logit_bias=logit_bias or None,
    )
