"""`tamis eval`: how much of a model's quality methods retain, by tasks, texts and attention.

Results are stored as they are computed; the same command resumes an interrupted run, and a longer
list of methods, lengths or tasks adds to the stored results.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note
from tamis.evals.own_data import METRICS

N_SAMPLE = 5
DEFAULT_AUDIT = 3  # coprime to rounds of methods; the shortest answers have three tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    common.add_model_arguments(parser, several=True, lengths=True)
    common.add_rope_arguments(parser)
    _add_questions(parser)
    parser.add_argument("--list", action="store_true", help="list the tasks and exit")
    parser.add_argument(
        "-l",
        "--length",
        type=common.counts,
        default=[4096],
        help="length of each sample in tokens, prompt and answer together; several values as "
        "4096,8192 (default: 4096)",
    )
    parser.add_argument(
        "-n",
        "--samples",
        type=common.count,
        metavar="N",
        help="number of samples of each task and length (default: 5; with --data: all)",
    )
    parser.add_argument(
        "--seed",
        type=common.count_or_zero,
        default=0,
        help="seed from which samples are generated (default: 0)",
    )
    parser.add_argument(
        "--fair",
        action="store_true",
        help="read the context before the question is known; the question is then read by decode "
        "steps, so that the method cannot select for it in advance",
    )
    parser.add_argument("--raw", action="store_true", help="apply no chat template")
    parser.add_argument(
        "--audit",
        type=common.count_or_zero,
        default=DEFAULT_AUDIT,
        metavar="N",
        help="measure the retained attention mass on every N-th decode step; 0: never (default: 3)",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="file with the text of --task text (default: Python's language reference)",
    )
    parser.add_argument(
        "--predict",
        type=common.count,
        default=128,
        metavar="N",
        help="with --task text: number of tokens that are predicted after the context (default: "
        "128)",
    )
    _add_results(parser)


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Add the flags of results: their folder and their forms."""
    parser.add_argument(
        "-o",
        "--out",
        metavar="DIR",
        help="folder in which results and the report are stored; an interrupted evaluation resumes "
        "there (required, except with --list)",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing; write the report from the stored results",
    )
    parser.add_argument(
        "--csv", action="store_true", help="also write results.csv beside the report"
    )
    parser.add_argument(
        "--json", action="store_true", help="also print each result on standard output as JSON"
    )


