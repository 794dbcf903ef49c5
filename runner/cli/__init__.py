"""The `tamis` command: parses the command line and runs a subcommand; an error is one line."""

import argparse
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

from tamis.cli.commands import COMMANDS, module_of
from tamis.cli.options import Parser, settings
from tamis.cli.options.errors import UsageError, one_line
from tamis.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 (failed), 2 (usage), 130 (interrupted).

    An error is one line on standard error; with --traceback it is raised instead.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]  # `list` is a command in this module
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        for number in (signal.SIGINT, signal.SIGALRM):  # the process belongs to this command
            signal.signal(number, _interrupt)
        sys.unraisablehook = _dropped
    try:
        _open_streams()
        if argv is None:
            _let_all_text_pass()
            warnings.showwarning = lambda message, *_where, **_more: _say(f"warning: {message}")
        arguments = _parser(words).parse_args(words)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        if argv is None and getattr(arguments, "ends_at_once", False):
            sys.stderr.flush()
            os._exit(code)  # else all objects are freed first, for seconds on a busy machine
        return code
    except SystemExit as done:  # argparse, which has printed the reason
        return done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:
        # The reader of our output is gone; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        if argv is None:  # a second Ctrl-C must not break the exit
            for number in (signal.SIGINT, signal.SIGALRM):
                signal.signal(number, signal.SIG_IGN)
        _say("interrupted")
        return 130
    except Exception as error:
        if "--traceback" in words:
            raise
        _say(f"error: {one_line(error)}")
        return 2 if isinstance(error, UsageError | settings.SettingsError) else 1


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not within an import: then try again 10 ms later.

    NumPy turns it into an ImportError there, and the import system may swallow it.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _dropped(found: "sys.UnraisableHookArgs") -> None:
    """Handle an exception that Python drops: a finalizer's interrupt is repeated 10 ms later."""
    if found.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(found)


def _open_streams() -> None:
    """Open the null device for standard streams that the caller closed (`<&-`), which are None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _let_all_text_pass() -> None:
    """Make reading and writing continue with text that the stream's encoding lacks."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Invalid input is rejected where a message is used; a failed read would lose earlier
        # messages.
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer, or a file name, may have characters that the locale's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of all commands; only the command that the line names is imported."""
    parser = Parser(
        prog="tamis",
        description="Run GGUF language models on CPU and GPU, and read only what matters of a "
        "long context.",
    )
    parser.add_argument("--version", action="version", version=f"tamis {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show the Python traceback of an error"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = subparsers.add_parser(name, help=text, description=text)
        # May also follow the command, as when it is appended to a line that failed.
        command.add_argument(
            "--traceback", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        if name == wanted:
            module = importlib.import_module(module_of(name))
            module.add_arguments(command)
            words = argv[argv.index(name) + 1 :]
            settings.apply(command, name, words)
            command.set_defaults(run=module.run, argv=words)
            parser.command = command
    return parser


def _say(text: str) -> None:
    # The terminal's line may have an unfinished progress message.
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}tamis: {text}\n")
