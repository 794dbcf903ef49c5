"""Tools of MCP servers in `tamis chat`: a small server, and a model with scripted answers."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mcp_types import CallToolResult, ImageContent, TextContent
from stand_in_engine import FakeEngine, FakeSession

from tamis.cli import main
from tamis.cli.commands import config
from tamis.cli.conversation import lines, mcp_servers, repl
from tamis.cli.conversation.mcp_servers import Servers, ServerTool, read_config
from tamis.cli.conversation.tools import NOBODY, REFUSED, Tools
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.engine import generate as generation
from tamis.engine.generate import Piece
from tamis.sampling.chain import SamplerParams
from tamis.text.chat_template import ChatTemplate

SERVER = '''
import os, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("small")
@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return f"{a + b} in {os.environ.get('UNIT', 'none')}"
@server.tool()
def fail(why: str) -> str:
    """Nothing: it fails."""
    raise ValueError(why)
@server.tool()
def end() -> str:
    """Ends the server."""
    print("gone for good", file=sys.stderr, flush=True)
    os._exit(3)
server.run(sys.argv[1], **({"port": int(sys.argv[2])} if len(sys.argv) > 2 else {}))
'''
TEMPLATE = """\
{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}\
{% for m in messages %}[{{ m.role }}]{{ m.content }}\
{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}[assistant]"""


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted(FakeEngine):
    """An engine whose answers are the script's, one after the other; `read` are its prompts."""

    def __init__(self, *answers):
        super().__init__()
        self.answers, self.read, self.held = list(answers), [], []
        self.vocab.chat_template = TEMPLATE
        self.chat_template = ChatTemplate(TEMPLATE)
        self.tokenizer.has_special = lambda _text: False
        self.tokenizer.encode_parts = lambda parts: list("".join(t for t, _ in parts).encode())

    def session(self, n_ctx=None, **_options):
        engine = self

        class Session(FakeSession):
            def generate(self, ids, params, **options):
                self.prefill(ids)
                engine.read.append(bytes(self.tokens).decode())
                engine.held.append(len(ids))
                answer = engine.answers.pop(0)
                if isinstance(answer, BaseException):
                    raise answer
                self.prefill(list(answer.encode()))
                yield Piece(answer, 2, -0.5, "stop")

        return Session(n_ctx or 4000, [])


@pytest.fixture
def server(tmp_path):
    """The file of a server, and its configuration in Claude Desktop's form."""
    (tmp_path / "server.py").write_text(SERVER)
    entry = {"command": sys.executable, "args": [str(tmp_path / "server.py"), "stdio"]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"sums": entry | {"env": {"UNIT": "metres"}}}}))
    return config


@pytest.fixture
def asked(monkeypatch):
    """A terminal at which each question gets the next answer; the questions."""
    questions, answers = [], []

    def ask(question):
        questions.append(question)
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(lines, "interactive", lambda: True)
    monkeypatch.setattr(lines, "ask", ask)
    return questions, answers


class OneServer:
    """Servers that have these tools, and answer with what they were asked."""

    def __init__(self, *tools):
        self.tools, self.called, self.closed = list(tools), [], False

    def call(self, tool, arguments):
        self.called.append((tool.server, tool.name, arguments))
        return f"{tool.name} of {tool.server}", tool.name == "wrong"

    def close(self):
        self.closed = True


def tool(server, name):
    return ServerTool(server, name, f"Does {name}.\nMore of it.", {"type": "object"})


def chat_of(engine, tools):
    words = config.parser_of("chat").parse_args(["--plain", "--prefill", "dense"])
    return repl.Chat(engine, engine.session(), SamplerParams(), words, None, tools)