def _add_questions(parser: argparse.ArgumentParser) -> None:
    """Add the flags of questions and of how answers are scored."""
    parser.add_argument(
        "--task",
        action="append",
        help="tasks to run: ruler (13 tasks), passkey, summary (ROUGE), text (perplexity and KL), "
        "all, or names of tasks as a,b; may be repeated (default: ruler)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="run your own prompts instead of tasks: JSONL with prompt and answer, or in "
        "LongBench's or RULER's format; may be repeated (default: none)",
    )
    parser.add_argument(
        "--metric",
        choices=METRICS,
        help="how all answers of --data are scored. match_part: one reference is contained in the "
        "answer; match_all: all are; f1: F1 of words; exact: equal; edit: edit similarity of "
        "a line of code; rouge: ROUGE-L (default: what the file says, else match_part)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compute the missing results, then the report; prints the report's paths."""
    from tamis.evals.tasks import tasks

    if arguments.list:
        for name, task in tasks().items():
            sys.stdout.write(f"{name}\n    {task.group}: {task.summary}\n")
        sys.stdout.write("text\n    text: perplexity and KL after a long context\n")
        return 0
    if arguments.out is None:
        raise UsageError("no folder for the results: give -o DIR")
    if arguments.report:
        return _report(arguments)
    _evaluate(arguments, _settings(arguments))
    return _report(arguments)


def _settings(arguments: argparse.Namespace) -> Any:
    """The settings of the flags, checked as far as that is possible without a model.

    Raises UsageError.
    """
    from tamis.evals.own_data import read_data
    from tamis.evals.plan import Settings
    from tamis.evals.scoring import rouge_scorer
    from tamis.evals.tasks import tasks
    from tamis.evals.tasks.base import ROUGE

    if arguments.data and arguments.task:
        raise UsageError("--data stands in place of --task: leave out one")
    if arguments.metric and not arguments.data:
        raise UsageError("--metric is for --data: name a file, or leave it out")
    data = tuple(read_data(path, arguments.metric) for path in arguments.data)
    chosen = () if data else _chosen(arguments.task or ["ruler"])
    scores = {example.metric for each in data for example in each.examples}
    if ROUGE in scores | {tasks()[name].score for name in chosen if name in tasks()}:
        rouge_scorer()
    settings = Settings(
        tasks=chosen,
        lengths=tuple(dict.fromkeys(arguments.length)),
        samples=arguments.samples or (0 if data else N_SAMPLE),
        data=data,
        attn=tuple(map(_method, arguments.attn or ())),
        prefill=tuple(arguments.prefill or ("dense",)),
        seed=arguments.seed,
        fair=arguments.fair,
        raw=arguments.raw,
        audit=arguments.audit,
        type_k=arguments.cache_type_k,
        type_v=arguments.cache_type_v,
        n_predict=arguments.predict,
        rope=common.rope_scaling(arguments),
    )
    for prefill, attn in settings.pairs():
        common.check_methods(attn if isinstance(attn, str) else "dense", prefill)
    return settings


def _method(word: str) -> Any:
    """A method of --attn; kvzip compresses before the first step. Raises UsageError."""
    from tamis.evals.plan import Given
    from tamis.select.kvzip import NAME, KVzip

    if word.partition(":")[0] != NAME:
        return word
    try:
        how = KVzip.parse(word)
    except ValueError as error:
        raise UsageError(f"--attn: {error}") from error
    return Given(word, repr(how), how)


def _chosen(words: Sequence[str]) -> tuple[str, ...]:
    """The names of tasks in a list of names and groups, each once. Raises UsageError."""
    from tamis.evals.tasks import chosen

    try:
        return chosen(words)
    except ValueError as error:
        raise UsageError(f"--task: {error}") from error


def _evaluate(arguments: argparse.Namespace, settings: Any) -> None:
    from tamis.engine.engine import Engine
    from tamis.evals import predict
    from tamis.evals.plan import missing, origin_of
    from tamis.evals.run import Evaluation
    from tamis.evals.store import Store

    progress = common.Progress()
    text = predict.own_text() if arguments.text is None else common.read_text(arguments.text)
    where = common.devices(arguments)
    common.warn_of_threads(arguments.threads)
    path = common.model_file(arguments.model, progress)
    store = Store(arguments.out)
    threads, rope = arguments.threads, settings.rope
    engine = Engine.load(path, n_threads=threads, rope=rope, progress=progress, **where)
    progress.clear()
    if settings.data:
        settings = dataclasses.replace(settings, lengths=(_longest(engine, settings),))
    _warn_of_lengths(engine, settings)
    evaluation = Evaluation(engine, settings, store, progress)
    evaluation.check()
    todo = missing(settings, origin_of(engine, text), store)
    clock = _Clock([cell.job.length for cells in todo for cell in cells])
    if store.rows:
        note(f"{len(store.rows)} results are there, {clock.n_left} are missing")
    for row in evaluation.run(todo, text):
        progress.clear()
        note(f"{clock.count(row['length'])} {_line(row)}")
        if arguments.json:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    store.close()
    engine.close()


def _longest(engine: Any, settings: Any) -> int:
    """Tokens of the data's longest prompt with its answer, rounded up to multiples of 256."""
    from tamis.evals.answer import encode

    examples = [example for data in settings.data for example in data.examples]
    sizes = (len(encode(engine, e.draft, settings.raw)) + e.n_predict for e in examples)
    return -(-max(sizes) // 256) * 256


def _warn_of_lengths(engine: Any, settings: Any) -> None:
    trained = int(engine.hp.n_ctx_train * (settings.rope.factor if settings.rope else 1))
    longer = [str(length) for length in settings.lengths if length > trained]
    if longer:
        note(f"the model was trained on {trained} tokens, asked for {', '.join(longer)}")


def _line(row: dict[str, Any]) -> str:
    result = f"KL {row['kl']:.5f}" if "kl" in row else f"{row['score']:.2f}"
    return f"{row['task']} {row['length']} #{row['sample']} {row['label']}: {result}"


def _report(arguments: argparse.Namespace) -> int:
    from tamis.evals.report import write_csv, write_report
    from tamis.evals.store import read_results

    rows = read_results(arguments.out)
    paths = write_report(rows, arguments.out)
    for path in [*paths, write_csv(rows, arguments.out)] if arguments.csv else paths:
        sys.stderr.write(f"{path}\n") if arguments.json else sys.stdout.write(f"{path}\n")
    return 0


class _Clock:
    """Counts results and estimates the time that the others will take, by their lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.n_left, self._left = len(lengths), sum(lengths)
        self._n, self._done, self._start = len(lengths), 0, time.monotonic()

    def count(self, length: int) -> str:
        """[done of all, time left] after one more result."""
        self.n_left, self._left, self._done = (
            self.n_left - 1,
            self._left - length,
            self._done + length,
        )
        seconds = (time.monotonic() - self._start) * self._left / self._done
        hours, minutes = divmod(round(seconds / 60), 60)
        left = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
        left = left if seconds >= 60 else f"{seconds:.0f} s"
        return f"[{self._n - self.n_left} of {self._n}, {left} left]"
