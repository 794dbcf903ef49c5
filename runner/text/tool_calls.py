"""An answer as it comes, parsed into thoughts, text and tool calls.

``OutputParser`` is fed the text of an answer in pieces of any size and gives out deltas; the joined
deltas do not depend on the pieces. What cannot be parsed is text: nothing is lost but marks of the
format and white space around them.
"""

import json
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tamis.text.call_syntax import gemma_arguments, python_calls, python_value
from tamis.text.chat_format import GEMMA_QUOTE, ChatFormat, ToolFormat
from tamis.text.chat_template import ChatTemplate
from tamis.text.json_stream import ObjectScanner

_NAME = re.compile(r"[\w.\-]+")
_NAME_AND_MORE = re.compile(r"([\w.\-]+)[^\w.\-]")
_MAX_NAME = 256
_MAX_HEADER = 4096  # characters from a call's mark to its arguments
_HARMONY_BODY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_HARMONY_TO = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_HARMONY_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

_Steps = Generator[None, None, Any]  # waits for more text where it yields


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: of its thoughts, its text, or a call.

    A call begins with a delta that has its ``id`` and ``name``; then come its arguments, JSON text
    in pieces. ``index`` counts calls from 0; it is None for thoughts and text.
    """

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""


def _piece(kind: str, text: str) -> Delta:
    return Delta(reasoning=text) if kind == "reasoning" else Delta(content=text)


def _new_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


class OutputParser:
    """Parses one answer; ``push`` text as it comes, then ``finish``.

    ``prompt`` is the text before the answer, or its end: it says whether the model is thinking
    already. ``tools`` are what the model may call, as in a request; without them calls are text.
    The text must have the control tokens in it that ``marks`` lists.
    """

    def __init__(
        self,
        format: ChatFormat,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: str = "",
        new_id: Callable[[], str] = _new_id,
    ):
        self.marks = format.marks()
        self._format = format
        self._tools = format.tools if tools else None
        self._schemas = _schemas(tools or ())
        self._new_id = new_id
        self._text, self._last = "", False
        self._out: list[Delta] = []
        self._n_calls = 0
        self._spaces = ""  # held back: they may be those before a mark
        self._fresh = ""  # "reasoning" or "content": white space at its start is dropped
        self._steps: _Steps = self._answer(prompt)

    @classmethod
    def for_template(
        cls,
        template: ChatTemplate,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: str = "",
        new_id: Callable[[], str] = _new_id,
    ) -> "OutputParser":
        """Return a parser of answers to prompts of ``template``."""
        return cls(ChatFormat.of(template), tools=tools, prompt=prompt, new_id=new_id)

    def push(self, text: str) -> list[Delta]:
        """Return what is certain after more of the answer."""
        self._text += text
        return self._advance()

    def finish(self) -> list[Delta]:
        """Return the rest, at the end of the answer."""
        self._last = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    # What the deltas are made of

    def _say(self, kind: str, text: str) -> None:
        if self._fresh == kind:
            text = text.lstrip()
        if not text:
            return
        self._fresh = ""
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if kept:
            self._out.append(_piece(kind, kept))

    def _end_of(self, kind: str, *, spaces: bool) -> None:
        """Thoughts or text end here; ``spaces``: also what was held back is part of them."""
        if self._spaces and spaces:
            self._out.append(_piece(kind, self._spaces))
        self._spaces = ""

    def _begin_call(self, name: str, id: str = "") -> None:
        self._end_of("content", spaces=False)
        self._out.append(Delta(index=self._n_calls, id=id or self._new_id(), name=name))
        self._n_calls += 1

    def _argue(self, text: str) -> None:
        if text:
            self._out.append(Delta(index=self._n_calls - 1, arguments=text))

    # Reading

    def _take(self, n: int) -> str:
        taken, self._text = self._text[:n], self._text[n:]
        return taken

    def _space(self) -> Generator[None, None, str]:
        """Take white space, all that comes."""
        taken = ""
        while True:
            n = len(self._text) - len(self._text.lstrip())
            taken += self._take(n)
            if self._text or self._last:
                return taken
            yield

    def _mark(self, marks: Iterable[str]) -> Generator[None, None, str]:
        """Take the longest of ``marks`` that the text goes on with; "" if with none."""
        marks = [mark for mark in marks if mark]
        while not self._last and any(
            len(mark) > len(self._text) and mark.startswith(self._text) for mark in marks
        ):
            yield
        return self._take(
            max((len(mark) for mark in marks if self._text.startswith(mark)), default=0)
        )

    def _until(self, marks: Sequence[str], use: Callable[[str], None]) -> _Steps:
        """Give all text before the first of ``marks`` to ``use``; take and return the mark.

        None at the end of the answer.
        """
        marks = [mark for mark in marks if mark]
        pattern = re.compile("|".join(re.escape(m) for m in sorted(marks, key=len, reverse=True)))
        beginnings = {mark[:n] for mark in marks for n in range(1, len(mark))}
        longest = max(map(len, marks), default=1)
        while True:
            found = pattern.search(self._text) if marks else None
            if found and (
                self._last
                or not any(m.startswith(found[0]) and m != found[0] for m in marks)
                or found.start() + longest <= len(self._text)
            ):
                use(self._take(found.start()))
                return self._take(len(found[0]))
            held = 0
            if not self._last:
                end = self._text[-longest:]
                held = next((n for n in range(len(end), 0, -1) if end[-n:] in beginnings), 0)
                if found:
                    held = max(held, len(self._text) - found.start())
            use(self._take(len(self._text) - held))
            if self._last and not self._text:
                return None
            yield

    # The answer

    def _answer(self, prompt: str) -> _Steps:
        style = self._format.tools.style if self._format.tools else ""
        if style == "harmony":
            yield from self._harmony(prompt)
        elif style == "recipient":
            yield from self._recipients()
        else:
            yield from self._plain(prompt)
        self._end_of("content", spaces=True)

    def _plain(self, prompt: str) -> _Steps:
        start, end = self._format.think or ("", "")
        tools, wrappers = self._tools, self._format.wrappers
        triggers = tools.triggers if tools else ()
        # Gemma 4 thinks again within an answer, and leaves marks of thoughts that are none.
        channel = "<|channel>"
        again = (start, end, channel) if start.startswith(channel) else ()
        may_think, thinking = bool(end), _is_open(prompt, start, end)
        if thinking:
            yield from self._thought(end)
        while True:
            if may_think and not thinking:
                spaces = yield from self._space()
                mark = yield from self._mark([start, end])
                if mark == start != "":
                    yield from self._thought(end)
                elif mark:
                    self._fresh = "content"
                else:
                    self._say("content", spaces)
            thinking = may_think = False
            if tools is not None and not triggers:
                yield from self._bare_calls(tools)
            mark = yield from self._until((*triggers, *wrappers, *again), self._content)
            if mark is None:
                return
            if mark in again:
                if mark == start:
                    self._end_of("content", spaces=False)
                    yield from self._thought(end)
                continue
            if tools is not None and mark in triggers:
                yield from self._calls(tools, mark)
                may_think = bool(end)
            else:
                self._fresh = "content" if mark == wrappers[0] else self._fresh

    def _content(self, text: str) -> None:
        self._say("content", text)

    def _thought(self, end: str) -> _Steps:
        self._fresh, self._spaces = "reasoning", ""
        found = yield from self._until((end,), lambda text: self._say("reasoning", text))
        self._end_of("reasoning", spaces=found is None)
        self._fresh = "content"

    # Calls

    def _calls(self, tools: ToolFormat, raw: str) -> _Steps:
        """Read calls after their first mark; what is none is text."""
        while raw:
            call_id = ""
            while True:
                raw += yield from self._space()
                mark = yield from self._mark(tools.openers)
                if not mark and tools.fields.get("id") == ("before",) and not call_id:
                    call_id = yield from self._identifier(tools)
                    mark = call_id
                if not mark:
                    break
                raw += mark
            if (yield from self._call(tools, raw, call_id)):
                raw = yield from self._after_call(tools)
            else:
                return

    def _identifier(self, tools: ToolFormat) -> Generator[None, None, str]:
        yield from self._wait(lambda: _NAME_AND_MORE.match(self._text) is not None)
        found = _NAME_AND_MORE.match(self._text)
        rest = self._text[found.end(1) :] if found else ""
        if found and any(mark.startswith(rest[:1]) for mark in tools.openers):
            return self._take(found.end(1))
        return ""

    def _wait(self, ready: Callable[[], bool]) -> _Steps:
        while not self._last and not ready() and len(self._text) <= _MAX_HEADER:
            yield

    def _after_call(self, tools: ToolFormat) -> Generator[None, None, str]:
        """Take what closes calls; return the mark of the next one, or ""."""
        closers = (*tools.closers, *(("]", ",") if tools.style == "json" else ()))
        while True:
            spaces = yield from self._space()
            mark = yield from self._mark((*closers, *tools.openers))
            if mark and mark in tools.openers and (mark in tools.triggers or mark[0] in "<["):
                return mark
            if tools.style == "json" and not tools.triggers and self._text[:1] == "{":
                return " "
            if tools.style == "json" and not mark and self._text[:1] == "{":
                return spaces or " "
            if not mark:
                self._fresh = "content" if spaces else self._fresh
                return ""

    def _call(self, tools: ToolFormat, raw: str, call_id: str) -> _Steps:
        """Read one call; False if there is none, with ``raw`` and what was read as text."""
        readers = {
            "json": self._json_call,
            "tag": self._tag_call,
            "tagged": self._tagged_call,
            "python": self._python_calls,
            "gemma": self._gemma_call,
        }
        return (yield from readers[tools.style](tools, raw, call_id))

    def _no_call(self, raw: str) -> bool:
        self._say("content", raw)
        return False

    def _bare_calls(self, tools: ToolFormat) -> _Steps:
        """Calls that no mark announces: all of the answer, and of a tool that there is."""
        raw = yield from self._space()
        raw += yield from self._mark((*tools.openers, "<|python_tag|>", "```json", "```"))
        raw += yield from self._space()
        if self._text[:1] in ("{", "[") and self._text:
            while (yield from self._json_call(tools, raw, "", known_only=True)):
                raw = yield from self._after_call(tools)
                separator = "" if raw else (yield from self._mark((";", "```")))
                if not raw and separator != ";":
                    break
                raw = yield from self._space()
        else:
            self._say("content", raw)

    def _json_call(
        self, tools: ToolFormat, raw: str, call_id: str, known_only: bool = False
    ) -> _Steps:
        while self._text[:1] == "[" or (self._text[:1] == "," and raw.strip()):
            raw += self._take(1)
            raw += yield from self._space()
        if self._text[:1] != "{":
            return self._no_call(raw)
        fields = dict(tools.fields)
        if known_only:
            fields.setdefault("name", ("name",))
        reader = _JsonCall(self, fields, call_id, known_only)
        scanner = ObjectScanner(reader.watched)
        while not scanner.done:
            n, found = scanner.feed(self._text)
            raw += self._take(n)
            for fragment in found:
                reader.read(fragment.path, fragment.text, fragment.last)
            if reader.refused or (self._last and not scanner.done):
                break
            if not scanner.done:
                yield
        if reader.begun:
            reader.end()
            return True
        return self._no_call(raw)

    def _tag_call(self, tools: ToolFormat, raw: str, call_id: str) -> _Steps:
        """A name between marks, then a JSON object."""
        yield from self._wait(lambda: "{" in self._text or self._closed(tools))
        brace = self._text.find("{")
        header = self._text[: brace if brace >= 0 else len(self._text)]
        found = _NAME.match(header)
        if found is None or len(header) > _MAX_HEADER or not self._is_tool(found[0]):
            return self._no_call(raw)
        marks = [c for c in tools.closers if c[0] != "`"]  # fences also stand before arguments
        close = min((n for c in marks if (n := header.find(c)) >= 0), default=-1)
        if close >= 0 or brace < 0:
            if close < 0:
                return self._no_call(raw)
            self._begin_call(found[0], call_id)
            self._argue("{}")
            self._take(close)
            return True
        self._take(brace)
        self._begin_call(found[0], call_id or _id_in(header, found[0], raw))
        scanner = ObjectScanner(frozenset())
        while not scanner.done:
            n, _ = scanner.feed(self._text)
            self._argue(self._take(n))
            if self._last:
                break
            if not scanner.done:
                yield
        return True

    def _closed(self, tools: ToolFormat) -> bool:
        return any(mark in self._text for mark in tools.closers if len(mark) > 1 and mark[0] != "`")

    def _is_tool(self, name: str) -> bool:
        return bool(name.strip(".-"))

    def _tagged_call(self, tools: ToolFormat, raw: str, call_id: str) -> _Steps:
        """A name, then each argument between marks."""
        yield from self._wait(lambda: _NAME_AND_MORE.match(self._text) is not None)
        found = _NAME.match(self._text)
        if found is None:
            return self._no_call(raw)
        name = self._take(found.end())
        before, front, back, after = (part.strip() for part in tools.argument)
        self._begin_call(name, call_id)
        schema = self._schemas.get(name, {})
        opened = "{"
        while True:
            yield from self._space()
            if not (yield from self._mark([before])):
                closer = yield from self._mark([c for c in tools.closers if c != before])
                if closer and not (closer in ("</tool_call>",) or self._ends_call(tools, closer)):
                    continue
                break
            key = yield from self._key(front, back)
            if key is None:
                break
            self._argue(f"{opened}{json.dumps(key, ensure_ascii=False)}: ")
            opened = ", "
            yield from self._value(schema.get(key), tools, after.replace("\0", key))
        self._argue("{}" if opened == "{" else "}")
        return True

    def _ends_call(self, tools: ToolFormat, closer: str) -> bool:
        return closer.startswith(("</", "<|/")) and tools.argument[3].strip() != closer

    def _key(self, front: str, back: str) -> Generator[None, None, str | None]:
        """The name of an argument, and what is between it and its value."""
        spaces = yield from self._space()
        name = yield from self._before(front)
        if name is None or any(c in name for c in '<>"'):
            self._text = spaces + self._text
            return None
        if back and (yield from self._before(back)) is None:
            return None
        return name.strip()

    def _before(self, mark: str) -> Generator[None, None, str | None]:
        """Take what is before ``mark``, and it; None where it does not come soon."""
        longest = _MAX_NAME + len(mark)
        while (at := self._text.find(mark, 0, longest)) < 0:
            if self._last or len(self._text) >= longest:
                return None
            yield
        name = self._take(at)
        self._take(len(mark))
        return name

    def _value(self, schema: Any, tools: ToolFormat, after: str) -> _Steps:
        """An argument's value as JSON; texts are given out as they come."""
        front, back, closing = tools.argument[1], tools.argument[2], tools.argument[3]
        margins = ((back or front).rpartition((back or front).strip())[2], _margin(closing))
        if margins[0] and not self._text and not self._last:
            yield
        yield from self._mark([margins[0]])
        if (yield from self._mark(["<![CDATA["])):
            after = "]]>" + after
        if _is_text(schema):
            self._argue('"')
            writer = _TextWriter(self._argue, margins[1])
            yield from self._until((after,), writer.write)
            writer.end()
            self._argue('"')
            return
        pieces: list[str] = []
        yield from self._until((after,), pieces.append)
        text = "".join(pieces).removesuffix(margins[1])
        self._argue(_as_json(text))

    def _python_calls(self, tools: ToolFormat, raw: str, call_id: str) -> _Steps:
        """A list of calls in Python's syntax, up to the mark that closes it."""
        pieces: list[str] = []
        closer = yield from self._until(tools.closers, pieces.append)
        text = "".join(pieces)
        calls = python_calls(text)
        if not calls or (closer is None and not text.rstrip().endswith("]")):
            return self._no_call(raw + text + (closer or ""))
        for name, arguments in calls:
            self._begin_call(name, call_id)
            self._argue(json.dumps(arguments, ensure_ascii=False))
        return True

    def _gemma_call(self, tools: ToolFormat, raw: str, call_id: str) -> _Steps:
        """A name and an object whose keys have no quotes and whose texts have marks for them."""
        pieces: list[str] = []
        closer = yield from self._until(tools.closers[:1], pieces.append)
        text = "".join(pieces)
        found = _NAME.match(text)
        arguments = gemma_arguments(text[found.end() :], GEMMA_QUOTE) if found else None
        if found is None or arguments is None:
            return self._no_call(raw + text + (closer or ""))
        self._begin_call(found[0], call_id)
        self._argue(json.dumps(arguments, ensure_ascii=False))
        return True

    # Formats that are messages, not marks within one

    def _recipients(self) -> _Steps:
        """``all`` and text, or a tool's name and JSON, each on a line after ``>>>``."""
        while True:
            yield from self._wait(lambda: "\n" in self._text)
            line, newline, _ = self._text.partition("\n")
            if newline and _NAME.fullmatch(line) and (line == "all" or line in self._schemas):
                self._take(len(line) + 1)
                if line == "all":
                    found = yield from self._until((">>>",), self._content)
                else:
                    self._begin_call(line)
                    found = yield from self._until((">>>",), self._argue)
            else:
                found = yield from self._until((">>>",), self._content)
            if found is None:
                return

    def _harmony(self, prompt: str) -> _Steps:
        """Messages with a channel each: thoughts, text, and calls to a recipient."""
        header = prompt.rpartition("<|start|>")[2] if "<|message|>" not in prompt[-64:] else ""
        body_only = prompt.endswith("<|message|>")
        while True:
            pieces: list[str] = []
            if not body_only:
                marks = ("<|message|>",)
                found = yield from self._until(marks, pieces.append)
                header += "".join(pieces)
                if found is None:
                    self._say("content", "".join(pieces))
                    return
            ended = yield from self._harmony_body(header)
            if ended is None:
                return
            header, body_only = (ended if ended == "<|channel|>" else ""), False

    def _harmony_body(self, header: str) -> _Steps:
        recipient = _HARMONY_TO.search(header)
        channel = _HARMONY_CHANNEL.search(header)
        if recipient and self._tools is not None:
            self._begin_call(recipient[1])
            return (yield from self._until(_HARMONY_BODY_ENDS, self._argue))
        kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        self._fresh, self._spaces = kind, ""
        ended = yield from self._until(_HARMONY_BODY_ENDS, lambda text: self._say(kind, text))
        self._end_of(kind, spaces=ended is None)
        return ended


