"""An answer parsed, while it is generated, into thoughts, text and tool calls.

``OutputParser`` is fed the text of an answer in pieces of any size and returns deltas; the joined
deltas do not depend on the pieces. Text that cannot be parsed stays text: only marks of the format
and white space around them are dropped.
"""

import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tamis.text.calls.format import FLAT, ToolFormat
from tamis.text.calls.readers import Call, CallReader, Found, trimmed
from tamis.text.calls.tape import MAX_NAME, Steps, Tape
from tamis.text.calls.values import Tools
from tamis.text.chat_format import ChatFormat
from tamis.text.chat_template import ChatTemplate

_MAX_HEADER = 4096  # characters from a message's mark to its text
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
# The assumed format of a model whose template shows no calls.
_USUAL = ToolFormat("json", ("<tool_call>",), ("</tool_call>",), ("<tool_call>",), fields=FLAT)


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
    """Parses one answer; ``push`` text as it arrives, then ``finish``.

    ``prompt`` is the text before the answer, or its end: it shows whether the model is thinking
    already. ``tools`` are what the model may call, as in a request; without them calls are text.
    The text must include the control tokens that ``marks`` lists. A call is returned once its name
    and the end of its arguments are certain; a false start becomes text. ``forced``: a grammar
    makes the answer a call, so that it is one even if it is cut off.
    """

    def __init__(
        self,
        format: ChatFormat,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: str = "",
        forced: bool = False,
        new_id: Callable[[], str] = _new_id,
    ):
        self.marks = format.marks()
        self._format = format
        self._tools = (format.tools or _USUAL) if tools else None
        self._known = Tools(tools or ())
        self._new_id = new_id
        self._tape = Tape()
        self._is_cut = False
        self._reader = CallReader(
            self._tape, self._tools or _USUAL, self._known, lambda: self._is_cut
        )
        self._reader.forced = forced
        self._out: list[Delta] = []
        self._n_calls = 0
        self._spaces = ""  # white space held back: it may precede a mark
        self._fresh = ""  # "reasoning" or "content": white space at its start is dropped
        self._steps: Steps[None] = self._answer(prompt)

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
        """Append a piece of the answer; return the deltas that are certain."""
        self._tape.push(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """Return the remaining deltas at the end of the answer.

        ``cut``: a limit of tokens ended it.

        A call with complete arguments may lack its closing mark if the model itself ended the
        answer.
        """
        self._is_cut = cut
        self._tape.last = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    # The building of deltas

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
        """End thoughts or text; ``spaces``: whether held-back white space belongs to them."""
        if self._spaces and spaces:
            self._out.append(_piece(kind, self._spaces))
        self._spaces = ""

    def _content(self, text: str) -> None:
        self._say("content", text)

    def _give(self, calls: Iterable[Call]) -> None:
        self._end_of("content", spaces=False)
        for call in calls:
            index, self._n_calls = self._n_calls, self._n_calls + 1
            self._out.append(Delta(index=index, id=call.id or self._new_id(), name=call.name))
            self._out.append(Delta(index=index, arguments=call.arguments))

    # The answer

    def _answer(self, prompt: str) -> Steps[None]:
        style = self._format.tools.style if self._format.tools else ""
        if style == "harmony":
            yield from self._harmony(prompt)
        elif style == "recipient":
            yield from self._recipients()
        else:
            yield from self._plain(prompt)
        self._end_of("content", spaces=True)

    def _plain(self, prompt: str) -> Steps[None]:
        start, end = self._format.think or ("", "")
        tools, wrappers = self._tools, self._format.wrappers
        triggers = tools.triggers if tools else ()
        # Gemma 4 thinks again within an answer, and leaves marks without thoughts.
        channel = "<|channel>"
        again = (start, end, channel) if start.startswith(channel) else ()
        is_start, may_think, thinking = True, bool(end), _is_open(prompt, start, end)
        if thinking:
            yield from self._thought(end)
        while True:
            if may_think and not thinking:
                yield from self._may_think(start, end)
            thinking = may_think = False
            if tools is not None and is_start:
                yield from self._untagged(tools)
            is_start = False
            mark = yield from self._tape.upto((*triggers, *wrappers, *again), self._content)
            if not mark:
                return
            if mark in again:
                if mark == start:
                    self._end_of("content", spaces=False)
                    yield from self._thought(end)
            elif mark in triggers:
                yield from self._calls(mark)
                may_think = bool(end)
            else:
                self._fresh = "content" if mark == wrappers[0] else self._fresh

    def _may_think(self, start: str, end: str) -> Steps[None]:
        spaces = yield from self._tape.space()
        mark = yield from self._tape.mark([start, end])
        if mark == start != "":
            yield from self._thought(end)
        elif mark:
            self._fresh = "content"
        else:
            self._say("content", spaces)

    def _thought(self, end: str) -> Steps[None]:
        self._fresh, self._spaces = "reasoning", ""
        found = yield from self._tape.upto((end,), lambda text: self._say("reasoning", text))
        self._end_of("reasoning", spaces=not found)
        self._fresh = "content"

    # Calls

    def _untagged(self, tools: ToolFormat) -> Steps[None]:
        """Read calls without a mark: they make up the whole answer."""
        self._tape.keep()
        found = yield from self._reader.untagged(own=not tools.triggers)
        text = self._tape.kept()
        if found:
            self._give(found)
        else:  # how much of it was read depends on its pieces, and marks may be in it
            self._tape.begin_again(text)

    def _calls(self, mark: str) -> Steps[None]:
        """Read calls from their first mark on; what is not a call becomes text."""
        following: str | None = mark
        while following is not None:
            self._tape.keep(following)
            found: Found = yield from self._reader.calls(following)
            if not found:
                text = self._tape.kept()
                if self._may_read_again():
                    self._tape.begin_again(text)
                    return
                self._content(text)
                return
            if not self._reader.may_be_torn:
                self._give(found)
                found = ()
            following = yield from self._reader.next_opener()
            is_torn = following is None and (yield from self._reader.is_torn())
            text = self._tape.kept()
            if is_torn:
                self._content(text)
                return
            if found:
                self._give(found)
            self._fresh = "content"

    def _may_read_again(self) -> bool:
        """Whether to read a call once more, given that the whole answer has arrived."""
        tape, reader = self._tape, self._reader
        again = tape.last and tape.is_empty and not self._is_cut and not reader.lenient
        again = again and reader.may_be_lenient
        reader.lenient |= again
        return again

    # Formats of separate messages rather than marks within one

    def _recipients(self) -> Steps[None]:
        """Read ``all`` and text, or a tool's name and JSON, each on a line after ``>>>``."""
        tape = self._tape
        while True:
            tape.keep()
            name = yield from tape.name()
            is_line = len(name) <= MAX_NAME and (yield from tape.mark(["\n"]))
            if is_line and name in self._known:
                arguments = yield from self._reader.object()
                yield from tape.space()
                mark = yield from tape.mark([">>>"])
                text = tape.kept()
                if arguments != "!" and (mark or not (yield from tape.peek())):
                    self._give([Call(name, arguments)])
                    if mark:
                        continue
                    return
                self._content(text)
            else:
                text = tape.kept()
                self._content("" if is_line and name == "all" else text)
            if not (yield from tape.upto((">>>",), self._content)):
                return

    def _harmony(self, prompt: str) -> Steps[None]:
        """Read messages that each have a channel: thoughts, text, and calls to a recipient."""
        _, start, header = prompt.rpartition("<|start|>")
        header = header if start and "<|message|>" not in header else ""
        body_only = prompt.endswith("<|message|>")
        while True:
            self._tape.keep()
            if not body_only:
                pieces: list[str] = []
                found = yield from self._tape.upto(("<|message|>",), pieces.append, _MAX_HEADER)
                header += "".join(pieces)
                if not found:
                    self._content(self._tape.kept())
                    if (yield from self._tape.peek()):
                        yield from self._tape.upto((), self._content)
                    return
            ended = yield from self._harmony_body(header)
            if not ended:
                return
            header, body_only = (ended if ended == "<|channel|>" else ""), False

    def _harmony_body(self, header: str) -> Steps[str]:
        tape, recipient = self._tape, _recipient(header)
        if recipient and self._tools is not None:
            yield from tape.space()
            arguments = yield from self._reader.object()
            yield from tape.space()
            ended = yield from tape.mark(_HARMONY_ENDS)
            if arguments != "!" and (ended or not (yield from tape.peek())):
                tape.kept()
                self._give([Call(recipient, arguments)])
                return ended
            self._content(tape.kept())
            return ended or (yield from tape.upto(_HARMONY_ENDS, self._content))
        tape.kept()
        kind = "reasoning" if _channel(header) == "analysis" else "content"
        self._fresh, self._spaces = kind, ""
        ended = yield from tape.upto(_HARMONY_ENDS, lambda text: self._say(kind, text))
        self._end_of(kind, spaces=not ended)
        return ended


def _recipient(header: str) -> str:
    """The tool that a message of gpt-oss is addressed to; "" for none."""
    for word in header.replace("<|", " <|").split():
        if word.startswith("to="):
            return trimmed(word[3:], ("functions.",))
    return ""


def _channel(header: str) -> str:
    found = re.match(r"\s*(\w*)", header.rpartition("<|channel|>")[2])
    return found[1] if found else ""


def _is_open(prompt: str, start: str, end: str) -> bool:
    """Whether a prompt ends within a thought."""
    return bool(start) and prompt.rfind(start) > prompt.rfind(end)


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
