"""`tamis cache`: the size and age of what tamis keeps on disk; and clearing it."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tamis.cli.commands.list import ago, size
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import table

COLUMNS = {
    "what": "what",
    "size": "size",
    "files": "files",
    "used": "last used",
    "folder": "folder",
}
DAY = 86400.0


class Kept(NamedTuple):
    """A folder of files that can be made or fetched again."""

    text: str
    folder: Callable[[], Path]


def kept() -> dict[str, Kept]:
    """The folders that can be cleared, by name."""
    from tamis.fetch.registry import models_folder
    from tamis.jit_kernels.compile import store
    from tamis.model import prepared
    from tamis.summary.cache import default_folder

    return {
        "kernels": Kept("compiled kernels: made again at the next start", store.user_folder),
        "weights": Kept("weights as kernels read them: made again", prepared.default_folder),
        "documents": Kept("what summarize has read, and its answers", default_folder),
        "downloads": Kept("unfinished downloads", lambda: models_folder() / ".partial"),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=["show", "clear"],
        default="show",
        help="show (the default): list what is stored; clear: remove it",
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help="with clear: kernels, weights, documents, downloads or all",
    )
    parser.add_argument(
        "--older",
        type=float,
        default=0.0,
        metavar="DAYS",
        help="with clear: remove only files that were not used for this many days (default: 0, all "
        "files)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print what is kept, or how much was freed. Raises UsageError."""
    known = kept()
    if arguments.action == "show" and not arguments.what:
        _show(known, as_json=arguments.json)
        return 0
    names = list(known) if arguments.what == ["all"] else arguments.what
    if arguments.action == "show" or not names or not set(names) <= set(known):
        raise UsageError(f"write: tamis cache clear {'|'.join([*known, 'all'])}")
    freed = sum(_clear(known[name].folder(), arguments.older) for name in names)
    report = json.dumps({"freed": freed}) if arguments.json else f"{size(freed)} freed"
    sys.stdout.write(report + "\n")
    return 0


def _show(known: dict[str, Kept], *, as_json: bool) -> None:
    from tamis.fetch.registry import models_folder

    rows: list[dict[str, Any]] = []
    for name, what in {**known, "models": Kept("see tamis list", models_folder)}.items():
        found = [(path, status) for path, status in _files(what.folder())]
        if name == "models":
            found = [(path, status) for path, status in found if ".partial" not in path.parts]
        n_bytes = sum(status.st_size for _, status in found)
        used = max((max(s.st_atime, s.st_mtime) for _, s in found), default=0.0)
        row = {"what": name, "bytes": n_bytes, "files": len(found), "folder": str(what.folder())}
        rows.append(row | {"text": what.text, "used_s": int(time.time() - used) if used else None})
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for row in rows:
        row["size"] = size(row["bytes"])
        row["used"] = "" if row["used_s"] is None else ago(row["used_s"])
    sys.stdout.write("\n".join(table.lines(rows, COLUMNS)) + "\n")
    sys.stdout.write(f"tamis cache clear {'|'.join([*known, 'all'])} frees it; tamis rm models\n")


def _files(folder: Path) -> Iterator[tuple[Path, Any]]:
    for parent, _, names in os.walk(folder):  # os.walk skips what it cannot read
        for path in (Path(parent, name) for name in names):
            with contextlib.suppress(OSError):  # another process may have removed it
                if path.is_file() and not path.is_symlink():
                    yield path, path.stat()


def _clear(folder: Path, days: float) -> int:
    """Remove files, then empty folders; returns the freed bytes."""
    freed = 0
    for path, status in list(_files(folder)):
        if time.time() - max(status.st_atime, status.st_mtime) >= days * DAY:
            with contextlib.suppress(OSError):
                path.unlink()
                freed += status.st_size
    if days <= 0:
        shutil.rmtree(folder, ignore_errors=True)
    return freed
