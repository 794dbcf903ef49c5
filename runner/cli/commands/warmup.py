"""`tamis warmup`: compile a model's kernels and prepare its weights before its first use."""

import argparse
import json
import sys
import time

from tamis.cli.options import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    common.add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Compile and prepare; prints how long it took."""
    progress = common.Progress()
    start = time.monotonic()
    engine = common.load_engine(arguments, progress)
    common.open_session(engine, arguments, progress)
    spent = time.monotonic() - start
    prepared = engine.prepared()
    engine.close()
    report = {
        "model": engine.path.name,
        "attn": arguments.attn,
        "prefill": arguments.prefill,
        "seconds": round(spent, 2),
        "prepared": prepared,
    }
    weights = ", weights prepared" if prepared else ""
    text = json.dumps(report) if arguments.json else f"kernels ready in {spent:.1f} s{weights}"
    sys.stdout.write(text + "\n")
    return 0
