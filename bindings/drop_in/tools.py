"""Tool calls in the text of an answer: Hermes' tags (ChatML models) and Llama 3's bare JSON."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

HERMES_SYSTEM = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)
_BEFORE = ("<|python_tag|>", "<|channel|>")


class ToolCall(NamedTuple):
    """A function the model wants called, and the JSON text of its arguments."""

    name: str
    arguments: str


def as_tools(
    tools: Sequence[Mapping[str, Any]] | None, functions: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The tools of a call, also those given the old way as functions."""
    found = [{"type": "function", "function": dict(f)} for f in functions or ()]
    return [dict(tool) for tool in tools or ()] + found


def forced(
    tools: list[dict[str, Any]], tool_choice: Any, function_call: Any
) -> tuple[str, Mapping[str, Any]] | None:
    """Name and JSON schema of the tool that must be called; None: the model decides.

    Raises ValueError for a tool that is not among them.
    """
    choice = tool_choice if tool_choice is not None else function_call
    if isinstance(choice, Mapping):
        name = choice.get("function", choice).get("name")
        for tool in tools:
            if tool["function"]["name"] == name:
                return name, tool["function"].get("parameters") or {"type": "object"}
        raise ValueError(f"tool choice {name!r} is not among the tools")
    if choice not in (None, "none", "auto", "required"):
        raise ValueError(f"tool choice {choice!r}, expected none, auto, required or a function")
    return None


def call_schema(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a call of any of the tools."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
    }


def find_calls(text: str, names: Sequence[str]) -> tuple[str, list[ToolCall]]:
    """The text before the calls, and the calls; only of tools that there are."""
    tagged = list(_TAGGED.finditer(text))
    if tagged:
        inside = [_call(match[1], names) for match in tagged]
        return text[: tagged[0].start()].strip(), [call for call in inside if call is not None]
    bare = text.strip()
    for mark in _BEFORE:
        bare = bare.removeprefix(mark)
    found = [_call(bare, names)] if bare.startswith("{") else []
    if found == [None]:  # Llama 3 puts several calls in a row
        found = [_call(part, names) for part in bare.split(";")]
    calls = [call for call in found if call is not None]
    return ("", calls) if calls and len(calls) == len(found) else (text, [])


def _call(text: str, names: Sequence[str]) -> ToolCall | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("name") not in names:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return ToolCall(found["name"], arguments if isinstance(arguments, str) else _json(arguments))


def plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of tools: all of it as text, Hermes' way."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{content}\n</tool_response>"
            found.append({"role": "user", "content": text})
            continue
        parts = [content] if content else []
        for call in message.get("tool_calls") or ():
            body = _json(_with_arguments(call["function"]))
            parts.append(f"<tool_call>\n{body}\n</tool_call>")
        found.append({"role": message["role"], "content": "\n".join(parts)})
    if tools:
        lines = "\n".join(_json(tool) for tool in tools)
        text = HERMES_SYSTEM.format(tools=lines)
        if found and found[0]["role"] == "system":
            text = found.pop(0)["content"] + "\n\n" + text
        found.insert(0, {"role": "system", "content": text})
    return found


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows tools: arguments of calls as values, not as text."""
    found = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": _with_arguments(call["function"])}
                for call in message["tool_calls"]
            ]
        found.append(message)
    return found


def _with_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
