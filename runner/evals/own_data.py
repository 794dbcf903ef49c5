"""Prompts and answers of a JSONL file: one's own, LongBench's or RULER's, recognised by keys.

One's own: {"prompt": TEXT, "answer": TEXT or "answers": [TEXT, ...]}, and optionally "metric" and
"max_tokens". LongBench: context, input, answers, dataset. RULER: input and outputs. LongBench's own
wordings of its prompts are not part of the file: a prompt is the context, then the input.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tamis.evals.tasks.base import EDIT, EXACT, F1, MATCH_ALL, MATCH_PART, ROUGE, Draft, Task

METRICS = (MATCH_PART, MATCH_ALL, F1, EXACT, EDIT, ROUGE)
N_PREDICT = {MATCH_PART: 64, MATCH_ALL: 128, F1: 64, EXACT: 64, EDIT: 64, ROUGE: 256}
GROUP = "data"
# The metrics of LongBench's sets.
_LONGBENCH = {
    F1: "narrativeqa qasper multifieldqa_en multifieldqa_zh hotpotqa 2wikimqa musique triviaqa",
    ROUGE: "dureader gov_report qmsum multi_news vcsum samsum",
    MATCH_PART: "trec lsht passage_retrieval_en passage_retrieval_zh passage_count",
    EDIT: "lcc repobench-p",
}
_METRIC_OF = {name: metric for metric, names in _LONGBENCH.items() for name in names.split()}


class DataError(ValueError):
    """A file of prompts that cannot be used; the message has the line and the expectation."""


class Example(NamedTuple):
    """A prompt with its answers, the metric of an answer, and its most tokens."""

    draft: Draft
    metric: str
    n_predict: int


@dataclass(frozen=True)
class DataSet:
    """The examples of a file, with its name and the digest of its bytes."""

    name: str
    digest: str
    examples: tuple[Example, ...]

    def task(self, sample: int) -> Task:
        """An example as a task, which has no filler."""
        draft, metric, n_predict = self.examples[sample]
        text = f"{len(self.examples)} prompts of a file"
        return Task(self.name, text, n_predict, lambda _seed, _n: draft, metric, GROUP)


def read_data(path: str | Path, metric: str | None = None) -> DataSet:
    """The examples of a JSONL file; metric: for all, overrides the file's. Raises DataError."""
    path = Path(path)
    data = path.read_bytes()
    examples = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if line.strip():
            examples.append(_example(f"{path}, line {number}", line, metric))
    if not examples:
        raise DataError(f"{path} has no lines, expected a JSON object in each")
    return DataSet(path.stem, hashlib.sha256(data).hexdigest()[:16], tuple(examples))


def _example(where: str, line: str, metric: str | None) -> Example:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is {line[:40]!r}, expected a JSON object")
    if "context" in row and "input" in row:
        found = _of_longbench(where, row, metric)
    elif "input" in row and "outputs" in row:
        found = (row["input"], "", row["outputs"], metric or MATCH_ALL)
    elif "prompt" in row and ("answer" in row or "answers" in row):
        answers = row.get("answers", row.get("answer"))
        found = (row["prompt"], "", answers, metric or row.get("metric", MATCH_PART))
    else:
        raise DataError(
            f"{where} has the keys {', '.join(row)}: expected prompt and answer or answers, "
            "LongBench's context, input and answers, or RULER's input and outputs"
        )
    context, question, answers, metric = found
    answers = [answers] if isinstance(answers, str) else answers
    texts = [context, question, *(answers if isinstance(answers, list) else [None])]
    if not all(isinstance(text, str) for text in texts) or not answers:
        raise DataError(f"{where}: prompt and answers are texts, at least one answer")
    if metric not in METRICS:
        raise DataError(f"{where}: metric is {metric!r}, expected {', '.join(METRICS)}")
    n = row.get("max_tokens", N_PREDICT[metric])
    if not isinstance(n, int) or n < 1:
        raise DataError(f"{where}: max_tokens is {n!r}, expected a whole number of at least 1")
    return Example(Draft(context, question, "", tuple(answers)), metric, n)


def _of_longbench(where: str, row: Mapping[str, Any], metric: str | None) -> tuple[Any, ...]:
    name = str(row.get("dataset", "")).removesuffix("_e")
    if metric is None and name and name not in _METRIC_OF:
        raise DataError(
            f"{where}: {name} has no metric here: choose one of {', '.join(METRICS)} for the file"
        )
    question = f"\n\n{row['input']}" if row["input"] else ""
    return row["context"], question, row.get("answers"), metric or _METRIC_OF.get(name, F1)
