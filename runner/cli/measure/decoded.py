"""`tamis perplexity --depth`: how well methods predict a text decoded after a long context.

The context is read once; dense attention and each method then decode the same tokens from it, one
by one. KL is the divergence of the method's next-token distribution from dense attention's, in
nats.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tamis.cli.measure import states
from tamis.cli.terminal import audit
from tamis.evals.predict import divergence, log_softmax

COLUMNS = {
    "attn": "attn",
    "depth": "depth",
    "n": "n",
    "perplexity": "perplexity",
    "error": "+-",
    "kl": "KL",
    "kl_p95": "p95",
    "same_top": "same top",
    "mass": "mass",
    "mass_p5": "p5",
    "best_mass": "best",
    "recall": "recall",
    "output_error": "out error",
    "tokens": "tokens",
    "mb_attention": "MB",
    "mb_selection": "MB sel.",
}


def measure(
    engine: Any, arguments: argparse.Namespace, ids: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Yield a row for dense attention, then one for each method. Raises UsageError."""
    n = arguments.n_gen
    base, following = states.base_session(engine, arguments, ids, arguments.depth, n + 1)
    depth = base.n_past
    dense = np.stack([log_softmax(base.decode(int(token))) for token in following[:-1]])
    base.truncate(depth)
    yield {"attn": "dense", "depth": depth, **_prediction(dense, following[1:])}
    for method, session in states.method_sessions(engine, arguments, base, arguments.attn):
        own = np.stack([log_softmax(session.decode(int(token))) for token in following[:-1]])
        kl = divergence(dense, own)
        row = {"attn": method, "depth": depth, **_prediction(own, following[1:])}
        row |= {"kl": round(float(kl.mean()), 5), "kl_p95": round(float(np.percentile(kl, 95)), 5)}
        row["same_top"] = round(float((dense.argmax(-1) == own.argmax(-1)).mean()), 4)
        if session.audit.n_step:
            found = audit.report(session.audit)
            row["output_error"] = found.pop("error")
            row |= {key: found[key] for key in COLUMNS if key in found}
            row["bounds"] = found["bounds"]
        yield row


def _prediction(log_p: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    losses = -log_p[np.arange(len(log_p)), expected].astype(np.float64)
    value, error = estimate(losses)
    return {"n": len(losses), "perplexity": round(value, 4), "error": round(error, 4)}


def estimate(losses: np.ndarray) -> tuple[float, float]:
    """Perplexity and its standard error, as llama-perplexity computes it: e^m * sd(m)."""
    value = math.exp(float(losses.mean()))
    return value, value * math.sqrt(float(losses.var()) / max(len(losses) - 1, 1))
