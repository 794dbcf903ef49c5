"""`tamis merge`: write a model of several files as one."""

import argparse
import sys
from pathlib import Path

from tamis.cli.commands.list import size
from tamis.cli.terminal.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("model", metavar="IN", help="any part of the model; all are in one folder")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write; must not exist")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print its name and size. Raises ValueError, FileExistsError, OSError."""
    from tamis.fetch.registry import resolve
    from tamis.formats.gguf import GGUFFile
    from tamis.make.copies import merge

    progress = Progress()
    with GGUFFile(resolve(arguments.model)) as file:
        merge(file, arguments.out, progress.of("write"))
    progress.clear()
    sys.stdout.write(f"{arguments.out}  {size(arguments.out.stat().st_size)}\n")
    return 0
