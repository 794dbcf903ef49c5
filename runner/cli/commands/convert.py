"""`tamis convert`: a GGUF file from a folder of safetensors, as Hugging Face's models have it."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tamis.cli.commands.list import size
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal.progress import Progress

HUB = "hf:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "model", metavar="DIR", help="a folder with config.json and safetensors, or hf:owner/repo"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write; must not exist")
    parser.add_argument(
        "--outtype",
        choices=["auto", "f16", "bf16", "f32", "q8_0"],
        default="auto",
        help="the type of matrices (default: auto, that of the weights, f16 if they have others)",
    )
    parser.add_argument(
        "--pre",
        metavar="NAME",
        help="the pre-tokenizer, such as qwen2, of a vocabulary that is not recognised",
    )
    parser.add_argument(
        "-n", "--dry-run", action="store_true", help="print the size and write nothing"
    )
    common.add_making_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the model and print its size. Raises UsageError, ModelError, OSError."""
    from tamis.make.convert.writing import convert, planned
    from tamis.make.copies import check_new
    from tamis.platform.processes import usable_cpus
    from tamis.text import pretokenize

    if arguments.pre is not None and not pretokenize.is_known(arguments.pre):
        raise UsageError(
            f"--pre {arguments.pre!r} is no pre-tokenizer that is known: expected one of "
            f"{', '.join(pretokenize.known())}"
        )
    check_new(arguments.out)
    progress = Progress()
    plan = planned(_folder(arguments.model, progress), arguments.outtype, pre=arguments.pre)
    if not arguments.dry_run:
        n_threads = arguments.threads or usable_cpus()
        convert(plan, arguments.out, n_threads=n_threads, each=progress.of("write"))
    progress.clear()
    counts = Counter(tensor.type.name for tensor in plan.tensors)
    if arguments.json:
        report: dict[str, Any] = {
            "path": None if arguments.dry_run else str(arguments.out),
            "architecture": plan.arch,
            "bytes": plan.n_bytes,
            "tensors": {tensor.name: tensor.type.name for tensor in plan.tensors},
        }
        sys.stdout.write(json.dumps(report) + "\n")
        return 0
    parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    where = "would have" if arguments.dry_run else "has"
    sys.stdout.write(f"{arguments.out} {where} {size(plan.n_bytes)} of {plan.arch}: {parts}\n")
    return 0


def _folder(model: str, progress: Progress) -> Path:
    """The folder of a model; one of the hub is fetched. Raises ModelError."""
    from tamis.fetch.registry import pull_folder

    return pull_folder(model.removeprefix(HUB), progress) if model.startswith(HUB) else Path(model)
