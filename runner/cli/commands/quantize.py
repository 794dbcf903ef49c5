"""`tamis quantize`: a copy of a model with its weights in smaller types."""

import argparse
import json
import re
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tamis.cli.commands.list import size
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note
from tamis.cli.terminal.progress import Progress

if TYPE_CHECKING:
    from tamis.formats.ggml_types import GGMLType
    from tamis.formats.gguf import GGUFFile
    from tamis.make.importance import Importance
    from tamis.make.mixes import Choice

MIN_TEXT = 16  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("model", metavar="IN", help="path or short name of the model")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write; must not exist")
    parser.add_argument(
        "type",
        metavar="TYPE",
        nargs="?",
        help="F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, IQ4_NL, "
        "IQ4_XS, Q4_1, Q4_0, Q3_K_L, Q3_K_M, Q3_K_S, Q2_K or Q2_K_S",
    )
    parser.add_argument(
        "--imatrix",
        type=Path,
        metavar="FILE",
        help="an importance matrix of the model, from llama-imatrix: errors count by it",
    )
    parser.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="PATTERN=TYPE",
        help="the type of tensors in whose names this regular expression is found (repeatable)",
    )
    _add_goals(parser)
    parser.add_argument("--output-tensor-type", metavar="TYPE", help="the type of output.weight")
    parser.add_argument(
        "--token-embedding-type", metavar="TYPE", help="the type of token_embd.weight"
    )
    parser.add_argument(
        "--leave-output-tensor", action="store_true", help="output.weight keeps the type it has"
    )
    parser.add_argument(
        "--pure", action="store_true", help="all tensors get TYPE; no rule gives some more bits"
    )
    parser.add_argument(
        "--allow-requantize",
        action="store_true",
        help="also quantize what is quantized already, though errors add up",
    )
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="print sizes and write nothing",
    )
    common.add_making_arguments(parser)