def test_a_server_over_stdio_is_asked_and_ended(server):
    (config,) = read_config(server)
    servers = Servers([config])
    pid = next(int(p.name) for p in Path("/proc").glob("[0-9]*") if _runs(p, server.parent))
    by_name = {tool.name: tool for tool in servers.tools}
    assert by_name["add"].description == "The sum of two numbers."
    assert set(by_name["add"].schema["properties"]) == {"a", "b"}
    assert servers.call(by_name["add"], {"a": 2, "b": 3}) == ("5 in metres", False)
    text, is_error = servers.call(by_name["fail"], {"why": "too cold"})
    assert is_error
    assert "fail" in text
    text, is_error = servers.call(by_name["add"], {"a": "x"})
    assert is_error
    servers.close()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/cmdline").exists()


def _runs(process, folder):
    try:
        return os.fsencode(folder) in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_a_server_that_ends_gives_an_error_with_what_it_wrote_last(server):
    servers = Servers(read_config(server))
    end = next(tool for tool in servers.tools if tool.name == "end")
    try:
        text, is_error = servers.call(end, {})
        assert is_error
        assert text.endswith(": gone for good")
    finally:
        servers.close()


def test_a_server_that_does_not_start_is_reported_and_the_others_are_there(server, capsys):
    found = json.loads(server.read_text())
    found["mcpServers"] |= {
        "none": {"command": "no-such-program"},
        "dies": {"command": sys.executable, "args": ["-c", "raise SystemExit('no key')"]},
        "off": {"command": "no-such-program", "disabled": True},
    }
    server.write_text(json.dumps(found))
    servers = Servers(read_config(server))
    servers.close()
    assert {tool.server for tool in servers.tools} == {"sums"}
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: MCP server none (no-such-program): ")
    assert second.startswith(f"error: MCP server dies ({sys.executable}): ")
    assert second.endswith(": no key")


def test_a_server_of_streamable_http_is_asked(server, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(tmp_path / "server.py"), "streamable-http", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < end
                time.sleep(0.1)
            entry = {"type": "http", "url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-A": "b"}}
            server.write_text(json.dumps({"mcpServers": {"far": entry}}))
            servers = Servers(read_config(server))
            add = next(tool for tool in servers.tools if tool.name == "add")
            assert servers.call(add, {"a": 4, "b": 5}) == ("9 in none", False)
            servers.close()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "is no JSON"),
        ("[]", "has no object mcpServers"),
        ('{"mcpServers": {}}', "names no server"),
        ('{"mcpServers": {"a": {}}}', "mcpServers.a is {}, expected an object with a command"),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "a command or a url"),
        ('{"mcpServers": {"a": {"command": 3}}}', "mcpServers.a.command is 3, expected a text"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "a.args is 'y', expected a list"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}', "expected texts by names"),
        ('{"mcpServers": {"a": {"url": "file:///x"}}}', "expected http:// or https://"),
        ('{"mcpServers": {"a": {"type": "sse", "url": "http://x"}}}', "expected stdio or http"),
    ],
)
def test_a_wrong_configuration_is_an_error_that_names_what_is_wrong(tmp_path, text, wrong):
    (tmp_path / "mcp.json").write_text(text)
    with pytest.raises(UsageError, match=r"mcp\.json") as error:
        read_config(tmp_path / "mcp.json")
    assert wrong in str(error.value)


def test_a_call_is_asked_about_made_and_answered_to_the_model(asked, capsys):
    questions, answers = asked
    answers[:] = ["y"]
    engine = Scripted("I look. " + call("add", a=2, b=3), "It is 5.")
    servers = OneServer(tool("sums", "add"))
    chat = chat_of(engine, Tools(servers))
    assert chat.handle("2 and 3?")
    assert questions == ["call sums.add(a=2, b=3)? [y]es, [n]o, [a]lways: "]
    assert servers.called == [("sums", "add", {"a": 2, "b": 3})]
    first, second = engine.read
    assert '"name": "add"' in first
    assert second.startswith(first)
    assert second.endswith("[tool]add of sums[assistant]")
    assert engine.held[1] < len(second) - len(first), "what was read is not read again"
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    shown = capsys.readouterr()
    assert shown.out == "I look.\nIt is 5.\n"
    assert "[sums.add(a=2, b=3): 11 characters]" in shown.err


