"""Chat templates from model files: rendered in a sandbox, with limits on time and size.

A template is code of a stranger: it sees only immutable values, cannot reach Python's attributes,
and ends after MAX_SECONDS or MAX_CHARS.
"""

import json
import secrets
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 2.0
MAX_CHARS = 8 << 20
MAX_SOURCE = 1 << 20

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' "
    "else 'user' %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
DEFAULTS = {"<|im_start|>": CHATML, "<start_of_turn>": GEMMA, "<|start_header_id|>": LLAMA3}


class PromptError(ValueError):
    """The chat template is missing, wrong, refuses the messages, or breaks its limits."""


class ChatTemplate:
    """A compiled chat template. Raises PromptError where the source is not valid."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise PromptError(f"chat template is {len(source)} characters, at most {MAX_SOURCE}")
        self._environment = _Environment()
        self._tokens = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise PromptError(f"chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The conversation as the model was trained to read it.

        Raises PromptError where the template refuses the messages or breaks its limits.
        """
        self._environment.deadline = time.monotonic() + MAX_SECONDS
        values = {**self._tokens, **extra, "messages": [dict(m) for m in messages]}
        parts, size = [], 0
        try:
            for part in self._template.generate(
                **values, add_generation_prompt=add_generation_prompt
            ):
                self._environment.check()
                size += len(part)
                if size > MAX_CHARS:
                    raise PromptError(f"chat template writes more than {MAX_CHARS} characters")
                parts.append(part)
        except PromptError:
            raise
        except Exception as error:  # whatever a stranger's code raises
            raise PromptError(f"chat template failed: {error}") from error
        return "".join(parts)

    def render_parts(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[tuple[str, bool]]:
        """The rendered text in pieces (text, is_template).

        Special tokens are to be parsed in template text only. Contents are found by rendering
        unguessable marks in their place. Where that gives another text (a template that looks into
        the contents), each content is looked for in the plain text, in order; one that is not found
        there is an error.
        """
        plain = self.render(messages, add_generation_prompt=add_generation_prompt)
        marks = [f"\ue000{secrets.token_hex(12)}\ue001" for _ in messages]
        marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        try:
            text = self.render(marked, add_generation_prompt=add_generation_prompt)
        except PromptError:
            text = ""
        contents = [str(m.get("content", "")) for m in messages]
        for choice in (contents, [c.strip() for c in contents]):
            parts = list(_split(text, marks, choice))
            if "".join(part for part, _ in parts) == plain:
                return parts
        return list(_found(plain, [c.strip() for c in contents]))


def default_template(tokens: Container[str]) -> str:
    """The usual template of a vocabulary with these tokens. Raises PromptError."""
    for token, source in DEFAULTS.items():
        if token in tokens:
            return source
    raise PromptError(
        "the model has no chat template and no known chat tokens: it may be a base model; "
        "use `tamis run --raw`"
    )


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a deadline in every loop and a limit on the size of values."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.deadline = float("inf")
        self.globals.pop("lipsum", None)
        for name in ("center", "format", "wordwrap", "pprint", "xmlattr"):  # sizes of their own
            self.filters.pop(name, None)
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.filters["tojson"] = _tojson

    def check(self) -> None:
        """Raise PromptError when time is up."""
        if time.monotonic() > self.deadline:
            raise PromptError(f"chat template runs longer than {MAX_SECONDS} s")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.check()
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise PromptError(f"chat template uses {operator!r}, which is not allowed")
        if operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            size = len(left if hasattr(left, "__len__") else right)
            count = right if hasattr(left, "__len__") else left
            if not isinstance(count, int) or size * count > MAX_CHARS:
                raise PromptError("chat template repeats a value too often")
        sized = operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__")
        if sized and len(left) + len(right) > MAX_CHARS:
            raise PromptError(f"chat template builds a value of over {MAX_CHARS} elements")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.check()
        name = getattr(obj, "__name__", "")
        if name in ("format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs"):
            raise PromptError(f"chat template calls {name}, which is not allowed")
        return super().call(context, obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        return super().getitem(obj, argument)

    def _range(self, *args: int) -> Iterator[int]:
        numbers = range(*args)
        if len(numbers) > 100_000:
            raise PromptError(f"chat template asks for a range of {len(numbers)}, at most 100000")

        def checked() -> Iterator[int]:
            for i in numbers:
                self.check()
                yield i

        return checked()


def _raise(message: str) -> None:
    raise PromptError(f"chat template refuses the messages: {message}")


def _tojson(value: Any, indent: int | None = None, **_ignored: Any) -> str:
    """JSON without the HTML escapes of jinja2's own filter, as chat templates expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _split(text: str, marks: list[str], contents: list[str]) -> Iterator[tuple[str, bool]]:
    """The marked text cut at its marks, with the contents put back."""
    at = dict(zip(marks, contents, strict=True))
    while text:
        hits = [(text.find(mark), mark) for mark in at]
        start, mark = min(((i, m) for i, m in hits if i >= 0), default=(len(text), ""))
        if start:
            yield text[:start], True
        if mark:
            yield at[mark], False
        text = text[start + len(mark) :]


def _found(plain: str, contents: list[str]) -> Iterator[tuple[str, bool]]:
    """The plain text cut at each content, in order."""
    for content in contents:
        at = plain.find(content)
        if not content:
            continue
        if at < 0:
            raise PromptError(
                "the chat template changes the text of a message, so that special tokens in it "
                "could not be told from the template's own"
            )
        yield plain[:at], True
        yield content, False
        plain = plain[at + len(content) :]
    yield plain, True
