"""`tamis serve`: OpenAI's API over HTTP, and a page to chat with, for this machine's programs."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from tamis.cli import UsageError, common

GIB = 1 << 30
MOST_CHOICES = 8  # of one request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.epilog = "--ctx is the context of one request: each of --parallel slots has as much"
    common.add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument("--port", type=common.count_or_zero, default=8080, help="0: any free one")
    parser.add_argument(
        "--parallel",
        type=common.count,
        default=4,
        metavar="N",
        help="answers at once (default: %(default)s)",
    )
    parser.add_argument(
        "--queue",
        type=common.count,
        default=64,
        metavar="N",
        help="requests that may wait; others get status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--ubatch",
        type=common.count,
        default=128,
        metavar="N",
        help="tokens of a prompt that are read between two tokens of other answers "
        "(default: %(default)s)",
    )
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--api-key", default="", help="what clients must send; others can see it here")
    key.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="a file with it, which is better; or several, a line each",
    )
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="share no part of a prompt's cache between requests (with several keys: between keys)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that clients call this machine by, beside localhost; may be given again",
    )
    parser.add_argument(
        "--max-body",
        type=common.size,
        default=4 << 20,
        metavar="SIZE",
        help="of one request (default: 4MiB)",
    )
    _add_limits(parser)
    parser.add_argument("--alias", help="the model's name in replies (default: its file's)")
    parser.add_argument("--metrics", action="store_true", help="show counts at /metrics")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """What one client may take of the server."""
    for name, default, text in (
        ("--timeout-header", 10, "for the head of a request"),
        ("--timeout-request", 60, "for a request's body, and for preparing it"),
        ("--timeout-prepare", 20, "of processor time, for a request's template, tokens, grammar"),
    ):
        parser.add_argument(
            name,
            type=common.count,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--memory-prepare",
        type=common.size,
        default=GIB,
        metavar="SIZE",
        help="of memory, for the same (default: 1GiB)",
    )
    parser.add_argument(
        "--max-connections",
        type=common.count,
        default=512,
        metavar="N",
        help="at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-connections-per-address",
        type=common.count,
        default=256,
        metavar="N",
        help="at once from one address (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    try:
        from tamis.bindings.serve import app, listen
    except ImportError as error:
        raise ImportError(f"serve needs {error.name}: pip install 'tamis[server]'") from error
    access = _access(arguments)
    progress = common.Progress()
    engine = common.load_engine(arguments, progress)
    sessions = _sessions(engine, arguments, progress)
    progress.clear()
    settings = app.Settings(
        model=arguments.alias or engine.path.stem,
        n_queue=arguments.queue,
        n_choices=min(MOST_CHOICES, arguments.queue),
        max_body=arguments.max_body,
        metrics=arguments.metrics,
        access=access,
        isolate=arguments.isolate,
        timeout_request=arguments.timeout_request,
        timeout_prepare=arguments.timeout_prepare,
        helper_bytes=arguments.memory_prepare,
    )
    server = app.Server(engine, sessions, settings, _log)

    def ready(url: str) -> None:
        n = len(sessions)
        common.note(f"serving {settings.model} at {url}: {n} answers at once, Ctrl-C ends")

    connections = listen.Connections(
        arguments.max_connections,
        arguments.max_connections_per_address,
        arguments.timeout_header,
        arguments.timeout_request,
    )
    ended = listen.serve(
        server, arguments.host, arguments.port, connections=connections, ready=ready, log=_log
    )
    if not ended:  # a thread is in a long step of the model, which nothing interrupts
        os._exit(0)
    engine.close()
    return 0


def _access(arguments: argparse.Namespace) -> Any:
    """Names and key. Raises UsageError for an address that others reach without a key."""
    from tamis.bindings.serve.guard import LOCAL, Access, is_local

    key = arguments.api_key
    if arguments.api_key_file is not None:
        key = Path(arguments.api_key_file).read_text(encoding="utf-8").strip()
        if not key:
            raise UsageError(f"{arguments.api_key_file} is empty, expected a key")
    if not is_local(arguments.host) and not key:
        raise UsageError(f"--host {arguments.host} lets other machines in: add --api-key-file")
    names = (*LOCAL, arguments.host, *arguments.allow_host)
    return Access(tuple(name.lower() for name in names), key)


def _sessions(engine: Any, arguments: argparse.Namespace, progress: common.Progress) -> list[Any]:
    """A session a slot. Raises MemoryError where all of them do not fit."""
    types = arguments.cache_type_k, arguments.cache_type_v
    plan = engine.memory_plan(arguments.ctx, arguments.ubatch, *types)
    n = arguments.parallel
    needed = n * (plan.kv + plan.workspace)
    if needed > plan.available:
        raise MemoryError(
            f"{n} contexts of {engine.context(arguments.ctx)} tokens take {needed / GIB:.1f} GiB, "
            f"free: {plan.available / GIB:.1f} GiB; lower --ctx or --parallel"
        )
    return [
        engine.session(
            n_ctx=arguments.ctx,
            n_ubatch=arguments.ubatch,
            attn=arguments.attn,
            prefill=arguments.prefill,
            type_k=types[0],
            type_v=types[1],
            progress=progress,
        )
        for _ in range(n)
    ]


def _log(line: str) -> None:
    common.note(f"{time.strftime('%H:%M:%S')} {line}")
