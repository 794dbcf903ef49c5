"""`tamis warmup`: compile the kernels of a model ahead of its first use."""

import argparse
import time

from tamis.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    common.add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compile, and say how long it took."""
    progress = common.Progress()
    start = time.monotonic()
    engine = common.load_engine(arguments, progress)
    common.open_session(engine, arguments, progress)
    common.note(f"kernels ready in {time.monotonic() - start:.1f} s")
    engine.close()
    return 0