def test_always_is_for_the_tool_and_no_refuses_the_call(asked):
    questions, answers = asked
    answers[:] = ["a", "n", ""]
    servers = OneServer(tool("one", "add"), tool("one", "get"))
    tools = Tools(servers)

    def ask(name):
        function = {"name": name, "arguments": '{"n": 1}'}
        (found,) = tools.results([{"id": "c", "type": "function", "function": function}])
        assert (found["role"], found["tool_call_id"], found["name"]) == ("tool", "c", name)
        return found["content"]

    assert [ask("add"), ask("add"), ask("get"), ask("get")] == [
        "add of one", "add of one", REFUSED, REFUSED
    ]  # fmt: skip
    assert len(questions) == 3
    assert [name for _, name, _ in servers.called] == ["add", "add"]


def test_without_a_terminal_only_what_a_flag_allows_is_called(monkeypatch, capsys):
    monkeypatch.setattr(lines, "interactive", lambda: False)
    servers = OneServer(tool("one", "add"), tool("two", "get"), tool("two", "wrong"))
    tools = Tools(servers, ["one.add", "two"])
    called = [
        {"id": "c", "function": {"name": name, "arguments": written}}
        for name, written in (
            ("add", "{}"),
            ("get", ""),
            ("wrong", "{}"),
            ("no", "{}"),
            ("add", "["),
        )
    ]
    found = [message["content"] for message in tools.results(called)]
    assert found[:3] == ["add of one", "get of two", "error: wrong of two"]
    assert found[3] == "error: there is no tool no; there are add, get, wrong"
    assert found[4] == "error: the arguments of add are no JSON object"
    (refused,) = Tools(servers).results(called[:1])
    assert refused["content"] == NOBODY
    assert "start with --mcp-allow one.add" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"--mcp-allow one.ad .* mean one.add"):
        Tools(servers, ["one.ad"])


def test_a_name_of_two_servers_has_its_server_before_it(asked):
    asked[1][:] = ["y"]
    servers = OneServer(tool("one", "get"), tool("two", "get"), tool("two", "put"))
    tools = Tools(servers)
    names = [schema["function"]["name"] for schema in tools.schemas]
    assert names == ["one_get", "two_get", "put"]
    (found,) = tools.results([{"id": "c", "function": {"name": "two_get", "arguments": "{}"}}])
    assert found["content"] == "get of two"
    assert tools.listing().splitlines()[2] == "two.put  Does put."


def test_a_failure_after_a_call_leaves_the_conversation_as_it_was(asked, capsys):
    asked[1][:] = ["y", "y", KeyboardInterrupt()]
    too_long = ValueError("prompt is 9 tokens, n_ctx is 8: raise n_ctx")
    engine = Scripted("Yes.", call("add", a=1), too_long, call("add", a=1), call("add", a=2))
    chat = chat_of(engine, Tools(OneServer(tool("sums", "add"))))
    chat.handle("Is it?")
    before = chat.messages
    chat.handle("More?")
    assert chat.messages == before
    chat.handle("And more?")
    assert chat.messages == before
    assert "[stopped: the conversation is as it was before]" in capsys.readouterr().err


def test_calls_without_end_stop_after_some_rounds(asked, capsys):
    asked[1][:] = ["a"]
    engine = Scripted(*[call("add", a=i) for i in range(repl.MOST_ROUNDS)], "Done.")
    chat = chat_of(engine, Tools(OneServer(tool("sums", "add"))))
    chat.handle("Go.")
    assert f"[{repl.MOST_ROUNDS} rounds of calls; /retry goes on]" in capsys.readouterr().err
    assert chat.messages[-1]["role"] == "tool"
    chat.handle("/retry")
    assert chat.messages[-1] == {"role": "assistant", "content": "Done."}


