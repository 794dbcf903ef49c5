"""`--ctx auto`: the context for a prompt and its answer, within training and memory."""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from tamis.cli.options import common
from tamis.cli.terminal import say

ANSWER = 4096  # tokens reserved for an answer of unknown length
LEAST = 8192  # the smallest context, if the model was trained on as many tokens
SHORTEST_ANSWER = 256  # the answer's tokens if memory has no room for more
ROUND = 256
MEMORY_SHARE = 0.9  # the used share of free memory


class Context(NamedTuple):
    """A chosen context for a session. n_bytes: of its KV cache."""

    n_ctx: int
    type_k: str
    type_v: str
    n_bytes: int

    def __str__(self) -> str:
        types = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        return f"{self.n_ctx} tokens (KV cache {self.n_bytes / common.MIB:.0f} MiB, {types})"


def prefill(method: str, n_prompt: int) -> str:
    """The method that --prefill means: auto is dense, and a window with Delta for long prompts."""
    if method != "auto":
        return method
    from tamis.select.notation import prefill_for

    return prefill_for(n_prompt)


def trained(n_train: int, arguments: argparse.Namespace) -> int:
    """The training context, stretched as --rope-scale asks for."""
    return int(n_train * (arguments.rope_scale or 1))


def check(n_prompt: int, n_train: int, arguments: argparse.Namespace) -> None:
    """Raise ContextError for a prompt that no context can hold, with remedies.

    The limit is --ctx, or the training context.
    """
    from tamis.engine.errors import ContextError

    if getattr(arguments, "context_shift", False):
        return
    limit = arguments.ctx or trained(n_train, arguments)
    if n_prompt < limit or not n_prompt:
        return
    if arguments.ctx and limit < trained(n_train, arguments):
        raise ContextError(
            f"the prompt is {n_prompt} tokens, --ctx is {limit}: raise it to more than "
            f"{n_prompt}, or leave it out"
        )
    factor = -(-(n_prompt + SHORTEST_ANSWER) // max(1, n_train))
    what = f"--ctx is {limit}" if arguments.ctx else f"the model was trained on {n_train}"
    raise ContextError(
        f"the prompt is {n_prompt} tokens, {what}: `tamis summarize FILE --ask QUESTION` reads any "
        f"length, --context-shift drops the oldest tokens, --rope-scaling yarn --rope-scale "
        f"{factor} stretches what the model can read"
    )


def choose(
    engine: Any, arguments: argparse.Namespace, n_prompt: int | None, n_answer: int | None = None
) -> Context:
    """The context and KV types for a prompt of n_prompt tokens; None: of a conversation.

    n_answer: -1, as many as fit; None, a default. Explicit --ctx and --cache-type are used
    unchanged. Raises ContextError.
    """
    limit = max(1, trained(engine.hp.n_ctx_train, arguments))
    least = (n_prompt or 0) + SHORTEST_ANSWER
    if n_prompt is not None:
        check(n_prompt, engine.hp.n_ctx_train, arguments)
        if arguments.context_shift:
            least = SHORTEST_ANSWER
    if arguments.ctx is not None:
        sizes = [arguments.ctx or limit]
    elif n_prompt is None or n_answer == -1:
        sizes = [*_smaller(limit, least)]
    else:
        room = ANSWER if n_answer is None else n_answer
        want = max(LEAST, -(-(n_prompt + room + 1) // ROUND) * ROUND)
        sizes = [*_smaller(min(limit, want), least)]
    types = _types(engine, arguments)
    for n_ctx in sizes:
        for type_k, type_v in types:
            plan = _plan(engine, arguments, n_ctx, type_k, type_v)
            if plan.kv + plan.workspace <= MEMORY_SHARE * plan.available:
                return _said(Context(n_ctx, type_k, type_v, plan.kv), sizes[0], arguments)
    type_k, type_v = types[0]  # the engine reports it if this does not fit
    n_ctx = sizes[0] if arguments.ctx is not None else sizes[-1]
    plan = _plan(engine, arguments, n_ctx, type_k, type_v)
    return Context(n_ctx, type_k, type_v, plan.kv)


def _smaller(most: int, least: int) -> Iterator[int]:
    """Yield sizes to try, each half of the one before, none below `least`."""
    n = most
    while n > least:
        yield n
        n = n // 2 // ROUND * ROUND if n > 2 * ROUND else 0
    if n != least or most <= least:
        yield min(most, least)


def _types(engine: Any, arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The KV types to try: 8 bits only if all methods read them, which the dense ones do."""
    k, v = arguments.cache_type_k, arguments.cache_type_v
    dense = arguments.attn in ("dense", "auto") and arguments.prefill == "dense"
    small = dense and engine.hp.head_dim % 32 == 0 and "q8_0" in engine.backend.kv_types
    found = [(k or type, v or type) for type in ("f16", "q8_0")[: 1 + small]]
    return list(dict.fromkeys(found))


def _plan(engine: Any, arguments: argparse.Namespace, n_ctx: int, k: str, v: str) -> Any:
    limits = {"kv_ram": arguments.kv_ram, "kv_vram": arguments.kv_vram}
    return engine.memory_plan(n_ctx, type_k=k, type_v=v, **limits)


def _said(found: Context, wanted: int, arguments: argparse.Namespace) -> Context:
    """The same context; writes a note if memory limited it."""
    if found.n_ctx < wanted:
        say(f"context {found}: memory has no room for {wanted} tokens")
    elif found.type_k != (arguments.cache_type_k or "f16"):
        say(f"context {found}: memory has no room for f16")
    return found
