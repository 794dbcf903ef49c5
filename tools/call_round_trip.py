"""Tool calls with hostile arguments, through chat templates and back.

`python -m tamis.tools.call_round_trip FOLDER` renders a call of each kind of argument with each
template (*.jinja) of FOLDER, as its model would write the call, parses the text whole and in pieces
of 1, 3 and 7 characters, and prints a table: `+` the same call comes back; `=` another call, which
the template writes in the same words and which fits the tool's schema, so that they cannot be told
apart; `~` the template writes a backslash unescaped, while its models write Python's escapes, which
are parsed; `-` the template does not render it; anything else is wrong, and the status is 1.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tamis.text.calls.format import ToolFormat
from tamis.text.calls.values import Tools
from tamis.text.chat_format import ChatFormat
from tamis.text.chat_template import ChatTemplate, PromptError
from tamis.text.tool_calls import OutputParser, message_of

NAME = "copy_tree"
_NULLABLE: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PROPERTIES: dict[str, dict[str, Any]] = {
    "path": {"type": "string"},
    "note": _NULLABLE,
    "level": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "items": {"type": "array", "items": {}},
    "data": {"type": "object", "additionalProperties": {}},
}
PARAMETERS = {
    "type": "object",
    "properties": {name: {**schema, "description": "d"} for name, schema in PROPERTIES.items()},
}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "d", "parameters": PARAMETERS}}
    for n in (NAME, "stop")
]
HELD = {"path": "a.txt", "level": 2, "note": "in lines\n"}  # arguments of calls within texts
QUESTION = {"role": "user", "content": "Qx7 question"}


def kinds(format: ToolFormat) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield arguments by kind; marks are those of ``format``, alone in texts and within others."""
    yield "none", {}
    yield "word", {"path": "a b"}
    yield "empty", {"path": "", "note": ""}
    yield "spaces", {"path": "  a\t b  ", "note": " "}
    yield "lines", {"path": "a\nb\n\nc", "note": "\nx\n"}
    yield "quotes", {"path": "it's \"so\" \\ 'and' `that`", "note": '\\n \\" {\'a\': "b"}'}
    yield "unicode", {"path": "Zürich 東京 🙂 \u200d é\u0301", "note": "ｆｕｌｌ"}
    yield "long", {"path": "0123456789 abc\n" * 2000}
    yield "numbers", {"level": -12, "ratio": 1.5e-7}
    yield "large", {"level": 12345678901234567890123, "ratio": -0.25}
    yield "booleans", {"deep": True}
    yield "null", {"note": None}
    yield "like JSON", {"path": '{"a": [1, null]}', "note": "[1]"}
    yield "like words", {"path": "null", "note": "True"}
    yield "like numbers", {"path": "007", "note": "42"}
    yield "list", {"items": [1, "two", [True, None], {"three": ["}", "]"]}]}
    yield "object", {"data": {"a": {"b": [{"c": "d"}]}, "e-f": 1.5, "g": None}}
    yield "empty ones", {"items": [], "data": {}}
    yield "braces", {"path": "mkdir x/{a,b", "data": {"x": "}}]", "y": '"{'}}
    marks = list(dict.fromkeys(m for m in _marks(format) if m))
    yield "marks", {"path": " ".join(marks)}
    yield "marks apart", {"note": "\n".join(f"see {mark} here" for mark in marks)}
    yield "marks deep", {"data": {"a": [*marks, {"b": "".join(marks[::-1])}]}}


