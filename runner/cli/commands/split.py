"""`tamis split`: write a model as several files, which llama.cpp and tamis open as one."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.cli.commands.list import size
from tamis.cli.options import common
from tamis.cli.terminal.progress import Progress

if TYPE_CHECKING:
    from tamis.make.copies import Part

TENSORS = 128  # of a part, as gguf-split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("model", metavar="IN", help="path or short name of the model")
    parser.add_argument(
        "prefix",
        metavar="PREFIX",
        help="the parts are named PREFIX-00001-of-00003.gguf and so on",
    )
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--max-tensors",
        "--split-max-tensors",
        type=common.count,
        metavar="N",
        help=f"tensors of a part (default: {TENSORS})",
    )
    limit.add_argument(
        "--max-size",
        "--split-max-size",
        type=common.size,
        metavar="SIZE",
        help="bytes of a part's tensors, such as 2GiB, instead of a number of tensors",
    )
    parser.add_argument(
        "--no-tensor-first-split",
        action="store_true",
        help="the first part has the metadata and no tensor",
    )
    parser.add_argument(
        "-n", "--dry-run", action="store_true", help="print the parts and write nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the parts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write the parts and print a line for each. Raises FileExistsError, OSError."""
    from tamis.fetch.registry import resolve
    from tamis.formats.gguf import GGUFFile
    from tamis.make import copies

    tensors = 0 if arguments.max_size else arguments.max_tensors or TENSORS
    progress = Progress()
    with GGUFFile(resolve(arguments.model)) as file:
        apart = arguments.no_tensor_first_split
        parts = copies.planned(file, tensors, arguments.max_size or 0, apart=apart)
        paths = [copies.part_path(arguments.prefix, no, len(parts)) for no in range(len(parts))]
        if not arguments.dry_run:
            copies.split(file, arguments.prefix, parts, progress.of("write"))
    progress.clear()
    _print(zip(paths, parts, strict=True), as_json=arguments.json)
    return 0


def _print(parts: "Iterable[tuple[Path, Part]]", *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"path": str(path), "bytes": part.n_bytes, "tensors": len(part.tensors)}
        for path, part in parts
    ]
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for row in rows:
        sys.stdout.write(f"{row['path']}  {size(row['bytes'])}, {row['tensors']} tensors\n")
