"""`tamis bench`: speed of prefill and decode, with the bytes that bound it."""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from tamis.cli import common

HELP = "measure prefill and decode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    common.add_model_arguments(parser)
    parser.add_argument("-p", "--n-prompt", type=int, default=512, help="tokens of a prefill")
    parser.add_argument("-n", "--n-gen", type=int, default=64, help="tokens of a decode run")
    parser.add_argument("-d", "--depth", type=int, default=0, help="tokens held before either")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--csv", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Print a row for prefill and one for decode: medians with minimum and maximum."""
    if min(arguments.n_prompt, arguments.n_gen, arguments.repetitions) < 1 or arguments.depth < 0:
        raise ValueError("-p, -n and -r must be at least 1, -d at least 0")
    progress = common.Progress()
    engine = common.load_engine(arguments, progress)
    need = arguments.depth + max(arguments.n_prompt, arguments.n_gen)
    arguments.ctx = max(need, arguments.ctx or 0)
    start = time.perf_counter()
    session = common.open_session(engine, arguments, progress)
    setup = time.perf_counter() - start
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.hp.n_vocab, need)
    if arguments.depth:
        session.prefill(ids[: arguments.depth])
    rows = []
    for name, n, measure in (
        ("pp", arguments.n_prompt, _prefill),
        ("tg", arguments.n_gen, _decode),
    ):
        measure(session, ids, arguments.depth, min(n, 8))
        speeds = [measure(session, ids, arguments.depth, n) for _ in range(arguments.repetitions)]
        rows.append(_row(engine, arguments, f"{name}{n}", speeds, setup))
    _print(rows, arguments)
    engine.close()
    return 0


def _prefill(session: Any, ids: np.ndarray, depth: int, n: int) -> float:
    session.truncate(depth)
    start = time.perf_counter()
    session.prefill(ids[depth : depth + n])
    return n / (time.perf_counter() - start)


def _decode(session: Any, ids: np.ndarray, depth: int, n: int) -> float:
    session.truncate(depth)
    start = time.perf_counter()
    for token in ids[depth : depth + n]:
        session.decode(int(token))
    return n / (time.perf_counter() - start)


def _row(
    engine: Any, arguments: argparse.Namespace, test: str, speeds: list[float], setup: float
) -> dict[str, Any]:
    hp = engine.hp
    kv = 4 * hp.n_layer * hp.n_embd_kv * arguments.depth
    n_bytes = engine.model.weights.n_bytes + kv
    median = statistics.median(speeds)
    row = {
        "model": engine.path.name,
        "threads": engine.n_threads,
        "attn": arguments.attn,
        "test": f"{test} @ {arguments.depth}",
        "tok_s": round(median, 2),
        "min": round(min(speeds), 2),
        "max": round(max(speeds), 2),
        "setup_s": round(setup, 2),
    }
    if test.startswith("tg"):
        # A token reads all weights and the keys and values before it, at least once.
        row["MB_per_token"] = round(n_bytes / 1e6, 1)
        row["GB_s"] = round(n_bytes * median / 1e9, 2)
    return row


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if arguments.json:
        sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[str(row.get(name, "")) for name in names] for row in rows]
    if arguments.csv:
        sys.stdout.write("".join(",".join(line) + "\n" for line in cells))
        return
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        sys.stdout.write(
            "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |\n"
        )
