"""`tamis imatrix`: an importance matrix of a model, from a text that it reads."""

import argparse
import json
import sys
import time
from pathlib import Path

from tamis.cli.commands.perplexity import DEFAULT_CTX, MIN_CTX, cut
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal.progress import Progress, duration

SAVE_FREQUENCY = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("model", metavar="MODEL", help="path or short name of the model")
    parser.add_argument("text", metavar="TEXT", help="file with the text, UTF-8; -: standard input")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write; must not exist")
    parser.add_argument(
        "-c",
        "--ctx",
        type=common.count,
        default=DEFAULT_CTX,
        help=f"tokens of a chunk (default: {DEFAULT_CTX})",
    )
    parser.add_argument(
        "--chunks", type=common.count, metavar="N", help="most chunks to read (default: all)"
    )
    parser.add_argument(
        "--save-frequency",
        type=common.count,
        default=SAVE_FREQUENCY,
        metavar="N",
        help=f"write OUT after every N chunks (default: {SAVE_FREQUENCY})",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from what OUT holds: the chunks of TEXT after those that it counts",
    )
    common.add_making_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the matrix. Raises UsageError, FileExistsError, OSError."""
    from tamis.engine.engine import Engine
    from tamis.fetch.registry import resolve
    from tamis.make.calibration import Calibration
    from tamis.make.copies import check_new

    if arguments.ctx < MIN_CTX:
        raise UsageError(f"--ctx is {arguments.ctx}, expected at least {MIN_CTX}")
    out: Path = arguments.out
    if arguments.resume:
        found = Calibration.load(out, arguments.ctx)
    else:
        check_new(out)
        found = Calibration(arguments.ctx)
    text, progress, start = common.read_text(arguments.text), Progress(), time.monotonic()
    with Engine.load(resolve(arguments.model), n_threads=arguments.threads) as engine:
        chunks = cut(engine.tokenizer, text, arguments.ctx)[: arguments.chunks][found.n_chunk :]
        if not len(chunks):
            raise UsageError(f"{out} has {found.n_chunk} chunks, TEXT has no more: give more text")
        if arguments.text not in found.datasets:
            found.datasets.append(arguments.text)
        total = found.n_chunk + len(chunks)
        for n in found.run(engine, chunks):
            progress("calibrate", n, total)
            if n % arguments.save_frequency == 0 or n == total:
                found.write(out)
    progress.clear()
    idle = sum(int((sums.rows == 0).sum()) for sums in found.sums.values())
    if arguments.json:
        report = {"path": str(out), "chunks": found.n_chunk, "n_ctx": found.n_ctx}
        report |= {"tensors": len(found.sums), "idle_experts": idle}
        sys.stdout.write(json.dumps(report) + "\n")
        return 0
    rest = f"; {idle} matrices of experts were not used" if idle else ""
    sys.stdout.write(
        f"{out} has {len(found.sums)} tensors after {found.n_chunk} chunks of {found.n_ctx} "
        f"tokens, {duration(time.monotonic() - start)}{rest}\n"
    )
    return 0
