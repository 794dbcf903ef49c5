"""Tools in conversations: schemas of calls, and messages for templates without tools."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tamis.text.calls.format import ToolFormat

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
_FIELDS = {"name": ("name",), "arguments": ("arguments",)}
# The format that `HERMES_SYSTEM` asks for and a grammar of `call_schema` enforces.
HERMES = ToolFormat("json", ("<tool_call>",), ("</tool_call>",), ("<tool_call>",), fields=_FIELDS)
BARE = ToolFormat("json", fields=_FIELDS)


# The parameters of a function that names none, as in OpenAI's API: it is called with {}.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def as_tools(
    tools: Sequence[Mapping[str, Any]] | None, functions: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The tools of a request, including those in the older `functions` form.

    All have parameters.
    """
    found = [{"type": "function", "function": dict(f)} for f in functions or ()]
    return [_with_parameters(dict(tool)) for tool in [*(tools or ()), *found]]


def _with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if isinstance(function, Mapping) and not function.get("parameters"):
        tool["function"] = {**function, "parameters": dict(NO_PARAMETERS)}
    return tool


def allowed(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Any]:
    """The tools and the mode that a choice of the kind allowed_tools names.

    Other choices are unchanged.

    Raises ValueError.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    given = choice.get("allowed_tools", choice)
    if not isinstance(given, Mapping):
        raise ValueError("tool choice has allowed_tools that is no object")
    mode, some = given.get("mode", "auto"), given.get("tools") or ()
    if mode not in ("auto", "required"):
        raise ValueError(f"tool choice has mode {mode!r:.60}, expected auto or required")
    names = set(map(_name, some if isinstance(some, list | tuple) else [some]))
    if unknown := names - {tool["function"]["name"] for tool in tools}:
        raise ValueError(f"tool choice {min(unknown)!r:.60} is not among the tools")
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def _name(tool: Any) -> str:
    """The name of a tool that a choice refers to. Raises ValueError."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"tool choice has {tool!r:.60}, expected a function with a name")
    return name


def forced(
    tools: list[dict[str, Any]], tool_choice: Any, function_call: Any
) -> tuple[str, Mapping[str, Any]] | None:
    """The name and JSON schema of the tool that must be called; None if the model decides.

    Raises ValueError for a tool that is not among them.
    """
    choice = tool_choice if tool_choice is not None else function_call
    if isinstance(choice, Mapping):
        name = _name(choice)
        for tool in tools:
            if tool["function"]["name"] == name:
                return name, tool["function"]["parameters"]
        raise ValueError(f"tool choice {name!r:.60} is not among the tools")
    if choice not in (None, "none", "auto", "required"):
        raise ValueError(f"tool choice {choice!r:.60}, expected none, auto, required or a function")
    return None


def call_schema(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a call of any of the tools.

    References in a tool's schema stay within it.
    """
    calls = []
    for i, tool in enumerate(tools):
        schema = tool["function"]["parameters"]
        if isinstance(schema, Mapping):
            schema = {"$id": f"tool:{i}"} | dict(schema)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


def plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages for a template without tools: calls and results as text, in Hermes' format."""
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
        kept = {key: message[key] for key in ("reasoning_content", "reasoning") if key in message}
        found.append(kept | {"role": message["role"], "content": "\n".join(parts)})
    if tools:
        lines = "\n".join(_json(tool) for tool in tools)
        text = HERMES_SYSTEM.format(tools=lines)
        if found and found[0]["role"] == "system":
            text = found.pop(0)["content"] + "\n\n" + text
        found.insert(0, {"role": "system", "content": text})
    return found


def _with_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {"name": function["name"], "arguments": arguments}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
