"""The notation of thoughts and tool calls, derived from a model's chat template.

The template is rendered with conversations that differ in one thing (a tool call, a thought), with
recognisable words in them: the text around these words is the format. There are rules for model
families only where a template does not show what its model writes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tamis.text.calls.format import FLAT, GEMMA_QUOTE, Argument, ToolFormat
from tamis.text.chat_template import ChatTemplate, Message, PromptError

_QUESTION, _ANSWER, _THOUGHT = "Qx7 question", "Ax7 answer", "Tx7 thought"
_NAMES = ("first_fun", "other_fun")
_ARGUMENTS = {"argOne": "VALx7", "argTwo": 4711}
_IDS = ("callx0001", "callx0002")  # nine letters and digits: Mistral's allow nothing else
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {
                "type": "object",
                "properties": {
                    "argOne": {"type": "string", "description": "one"},
                    "argTwo": {"type": "integer", "description": "two"},
                },
                "required": ["argOne"],
            },
        },
    }
    for name in _NAMES
]
# Marks of thoughts that templates contain but may not render in messages.
_KNOWN_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
_TOKEN = re.compile(r"<[^<>\s]+>|<[^<>]*$|\[/?[A-Z_]+\]|```[a-z]*|[^<\[`\s]+|\S")
_MARK = re.compile(r"<[^<>\s]{2,}>|<\S[^<>]{3,}|\[/?[A-Z_]{3,}\]")


@dataclass(frozen=True)
class ChatFormat:
    """The form of answers to a template's prompts.

    ``think`` are the marks around thoughts ("" for a start that is not written); ``wrappers`` are
    marks around all other text. ``arguments_as_text``: the template expects a call's arguments as
    JSON text. ``thought_key``: the key of a message under which the template reads thoughts.
    """

    think: tuple[str, str] | None = None
    wrappers: tuple[str, ...] = ()
    tools: ToolFormat | None = None
    arguments_as_text: bool = False
    null_content: bool = True
    thought_key: str | None = None
    joins_responses: bool = False  # results of tools are a part of the message that calls them

    @classmethod
    def of(cls, template: ChatTemplate) -> "ChatFormat":
        """Derive the format from ``template``; what it does not show is None."""
        return _Reader(template).format()

    def marks(self) -> frozenset[str]:
        """Texts of control tokens that a parser must see, if the vocabulary has them."""
        tools = self.tools or ToolFormat("")
        texts = {*(self.think or ()), *self.wrappers, *tools.openers, *tools.closers}
        # Gemma 4's thoughts begin with a control token and a word.
        texts.update(mark for text in self.think or () for mark in re.findall(r"<[^<>\s]+>", text))
        a = tools.argument
        texts.update(*map(_tokens, (a.before, *a.front, a.kind_end, a.closing, *tools.middle)))
        texts.update(*map(_tokens, (*texts, a.before)))  # some marks are several tokens
        if tools.style == "elements":
            texts.add(a.before)
        if tools.style == "harmony":
            texts |= HARMONY_MARKS
        if tools.style == "gemma":
            texts.add(GEMMA_QUOTE)
        return frozenset(text for text in texts if _MARK.fullmatch(text) or len(text) > 3)

    def normalized(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return copies of ``messages`` in the form that the template reads.

        Arguments of calls become a dict or JSON text, thoughts get the template's key for them, and
        None becomes an empty text if the template cannot render it. Arguments that are not a JSON
        object stay text.
        """
        found = [self._normalized(dict(message)) for message in messages]
        return _joined(found) if self.joins_responses else found

    def _normalized(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("tool_calls"):
            calls = [dict(call) for call in message["tool_calls"]]
            for call in calls:
                if isinstance(call.get("function"), Mapping):
                    call["function"] = self._function(dict(call["function"]))
            message["tool_calls"] = calls
        if message.get("content") is None and not self.null_content:
            message["content"] = ""
        thought = message.get("reasoning_content") or message.get("reasoning")
        if thought and self.thought_key == "[]":
            message = _as_blocks(message, thought)
        elif thought and self.thought_key is not None:
            message.setdefault(self.thought_key, thought)
        return message

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        if self.arguments_as_text and isinstance(arguments, Mapping):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            try:
                value = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return function
            if isinstance(value, dict):
                function["arguments"] = value
        return function


_UNRENDERED = {
    "<|tool_list_start|>": ToolFormat(
        "python", ("<|tool_call_start|>",), ("<|tool_call_end|>",), ("<|tool_call_start|>",)
    ),
    "List of tools: [": ToolFormat(
        "python", ("<|tool_call_start|>",), ("<|tool_call_end|>",), ("<|tool_call_start|>",)
    ),
    "<tool_call>": ToolFormat(
        "json", ("<tool_call>",), ("</tool_call>",), ("<tool_call>",), fields=FLAT
    ),
    "<|tool_call|>": ToolFormat(
        "json", ("<|tool_call|>",), ("<|/tool_call|>",), ("<|tool_call|>",), fields=FLAT
    ),
}
# Kimi K3 writes all of an answer in tags with attributes.
_XTML = ToolFormat(
    "xtml",
    ("<|open|>tools<|sep|>", "<|open|>call"),
    ("<|close|>call<|sep|>", "<|close|>tools<|sep|>", "<|close|>json<|sep|>"),
    ("<|open|>tools<|sep|>", "<|open|>call"),
    middle=("<|open|>json",),
    argument=Argument("<|open|>argument", closing="<|close|>argument<|sep|>", kind_end="<|sep|>"),
)
HARMONY_MARKS = frozenset(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return")
)


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form of Gemma 4's first templates, whose calls contain their results.

    Each message with calls has the tools' results after it as ``tool_responses``, and the text of
    the assistant's next message.
    """
    found: list[dict[str, Any]] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        found.append(message)
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            continue
        message.pop("content", None)
        calls, responses = message["tool_calls"], list[dict[str, Any]]()
        while left and left[0].get("role") == "tool":
            answer = left.pop(0)
            call = calls[len(responses)] if len(responses) < len(calls) else {}
            name = call.get("function", {}).get("name") or answer.get("tool_call_id", "")
            responses.append({"name": name, "response": _value(answer.get("content"))})
        if responses:
            message["tool_responses"] = responses
        following = left[0] if left else {}
        speaks = following.get("content") and not following.get("tool_calls")
        if following.get("role") == "assistant" and speaks:
            message["content"] = left.pop(0)["content"]
    return found


def _value(content: Any) -> Any:
    """The content of a tool's result, decoded from JSON if it is JSON."""
    try:
        return json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        return content


def _as_blocks(message: dict[str, Any], thought: str) -> dict[str, Any]:
    """A message whose content is a list, with the thought as its first block."""
    content = message.get("content") or ""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
    if content == "":
        blocks = []
    message.pop("reasoning_content", None)
    return message | {"content": [{"type": "thinking", "thinking": thought}, *blocks]}


def _common_start(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def _common_end(a: str, b: str) -> str:
    return _common_start(a[::-1], b[::-1])[::-1]


def _tag_of(mark: str) -> str:
    """The name in marks such as ``<|START_TEXT|>`` and ``<|END_TEXT|>``."""
    return re.sub(r"(?i)start|end|\W|_", "", mark)


def _whole_marks(text: str) -> str:
    """The ``text`` without an incomplete mark at its end."""
    for opening, closing in ("<>", "[]"):
        start = text.rfind(opening)
        if start > text.rfind(closing):
            text = text[:start]
    return text


class _Reader:
    """Renders variants of one template and compares them."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._as_text = False
        self._null_content = True

    def format(self) -> ChatFormat:
        source = self._template.source
        if "<|channel|>" in source and "<|message|>" in source:
            harmony = ToolFormat("harmony")
            return ChatFormat(
                ("", ""), tools=harmony, thought_key="thinking", null_content=self._takes_none()
            )
        if "<|open|>" in source and "<|sep|>" in source:
            return ChatFormat(
                ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
                ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
                _XTML,
                thought_key="reasoning_content",
            )
        plain = self._tail([{"role": "assistant", "content": _ANSWER}])
        before, _, after = (plain or "").partition(_ANSWER)
        key, think = self._thoughts()
        tools = self._tool_format(before, after)
        wrappers = self._wrappers(before, after, think)
        joins = "'<|tool_call>call:'" in source and "OpenAI Chat Completions:" not in source
        return ChatFormat(think, wrappers, tools, self._as_text, self._null_content, key, joins)

    def _takes_none(self) -> bool:
        """Whether None as the text of a message with a call renders like an empty text."""
        message = {"role": "assistant", "tool_calls": [_call(0, _ARGUMENTS)]}
        empty, none = (self._tail([message | {"content": text}]) for text in ("", None))
        return none is not None and none == empty

    def _tail(self, messages: Sequence[Message], **extra: Any) -> str | None:
        """The text rendered after the question; None if the template refuses."""
        question = {"role": "user", "content": _QUESTION}
        options: dict[str, Any] = {
            "add_generation_prompt": False,
            "tools": _TOOLS,
            "functions": "",
            "datetime": "",
        }
        try:
            text = self._template.render([question, *messages], **(options | extra))
        except PromptError:
            return None
        return text.rpartition(_QUESTION)[2]

    def _prompt_end(self) -> str:
        return self._tail([], add_generation_prompt=True) or ""

    # Thoughts

    def _thoughts(self) -> tuple[str | None, tuple[str, str] | None]:
        found = None
        call = [_call(0, _ARGUMENTS)]
        for key in ("reasoning_content", "reasoning", "thinking", "[]"):
            for rest in ({"content": _ANSWER}, {"content": "", "tool_calls": call}):
                message: dict[str, Any] = {"role": "assistant", **rest}
                if key == "[]":
                    message = _as_blocks(message, _THOUGHT)
                else:
                    message[key] = _THOUGHT
                tail = self._tail([message], enable_thinking=True, thinking=True)
                if tail and _THOUGHT in tail and not re.search("['\"]thinking['\"]", tail):
                    found = found or key
                    marks = self._around_thought(tail)
                    if marks:
                        return key, marks
        for start, end in _KNOWN_THOUGHTS:
            if start in self._template.source or end in self._template.source:
                return found, (start, end)
        return found, None

    def _around_thought(self, tail: str) -> tuple[str, str] | None:
        before, _, after = tail.partition(_THOUGHT)
        end = re.match(r"\s*(<[^<>]+>|\[/[A-Z_]+\])", after)
        if end is None:
            return None
        for known in _KNOWN_THOUGHTS:
            if known[1] == end[1]:
                return known
        start = re.search(r"(<[^<>]+>[a-z]*|\[[A-Z_]+\])\s*$", before)
        if start and re.sub(r"\W", "", start[1]) and "think" in (start[1] + end[1]).lower():
            return start[1], end[1]
        return None

    def _wrappers(self, before: str, after: str, think: tuple[str, str] | None) -> tuple[str, ...]:
        """Marks around an answer's text that are not the end of the prompt."""
        if re.search("<response>[^{}]*</response>", self._template.source):  # Granite's prompt
            return ("<response>", "</response>")
        prompt = self._prompt_end()
        own = before[len(_whole_marks(_common_start(before, prompt))) :]
        start = re.search(r"(<[^<>\s]+>)\s*$", own)
        end = re.match(r"\s*(<[^<>\s]+>)", after)
        if start is None or start[1] in (think or ()) or start[1].startswith("</"):
            return ()
        if end and _tag_of(start[1]) == _tag_of(end[1]):
            return (start[1], end[1])
        return (start[1],)

    # Tool calls

    def _tool_format(self, before: str, after: str) -> ToolFormat | None:
        for count in (2, 1):
            tail = self._rendered_calls(count)
            if tail is not None:
                break
        else:
            self._null_content = self._takes_none()
            return self._unrendered()
        head = _whole_marks(_common_start(tail, before))
        body = tail[len(head) :]
        ending = _common_end(body, after)
        # The end of a turn begins with a mark, or else it is a part of what closes the calls.
        mark = _MARK.search(ending)
        body = body[: len(body) - len(ending) + mark.start()] if mark else body
        found = self._without_thoughts(_read_calls(body)) or self._unrendered()
        return self._refined(found)

    def _without_thoughts(self, found: ToolFormat | None) -> ToolFormat | None:
        """The format without the marks of an empty thought before the calls."""
        if found is None or self._prompt_end().endswith(">>>"):
            return found and ToolFormat("recipient")
        marks = {mark for pair in _KNOWN_THOUGHTS for mark in pair}
        openers = tuple(t for t in found.openers if t not in marks and _NAMES[0] not in t)
        triggers = openers if found.style == "elements" else _triggers(openers)
        return replace(found, openers=openers, triggers=triggers)

    def _unrendered(self) -> ToolFormat | None:
        """The format of calls that the template asks for but does not render."""
        for mark, found in _UNRENDERED.items():
            if mark in self._template.source:
                return found
        return None

    def _rendered_calls(self, count: int) -> str | None:
        # The first publishers of Kimi K2 write a call's id, of which the name is a part.
        for ids in (_IDS, tuple(f"functions.{name}:{i}" for i, name in enumerate(_NAMES))):
            for as_text in (False, True):
                arguments: Any = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
                calls = [_call(i, arguments) | {"id": ids[i]} for i in range(count)]
                for content in (None, "", _ANSWER):
                    tail = self._tail(
                        [{"role": "assistant", "content": content, "tool_calls": calls}]
                    )
                    if tail is None or "{'argOne'" in tail or "None" in tail:
                        continue
                    if _NAMES[0] in tail and "VALx7" in tail:
                        self._as_text, self._null_content = as_text, content is None
                        return tail.replace(_ANSWER, "", 1)
        return None

    def _refined(self, found: ToolFormat | None) -> ToolFormat | None:
        """The format completed by further calls, and by marks that models use instead."""
        if found is None:
            return None
        if found.style == "tagged":
            calls = [_call(0, {"argOne": True, "argTwo": [1]})]
            tail = self._tail([{"role": "assistant", "content": _ANSWER, "tool_calls": calls}])
            has_cdata = "<![CDATA[" in self._template.source
            found = replace(
                found,
                python_words="True" in (tail or ""),
                argument=replace(found.argument, has_cdata=has_cdata),
            )
        return replace(
            found,
            openers=_with_singular(found.openers),
            closers=_with_singular(found.closers),
            triggers=_with_singular(found.triggers),
        )


def _with_singular(marks: tuple[str, ...]) -> tuple[str, ...]:
    """The marks, and Kimi K2's singular forms of its section marks."""
    plural, one = "tool_calls_section", "tool_call_section"
    also = (m.replace(plural, one) for m in marks if plural in m)
    n = next((i for i, m in enumerate(marks) if plural not in m), len(marks))
    return (*marks[:n], *also, *marks[n:])


def _call(index: int, arguments: Any) -> dict[str, Any]:
    function = {"name": _NAMES[index], "arguments": arguments}
    return {"id": _IDS[index], "type": "function", "function": function}


def _read_calls(body: str) -> ToolFormat | None:
    """The format of ``body``, which has one or two calls."""
    end = body.find("argOne")
    at = body.rfind(_NAMES[0], 0, end if end >= 0 else None)
    if at < 0:
        return None
    after_name = body[at + len(_NAMES[0]) :]
    found = _json_object(body, at)
    if found is not None:
        start, stop, fields = found
        return _marked("json", body, start, stop, fields=fields)
    if after_name.startswith("("):
        start = max(body.rfind("[", 0, at), 0)
        return _marked("python", body, start, body.rfind(")") + 1)
    if after_name.startswith("{argOne:"):
        return _marked("gemma", body, at, body.find("}", at) + 1)
    found_elements = _elements(body, at)
    if found_elements is not None:
        return found_elements
    brace = body.find("{", at)
    if brace >= 0:
        try:
            value, stop = json.JSONDecoder().raw_decode(body, brace)
        except ValueError:
            value, stop = None, 0
        if value == _ARGUMENTS:
            written = _tokens(body[at + len(_NAMES[0]) : brace])
            middle = tuple(t for t in written if not t[0].isalnum() and t[0] != ":")
            return _marked("tag", body, at, stop, middle=middle)
    return _tagged(body, at)


def _json_object(body: str, at: int) -> tuple[int, int, dict[str, tuple[str, ...]]] | None:
    """The start and end of the JSON object with the name, and the paths in it."""
    for match in re.finditer(r"\{", body[:at]):
        try:
            value, stop = json.JSONDecoder().raw_decode(body, match.start())
        except ValueError:
            continue
        fields = {}
        for path, item in _leaves(value, ()):
            if item == _NAMES[0]:
                fields["name"] = path
            elif item == _IDS[0]:
                fields["id"] = path
            elif item in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
                fields["arguments"] = path
                if path == (_NAMES[0],):
                    fields |= {"name": ("*",), "arguments": ("*",)}
            elif isinstance(item, str | int) and "id" in path[-1].lower().split("_"):
                fields.setdefault("id", path)
        if {"name", "arguments"} <= fields.keys():
            return match.start(), stop, fields
    return None


def _object_around(text: str, at: int) -> int:
    """Where the outermost JSON object begins that reaches over a position; 0 if none does."""
    for match in re.finditer(r"\{", text[:at]):
        try:
            _, stop = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        if stop > at:
            return match.start()
    return 0


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value != _ARGUMENTS:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _marked(style: str, body: str, start: int, stop: int, **fields: Any) -> ToolFormat:
    """The marks before and after the call at ``start`` to ``stop``."""
    opening, rest = body[:start], body[stop:]
    second = rest.find(_NAMES[1])
    between = rest[:second] if second >= 0 else ""
    if style == "json" and second >= 0:
        between = rest[: _object_around(rest, second)]
    last = body[body.rfind("}" if style in ("json", "tag", "gemma") else ")") + 1 :]
    if style == "tagged":
        last = body[body.rfind("4711") + 4 :]
    if style == "python":
        between, last = "", rest
    if _IDS[0] in opening:
        fields.setdefault("fields", {"id": ("before",)})
    openers = tuple(dict.fromkeys(t for t in _tokens(opening) if t not in ("[", ",")))
    after = dict.fromkeys(_tokens(between) + _tokens(last))
    closers = tuple(t for t in after if t not in openers and not t[0].isalnum() and t not in "[],>")
    return ToolFormat(style, openers, closers, _triggers(openers), **fields)


def _tokens(text: str) -> list[str]:
    """Marks and words of ``text``, without the identifiers of calls."""
    return [t for t in _TOKEN.findall(text) if t not in _IDS]


def _triggers(openers: tuple[str, ...]) -> tuple[str, ...]:
    """All marks before a name: models omit those around calls."""
    marks = [t for t in openers if _MARK.fullmatch(t)]
    if not marks:
        return tuple(t for t in openers[:1] if len(t) > 3)
    return tuple(marks)


def _elements(body: str, at: int) -> ToolFormat | None:
    """The marks around elements of the call at ``at``; a control token announces them."""
    found = re.search(r"VALx7(\S+)</argOne>", body[at:])
    if found is None or f"{found[1]}<argOne>VALx7" not in body:
        return None
    prefix = found[1]
    marks = re.compile(re.escape(prefix) + "<[^<>]*>?")
    end = body.rfind("</argTwo>") + len("</argTwo>")
    openers = tuple(dict.fromkeys(marks.findall(body[:at])))
    closers = tuple(dict.fromkeys(marks.findall(body[end:])))
    middle = body[at + len(_NAMES[0]) : body.find(prefix, at)].strip()
    return ToolFormat(
        "elements", openers, closers, openers, middle=(middle,), argument=Argument(prefix)
    )


def _tagged(body: str, at: int) -> ToolFormat | None:
    """The marks around the arguments of a call whose name is at ``at``."""
    one, two = body.find("argOne", at), body.find("argTwo", at)
    value, other = body.find("VALx7", at), body.find("4711", at)
    if not at < one < value < two < other:  # a missing one is at -1
        return None
    middle, second = body[one + 6 : value], body[two + 6 : other]
    gap = body[value + 5 : two]
    header = body[at + len(_NAMES[0]) : one]
    before = re.sub(r"^[^<\[\]]+", "", _common_end(header, gap))
    after = gap[: len(gap) - len(before)]
    front = _common_start(middle, second)
    back = re.sub(r"^\w+", "", _common_end(middle, second)) if front != middle else ""
    closing = after.replace("argOne", "\0")
    marks = tuple(re.findall(r"<[^<>\s]+>", front))
    argument = Argument(
        before.strip(),
        marks if not back and "".join(marks) == re.sub(r"\s", "", front) else (front.strip(),),
        closing.strip(),
        margin=re.split(r"\S", back or front)[-1],
        end_margin=re.split(r"\S", closing)[0],
        kind_end=back.strip(),
    )
    found = _marked("tagged", body, at, other + 4, argument=argument)
    own = (*_tokens(closing), *_tokens(after))
    closers = tuple(t for t in found.closers if t not in own and t != '">')
    return replace(found, closers=closers, middle=tuple(_tokens(header.removesuffix(before))))