def test_a_conversation_with_calls_is_kept_and_goes_on(asked, tmp_path, capsys):
    asked[1][:] = ["y"]
    engine = Scripted(call("add", a=1), "It is 1.", "As I said.")
    chat = chat_of(engine, Tools(OneServer(tool("sums", "add"))))
    chat.handle("Go.")
    chat.handle(f"/save {tmp_path / 'talk'}")
    other = chat_of(engine, None)
    other.handle(f"/load {tmp_path / 'talk'}")
    assert other.messages == chat.messages
    other.handle("And?")
    assert other.messages[-1]["content"] == "As I said."
    assert not other.failed
    told = tmp_path / "talk.json"
    kept = json.loads(told.read_text())
    kept["messages"][1]["tool_calls"] = [{"id": 3}]
    told.write_text(json.dumps(kept))
    other.handle(f"/load {tmp_path / 'talk'}")
    assert other.failed
    assert "is not a kept conversation" in capsys.readouterr().err


def test_a_full_context_loses_a_question_with_all_its_calls():
    engine = Scripted()
    chat = chat_of(engine, Tools(OneServer(tool("sums", "add"))))
    function = {"name": "add", "arguments": "{}"}
    turn = [
        {"role": "user", "content": "u" * 900},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "content": "t" * 900, "name": "add", "tool_call_id": "c"},
        {"role": "assistant", "content": "a"},
    ]
    messages = [*turn, *turn, {"role": "user", "content": "last"}]
    kept, ids = chat._shortened(messages, chat._encode(messages))
    assert kept == [messages[-1]]
    assert ids == chat._encode(kept)


def test_the_command_line_starts_servers_and_refuses_what_it_cannot_use(
    server, monkeypatch, capsys
):
    engine = Scripted(call("add", a=2, b=3), "It is 5.")
    monkeypatch.setattr("tamis.engine.engine.Engine.load", lambda *_args, **_options: engine)
    monkeypatch.setattr(common, "model_file", lambda *_args: Path("fake.gguf"))
    left = iter(["/tools\n", "Go.\n"])
    stdin = SimpleNamespace(readline=lambda: next(left, ""), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["chat", "--mcp", str(server), "--mcp-allow", "sums.add"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "It is 5.\n"
    assert "3 tools of MCP servers: /tools lists them" in shown.err
    assert "sums.add (allowed)  The sum of two numbers." in shown.err
    assert engine.read[1].endswith("[tool]5 in metres[assistant]")
    assert main(["chat", "--mcp-allow", "sums"]) == 2
    assert main(["chat", "--mcp", str(server) + ".none"]) != 0
    engine.vocab.chat_template = None
    assert main(["chat", "--mcp", str(server)]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_what_a_tool_returns_is_text_and_other_parts_are_named():
    image = ImageContent(type="image", data="aGk=", mime_type="image/png")
    result = CallToolResult(content=[TextContent(type="text", text="a"), image])
    assert mcp_servers._text_of(result) == "a\n[image image/png: not text]"
    bare = CallToolResult(content=[], structured_content={"n": 1})
    assert mcp_servers._text_of(bare) == '{"n": 1}'


def test_control_tokens_that_mark_calls_are_part_of_the_answer(monkeypatch):
    """generate() leaves the text of control tokens out but for those that are asked for."""

    class Two:
        eog, n_vocab = frozenset({3}), 4

        def piece(self, token, *, special=False):
            return b"<call>" if token == 1 and special else b"" if token == 1 else b"x"

    class Steps:
        def decode_best(self, token, _n):
            return np.eye(4, dtype=np.float32)[min(token + 1, 3)]

    class Best:
        n_best = None

        def sample(self, logits):
            return int(np.argmax(logits))

        def logprob(self, _logits, _token):
            return 0.0

        def accept(self, token):
            pass

    first = np.eye(4, dtype=np.float32)[1]
    for shown, text in (((), "x"), ({1}, "<call>x")):
        pieces = generation.generate(Steps(), first, Best(), Two(), n_max=9, shown=shown)
        assert "".join(piece.text for piece in pieces) == text
