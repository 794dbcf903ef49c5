"""Decoding with a KV cache on disk: for each method and unit, time, hits and bytes per step.

Run it as `python -m tamis.tools.bench_kv -m MODEL --session FILE --kv-ram 512MiB --kv-dir DIR`. The
system's own copies of the file are dropped before every step (fdatasync, then POSIX_FADV_DONTNEED),
so that reads are the disk's; they are counted by read_bytes of /proc/self/io. The text is compared
with that of a session whose KV cache is all in memory. The last lines are JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tamis.cli.options import common
from tamis.engine.engine import Engine
from tamis.kv.cache import KVCounts
from tamis.kv.types import UNITS

METHODS = ["dense", "topk", "quest", "hip", "tactic"]


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-c", "--ctx", type=common.count)
    parser.add_argument("--session", required=True, help="the context to start from")
    parser.add_argument("--kv-ram", type=common.size, required=True)
    parser.add_argument("--kv-dir", required=True)
    parser.add_argument("--attn", action="append")
    parser.add_argument("--unit", type=int, action="append", choices=UNITS)
    parser.add_argument("-n", "--n-gen", type=common.count, default=8)
    parser.add_argument("--cached", action="store_true", help="leave the system's copies alone")
    return parser.parse_args(argv)


def disk_bytes() -> int:
    """The bytes that this process has read from the disk so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def decoded(session: Any, first: int, n: int, drop: bool) -> tuple[list[int], list[list[float]]]:
    """Greedy tokens from `first` on.

    For each step seconds, disk bytes and the result of `counted`.
    """
    tokens, steps = [first], []
    for _ in range(n):
        counts = session.kv_counts
        if counts is not None and drop:
            session._kv.drop_cached()
        before = counted(counts)
        n_disk, start = disk_bytes(), time.perf_counter()
        logits = session.decode(tokens[-1])
        spent, n_disk = time.perf_counter() - start, disk_bytes() - n_disk
        after = counted(counts)
        steps.append([spent, n_disk, *(b - a for a, b in zip(before, after, strict=True))])
        tokens.append(int(np.argmax(logits)))
    return tokens, steps


def counted(counts: KVCounts | None) -> tuple[int, ...]:
    """Units that were in memory, units waited for, units read ahead, bytes read."""
    if counts is None:
        return 0, 0, 0, 0
    return counts.n_hit, counts.n_miss, counts.n_ahead, counts.n_read


def row_of(steps: list[list[float]], session: Any) -> dict[str, Any]:
    """Medians over all steps but the first, which finds nothing in memory."""
    spent, n_disk, n_hit, n_miss, n_ahead, n_read = (
        statistics.median(column) for column in zip(*steps[1:], strict=True)
    )
    row = {"ms": round(1e3 * spent, 1), "first_s": round(steps[0][0], 2)}
    if session.kv_counts is not None:
        row |= {
            "hit": round((n_hit - n_ahead) / (n_hit + n_miss), 4),
            "ahead": round(n_ahead / (n_hit + n_miss), 4),
            "mb_read": round(n_read / 1e6, 2),
            "mb_disk": round(n_disk / 1e6, 2),
            "amplification": round(session.kv_counts.amplification, 2),
        }
    return row


def main() -> None:
    """Print a row as soon as it is known."""
    given = arguments_of()
    engine = Engine.load(given.model)
    for attn in given.attn or METHODS:
        text: list[int] = []
        for unit in [None, *(given.unit or UNITS)]:
            tier = {}
            if unit is not None:
                tier = {"kv_ram": given.kv_ram, "kv_dir": given.kv_dir, "kv_unit": unit}
            session = engine.session(given.ctx, attn=attn, **tier)
            session.load(given.session)
            first = session.tokens[-1]
            session.truncate(session.n_past - 1)
            tokens, steps = decoded(session, first, given.n_gen, not given.cached)
            text = text or tokens
            row = {"attn": attn, "n_past": session.n_past, "unit": unit, **row_of(steps, session)}
            sys.stdout.write(json.dumps(row | {"same_text": tokens == text}) + "\n")
            sys.stdout.flush()
            del session
    engine.close()


if __name__ == "__main__":
    main()
