"""One long context from which several methods start; it is read once, with dense decoding."""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from tamis.cli.options import common
from tamis.cli.options.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the context's origin, beside -d, its KV cache and its positions."""
    parser.add_argument(
        "--session",
        metavar="FILE",
        help="saved session to start from, made with any method (default: none)",
    )
    common.add_audit_argument(parser)
    common.add_context_arguments(parser)


def base_session(
    engine: Any, arguments: argparse.Namespace, ids: np.ndarray | None, depth: int, n_decode: int
) -> tuple[Any, np.ndarray]:
    """A session with `depth` tokens that decodes densely, and the n_decode tokens that follow.

    ids: the text, None: random tokens. --session provides the first tokens: all of its own if depth
    is 0. Raises UsageError, ContextError.
    """
    progress = common.Progress()
    session = engine.session(
        n_ctx=arguments.ctx,
        prefill=arguments.prefill,
        progress=progress,
        **common.kv_options(arguments),
    )
    progress.clear()
    if arguments.session is not None:
        session.load(arguments.session)
        session.truncate(min(depth, session.n_past) if depth else session.n_past)
    n_past = session.n_past
    depth = max(depth, n_past)
    if ids is None:
        ids = np.random.default_rng(0).integers(0, engine.hp.n_vocab, depth + n_decode)
        ids[:n_past] = session.tokens
    if session.tokens != ids[:n_past].tolist():
        raise UsageError(f"{arguments.session} does not hold the beginning of this text")
    if len(ids) < depth + n_decode:
        raise UsageError(f"the text has {len(ids)} tokens, this needs {depth + n_decode}")
    if session.n_ctx < (need := depth + n_decode - 1):  # checked first: reading may take hours
        raise UsageError(f"--ctx is {session.n_ctx}, this needs {need}: raise it")
    if depth > n_past:
        session.prefill(ids[n_past:depth], progress.reading(depth - n_past, n_past))
        progress.clear()
    return session, ids[depth : depth + n_decode]


def method_sessions(
    engine: Any, arguments: argparse.Namespace, base: Any, methods: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yield each method with a session that holds the tokens of `base`; one at a time."""
    for method in methods:
        progress = common.Progress()
        session = engine.session(
            n_ctx=base.n_ctx,
            attn=method,
            prefill=arguments.prefill,
            audit=arguments.audit,
            progress=progress,
            **common.kv_options(arguments),
        )
        progress.clear()
        session.copy(base)
        yield method, session
