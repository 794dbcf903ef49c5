"""The `tamis` command: one file a subcommand, each with `add(subparsers)` and `run(arguments)`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tamis import __version__

COMMANDS = ("chat", "run", "pull", "inspect", "bench", "perplexity", "tokenize", "warmup")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0, 1 (failed), 2 (usage), 130 (interrupted)."""
    parser = argparse.ArgumentParser(prog="tamis", description="Run GGUF models, read what matters")
    parser.add_argument("--version", action="version", version=f"tamis {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"tamis.cli.{name}")
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who read our output has gone; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("\ntamis: interrupted\n")
        return 130
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        sys.stderr.write(f"tamis: error: {error}\n")
        return 1
