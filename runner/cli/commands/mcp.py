"""`tamis mcp`: summaries and answers about documents for agents, by the Model Context Protocol."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tamis.cli.commands import summarize
from tamis.cli.options import common, samplers
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.add_argument(
        "folders",
        nargs="*",
        default=["."],
        metavar="FOLDER",
        help="folder whose documents may be read, with all folders in it (default: the current "
        "folder)",
    )
    summarize.add_cache_arguments(parser)
    common.add_model_arguments(parser, auto=True)
    common.add_kv_arguments(parser)
    common.add_vram_argument(parser)
    samplers.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve on standard input and output until the client closes them."""
    folders = [Path(folder) for folder in arguments.folders]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder: name the folders whose documents may be read")
    try:
        from tamis.summary.mcp_server import Documents, server_of
    except ImportError as error:
        raise UsageError(
            f'`tamis mcp` needs the package mcp ({error}): pip install "tamis[mcp]"'
        ) from None
    from tamis.summary.cache import MAX_BYTES, Cache

    # What the tools are called with takes the place of these flags of `tamis summarize`.
    vars(arguments).update(length=summarize.N_WORDS, instruction=None, ask=None, cite=False)
    settings = summarize.settings_of(arguments, n_session=1)
    model, cache = common.model_file(arguments.model, common.Progress()), None
    if not arguments.no_cache:
        store = None if arguments.cache_dir is None else Path(arguments.cache_dir)
        cache = Cache(store, arguments.cache_size or MAX_BYTES, note)
        if settings.kv_dir is None:
            settings = replace(settings, kv_dir=cache.folder)
    documents = Documents(folders, lambda: _engine(arguments, model), model, settings, cache, note)
    if sys.stdin.isatty():
        note("tamis mcp speaks a protocol on standard input and output: an agent starts it")
    try:
        server_of(documents).run("stdio")
    finally:
        documents.close()
    return 0


def _engine(arguments: argparse.Namespace, model: Path) -> Any:
    from tamis.engine.engine import Engine

    where = common.devices(arguments)
    common.warn_of_threads(arguments.threads)
    return Engine.load(model, n_threads=arguments.threads, progress=lambda *_: None, **where)
