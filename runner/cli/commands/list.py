"""`tamis list`: the installed models, and those with a short name."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tamis.cli.terminal import table

COLUMNS = {"name": "name", "size": "size", "used": "used", "file": "file"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--all", action="store_true", help="also list the models that can be fetched"
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each model."""
    from tamis.fetch.registry import KNOWN, installed, models_folder

    rows: list[dict[str, Any]] = [
        {"name": m.name, "bytes": m.n_bytes, "path": str(m.path), "used_s": _used(m.path)}
        for m in installed()
    ]
    if arguments.all:
        there = {row["name"] for row in rows}
        rows += [
            {"name": m.name, "bytes": m.n_bytes} for m in KNOWN.values() if m.name not in there
        ]
    if arguments.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    if not rows:
        sys.stdout.write(f"no models in {models_folder()}: tamis pull {next(iter(KNOWN))}\n")
        return 0
    shown = [
        {
            "name": row["name"],
            "size": size(row["bytes"]),
            "used": ago(row["used_s"]) if "used_s" in row else "not here",
            "file": row.get("path", f"tamis pull {row['name']}"),
        }
        for row in rows
    ]
    sys.stdout.write("\n".join(table.lines(shown, COLUMNS)) + "\n")
    return 0


def _used(path: Path) -> int:
    """Seconds since a file was last read or written, as far as the file system records it."""
    status = path.stat()
    return max(0, int(time.time() - max(status.st_atime, status.st_mtime)))


def size(n_bytes: float) -> str:
    """A number of bytes in readable form."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{n_bytes:.0f} B"


def ago(seconds: float) -> str:
    """A time in the past in readable form."""
    for unit, factor in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * factor:
            return f"{seconds // factor:.0f} {unit} ago"
    return "just now"
