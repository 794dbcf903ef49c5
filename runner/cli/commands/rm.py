"""`tamis rm`: remove models from the folder that tamis keeps."""

import argparse
import json
import sys

from tamis.cli.commands.list import size
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "names", nargs="+", metavar="MODEL", help="names of models as `tamis list` prints them"
    )
    parser.add_argument(
        "-y",
        "--yes",
        action="store_true",
        help="remove without asking (default: ask if standard input is a terminal)",
    )
    parser.add_argument("--json", action="store_true", help="print what was removed as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Remove all named models, or none if one does not exist. Raises UsageError."""
    from tamis.fetch.registry import installed, remove

    there = {model.name: model for model in installed()}
    for name in arguments.names:
        if name not in there:
            raise UsageError(
                f"there is no model {name!r} in the folder of models: `tamis list` names them; a "
                "file elsewhere is yours to remove"
            )
    chosen = [there[name] for name in dict.fromkeys(arguments.names)]
    total = sum(model.n_bytes for model in chosen)
    if not arguments.yes and sys.stdin.isatty():
        sys.stderr.write(f"remove {', '.join(m.name for m in chosen)} ({size(total)})? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            note("nothing was removed")
            return 1
    for model in chosen:
        remove(model)
    if arguments.json:
        rows = [{"name": model.name, "bytes": model.n_bytes} for model in chosen]
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        sys.stdout.write(f"{size(total)} freed\n")
    return 0
