"""Tools of MCP servers in a conversation: as the model sees them, and calls with consent."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tamis.bindings.drop_in.chat import ChatFormat
from tamis.bindings.drop_in.tools import NO_PARAMETERS
from tamis.cli.conversation import lines
from tamis.cli.conversation.mcp_servers import ServerTool
from tamis.cli.options import did_you_mean
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import printable, say
from tamis.text.tool_calls import OutputParser

LONGEST = 60  # characters of an argument in a question
REFUSED = "error: the user refused this call"
NOBODY = "error: nobody is there to allow this call"


class Caller(Protocol):
    """Servers that have tools: a Protocol."""

    tools: list[ServerTool]

    def call(self, tool: ServerTool, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The text of a tool's result, and whether it is an error."""
        ...

    def close(self) -> None:
        """End them."""


class Tools:
    """The tools of a conversation; a name that two servers have gets its server's before it."""

    def __init__(self, servers: Caller, allowed: Sequence[str] = ()) -> None:
        """Take servers; allowed: SERVER, or SERVER.TOOL, whose calls are made without a question.

        Raises UsageError for names that are not there.
        """
        self._servers = servers
        names = [tool.name for tool in servers.tools]
        self._tools = {
            tool.name if names.count(tool.name) == 1 else f"{tool.server}_{tool.name}": tool
            for tool in servers.tools
        }
        known = {tool.server for tool in servers.tools} | set(map(_full, servers.tools))
        for name in allowed:
            if name not in known:
                there = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
                raise UsageError(f"--mcp-allow {name} is no server or SERVER.TOOL{there}")
        self._allowed = set(allowed)
        self.schemas = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": tool.description,
                    "parameters": tool.schema or NO_PARAMETERS,
                },
            }
            for name, tool in self._tools.items()
        ]

    def parser(self, engine: Any, end: str) -> OutputParser:
        """A parser of the answer to a prompt that has this end."""
        format = ChatFormat(engine, None).parsed(tools=bool(self.schemas))
        return OutputParser(format, tools=self.schemas or None, prompt=end)

    def results(self, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages that answer a message's calls, each made if the user allows it."""
        found = []
        for call in calls:
            name = call["function"]["name"]
            text = self._result(name, call["function"]["arguments"])
            found.append(
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}
            )
        return found

    def _result(self, name: str, written: str) -> str:
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name}; there are {', '.join(self._tools)}"
        try:
            arguments = json.loads(written or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return f"error: the arguments of {name} are no JSON object"
        shown = f"{_full(tool)}({', '.join(f'{k}={_short(v)}' for k, v in arguments.items())})"
        if refusal := self._refusal(tool, shown):
            say(f"[{shown}: not called]")
            return refusal
        text, is_error = self._servers.call(tool, arguments)
        say(f"[{shown}: {f'error: {text}' if is_error else f'{len(text)} characters'}]")
        return f"error: {text}" if is_error else text

    def _refusal(self, tool: ServerTool, shown: str) -> str:
        """What the model gets in place of a result; "" if the user, or a flag, allows the call."""
        if not self._allowed.isdisjoint((tool.server, _full(tool))):
            return ""
        if not lines.interactive():
            say(f"error: {shown} needs consent: start with --mcp-allow {_full(tool)}")
            return NOBODY
        answer = lines.ask(f"call {printable(shown)}? [y]es, [n]o, [a]lways: ")
        if answer in ("a", "always"):
            self._allowed.add(_full(tool))
        return "" if answer in ("y", "yes", "a", "always") else REFUSED

    def listing(self) -> str:
        """A line a tool: its name, whether it is allowed, and the first line of its description."""
        rows = []
        for tool in self._tools.values():
            about = (tool.description.strip().splitlines() or [""])[0]
            free = self._allowed.isdisjoint((tool.server, _full(tool)))
            rows.append(f"{_full(tool)}{'' if free else ' (allowed)'}  {about}".rstrip())
        return "\n".join(rows) or "the servers have no tools"

    def close(self) -> None:
        """End the servers."""
        self._servers.close()


def _full(tool: ServerTool) -> str:
    return f"{tool.server}.{tool.name}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"