class _JsonCall:
    """Makes deltas of the values of an object that is a call."""

    def __init__(
        self, parser: OutputParser, fields: Mapping[str, Any], call_id: str, known_only: bool
    ):
        self.begun = self.refused = self._argued = False
        self._parser, self._known_only = parser, known_only
        self._name_path, self._id_path = fields["name"], fields.get("id")
        self._argument_paths = {fields["arguments"], ("parameters",), ("arguments",)}
        self._name, self._id, self._arguments = "", call_id, ""
        self._id_known = self._id_path is None
        self._quoted: str | None = None  # arguments that are JSON within a string
        paths = {self._name_path, *self._argument_paths}
        if self._id_path is not None:
            paths.add(self._id_path)
        self.watched = frozenset({("*",)} if self._name_path == ("*",) else paths)

    def read(self, path: tuple[str, ...], text: str, last: bool) -> None:
        """Take a part of a value."""
        if self._name_path == ("*",):
            self._begin(path[0])
            self._argue(text, last)
        elif path == self._name_path:
            self._name += text
            if last:
                name = _unquoted(self._name)
                known = not self._known_only or name in self._parser._schemas
                self.refused = name is None or not known or not name
                if name and not self.refused:
                    self._begin(name)
        elif path == self._id_path:
            self._id += text
        elif path in self._argument_paths:
            self._argue(text, last)

    def _begin(self, name: str) -> None:
        if not self.begun:
            self.begun = True
            self._parser._begin_call(name, (_unquoted(self._id) or self._id).strip('"'))
            held, self._arguments = self._arguments, ""
            self._parser._argue(held)

    def _argue(self, text: str, last: bool) -> None:
        if not self._argued and self._quoted is None and text == '"':
            self._quoted = ""
        if self._quoted is not None:
            self._quoted += text
            if not last:
                return
            inner = _unquoted(self._quoted)
            text, self._quoted = (inner if inner is not None else self._quoted), None
        self._argued = True
        if self.begun:
            self._parser._argue(text)
        else:
            self._arguments += text

    def end(self) -> None:
        """Finish a call: without arguments they are an empty object."""
        if not self._argued:
            self._parser._argue("{}")


