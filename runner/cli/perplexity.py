"""`tamis perplexity`: how well a model predicts a text, counted as llama-perplexity counts."""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from tamis.cli import common

HELP = "perplexity of a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    common.add_model_arguments(parser)
    parser.add_argument("-f", "--file", required=True, help="the text, UTF-8")
    parser.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Print perplexity and its standard error.

    The text is cut in chunks of --ctx tokens (512); the predictions of the second half of each
    chunk count. Where the model adds BOS, it stands in place of each chunk's first token.
    """
    text = Path(arguments.file).read_text(encoding="utf-8")
    arguments.ctx = n = arguments.ctx or 512
    progress = common.Progress()
    engine = common.load_engine(arguments, progress)
    ids = np.array(engine.tokenizer.encode(text))
    chunks = ids[: len(ids) // n * n].reshape(-1, n).copy()
    if n < 8 or not len(chunks):
        raise ValueError(f"the text has {len(ids)} tokens: at least one chunk of --ctx {n} needed")
    if engine.tokenizer.add_bos and engine.tokenizer.bos is not None:
        chunks[:, 0] = engine.tokenizer.bos
    session = common.open_session(engine, arguments, progress)
    losses: list[float] = []
    for i, chunk in enumerate(chunks):
        progress("perplexity", i, len(chunks))
        session.truncate(0)
        losses += _losses(np.concatenate(list(session.logits(chunk))), chunk)
    progress.clear()
    mean = sum(losses) / len(losses)
    perplexity = math.exp(mean)
    error = perplexity * float(np.std(losses)) / math.sqrt(len(losses))
    report = {"perplexity": perplexity, "error": error, "chunks": len(chunks), "n": len(losses)}
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"perplexity {perplexity:.4f} +- {error:.4f} ({len(losses)} predictions, "
            f"{len(chunks)} chunks of {n})\n"
        )
    engine.close()
    return 0


def _losses(logits: np.ndarray, chunk: np.ndarray) -> list[float]:
    """Negative log-likelihoods of the second half's tokens, in float64."""
    half = len(chunk) // 2
    rows = logits[half:-1].astype(np.float64)
    top = rows.max(-1)
    log_sum = top + np.log(np.exp(rows - top[:, None]).sum(-1))
    return (log_sum - rows[np.arange(len(rows)), chunk[half + 1 :]]).tolist()
