"""`tamis mcp`: summaries and answers about documents for agents, by the Model Context Protocol."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tamis.cli.commands import summarize
from tamis.cli.options import common, samplers
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
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
    common.add_rope_arguments(parser)
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
    # The tools' arguments take the place of these flags of `tamis summarize`.
    vars(arguments).update(length=summarize.N_WORDS, instruction=None, ask=None, cite=False)
    settings = summarize.settings_of(arguments, n_session=1)
    model = common.model_file(arguments.model, common.Progress())
    cache, settings = summarize.cache_of(arguments, settings, note)
    documents = Documents(folders, lambda: _engine(arguments, model), model, settings, cache, note)
    if sys.stdin.isatty():
        note("tamis mcp speaks a protocol on standard input and output: an agent starts it")
    try:
        server_of(documents).run("stdio")
    finally:
        documents.close()
    return 0


def _engine(arguments: argparse.Namespace, model: Path) -> Any:
    """Load the model at the first document, without a progress line: the client's log has none."""
    from tamis.engine.engine import Engine

    where = common.devices(arguments)
    common.warn_of_threads(arguments.threads)
    rope = common.rope_scaling(arguments)
    where |= {"n_threads": arguments.threads, "rope": rope}
    return Engine.load(model, progress=lambda *_: None, **where)
