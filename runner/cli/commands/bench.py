"""`tamis bench`: speed of prefill and decode, with the bytes that bound it.

Values are medians after a warm-up; the time to open a session, in which kernels may be compiled, is
reported apart. With several methods, or --text, --session or --audit, it reports the time of
attention in a step, see compare.py. With -np it runs several sequences at once, see batched.py;
--compare measures nothing, see against.py.
"""

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tamis.cli.measure import against, batched, compare, profile, states
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note, table
from tamis.jit_kernels.backends import on_host
from tamis.jit_kernels.backends import roofline as ceilings
from tamis.jit_kernels.contract.types import PAGE

WARM_UP = 8  # tokens
COLUMNS = {  # of the table; JSON and CSV use the keys
    "model": "model",
    "threads": "threads",
    "attn": "attn",
    "prefill": "prefill",
    "test": "test",
    "tok_s": "t/s",
    "min": "min",
    "max": "max",
    "setup_s": "setup s",
    "mb_per_token": "MB/token",
    "gb_s": "GB/s",
    "hit_rate": "hits",
    "mb_brought": "MB fetched",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    common.add_model_arguments(parser, threads=False, several=True)
    states.add_arguments(parser)
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="file with the text that fills the context (default: random tokens)",
    )
    lists = (
        ("-p", "--n-prompt", "512", "tokens of a prompt; 0: no such test"),
        ("-n", "--n-gen", "64", "decode steps; 0: no such test"),
        ("-d", "--depth", "0", "tokens in the KV cache before the test"),
    )
    for short, long, default, text in lists:
        text += f"; several values as 1,2 (default: {default})"
        parser.add_argument(short, long, type=common.counts_or_zero, default=default, help=text)
    parser.add_argument(
        "-t",
        "--threads",
        type=common.counts,
        help="number of CPU threads; several values as 1,2 (default: all cores)",
    )
    parser.add_argument(
        "-r",
        "--repetitions",
        type=common.count,
        default=5,
        metavar="N",
        help="number of runs of each test; the median is reported (default: %(default)s)",
    )
    parser.add_argument(
        "-np",
        "--parallel",
        type=common.counts,
        metavar="N",
        help="number of sequences that are decoded at the same time; several values as 1,4,16. "
        "Prints another table: PP and TG are tokens of each sequence, B sequences, T seconds, "
        "S tokens per second of all sequences (default: one sequence, no such table)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the time, bytes and rates of each op beside the measured peak bandwidth and "
        "FLOP/s",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        type=Path,
        help="run nothing: compare two files written with --json; exit status 1 if a test became "
        "slower",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object on each line")
    form.add_argument("--csv", action="store_true", help="print the table as CSV")
    common.add_adapter_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each test: the median speed with minimum and maximum."""
    if arguments.compare:
        return _compare(arguments)
    tests = [("pp", n) for n in arguments.n_prompt if n] + [("tg", n) for n in arguments.n_gen if n]
    if not tests:
        raise UsageError("nothing to measure: -p and -n are both 0")
    if arguments.profile and arguments.csv:
        raise UsageError("--profile has no place in --csv: use --json")
    if arguments.profile and not on_host(common.devices(arguments)["device"]):
        raise UsageError(
            "--profile counts the CPU's cycles: leave out --device and -ngl; several --attn are "
            "timed on a GPU, too"
        )
    methods = arguments.attn or ["dense"]
    if arguments.parallel:
        return _batched(arguments, methods)
    comparing = len(methods) > 1 or arguments.text or arguments.session or arguments.audit
    if comparing and (arguments.profile or not max(arguments.n_gen)):
        raise UsageError("comparing methods decodes: it takes no --profile, and -n is at least 1")
    need = max(arguments.depth) + max(max(n for _, n in tests), WARM_UP) + bool(comparing)
    if arguments.ctx is not None and arguments.ctx < need:
        raise UsageError(f"--ctx is {arguments.ctx}, these tests need {need}: leave it away")
    if not arguments.session or max(arguments.depth):
        arguments.ctx = arguments.ctx or need
    arguments.attn = methods if comparing else methods[0]
    if comparing:
        _write(arguments, compare.COLUMNS, compare.compare)
        return 0
    for row in _write(arguments, COLUMNS, lambda given: measure(given, tests)):
        if "profile" in row and not arguments.json:
            profile.write_table(f"{row['test']}, {row['threads']} threads", row["profile"])
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    """Print the table of --compare; returns 1 if a test became slower.

    Raises UsageError, OSError.
    """
    rows = against.compare(*arguments.compare)
    if arguments.json:
        sys.stdout.writelines(json.dumps(row) + "\n" for row in rows)
    elif arguments.csv:
        _write_csv(rows, against.COLUMNS)
    else:
        sys.stdout.write("\n".join(table.lines(rows, against.COLUMNS)) + "\n")
    slower = [row["test"] for row in rows if against.is_slower(row)]
    if slower:
        note(f"slower in every run, and by 5 % or more: {', '.join(slower)}")
    return int(bool(slower))


def _batched(arguments: argparse.Namespace, methods: list[str]) -> int:
    """Print the table of -np. Raises UsageError."""
    others = ("profile", "text", "session", "audit", "ctx")
    given = [f"--{name}" for name in others if getattr(arguments, name)]
    given += ["-d"] if any(arguments.depth) else []
    given += ["several --attn"] if len(methods) > 1 else []
    if given:
        raise UsageError(f"-np measures sequences at once: leave out {', '.join(given)}")
    arguments.attn = methods[0]
    _write(arguments, batched.COLUMNS, batched.measure)
    return 0


def _write(
    arguments: argparse.Namespace,
    columns: dict[str, str],
    found: Callable[[argparse.Namespace], Iterator[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Write the rows of each number of threads as the flags ask for; returns the rows."""
    rows: list[dict[str, Any]] = []
    for n_threads in arguments.threads or [None]:
        arguments.threads = n_threads
        for row in found(arguments):
            rows.append(row)
            if arguments.json:
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    if arguments.csv:
        _write_csv(rows, columns)
    elif not arguments.json:
        sys.stdout.write("\n".join(table.lines(rows, columns)) + "\n")
    return rows


def measure(
    arguments: argparse.Namespace, tests: list[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one number of threads, each as soon as it is measured."""
    progress = common.Progress()
    engine = common.load_engine(arguments, progress)
    start = time.perf_counter()
    session = common.open_session(engine, arguments, progress)
    setup = time.perf_counter() - start
    ceiling = ceilings.measure(engine.backend) if arguments.profile else None
    ids = np.random.default_rng(0).integers(0, engine.hp.n_vocab, arguments.ctx)
    for depth in arguments.depth:
        session.truncate(0)
        if depth:
            session.prefill(ids[:depth], progress.reading(depth))
            progress.clear()
        for kind, n in tests:
            once = _prefill if kind == "pp" else _decode
            _speeds(once, session, ids[depth:], min(n, WARM_UP), 1)
            asked = _asked(session)
            speeds = _speeds(once, session, ids[depth:], n, arguments.repetitions)
            asked = _asked(session) - asked
            row = {
                "model": engine.path.name,
                "threads": engine.n_threads,
                "attn": arguments.attn,
                "prefill": arguments.prefill,
                "test": f"{kind}{n}" + (f" @ d{depth}" if depth else ""),
                "tok_s": round(statistics.median(speeds), 2),
                "min": round(min(speeds), 2),
                "max": round(max(speeds), 2),
                "setup_s": round(setup, 2),
            }
            if kind == "tg":
                row |= _traffic(engine, session.kv_types, depth + n / 2, row["tok_s"])
            if asked[:2].any():  # hits and misses in units or pages, and fetched bytes
                brought = asked[2] / (n * arguments.repetitions) / 1e6
                row |= {"hit_rate": round(asked[0] / asked[:2].sum(), 4)}
                row |= {"mb_brought": round(brought, 2)}
            if ceiling is not None:
                ops = ids[depth : depth + n]
                row["profile"] = profile.profile(session, ops, kind, ceiling)
            yield row
    engine.close()


def _speeds(
    once: Callable[[Any, np.ndarray], float],
    session: Any,
    ids: np.ndarray,
    n: int,
    repetitions: int,
) -> list[float]:
    """Tokens per second of each repetition; the session keeps its depth."""
    depth, speeds = session.n_past, []
    for _ in range(repetitions):
        speeds.append(once(session, ids[:n]))
        session.truncate(depth)
    return speeds


def _asked(session: Any) -> np.ndarray:
    """Counters of a KV tier so far: hits, misses and fetched bytes."""
    counts = session.kv_counts
    found = (0, 0, 0) if counts is None else (counts.n_hit, counts.n_miss, counts.n_read)
    return np.array(found, np.int64)


def _prefill(session: Any, ids: np.ndarray) -> float:
    start = time.perf_counter()
    session.prefill(ids)
    return len(ids) / (time.perf_counter() - start)


def _decode(session: Any, ids: np.ndarray) -> float:
    start = time.perf_counter()
    for token in ids:
        session.decode(int(token))
    return len(ids) / (time.perf_counter() - start)


def _traffic(engine: Any, types: Any, n_past: float, tok_s: float) -> dict[str, float]:
    """MB that a decoded token has to read, with all n_past KV rows, and the implied GB/s.

    A method that selects reads fewer KV rows than are counted here.
    """
    hp = engine.hp
    kv = engine.loaded.kv_bytes(PAGE, types) / PAGE * n_past
    n_bytes = token_weights(engine.file.tensors, hp) + kv
    return {"mb_per_token": round(n_bytes / 1e6, 1), "gb_s": round(n_bytes * tok_s / 1e9, 2)}


def token_weights(tensors: Any, hp: Any) -> float:
    """Bytes of weights that one token needs.

    Of experts only the used ones count, of an untied token embedding one row.
    """
    total = 0.0
    for name, tensor in tensors.items():
        share = 1.0
        if "_exps." in name:
            share = hp.n_expert_used / hp.n_expert
        elif name == "token_embd.weight" and "output.weight" in tensors:
            share = 1 / hp.n_vocab
        total += share * tensor.n_bytes
    return total


def _write_csv(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    writer = csv.DictWriter(sys.stdout, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
