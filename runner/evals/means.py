"""Means over results: grouped, over tasks, beside dense attention on the same samples."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from tamis.evals.scoring import Interval, paired, wilson
from tamis.evals.tasks import tasks
from tamis.evals.tasks.base import RULER
from tamis.select.notation import DENSE

Row = Mapping[str, Any]  # a result as it is stored


def grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by key, in the order in which keys first occur; numbers are sorted."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    if all(isinstance(value, int) for value in found):
        return dict(sorted(found.items()))
    return found


def overall(own: Sequence[Row], rows: Sequence[Row]) -> tuple[Interval, Interval | None]:
    """A method's mean over tasks, and the paired difference to dense; None for dense itself."""
    dense = {sample_of(row): row["score"] for row in rows if row["label"] == DENSE}
    pairs = [
        [row["score"] - dense[sample_of(row)] for row in items if sample_of(row) in dense]
        for items in grouped(counted(own), lambda row: row["task"]).values()
    ]
    pairs = [items for items in pairs if items]
    apart = paired(pairs) if own[0]["label"] != DENSE and pairs else None
    return mean_over_tasks(own), apart


def mean_over_tasks(own: Sequence[Row]) -> Interval:
    """Wilson's interval over all samples, centred on the mean of the tasks' means."""
    rows = counted(own)
    by_task = grouped(rows, lambda row: row["task"]).values()
    mean = fmean(fmean(row["score"] for row in items) for items in by_task)
    return wilson(mean, len(rows))


def counted(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of RULER's tasks; all rows if there are none."""
    known = tasks()
    of_ruler = [r for r in rows if r["task"] in known and known[r["task"]].group == RULER]
    return of_ruler or rows


def label_of(row: Row) -> str:
    """The methods of a result, in the user's spelling."""
    return str(row["label"])


def sample_of(row: Row) -> tuple[str, int]:
    """The task and number of a result's sample."""
    return row["task"], row["sample"]


def is_rouge(row: Row) -> bool:
    """Whether a result is a summary's, which has ROUGE in place of a score."""
    return "rougeL" in row