def _add_goals(parser: argparse.ArgumentParser) -> None:
    """Add what may stand in place of TYPE."""
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--target-size",
        type=common.size,
        metavar="SIZE",
        help="in place of TYPE: the types of at most so many bytes, such as 3.5GiB, that change "
        "answers least; each tensor is measured on --text",
    )
    goal.add_argument(
        "--max-kl",
        type=_divergence,
        metavar="KL",
        help="in place of TYPE: small types whose KL divergence on --text is at most this, such as "
        "0.02 nats a token",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="a text that is like those that the model is for; -: stdin"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the model and print its size. Raises UsageError, FileExistsError, OSError."""
    from tamis.fetch.registry import resolve
    from tamis.formats.gguf import GGUFFile
    from tamis.make import importance, mixes, quantize
    from tamis.platform.processes import usable_cpus

    name = _mixture(arguments)
    choice = _choice(arguments)
    weights = importance.load(arguments.imatrix) if arguments.imatrix else importance.NONE
    with GGUFFile(resolve(arguments.model)) as file:
        kl = None
        if name is None:
            types, kl = _measured(arguments, weights)
            name = mixes.nearest(types)
        else:
            types = mixes.types(file, name, choice, has_importance=bool(weights.values))
        if not arguments.dry_run:
            _refuse_lossy(file, types, allowed=arguments.allow_requantize)
            if weights.values and not weights.values.keys() & file.tensors.keys():
                raise UsageError(f"{arguments.imatrix} names no tensor of {file.path}")
            progress = Progress()
            quantize.quantize(
                file,
                arguments.out,
                name,
                types,
                n_threads=arguments.threads or usable_cpus(),
                importance=weights,
                each=progress.of("write"),
            )
            progress.clear()
        _report(file, arguments, types, kl)
    return 0


def _divergence(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no divergence: expected such as 0.02")
    return value


def _mixture(arguments: argparse.Namespace) -> str | None:
    """The mixture that TYPE names; None if types are to be measured. Raises UsageError."""
    from tamis.make import mixes

    measured = arguments.target_size is not None or arguments.max_kl is not None
    if measured == (arguments.type is not None):
        raise UsageError("name one of TYPE, --target-size and --max-kl: what the file is to be")
    if not measured:
        name: str = mixes.ALIASES.get(arguments.type.upper(), arguments.type.upper())
        if name not in mixes.MIXES:
            known = ", ".join(mixes.MIXES)
            raise UsageError(
                f"{arguments.type!r} is no type to quantize to: expected one of {known}"
            )
        return name
    if arguments.text is None:
        raise UsageError("--target-size and --max-kl measure on a text: add --text FILE")
    fixed = (arguments.tensor_type, arguments.output_tensor_type, arguments.token_embedding_type)
    if any(fixed) or arguments.pure or arguments.leave_output_tensor:
        raise UsageError("types are measured: leave out the flags that choose them")
    return None


def _measured(
    arguments: argparse.Namespace, weights: "Importance"
) -> "tuple[dict[str, GGMLType], float]":
    """Types by measurement, and their KL divergence. Raises UsageError, ValueError."""
    from tamis.engine.engine import Engine
    from tamis.fetch.registry import resolve
    from tamis.make.quantize import Encoder
    from tamis.make.sensitivity import N_TEXT, Sensitivity
    from tamis.platform.processes import usable_cpus

    n_threads, progress = arguments.threads or usable_cpus(), Progress()
    text = common.read_text(arguments.text)
    with Engine.load(resolve(arguments.model), n_threads=n_threads) as engine:
        ids = np.array(engine.encode(text)[:N_TEXT], np.int64)
        if len(ids) < MIN_TEXT:
            raise UsageError(f"--text has {len(ids)} tokens, expected at least {MIN_TEXT}")
        found = Sensitivity(engine, ids, Encoder(n_threads), weights)
        found.measure(progress.of("measure"))
        progress.clear()
        if arguments.target_size is not None:
            chosen = found.smallest(arguments.target_size)
        else:
            chosen = found.nearest(arguments.max_kl)
    return chosen.types, chosen.kl


def _choice(arguments: argparse.Namespace) -> "Choice":
    """What the flags ask for. Raises UsageError."""
    from tamis.make.mixes import Choice

    patterns = []
    for text in arguments.tensor_type:
        pattern, equals, type = text.rpartition("=")
        if not (pattern and equals):
            raise UsageError(f"--tensor-type {text!r}: expected PATTERN=TYPE, such as attn_v=q8_0")
        try:
            patterns.append((re.compile(pattern), _type(type, "--tensor-type")))
        except re.error as error:
            raise UsageError(f"--tensor-type {pattern!r} is no expression: {error}") from None
    output, embeddings = arguments.output_tensor_type, arguments.token_embedding_type
    return Choice(
        pure=arguments.pure,
        output=_type(output, "--output-tensor-type") if output else None,
        embeddings=_type(embeddings, "--token-embedding-type") if embeddings else None,
        leave_output=arguments.leave_output_tensor,
        tensors=tuple(patterns),
    )


def _type(text: str, flag: str) -> "GGMLType":
    from tamis.formats.ggml_types import GGMLType
    from tamis.make.mixes import WRITTEN

    if text.upper() not in WRITTEN:
        raise UsageError(f"{flag} {text!r} is no type of a tensor: expected {', '.join(WRITTEN)}")
    return GGMLType[text.upper()]


def _refuse_lossy(file: "GGUFFile", types: "dict[str, GGMLType]", *, allowed: bool) -> None:
    """Refuse to quantize what is quantized. Raises UsageError."""
    from tamis.make.quantize import lossy_sources

    lossy = lossy_sources(file, types)
    if lossy and not allowed:
        raise UsageError(
            f"{len(lossy)} tensors of {file.path} are quantized already ({lossy[0].name} is "
            f"{lossy[0].type.name}), and errors would add up: take a file in F32, F16 or BF16, or "
            "add --allow-requantize"
        )
    if lossy:
        note(f"{len(lossy)} tensors were quantized already: their errors add up")


def _report(
    file: "GGUFFile",
    arguments: argparse.Namespace,
    types: "dict[str, GGMLType]",
    kl: float | None,
) -> None:
    from tamis.make.quantize import n_bytes

    old = {tensor.name: tensor.type for tensor in file.tensors.values()}
    before, after = n_bytes(file, old), n_bytes(file, types)
    n = sum(prod(tensor.shape) for tensor in file.tensors.values())
    counts = Counter(type.name for type in types.values())
    if arguments.json:
        report: dict[str, Any] = {
            "path": None if arguments.dry_run else str(arguments.out),
            "bytes_before": before,
            "bytes": after,
            "bits_per_weight": 8 * after / n,
            "tensors": {name: type.name for name, type in types.items()},
        }
        if kl is not None:
            report["kl"] = kl
        sys.stdout.write(json.dumps(report) + "\n")
        return
    parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    where = "would have" if arguments.dry_run else "has"
    sizes = f"{size(after)} instead of {size(before)}, {8 * after / n:.2f} bits a weight"
    cost = "" if kl is None else f"; KL {kl:.4f} nats a token"
    sys.stdout.write(f"{arguments.out} {where} {sizes}: {parts}{cost}\n")
