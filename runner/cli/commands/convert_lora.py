"""`tamis convert-lora`: a GGUF file from a LoRA adapter of PEFT."""

import argparse
import json
import sys
from pathlib import Path

from tamis.cli.commands.list import size
from tamis.cli.options import common
from tamis.cli.terminal.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "adapter",
        metavar="DIR",
        type=Path,
        help="a folder with adapter_config.json and adapter_model.safetensors",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write; must not exist")
    parser.add_argument(
        "--base",
        metavar="DIR",
        type=Path,
        required=True,
        help="a folder with the config.json of the model that the adapter is for (required)",
    )
    parser.add_argument(
        "--outtype",
        choices=["f32", "f16", "bf16", "q8_0"],
        default="f32",
        help="the type of matrices (default: f32)",
    )
    common.add_making_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the adapter and print its size. Raises FileExistsError, OSError."""
    from tamis.make.convert.lora import planned
    from tamis.make.convert.writing import convert
    from tamis.make.copies import check_new
    from tamis.platform.processes import usable_cpus

    check_new(arguments.out)
    plan, progress = planned(arguments.adapter, arguments.base, arguments.outtype), Progress()
    n_threads = arguments.threads or usable_cpus()
    convert(plan, arguments.out, n_threads=n_threads, each=progress.of("write"))
    progress.clear()
    n = len(plan.tensors) // 2
    if arguments.json:
        report = {"path": str(arguments.out), "bytes": plan.n_bytes, "matrices": n}
        sys.stdout.write(json.dumps(report | {"architecture": plan.arch}) + "\n")
    else:
        sys.stdout.write(
            f"{arguments.out} has {size(plan.n_bytes)}: it changes {n} matrices of {plan.arch}\n"
        )
    return 0
