"""MCP servers of `tamis chat --mcp`: their configuration, connections and tools."""

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO

import anyio
import anyio.abc
import anyio.from_thread
import httpx2
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import say

START_S, END_S = 120, 10  # `npx -y` may download a server first
SHAPE = '{"mcpServers": {"NAME": {"command": ..., "args": [...], "env": {...}}}}'


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    """How one server is reached: a program that is started, or a URL of streamable HTTP."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server."""

    server: str
    name: str
    description: str
    schema: dict[str, Any]


def read_config(path: Path) -> list[ServerConfig]:
    """The servers of a file in the form of Claude Desktop's. Raises UsageError, OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON ({error}); expected {SHAPE}") from None
    servers = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f"{path} has no object mcpServers; expected {SHAPE}")
    if not servers:
        raise UsageError(f"{path} names no server; expected {SHAPE}")
    given = [(name, entry) for name, entry in servers.items() if not _is_disabled(entry)]
    return [_config_of(f"{path}: mcpServers.{name}", name, entry) for name, entry in given]


def _is_disabled(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("disabled") is True


def _config_of(where: str, name: str, entry: Any) -> ServerConfig:
    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        raise UsageError(f"{where} is {entry!r:.60}, expected an object with a command or a url")
    kind = entry.get("type", entry.get("transport"))
    if kind not in (None, "stdio", "http", "streamable-http", "streamableHttp"):
        raise UsageError(f"{where} is of type {kind!r:.20}, expected stdio or http")
    known = {field.name: field for field in dataclasses.fields(ServerConfig)}
    fields = {key: value for key, value in entry.items() if key in known and key != "name"}
    for key, value in fields.items():
        if key == "args":
            right = isinstance(value, list) and all(isinstance(item, str) for item in value)
        elif key in ("env", "headers"):
            right = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        else:
            right = isinstance(value, str) and bool(value)
        if not right:
            kinds = {
                "args": "a list of texts",
                "env": "texts by names",
                "headers": "texts by names",
            }
            raise UsageError(f"{where}.{key} is {value!r:.60}, expected {kinds.get(key, 'a text')}")
    url = fields.get("url", "http://")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{where}.url is {url!r:.60}, expected http:// or https://")
    fields["args"] = tuple(fields.get("args", ()))
    return ServerConfig(name, **fields)


class Servers:
    """Connected servers; a server that does not start is reported, and the others are there.

    They run on an event loop in a thread of its own. `close` ends them.
    """

    def __init__(self, configs: list[ServerConfig]) -> None:
        """Start or connect to all of them."""
        self.tools: list[ServerTool] = []
        self._clients: dict[str, Client] = {}
        self._running: list[tuple[anyio.Event, Future[None]]] = []
        self._logs: dict[str, TextIO] = {}
        self._left = contextlib.ExitStack()
        self._portal = self._left.enter_context(anyio.from_thread.start_blocking_portal())
        try:
            for config in configs:
                self._start(config)
        except BaseException:
            self.close()
            raise

    def _start(self, config: ServerConfig) -> None:
        # Opened to append, as the reading here moves the offset that the server's writing has.
        log = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115 - open till close()
        self._logs[config.name] = log
        self._left.callback(log.close)
        try:
            future, (stop, tools) = self._portal.start_task(self._serve, config, log)
        except Exception as error:
            what = config.url or config.command
            say(f"error: MCP server {config.name} ({what}): {self._reason(config.name, error)}")
            return
        self._running.append((stop, future))
        self.tools += tools

    async def _serve(
        self, config: ServerConfig, log: TextIO, *, task_status: anyio.abc.TaskStatus[Any]
    ) -> None:
        """Hold the connection to a server until it is to stop."""
        stop = anyio.Event()
        async with contextlib.AsyncExitStack() as stack:
            scope = stack.enter_context(anyio.fail_after(START_S))
            if config.url:
                http = httpx2.AsyncClient(headers=dict(config.headers), timeout=START_S)
                await stack.enter_async_context(http)
                transport = streamable_http_client(config.url, http_client=http)
            else:
                started = StdioServerParameters(
                    command=config.command,
                    args=list(config.args),
                    env=dict(config.env),
                    cwd=config.cwd,
                )
                transport = stdio_client(started, errlog=log)
            client = await stack.enter_async_context(Client(transport))
            tools = await _tools_of(client, config.name)
            self._clients[config.name] = client
            scope.deadline = math.inf
            task_status.started((stop, tools))
            await stop.wait()

    def call(self, tool: ServerTool, arguments: dict[str, Any]) -> tuple[str, bool]:
        """The text of a tool's result, and whether it is an error.

        Ctrl-C cancels the call.
        """
        client = self._clients[tool.server]
        future = self._portal.start_task_soon(client.call_tool, tool.name, arguments)
        try:
            result = future.result()
        except Exception as error:
            return self._reason(tool.server, error), True
        finally:
            future.cancel()
        return _text_of(result), bool(result.is_error)

    def _reason(self, name: str, error: BaseException) -> str:
        """What went wrong, with the last line that the server wrote on standard error."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text = f"no answer within {START_S} s" if isinstance(error, TimeoutError) else str(error)
        text = text or type(error).__name__
        log = self._logs[name]
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
        return f"{text}: {said[-1]}" if said else text

    def close(self) -> None:
        """End the programs and close the connections."""
        for stop, future in self._running:
            with contextlib.suppress(Exception):
                self._portal.call(stop.set)
                future.result(END_S)
        self._running = []
        self._left.close()


async def _tools_of(client: Client, server: str) -> list[ServerTool]:
    found: list[ServerTool] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [
            ServerTool(server, t.name, t.description or "", t.input_schema) for t in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return found


def _text_of(result: Any) -> str:
    """The result of a call as text; parts that are no text are named."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        if text is None:
            kind = getattr(block, "mime_type", None) or getattr(resource, "mime_type", None)
            text = f"[{block.type}{f' {kind}' if kind else ''}: not text]" if kind else ""
            uri = getattr(block, "uri", None) or getattr(resource, "uri", None)
            text = text or f"[{block.type}{f' {uri}' if uri else ''}]"
        parts.append(text)
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
