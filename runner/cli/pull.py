"""`tamis pull`: fetch a model."""

import argparse
import sys

from tamis.cli import common
from tamis.models import KNOWN, pull


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    names = ", ".join(sorted(KNOWN))
    parser.add_argument("name", help=f"{names}, or hf:owner/repo:Q4_K_M")


def run(arguments: argparse.Namespace) -> int:
    """Print the path of the file."""
    progress = common.Progress()
    path = pull(arguments.name, progress=progress)
    progress.clear()
    sys.stdout.write(f"{path}\n")
    return 0
