"""Chat templates: a conversation as the text, and as the tokens, that a model was trained on."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from jinja2 import Template, TemplateError, TemplateSyntaxError

from tamis.text import picture_marks
from tamis.text import tagged_text as usertext
from tamis.text.template_sandbox import TemplateEnvironment, WorkLimit, size

Message = Mapping[str, Any]

_MAX_SOURCE = 64 * 1024  # twice the longest known; compiling so much takes up to two seconds
_MAX_INPUT = 1 << 30  # characters

_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_GEMMA = """\
{{- bos_token }}
{%- set system = '' %}
{%- if messages and messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim + '\\n\\n' %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{{- '<start_of_turn>' }}
{{- 'model' if message['role'] == 'assistant' else message['role'] }}
{{- '\\n' + (system if loop.first else '') + message['content'] | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
_DEFAULTS = {
    "<|im_start|>": _CHATML,
    "<start_of_turn>": _GEMMA,
    "<|start_header_id|>": _LLAMA3,
}


class PromptError(ValueError):
    """A chat template that cannot be used, or that refuses the conversation."""


class ChatTokenizer(Protocol):
    """What ``encode_chat`` needs of a tokenizer: a Protocol."""

    bos: int | None
    add_bos: bool

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of the joined parts; control tokens are parsed only in parts marked True."""

    def has_special(self, text: str) -> bool:
        """Whether a control token is written out in ``text``."""


def default_template(tokens: Sequence[str]) -> str:
    """Return the usual template for a vocabulary with these ``tokens``.

    Raises PromptError if they do not belong to a known chat format.
    """
    for token, source in _DEFAULTS.items():
        if token in tokens:
            return source
    raise PromptError(
        "the model file has no chat template, and its tokens are of no known chat format "
        f"({', '.join(_DEFAULTS)}): it may be a base model; use `tamis run --raw`"
    )


class ChatTemplate:
    """A jinja2 template, compiled once; renderings may run in several threads.

    ``bos`` and ``eos`` are the texts of these tokens, for the template. The template is not
    trusted: PromptError is raised for forbidden operations, and for taking more than about a
    second, or values or output of more than 2 million characters, beyond what its input needs.
    """

    def __init__(self, source: str, bos: str = "", eos: str = ""):
        if len(source) > _MAX_SOURCE:
            raise PromptError(
                f"chat template of {len(source)} characters, the most is {_MAX_SOURCE}: "
                "give a shorter one"
            )
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._env = TemplateEnvironment()
        self._env.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self._template: Template = _guarded(self._env.from_string, source)
        # Gemma 4's template opens no answer after a message with text, calls and their results.
        self._turn = "<|turn>model\n" if "'<|tool_call>call:'" in source else ""

    def __repr__(self) -> str:
        return f"<ChatTemplate of {len(self.source)} characters>"

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """Return the text of a conversation, by default with the assistant's answer opened.

        Messages are dicts with "role" and "content"; ``extra`` holds further variables of the
        template ("tools", "enable_thinking", ...). Raises PromptError. To make tokens of a
        conversation, use ``encode_chat``: in this text, a user's control tokens look like the
        template's.
        """
        variables = {"messages": [*messages], "tools": None, "documents": None} | extra
        return self._render(variables, add_generation_prompt)

    def render_parts(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[tuple[str, bool]]:
        """Return the text in parts: (text, whether it is the template's own).

        All strings in ``messages`` and ``extra`` are the user's: the template gets them with
        veiled characters (see ``usertext``), which come out marked wherever it puts them. It can
        compare, search, strip and cut them as ever. The joined parts are ``render``'s text,
        unless the template does something to them that looks through no veil (a regular
        expression of a rare filter, a number read from a text).
        """
        variables = {"messages": [*messages], "tools": None, "documents": None} | extra
        try:
            variables = usertext.veiled(variables)
        except ValueError as e:
            raise PromptError(str(e)) from None
        return usertext.parts(self._render(variables, add_generation_prompt))

    def _render(self, variables: dict[str, Any], add_generation_prompt: bool) -> str:
        meter = WorkLimit.for_input(_guarded(size, variables, _MAX_INPUT))
        own = self._tokens | {"add_generation_prompt": add_generation_prompt}
        context = self._template.new_context(own | variables)
        text = _guarded(lambda: self._env.write(self._template.root_render_func(context), meter))
        if add_generation_prompt and self._turn and text.endswith("<turn|>\n"):
            text += self._turn
        return text


def encode_chat(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    ids_of: Callable[[int], Sequence[int]] | None = None,
    **extra: Any,
) -> list[int]:
    """Return the tokens of a conversation, BOS included if the model wants one.

    ids_of: the ids that stand for a picture, by the number of its mark (see ``picture_marks``).

    Control tokens are read in the template's own text only. The ids are those of the rendered
    text as long as no message has a control token in it. Where the template sees through no veil
    (see ``render_parts``), messages without control tokens are rendered plainly; others as far as
    the template gets with veils: safe, though perhaps not what it would make of the text.
    """
    kwargs = {"add_generation_prompt": add_generation_prompt} | extra
    return chat_ids(tokenizer, chat_parts(tokenizer, template, messages, **kwargs), ids_of)


def chat_parts(
    tokenizer: ChatTokenizer, template: ChatTemplate, messages: Sequence[Message], **extra: Any
) -> list[tuple[str, bool]]:
    """Return what ``encode_chat`` encodes: (text, whether control tokens are parsed).

    ``extra`` is that of ``ChatTemplate.render``.
    """
    parts = template.render_parts(messages, **extra)
    try:
        picture_marks.check_kept(usertext.strings([*messages]), parts)
    except ValueError as e:
        raise PromptError(str(e)) from None
    text = template.render(messages, **extra)
    if text != "".join(part for part, _ in parts):
        users = usertext.strings([*messages, extra])
        if not any(map(tokenizer.has_special, users)):
            parts = [(text, True)]
    return parts


def chat_ids(
    tokenizer: ChatTokenizer,
    parts: Iterable[tuple[str, bool]],
    ids_of: Callable[[int], Sequence[int]] | None = None,
) -> list[int]:
    """Return the tokens of ``chat_parts``, BOS included if the model wants one."""
    if ids_of is None:
        ids = tokenizer.encode_parts(parts)
    else:
        ids = picture_marks.encode(tokenizer.encode_parts, parts, ids_of)
    if tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
        ids.insert(0, tokenizer.bos)
    return ids


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Call jinja2; any error of a template becomes a PromptError with its text."""
    try:
        return function(*args)
    except TemplateSyntaxError as e:
        raise PromptError(f"chat template, line {e.lineno}: {e.message}") from None
    except RecursionError:
        raise PromptError("chat template: nested too deeply, or a macro calls itself") from None
    except TemplateError as e:
        raise PromptError(f"chat template: {e.message}") from None
    except Exception as e:  # a template is a program: it can raise anything
        raise PromptError(f"chat template: {type(e).__name__}: {e}") from e


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 100 or any(c.isdigit() for c in format):
        raise TemplateError(f"strftime_now of {format[:100]!r}")
    return time.strftime(format)
