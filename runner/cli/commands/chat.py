"""`tamis chat`: talk in the terminal. Ctrl-C stops the answer, Ctrl-D ends the program."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from tamis.cli.commands import completion
from tamis.cli.conversation import lines, repl
from tamis.cli.options import common, context, draft, group, samplers
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import say
from tamis.fetch.registry import CHAT, KNOWN, has_room


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    common.add_model_arguments(parser, auto=True)
    common.add_picture_arguments(parser)
    parser.set_defaults(shows_pictures=True)
    common.add_context_arguments(parser)
    common.add_audit_argument(parser)
    samplers.add_arguments(parser)
    samplers.add_grammar_arguments(parser)
    draft.add_arguments(parser)
    answer = group(parser, "conversation")
    answer.add_argument(
        "-sys",
        "--system",
        "--system-prompt",
        type=common.text,
        metavar="TEXT",
        help="system message (default: none, or the chat template's own)",
    )
    answer.add_argument(
        "-n",
        "--max-tokens",
        "--predict",
        "--n-predict",
        type=common.answer_length,
        metavar="N",
        help="most tokens of an answer; -1: as many as the context has room for (default: -1)",
    )
    answer.add_argument(
        "--context-shift",
        action="store_true",
        help="when the context is three quarters full, remove the oldest messages but not the "
        "system message until it is half full; the messages that stay are not read again "
        "(default: a full context is an error)",
    )
    answer.add_argument(
        "--plain",
        action="store_true",
        help="show answers as plain text, without rendering Markdown",
    )
    tools = group(parser, "tools")
    tools.add_argument(
        "--mcp",
        type=Path,
        metavar="FILE",
        help="JSON file with MCP servers, as Claude Desktop has it (mcpServers: command, args and "
        "env, or url), whose tools the model may call; each call is asked about (default: no "
        "tools)",
    )
    tools.add_argument(
        "--mcp-allow",
        action="append",
        default=[],
        metavar="NAME",
        help="SERVER, or SERVER.TOOL, whose calls are made without a question; may be repeated; "
        "without a terminal all others are refused (default: none)",
    )
    common.add_adapter_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read messages and commands until the end of input; returns 1 if one from a pipe failed."""
    progress = common.Progress()
    params = samplers.params(arguments)
    samplers.check(arguments)
    draft.check(arguments)
    configs = _mcp_configs(arguments)
    arguments.prefill = context.prefill(arguments.prefill, 0)
    engine = common.load_engine(arguments, progress)
    params = samplers.for_model(params, arguments, engine.path)
    chosen = context.choose(engine, arguments, None)
    arguments.ctx, arguments.cache_type_k, arguments.cache_type_v = chosen[:3]
    session = common.open_session(engine, arguments, progress)
    common.note_untrained(engine, session, arguments)
    drafts = draft.open_draft(engine, session, arguments)
    with contextlib.ExitStack() as stack:
        tools = None
        if configs and engine.vocab.chat_template is None:
            raise UsageError(f"{engine.path.name} has no chat template: --mcp needs one")
        if configs:
            tools = _tools(configs, arguments)
            stack.callback(tools.close)
        chat = repl.Chat(engine, session, params, arguments, drafts, tools)
        for name in arguments.image:
            chat.show(name)
        stack.callback(lambda: chat.engine.close())
        say(f"{engine.path.name}, context {chosen}\n/help lists the commands")
        if lines.interactive() and (better := _better_model(engine.path.name)):
            say(better)
        if chat.completes:
            say("It has no chat template (a base model): it continues what is written.")
        for text in lines.messages(chat.status, chat.take_draft, completion.of_message):
            if not chat.handle(text):
                break
    return int(chat.failed and not lines.interactive())


def _mcp_configs(arguments: argparse.Namespace) -> list[Any]:
    """The servers that --mcp names; [] without it. Raises UsageError, OSError."""
    if arguments.mcp is None:
        if arguments.mcp_allow:
            raise UsageError("--mcp-allow is for the servers of --mcp: name their file")
        return []
    try:
        from tamis.cli.conversation.mcp_servers import read_config
    except ImportError as error:
        raise UsageError(
            f'--mcp needs the package mcp ({error}): pip install "tamis[mcp]"'
        ) from None
    return read_config(arguments.mcp)


def _tools(configs: list[Any], arguments: argparse.Namespace) -> Any:
    """The tools of the servers, which are started."""
    from tamis.cli.conversation.mcp_servers import Servers
    from tamis.cli.conversation.tools import Tools

    servers = Servers(configs)
    try:
        tools = Tools(servers, arguments.mcp_allow)
    except BaseException:
        servers.close()
        raise
    n = len(servers.tools)
    say(f"{n} tool{'s' * (n != 1)} of MCP servers: /tools lists them")
    return tools


def _better_model(file: str) -> str:
    """The line that names a better model than that of a file, where memory and disk have room."""
    for at, name in enumerate(CHAT):
        if file == KNOWN[name].file:
            better = (KNOWN[each] for each in CHAT[:at])
            for model in filter(has_room, better):
                size = f"{model.n_bytes / 1e6:.0f} MB"
                return f"{name} is often wrong: -m {model.name} ({size}) knows more"
    return ""
