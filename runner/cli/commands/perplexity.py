"""`tamis perplexity`: how well a model predicts a text, with the counting of llama-perplexity."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tamis.cli.measure import decoded, states
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note, table

MIN_CTX, DEFAULT_CTX = 8, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    common.add_model_arguments(parser, several=True)
    states.add_arguments(parser)
    parser.add_argument(
        "-d",
        "--depth",
        type=common.count_or_zero,
        default=0,
        help="number of tokens that are read first; then methods are compared with dense decoding "
        "(default: 0, perplexity of the whole text)",
    )
    parser.add_argument(
        "-n",
        "--n-gen",
        type=common.count,
        default=256,
        help="with -d: number of tokens to decode (default: 256)",
    )
    parser.add_argument(
        "-f",
        "--file",
        required=True,
        help="file with the text, UTF-8; -: standard input (required)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_adapter_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print perplexity and its standard error; the value so far goes to standard error."""
    methods = arguments.attn or ["dense"]
    if arguments.depth or arguments.session:
        return _compare(arguments, methods)
    if len(methods) > 1 or arguments.audit:
        raise UsageError("several methods, or --audit, need a context to decode after: give -d")
    arguments.attn, arguments.ctx = methods[0], arguments.ctx or DEFAULT_CTX
    if arguments.ctx < MIN_CTX:
        raise UsageError(f"--ctx is {arguments.ctx}, expected at least {MIN_CTX}")
    text = common.read_text(arguments.file)
    progress = common.Progress()
    engine = common.load_engine(arguments, progress)
    chunks = cut(engine.tokenizer, text, arguments.ctx)
    session = common.open_session(engine, arguments, progress)
    losses = np.empty(0)
    for i, chunk in enumerate(chunks):
        session.truncate(0)
        losses = np.concatenate([losses, *chunk_losses(session.logits(chunk), chunk)])
        note(f"[{i + 1}/{len(chunks)}] {math.exp(losses.mean()):.4f}")
    engine.close()
    value, error = decoded.estimate(losses)
    n_ctx, n = arguments.ctx, len(losses)
    if arguments.json:
        report = {"perplexity": value, "error": error, "n": n, "chunks": len(chunks)}
        report |= {"n_ctx": n_ctx, "attn": arguments.attn, "prefill": arguments.prefill}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"perplexity {value:.4f} +- {error:.4f} "
            f"({n} predictions, {len(chunks)} chunks of {n_ctx})\n"
        )
    return 0


def _compare(arguments: argparse.Namespace, methods: list[str]) -> int:
    """Print a row for each method, dense attention's first."""
    text = common.read_text(arguments.file)
    arguments.attn = [method for method in methods if method != "dense"]
    if arguments.depth:
        arguments.ctx = arguments.ctx or arguments.depth + arguments.n_gen + 1
    engine = common.load_engine(arguments, common.Progress())
    ids = np.array(engine.tokenizer.encode(text), np.int64)
    rows = []
    for row in decoded.measure(engine, arguments, ids):
        rows.append(row)
        if arguments.json:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    engine.close()
    if not arguments.json:
        sys.stdout.write("\n".join(table.lines(rows, decoded.COLUMNS)) + "\n")
    return 0


def cut(tokenizer: Any, text: str, n_ctx: int) -> np.ndarray:
    """The text in chunks, int64 [n_chunk, n_ctx]; the remainder at the end is not counted.

    If the model adds BOS, it replaces each chunk's first token. Raises ValueError for a text
    shorter than one chunk.
    """
    ids = np.array(tokenizer.encode(text), np.int64)
    chunks = ids[: len(ids) // n_ctx * n_ctx].reshape(-1, n_ctx).copy()
    if not len(chunks):
        raise ValueError(
            f"the text has {len(ids)} tokens, expected at least {n_ctx}: lower --ctx or give more"
        )
    if tokenizer.add_bos and tokenizer.bos is not None:
        chunks[:, 0] = tokenizer.bos
    return chunks


def chunk_losses(slices: Iterable[np.ndarray], chunk: np.ndarray) -> Iterator[np.ndarray]:
    """Negative log-likelihoods, float64, of the predictions at positions n_ctx/2 to n_ctx - 2.

    slices: float32 [n_rows, n_vocab], with one row for each position in total; all are consumed.
    """
    first, last = len(chunk) // 2, len(chunk) - 1
    at = 0
    for logits in slices:
        low, high = max(first - at, 0), min(last - at, len(logits))
        if low < high:
            rows = logits[low:high].astype(np.float64)
            top = rows.max(-1)
            log_sum = top + np.log(np.exp(rows - top[:, None]).sum(-1))
            yield log_sum - rows[np.arange(len(rows)), chunk[at + low + 1 : at + high + 1]]
        at += len(logits)