class _TextWriter:
    """Writes a text as the inside of a JSON string, without ``margin`` at its end."""

    def __init__(self, use: Callable[[str], None], margin: str):
        self._use, self._margin, self._held = use, margin, ""

    def write(self, text: str) -> None:
        """Take more of the text."""
        text = self._held + text
        n = len(self._margin)
        keep = len(text) - n if n and not text.endswith("\0") else len(text)
        keep = max(keep, 0)
        self._held = text[keep:]
        self._use(json.dumps(text[:keep], ensure_ascii=False)[1:-1])

    def end(self) -> None:
        """Write what is held back."""
        text = self._held.removesuffix(self._margin) if self._margin else self._held
        self._use(json.dumps(text, ensure_ascii=False)[1:-1])


def _schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of arguments, by the tool's name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found


def _is_open(prompt: str, start: str, end: str) -> bool:
    """Whether a prompt ends within a thought."""
    return bool(start) and prompt.rfind(start) > prompt.rfind(end)


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum")
    if schema.get("type") is None and isinstance(values, list):
        return bool(values) and all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def _as_json(text: str) -> str:
    """A value that is written without quotes: JSON if it is, or else a string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        value = python_value(text) if text.lstrip()[:1] in ("{", "[") else None
        return json.dumps(text if value is None else value, ensure_ascii=False)
    return text.strip()


def _margin(closing: str) -> str:
    """White space before the mark that closes a value."""
    return closing[: len(closing) - len(closing.lstrip())]


def _unquoted(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _id_in(header: str, name: str, raw: str) -> str:
    """An identifier written between a name and its arguments, or as ``functions.name:0``."""
    rest = header[len(name) :]
    if number := re.match(r":(\d+)\b", rest):
        prefix = "functions." if raw.rstrip().endswith("functions.") else ""
        return f"{prefix}{name}:{number[1]}"
    found = re.search(r"\[CALL_ID\]([\w\-]+)", rest)
    return found[1] if found else ""


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the assistant's message that ``deltas`` add up to, as in a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        message["content"] += delta.content
        if delta.reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta.reasoning
        if delta.index is not None:
            if delta.index == len(calls):
                function = {"name": delta.name, "arguments": ""}
                calls.append({"id": delta.id, "type": "function", "function": function})
            calls[delta.index]["function"]["arguments"] += delta.arguments
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message
