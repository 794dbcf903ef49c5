"""From the bodies of requests to tasks: prompts as tokens, sampling, limits.

This runs where a request may take time and memory, see `helper`. Grammars are left as texts.
"""

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tamis.bindings.drop_in import chat
from tamis.bindings.drop_in.completion import Request
from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.markers import steady
from tamis.bindings.serve.body import Body, shown
from tamis.bindings.serve.errors import ApiError, invalid, too_long
from tamis.bindings.serve.media import MARKER, Media, url_of
from tamis.bindings.serve.sampling import sampling_of
from tamis.bindings.serve.tasks import LEAST_SEED, MOST_SEED, Inputs, Task
from tamis.bindings.serve.text import TextModel, TooManyTokens
from tamis.text import picture_marks

MAX_MESSAGES, MAX_TOOLS, MAX_INPUTS = 4096, 128, 256
MAX_STOP, MAX_STOP_LENGTH = 16, 256
MAX_LOGPROBS = 20
MAX_SALT = 1024
# the most tokens that a request may name; an answer ends with the context
MOST_TOKENS = (1 << 63) - 1
MOST_DRAFTED = 64  # the longest draft that a request may name
# the longest answer for which the context is shifted: the answer stays in memory
MAX_SHIFTED = 1 << 17


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    n_ctx: int
    n_choices: int  # n times the number of prompts