def kinds_of_calls(own: str, others: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield arguments whose texts hold whole calls: ``own`` of the template, and of ``others``."""
    yield "own call", {"path": own, "note": f"See:\n{own}\nand {own} again."}
    yield "own call last", {"level": 1, "path": f"{own}\n{own.replace(NAME, 'other')}"}
    yield "own call deep", {"data": {"a": [own, {"b": f"{own}{own}"}]}, "path": own}
    yield "others' calls", {"path": "\n".join(others[::2]), "note": "".join(others[1::2])}


def _marks(format: ToolFormat) -> Iterator[str]:
    argument = format.argument
    yield from (argument.before, *argument.front, argument.closing, *format.middle)
    yield from (*format.openers, *format.closers)
    yield from ("<|im_end|>", "<think>", "```")


def answer(template: ChatTemplate, arguments: Mapping[str, Any]) -> str | None:
    """Return what a model of ``template`` writes to call NAME; None if it renders no such call."""
    format = ChatFormat.of(template)
    call = {
        "id": "abcdefg01",
        "type": "function",
        "function": {"name": NAME, "arguments": json.dumps(arguments)},
    }
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    options: dict[str, Any] = {"tools": TOOLS, "functions": "", "datetime": ""}
    try:
        whole, plain = (
            template.render(
                format.normalized([QUESTION, m]), add_generation_prompt=False, **options
            )
            for m in (message, {"role": "assistant", "content": "Ax7 answer"})
        )
        prompt = template.render([QUESTION], **options)
    except PromptError:
        return None
    start = _marks_whole(_common(whole, prompt))
    end = _common(whole[::-1], plain[::-1])[::-1]
    turn = re.search(r"<[^<>\s]+>|\[[A-Z/_]+\]", end)
    stop = len(whole) - (len(end) - turn.start() if turn else 0)
    # what ends the turn may be part of a mark
    for mark in (format.tools or ToolFormat("")).closers:
        at = whole.rfind(mark)
        stop = max(stop, at + len(mark)) if 0 <= at < stop else stop
    text = whole[len(start) : stop]
    return text if NAME in text else None


def _common(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))]


def _marks_whole(text: str) -> str:
    at = text.rfind("<")
    return text[:at] if at > text.rfind(">") else text


def calls(template: ChatTemplate, text: str, step: int) -> list[tuple[str, Any]]:
    """Return the calls that are parsed from ``text``, fed in pieces of ``step`` characters."""
    ids = itertools.count()
    parser = OutputParser.for_template(template, tools=TOOLS, new_id=lambda: f"id{next(ids)}")
    deltas = [d for i in range(0, len(text), step) for d in parser.push(text[i : i + step])]
    message = message_of([*deltas, *parser.finish()])
    return [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message.get("tool_calls") or ()
    ]


def verdict(template: ChatTemplate, arguments: Mapping[str, Any]) -> str:
    """Return the mark of the table for a call with ``arguments``, or what is wrong."""
    text = answer(template, arguments)
    if text is None:
        return "-"
    found = [calls(template, text, step) for step in (max(len(text), 1), 1, 3, 7)]
    if any(other != found[0] for other in found):
        return "depends on the pieces"
    if json.dumps(found[0], sort_keys=True) == json.dumps([(NAME, arguments)], sort_keys=True):
        return "+"
    if len(found[0]) == 1 and found[0][0][0] == NAME:
        other = found[0][0][1]
        fits = Tools(TOOLS).fits(NAME, json.dumps(other))
        if fits and answer(template, other) == text:
            return "="
        format = ChatFormat.of(template).tools
        if format and format.style == "python" and "\\\\" in json.dumps(arguments):
            return "~"
    return f"{found[0]!r:.200} of {text!r:.300}"


def main() -> None:
    """Print the table of a folder of templates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="templates with this in their name")
    given = parser.parse_args()
    wrong: list[str] = []
    heading: list[str] = []
    every = {path.stem: ChatTemplate(path.read_text()) for path in given.folder.glob("*.jinja")}
    held = {name: (answer(every[name], HELD) or "").strip() for name in sorted(every)}
    for name, template in sorted(every.items()):
        if given.only not in name:
            continue
        format = ChatFormat.of(template).tools or ToolFormat("")
        others = list(dict.fromkeys(text for text in held.values() if text != held[name]))
        every_kind = [*kinds(format), *kinds_of_calls(held[name], others)]
        row = {kind: verdict(template, arguments) for kind, arguments in every_kind}
        if set(row.values()) == {"-"}:
            continue
        if not heading:
            heading = list(row)
            print("| template | " + " | ".join(heading) + " |\n" + "|---" * (len(row) + 1) + "|")
        cells = [v if v in "+=~-" else "WRONG" for v in row.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        wrong += [f"{name}, {kind}: {v}" for kind, v in row.items() if v not in "+=~-"]
    print("\n".join(["", *wrong]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
