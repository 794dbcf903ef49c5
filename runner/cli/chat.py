"""`tamis chat`: talk in the terminal. Ctrl-C stops the answer, Ctrl-D ends the program."""

import argparse

from tamis.cli import common, lines, repl


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    common.add_model_arguments(parser)
    common.add_context_arguments(parser)
    common.add_audit_argument(parser)
    common.add_sampling_arguments(parser)
    parser.add_argument("--system", type=common.text, help="a system message")
    parser.add_argument("-n", "--max-tokens", type=common.count, help="longest answer in tokens")
    parser.add_argument(
        "--context-shift",
        action="store_true",
        help="once the context is three quarters full, forget the oldest messages, not the system "
        "message, down to half of it; the others are not read again",
    )
    parser.add_argument("--plain", action="store_true", help="show answers as they are written")


def run(arguments: argparse.Namespace) -> int:
    """Read messages and commands until the end of input; 1 where one from a pipe failed."""
    progress = common.Progress()
    params = common.sampler_params(arguments)
    engine = common.load_engine(arguments, progress)
    session = common.open_session(engine, arguments, progress)
    common.note_untrained(engine, session, arguments)
    chat = repl.Chat(engine, session, params, arguments)
    common.note(f"{engine.path.name}, context {session.n_ctx} tokens. /help lists the commands.")
    for text in lines.messages(chat.status):
        if not chat.handle(text):
            break
    engine.close()
    return int(chat.failed and not lines.interactive())
