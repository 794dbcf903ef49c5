"""`tamis bench --compare`: two files of rows from `tamis bench --json`, compared.

A test that occurs several times in a file, as in alternating rounds, has the median of its speeds,
the smallest minimum and the greatest maximum.
"""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tamis.cli.options.errors import UsageError

SLOWER = 0.95  # of the old speed: a smaller one is reported if no new run was as fast as an old one
COLUMNS = {
    "model": "model",
    "threads": "threads",
    "attn": "attn",
    "prefill": "prefill",
    "test": "test",
    "old": "old t/s",
    "new": "new t/s",
    "ratio": "ratio",
    "ratio_min": "min",
    "ratio_max": "max",
}
_NAMES = ("model", "threads", "attn", "prefill")


class _Speed(NamedTuple):
    """Speeds of a test in tokens per second."""

    median: float
    least: float
    most: float


_Found = dict[tuple[Any, ...], list[_Speed]]


def compare(old: Path, new: Path) -> list[dict[str, Any]]:
    """A row for each test of both files, with the ratio of new to old and its range over runs.

    Raises UsageError, also for a test that one file lacks, and OSError.
    """
    before, now = _read(old), _read(new)
    for found, other, path in ((before, now, new), (now, before, old)):
        for key in found.keys() - other.keys():
            raise UsageError(f"{path} has no row of {_named(key)}: measure the same tests")
    return [_row(key, _joined(before[key]), _joined(now[key])) for key in before]


def is_slower(row: dict[str, Any]) -> bool:
    """Whether a test lost more than its runs differ from each other."""
    return row["ratio"] < SLOWER and row["ratio_max"] < 1


def _row(key: tuple[Any, ...], old: _Speed, new: _Speed) -> dict[str, Any]:
    return dict(zip((*_NAMES, "test"), key, strict=True)) | {
        "old": old.median,
        "new": new.median,
        "ratio": round(new.median / old.median, 3),
        "ratio_min": round(new.least / old.most, 3),
        "ratio_max": round(new.most / old.least, 3),
    }


def _joined(runs: list[_Speed]) -> _Speed:
    median, least, most = zip(*runs, strict=True)
    return _Speed(round(statistics.median(median), 2), min(least), max(most))


def _named(key: tuple[Any, ...]) -> str:
    model, threads, *methods, test = key
    return f"{test}, {model}, {threads} threads, {' and '.join(map(str, methods))}"


def _read(path: Path) -> _Found:
    """The speeds of each test, in the order of the file."""
    found: _Found = {}
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text: expected lines of tamis bench --json") from None
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            named = tuple(row[name] for name in _NAMES)
            hash(named)
            for test, *speed in _speeds(row):
                if not all(isinstance(x, int | float) and 0 < x < math.inf for x in speed):
                    raise ValueError
                found.setdefault((*named, test), []).append(_Speed(*speed))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(
                f"{path}:{i} is {line[:60]!r}: expected a row of tamis bench --json, of one method "
                "or of -np"
            ) from None
    if not found:
        raise UsageError(f"{path} is empty: expected lines of tamis bench --json")
    return found


def _speeds(row: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield each test of a row with its median, minimum and maximum.

    Rows of -np have medians only.
    """
    if "b" not in row:
        yield row["test"], row["tok_s"], row["min"], row["max"]
        return
    for kind in ("pp", "tg"):
        if row[kind]:
            speed = row[f"s_{kind}"]
            yield f"{kind}{row[kind]} x {row['b']}", speed, speed, speed
