"""Prediction of a text after a long context: perplexity, KL to dense, tokens that need the context.

A token needs the context if dense attention loses over GAIN nats more when it sees only SHORT
tokens before it (and those of the passage that were predicted already), and less than LOSS nats
with all of it: the key tokens of LongPPL (Fang et al. 2024, arXiv 2410.23771), its alpha and beta.
"""

import math
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tamis.evals.answer import Steps

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.engine.session import Session

SHORT = 256  # tokens
GAIN, LOSS = 2.0, 2.0  # nats


class Passage(NamedTuple):
    """A stretch of a text: ids [length + 1]; the last n_predict of them are predicted."""

    ids: list[int]
    n_predict: int

    @property
    def n_shared(self) -> int:
        """The number of tokens that are read before the first decoded one."""
        return len(self.ids) - 1 - self.n_predict

    @property
    def decoded(self) -> list[int]:
        """The tokens that are decoded; the next token is predicted after each one."""
        return self.ids[self.n_shared : -1]

    @property
    def expected(self) -> np.ndarray:
        """int64 [n_predict]: the tokens that follow."""
        return np.array(self.ids[self.n_shared + 1 :], np.int64)


class Reference(NamedTuple):
    """Dense attention's predictions of a passage."""

    log_p: np.ndarray  # float32 [n_predict, n_vocab]
    needing: np.ndarray  # bool [n_predict]: whether a token needs the context


def own_text() -> str:
    """A text that every machine with Python has: its language reference, 106,000 tokens."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def passage(text_ids: Sequence[int], length: int, seed: str, n_predict: int) -> Passage:
    """A passage that begins at a random token. Raises ValueError for a text that is too short."""
    if length < n_predict + SHORT:
        raise ValueError(
            f"--length is {length}, a text needs {n_predict + SHORT}: {n_predict} to predict "
            f"after at least {SHORT}"
        )
    if len(text_ids) < length + 1:
        raise ValueError(
            f"the text has {len(text_ids)} tokens, --length {length} needs {length + 1}"
        )
    start = Random(seed).randrange(len(text_ids) - length)
    return Passage(list(text_ids[start : start + length + 1]), n_predict)


def predicted(session: "Session", part: Passage) -> tuple[np.ndarray, dict[str, Any]]:
    """Log-probabilities, float32 [n_predict, n_vocab], of a session that holds the shared tokens.

    The second value is the cost of its steps.
    """
    decode = Steps(session)
    log_p = np.stack([log_softmax(decode(token)) for token in part.decoded])
    return log_p, decode.found()


def reference(engine: "Engine", log_p: np.ndarray, part: Passage) -> Reference:
    """Dense attention's log-probabilities, and which tokens need the context by them."""
    bos = engine.tokenizer.bos if engine.tokenizer.add_bos else None
    ids = [*([] if bos is None else [bos]), *part.ids[part.n_shared + 1 - SHORT : -1]]
    session = engine.session(n_ctx=len(ids))
    rows = np.concatenate([np.array(logits) for logits in session.logits(ids)])[-part.n_predict :]
    short = _losses(np.stack([log_softmax(row) for row in rows]), part.expected)
    long = _losses(log_p, part.expected)
    return Reference(log_p, (short - long > GAIN) & (long < LOSS))


def compared(log_p: np.ndarray, dense: Reference, part: Passage) -> dict[str, Any]:
    """Losses in nats per token, over all and over those that need the context; KL from dense."""
    losses, kl = _losses(log_p, part.expected), divergence(dense.log_p, log_p)
    n = int(dense.needing.sum())
    return {
        "n": len(losses),
        "loss": round(float(losses.mean()), 5),
        "n_needing": n,
        "loss_needing": round(float(losses[dense.needing].sum() / n), 5) if n else None,
        "kl": round(float(kl.mean()), 6),
        "kl_p95": round(float(np.percentile(kl, 95)), 6),
        "same_top": round(float((dense.log_p.argmax(-1) == log_p.argmax(-1)).mean()), 5),
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float32, of logits [n_vocab]; summed in float64."""
    x = logits.astype(np.float64)
    top = x.max()
    return (x - top - math.log(np.exp(x - top).sum())).astype(np.float32)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) of each row, float64 [n], from log-probabilities [n, n_vocab]."""
    rows = (a.astype(np.float64) for a in p), (b.astype(np.float64) for b in q)
    return np.array([(np.exp(a) * (a - b)).sum() for a, b in zip(*rows, strict=True)])


def _losses(log_p: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return -log_p[np.arange(len(log_p)), expected].astype(np.float64)