MAX_ADAPTERS = 64  # adapters that one request may name
# Fields that never change an answer here; all other unread fields are reported to the client.
HARMLESS = {
    "background", "betas", "cache_control", "client_metadata", "keep_alive", "metadata", "model",
    "prediction", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "service_tier", "speculative", "sse_ping_interval", "store", "user",
}  # fmt: skip
# The last one adds characters to OpenAI's streams, which hide the lengths of tokens.
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
MOST_NORM = 1 << 10  # the largest p of a p-norm; it equals the largest element long before that
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Reader:
    """Makes tasks for one model. One call at a time.

    usual: default fields of requests.
    """

    def __init__(
        self,
        text: TextModel,
        model: str,
        limits: Limits,
        usual: Mapping[str, Any] | None = None,
        media: Media | None = None,
    ) -> None:
        self.text, self.model, self.limits = text, model, limits
        self.media = media or Media()
        self._usual = dict(usual or {})
        self._n_vocab = len(text.vocab)
        self._format: chat.ChatFormat | None = None

    @property
    def format(self) -> chat.ChatFormat:
        """The model's chat template. Raises ApiError if it has no usable one."""
        if self._format is None:
            try:
                self._format = chat.ChatFormat(self.text, None)
            except ValueError as error:
                raise invalid(str(error), "messages") from None
        return self._format

    def with_usual(self, body: Body) -> Body:
        """The fields of a request, with the default ones that it lacks."""
        given = {name: value for name, value in body.fields.items() if value is not None}
        return Body(body.fields | {k: v for k, v in self._usual.items() if k not in given})

    def chat_task(self, body: Body) -> Task:
        """The task of a chat completion. Raises ApiError."""
        body = self.with_usual(body)
        wanted, prompt = self.chat_prompt(body)
        n = _most_tokens(body, ("max_completion_tokens", "max_tokens", "n_predict"), least=1)
        logprobs = body.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
        task = self.task(body, [prompt.ids], n, self.format.stop)
        requests = [
            replace(
                request,
                logprobs=logprobs if body.flag("logprobs") else None,
                shown=prompt.shown,
                budget=prompt.budget,
            )
            for request in task.requests
        ]
        sampling = replace(task.sampling, grammar=wanted.grammar)
        wanted = wanted._replace(tail=prompt.tail)
        shown = picture_marks.shown(prompt.text, MARKER)
        about = {"prompt": shown} if body.flag("verbose") else {}
        task = task._replace(requests=requests, wanted=wanted, sampling=sampling, about=about)
        return self.noted(task, body)

    def chat_prompt(self, body: Body) -> tuple[chat.Wanted, chat.Prompt]:
        """The form that a chat asks for, and its prompt. Raises ApiError."""
        messages = _messages(body)
        marked = body.switch("keep_markers")
        if not (self._usual.get("keep_markers") is True if marked is None else marked):
            messages = steady(messages)
        messages = self.media.marked(messages)
        wanted = self._wanted(body)
        thinking, variables = _thinking(body, wanted)
        wanted = wanted._replace(thoughts=thinking.shown)
        continued = _continued(body, messages)
        generation = continued or body.switch("add_generation_prompt") is not False
        try:
            prompt = self.format.prompt(
                messages,
                wanted.tools,
                thinking=thinking,
                variables=variables,
                continued=continued,
                generation=generation,
                ids_of=self.media.ids_of(self.text.unbounded.encode_parts),
            )
        except TooManyTokens as error:
            raise too_long(error.n, self.limits.n_ctx, at_least=True) from None
        except RecursionError:
            raise invalid("the messages or tools are nested too deeply", "messages") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise invalid(
                f"the messages do not fit the chat template: {error}", "messages"
            ) from None
        return wanted, prompt

    def completion_task(self, body: Body) -> Task:
        """The task of a text completion. Raises ApiError."""
        body = self.with_usual(body)
        texts, n = self.prompts(body.get("prompt")), _most_tokens(body, ("max_tokens", "n_predict"))
        if body.get("max_tokens") is None and body.get("n_predict") is None:
            n = 16
        logprobs, echo = body.integer("logprobs", 0, MAX_LOGPROBS), body.flag("echo")
        if body.get("suffix"):
            if len(texts) > 1 or echo:
                raise invalid("suffix goes with one prompt, and without echo", "suffix")
            before = body.get("prompt")
            texts = [(texts[0][0], self.infill(before, body.text("suffix") or "", ()))]
        task = self.task(body, [ids for _, ids in texts], n, ())
        n_each = len(task.requests) // len(texts)
        requests = []
        for i, request in enumerate(task.requests):
            text = texts[i // n_each][0]
            one = replace(request, logprobs=logprobs, offset=0 if echo else len(text))
            requests.append(replace(one, echo=text if echo else None))
        sampling = replace(task.sampling, grammar=self.grammar(body))
        if task.tiles and echo and logprobs is not None:
            raise invalid("echo with logprobs goes with text only: leave pictures out", "echo")
        return self.noted(task._replace(requests=requests, sampling=sampling), body)

    @staticmethod
    def grammar(body: Body) -> LlamaGrammar | None:
        """The grammar of an answer: response_format's, otherwise grammar's or json_schema's.

        A grammar or schema overrides a response_format of any JSON object. Raises ApiError.
        """
        given = body.record("response_format")
        schema, text = body.get("json_schema"), body.text("grammar")
        any_object = given == {"type": "json_object"}
        try:
            form = None if any_object and (text or schema) else chat.grammar_of(given)
        except RecursionError:
            raise invalid("response_format is nested too deeply", "response_format") from None
        except KeyError as error:
            raise invalid(f"response_format has no {error}", "response_format") from None
        except (ValueError, TypeError) as error:
            raise invalid(str(error), "response_format") from None
        if schema is not None and not isinstance(schema, dict | bool):
            raise invalid(f"json_schema is {shown(schema)}, expected an object", "json_schema")
        if form is None and text:
            return LlamaGrammar.from_string(text)
        if form is None and schema is not None:
            return LlamaGrammar.from_json_schema(json.dumps(schema))
        return form

    def infill(self, before: Any, after: str, extra: tuple[tuple[str, str], ...]) -> list[int]:
        """Fill-in-the-middle tokens for a prefix and a suffix; extra: (name, text) of files.

        Raises ApiError for a model without such tokens.
        """
        vocab, tokenizer = self.text.vocab, self.text.tokenizer
        fim = vocab.fim
        if not {"pre", "suf", "mid"} <= fim.keys():
            raise ApiError(
                501,
                "infill is not supported by this model: its vocabulary has no tokens for that",
                code="unsupported",
                param="suffix",
            )

        def ids(text: str) -> list[int]:
            try:
                return tokenizer.encode(text, add_special=False)
            except TooManyTokens as error:
                raise too_long(error.n, self.limits.n_ctx, at_least=True) from None

        found = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        for name, text in extra:
            mark = [fim["sep"]] if "sep" in fim else ids("\n\n--- snippet ---\n\n")
            found += [*mark, *(ids(name + "\n") if "sep" in fim else []), *ids(text)]
        if extra and "sep" in fim:
            found += [fim["sep"], *ids("filename\n")]
        before = before if isinstance(before, list) else ids(before or "")
        return [*found, fim["pre"], *before, fim["suf"], *ids(after), fim["mid"]]

    def noted(self, task: Task, body: Body) -> Task:
        """A task with the names of the fields that had no effect on it."""
        options = parts_of("stream_options", body.record("stream_options") or {}, STREAM_OPTIONS)
        parts = tuple(name for name, value in options.items() if value is not None)
        return task._replace(ignored=(*unheeded(body), *parts))

    def inputs(self, body: Body) -> Inputs:
        """The texts of an embeddings request ("input" or "content") as tokens.

        Raises ApiError.
        """
        given, content = body.get("input"), body.get("content")
        form = body.text("encoding_format")
        if form not in (None, "float", "base64"):
            raise invalid("encoding_format is unknown, expected float or base64", "encoding_format")
        found = [ids for _, ids in self.prompts(content if given is None else given, "input")]
        for ids in found:
            if len(ids) > self.limits.n_ctx:
                raise too_long(len(ids), self.limits.n_ctx)
        return self.vectors_wanted(body, found, packed=form == "base64")

    def vectors_wanted(self, body: Body, texts: list[list[int]], *, packed: bool = False) -> Inputs:
        """The texts with the form of vectors that a request asks for. Raises ApiError."""
        norm = body.integer("embd_normalize", -1, MOST_NORM)
        dimensions = body.integer("dimensions", 1, 1 << 20)
        return Inputs(texts, packed, dimensions, norm, unheeded(body), self.media.tiles)

    def tokens(self, text: str, body: Body, *, special: bool) -> list[int]:
        """The tokens of a text of any length, with BOS and EOS as the model has them.

        Raises ApiError.
        """
        parsed = body.switch("parse_special") is not False
        return self.text.unbounded.encode(text, add_special=special, parse_special=parsed)

    def _wanted(self, body: Body) -> chat.Wanted:
        tools = body.records("tools", MAX_TOOLS)
        functions = body.records("functions", MAX_TOOLS)
        given = {
            "tools": tools,
            "functions": functions,
            "function_call": body.get("function_call"),
            "tool_choice": body.get("tool_choice"),
            "response_format": None,
            "grammar": self.grammar(body),
        }
        for tool in [*tools, *({"function": each} for each in functions)]:
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise invalid("a tool has no function with a name", "tools")
        try:
            found = chat.wanted(given)
        except RecursionError:
            raise invalid("tools are nested too deeply", "tools") from None
        except (ValueError, AttributeError, TypeError) as error:
            raise invalid(str(error), "tool_choice") from None
        if body.switch("parse_tool_calls") is False and not found.formed:
            found = found._replace(parsed=False)
        return found._replace(parallel=body.switch("parallel_tool_calls") is not False)

    def task(
        self, body: Body, prompts: list[list[int]], n_most: int | None, stop: tuple[str, ...]
    ) -> Task:
        """The parts of a task that all completions share. Raises ApiError."""
        n_choices = body.integer("n", 1, self.limits.n_choices) or 1
        n_choices = body.integer("n_cmpl", 1, self.limits.n_choices) or n_choices
        if (body.integer("best_of", 1, 1 << 10) or 1) > n_choices:
            raise invalid("best_of is above n, expected no more than that", "best_of")
        if n_choices * len(prompts) > self.limits.n_choices:
            most = self.limits.n_choices
            raise invalid(f"n times the number of prompts is above {most}", "n")
        words = body.texts("stop", MAX_STOP, MAX_STOP_LENGTH, least=0)
        stop = (*stop, *(word for word in words if word))  # an empty text is not a stop string
        n_draft = body.integer("speculative.n_max", 0, MOST_DRAFTED)
        first: Request | None = None
        requests = []
        for ids in prompts:
            if not ids:  # a chat template may render nothing
                raise invalid("the prompt has no tokens, expected one or more")
            room = self.limits.n_ctx - len(ids)
            if room < 1:
                raise too_long(len(ids), self.limits.n_ctx)
            shifts = body.flag("context_shift") and n_most is not None
            if shifts and (n_most or 0) > MAX_SHIFTED:
                expected = f"expected at most {MAX_SHIFTED}"
                raise invalid(f"context_shift with {n_most} tokens, {expected}", "context_shift")
            most = room if n_most is None else n_most if shifts else min(n_most, room)
            how: dict[str, Any] = {
                "shifts": shifts,
                "n_keep": _n_keep(body, ids),
                "n_draft": n_draft,
            }
            request = Request(ids, most, self.model, stop, **how)
            first = first or request
            requests += [replace(request, id=first.id)] * n_choices
        options = body.record("stream_options") or {}
        seed = body.integer("seed", LEAST_SEED, MOST_SEED)
        return Task(
            requests=requests,
            sampling=sampling_of(body, self.text),
            seed=secrets.randbelow(1 << 32) if seed in (None, -1) else seed,
            stream=body.flag("stream"),
            include_usage=options.get("include_usage") is True,
            running_usage=all(options.get(name) is True for name in STREAM_OPTIONS[:2]),
            progress=body.flag("return_progress"),
            wanted=None,
            prompt_tokens=sum(map(len, prompts)),
            salt=_salt(body),
            timings=body.flag("timings_per_token"),
            slot=_slot(body),
            lora=None if body.get("lora") is None else body.records("lora", MAX_ADAPTERS),
            cached=body.switch("cache_prompt") is not False,
            reuse=body.integer("n_cache_reuse", 0, MOST_SEED) or 0,
            tiles=self.media.tiles,
        )

    def prompts(
        self, given: Any, name: str = "prompt", *, truncate: bool = False
    ) -> list[tuple[str, list[int]]]:
        """Texts with their tokens, from a string, a list of tokens, or a list of either.

        truncate: texts are cut where the context ends. Raises ApiError.
        """
        mixed = isinstance(given, list) and any(isinstance(item, int) for item in given)
        items = [given] if isinstance(given, str | dict) or mixed else given
        if not isinstance(items, list) or not items:
            raise invalid(f"{name} is empty, expected a text or tokens", name)
        if len(items) > MAX_INPUTS:
            raise invalid(f"{name} has {len(items)} texts, expected at most {MAX_INPUTS}", name)
        found = [self._prompt(item, name, truncate=truncate) for item in items]
        n_ctx = self.limits.n_ctx
        return [(text, ids[:n_ctx]) for text, ids in found] if truncate else found

    def _prompt(self, item: Any, name: str, *, truncate: bool) -> tuple[str, list[int]]:
        if isinstance(item, dict):
            item = self._text_of_object(item, name)
        if isinstance(item, str):
            if truncate:  # a text of so many characters has at least as many tokens as fit
                item = item[: self.limits.n_ctx * self.text.tokenizer.longest]
            ids = self._ids(item, name, first=True, bounded=not truncate)
            ids = ids or [i for i in [self.text.tokenizer.bos] if i is not None]
            if not ids:
                raise invalid(f"{name} has no tokens", name)
            text = item.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
            return picture_marks.shown(text, MARKER), ids
        if not isinstance(item, list) or not item:
            raise invalid(f"{name} has an entry that is no text and no list of tokens", name)
        found: list[int] = []
        for i, part in enumerate(item):
            if isinstance(part, str):
                found += self._ids(part, name, first=i == 0)
            elif isinstance(part, bool) or not isinstance(part, int):
                raise invalid(f"{name} has an entry that is no text and no token", name)
            elif not 0 <= part < self._n_vocab:
                most = self._n_vocab - 1
                raise invalid(f"{name} has a token that is not one of 0 to {most}", name)
            else:
                found.append(part)
        return self.text.unbounded.decode(found, special=True), found

    def _ids(self, text: str, name: str, *, first: bool, bounded: bool = True) -> list[int]:
        # JSON may escape an unpaired surrogate, which no reply could repeat in UTF-8. Special
        # tokens are parsed in a prompt, which is the client's own template, as in llama.cpp's
        # server; a text to embed may be anyone's.
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        if picture_marks.numbers(text):
            return self._ids_with_pictures(text, name, first=first)
        try:
            tokenizer = self.text.tokenizer if bounded else self.text.unbounded
            return tokenizer.encode(text, add_special=first, parse_special=name == "prompt")
        except TooManyTokens as error:
            raise too_long(error.n, self.limits.n_ctx, at_least=True) from None

    def _ids_with_pictures(self, text: str, name: str, *, first: bool) -> list[int]:
        tokenizer = self.text.tokenizer
        try:
            parts = [(text, name == "prompt")]
            ids_of = self.media.ids_of(self.text.unbounded.encode_parts)
            ids = picture_marks.encode(tokenizer.encode_parts, parts, ids_of)
        except TooManyTokens as error:
            raise too_long(error.n, self.limits.n_ctx, at_least=True) from None
        bos = tokenizer.bos if first and tokenizer.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _text_of_object(self, item: dict[str, Any], name: str) -> str:
        """The text of {"prompt_string": text} or {"content": [parts]}, with marks of pictures.

        Raises ApiError.
        """
        text, parts = item.get("prompt_string"), item.get("content")
        if isinstance(text, str):
            pictures = item.get("multimodal_data")
            return text if pictures is None else self.media.filled(text, pictures, name)
        if isinstance(parts, list) and parts:
            found = []
            for part in parts:
                url = url_of(part)
                if url is None and not (
                    isinstance(part, dict) and isinstance(part.get("text"), str)
                ):
                    raise invalid(f"{name} has a part that is no text and no picture", name)
                found.append(part["text"] if url is None else self.media.mark(url, name))
            return "".join(found)
        raise invalid(f"{name} has an object without prompt_string and content", name)


def shown_ids(text: TextModel, ids: Sequence[int]) -> str:
    """The text of a prompt's tokens, with MARKER in place of a picture's rows."""
    found = [
        MARKER if is_picture else text.unbounded.decode(list(own), special=True)
        for is_picture, own in itertools.groupby(ids, lambda i: i < 0)
    ]
    return "".join(found)


def parts_of(name: str, record: Mapping[str, Any], heeded: tuple[str, ...]) -> dict[str, Any]:
    """The parts of an object field that have no effect, under the name NAME.PART."""
    return {f"{name}.{str(key)[:64]}": v for key, v in record.items() if key not in heeded}


def unheeded(body: Body) -> tuple[str, ...]:
    """The names of fields that were not read and could have changed the reply."""
    return tuple(name for name in body.unread() if name not in HARMLESS)


def _messages(body: Body) -> list[dict[str, Any]]:
    messages = body.records("messages", MAX_MESSAGES)
    if not messages:
        raise invalid("messages is empty, expected at least one", "messages")
    for message in messages:
        _check_message(message)
    if [m["role"] for m in messages[-2:]] == ["assistant", "assistant"]:
        raise invalid("the last two messages are both the assistant's, expected one", "messages")
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _continued(body: Body, messages: list[dict[str, Any]]) -> bool:
    """Whether the answer continues the last message: by default if that is an assistant's."""
    given, generation = body.switch("continue_final_message"), body.switch("add_generation_prompt")
    last = messages[-1]
    if given and generation:
        raise invalid(
            "add_generation_prompt and continue_final_message are both true, expected one",
            "continue_final_message",
        )
    is_assistants = last["role"] == "assistant" and not last.get("tool_calls")
    if given and not is_assistants:
        raise invalid(
            "continue_final_message is true and the last message not the assistant's",
            "continue_final_message",
        )
    return is_assistants and given is not False and (given or generation is None)


def _thinking(body: Body, wanted: chat.Wanted) -> tuple[chat.Thinking, dict[str, Any]]:
    """What a request asks for about thoughts, and the template's variables. Raises ApiError."""
    variables = dict(body.record("chat_template_kwargs") or {})
    effort = body.text("reasoning_effort")
    if effort is not None:
        if effort not in REASONING_EFFORTS:
            expected = ", ".join(REASONING_EFFORTS)
            raise invalid(f"reasoning_effort is {effort!r}, expected {expected}"[:300])
        variables.setdefault("reasoning_effort", effort)
    budget = None
    for name in ("thinking_budget", "thinking_budget_tokens", "reasoning_budget"):
        found = body.integer(name, -1, MOST_TOKENS)
        budget = found if found is not None and found >= 0 else budget
    on = body.switch("enable_thinking")
    on = variables.get("enable_thinking", on)
    if not isinstance(on, bool) and on is not None:
        raise invalid(f"enable_thinking is {shown(on)}, expected true or false")
    if on is None and (effort == "none" or wanted.formed):
        on = False
    form = body.text("reasoning_format") or "auto"
    if form not in ("auto", "none", "deepseek", "deepseek-legacy"):
        raise invalid("reasoning_format is unknown, expected auto, none or deepseek")
    return chat.Thinking(on, budget, shown=form != "none"), variables


def _most_tokens(body: Body, names: tuple[str, ...], least: int = 0) -> int | None:
    """The most tokens of an answer, from the first of these fields that is set; None: no limit.

    -1 also means no limit.
    """
    for name in names:
        found = body.integer(name, -1, MOST_TOKENS)
        if found is not None:
            if 0 <= found < least:
                raise invalid(f"{name} is {found}, expected {least} or more, or -1", name)
            return None if found == -1 else found
    return None


def _n_keep(body: Body, ids: list[int]) -> int:
    """The number of tokens that a context shift keeps: at least the first, which may be BOS."""
    found = body.integer("n_keep", -1, 1 << 30) or 0
    return len(ids) if found == -1 else min(found + 1, len(ids))


def _slot(body: Body) -> int | None:
    found = body.integer("id_slot", -1, 1 << 16)
    return None if found == -1 else found


def _check_message(message: dict[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise invalid("a message has no role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                continue
            if url_of(part) is None:
                raise invalid(_no_text(part), "messages")
    elif content is not None and not isinstance(content, str):
        raise invalid("a message's content is no string and no list of parts", "messages")


def _no_text(part: Any) -> str:
    """The reason why a part of a message is refused."""
    kind = part.get("type") if isinstance(part, dict) else None
    for word, names in (
        ("audio", ("input_audio", "audio")),
        ("video", ("input_video", "video_url")),
        ("file", ("file", "input_file", "document")),
    ):
        if kind in names:
            return f"{word} input is not supported: a message has a part that is no text"
    return "a message has a part that is no text"


def _salt(body: Body) -> str:
    """The text that keeps prefixes apart, as vLLM's cache_salt does; "" for none."""
    salt = body.text("cache_salt")
    if salt is not None and not 1 <= len(salt) <= MAX_SALT:
        raise invalid(f"cache_salt has {len(salt)} characters, expected 1 to {MAX_SALT}")
    return salt or ""
