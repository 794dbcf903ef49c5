"""`tamis pull`: fetch a model."""

import argparse
import json
import sys

from tamis.cli.options import common
from tamis.fetch.registry import KNOWN, pull


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    names = ", ".join(sorted(KNOWN))
    parser.add_argument(
        "name", help=f"model to fetch: {names}, or hf:owner/repo:Q4_K_M from the Hugging Face hub"
    )
    parser.add_argument("--json", action="store_true", help="print the path and the size as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the path of the file."""
    progress = common.Progress()
    path = pull(arguments.name, progress=progress)
    progress.clear()
    report = {"path": str(path), "bytes": path.stat().st_size}
    sys.stdout.write(f"{json.dumps(report) if arguments.json else path}\n")
    return 0
