"""`tamis.evaluate`: what `tamis eval` does, from Python, with methods as texts or as objects."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from tamis.engine.checks import check_engine
from tamis.evals import predict
from tamis.evals.identity import identity
from tamis.evals.means import Row, grouped, is_rouge, label_of, overall
from tamis.evals.plan import TEXT, Given, Method, Settings, missing, origin_of
from tamis.evals.run import Evaluation
from tamis.evals.scoring import Interval
from tamis.evals.store import Store
from tamis.evals.tasks import chosen
from tamis.select.base import DECODE
from tamis.select.notation import DENSE, MethodError, parse_method, parse_methods

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.select.base import Selector

N_SAMPLE = 5


class EvalOptions(TypedDict, total=False):
    """The options of `evaluate`; a missing one has the default of its flag of `tamis eval`.

    lengths: tokens of prompt and answer together (4096). samples: of each task and length (5).
    seed: of the samples (0). prefill: methods that read the prompt, as texts (dense). fair: the
    context is read before the question is known. raw: no chat template. audit: every how manyth
    decode step is compared with dense attention; 0: none (3). text: for the task "text", in place
    of Python's language reference; n_predict: tokens of it that are predicted (128). type_k,
    type_v: of the KV cache (f16).
    """

    lengths: Sequence[int]
    samples: int
    seed: int
    prefill: Sequence[str]
    fair: bool
    raw: bool
    audit: int
    text: str
    n_predict: int
    type_k: str
    type_v: str


@dataclass(frozen=True, slots=True)
class MethodResult:
    """A method's results at one length, as means over samples; None: no task measured it.

    method: its label, "dense" for dense attention. n: samples. score: the mean over tasks, from 0
    to 1, with its 95 % interval; to_dense: the difference to dense attention on the same samples.
    kl: of the text's next tokens from dense attention's, in nats; perplexity and same_top: of the
    same tokens. read: the share of keys that steps read; mass: the share of attention on them.
    step_ms: the median decode step in milliseconds.
    """

    method: str
    length: int
    n: int
    score: Interval | None
    to_dense: Interval | None
    kl: float | None
    perplexity: float | None
    same_top: float | None
    read: float | None
    mass: float | None
    step_ms: float


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The results of all samples, as `tamis eval` stores them, and each method's means."""

    rows: tuple[Row, ...]
    methods: tuple[MethodResult, ...]

    def of(self, method: str, length: int | None = None) -> MethodResult:
        """The means of a method, by its label; length None: its first one. Raises KeyError."""
        for found in self.methods:
            if found.method == method and length in (None, found.length):
                return found
        known = ", ".join(f"{found.method} at {found.length}" for found in self.methods)
        raise KeyError(f"{method!r} at {length or 'any length'} is not there: there are {known}")

    def write_report(self, folder: str | Path) -> list[Path]:
        """Write report.md and report.html into a folder, which is made; returns their paths."""
        from tamis.evals.report import write_report

        Path(folder).mkdir(parents=True, exist_ok=True)
        return write_report(self.rows, folder)

    def __str__(self) -> str:
        return "\n".join(map(_line, self.methods))


def evaluate(
    engine: "Engine",
    attn: "str | Selector | Sequence[str | Selector] | Mapping[str, str | Selector]",
    tasks: Sequence[str] = ("ruler",),
    *,
    out: str | Path | None = None,
    progress: Callable[[Row], None] | None = None,
    **options: Unpack[EvalOptions],
) -> EvalResult:
    """Measure decode methods beside dense attention, as `tamis eval` does.

    attn: a method, several, or several by the labels of their results: texts as in `--attn`, or
    objects such as `NumpySelector(scores)`. tasks: names or groups as in `--task`: ruler (needles
    and more), passkey, summary, text (perplexity and KL from dense attention). out: a folder in
    which results are stored; the same call resumes there. progress(row): called after each result.
    Raises ValueError, MethodError, LengthError, StoreError, MemoryError.
    """
    check_engine(engine)
    if isinstance(tasks, str):
        tasks = (tasks,)
    settings = _settings(_methods(attn), chosen(tasks), options)
    text = options.get("text") or predict.own_text()
    with _folder(out) as folder, contextlib.closing(Store(folder)) as store:
        evaluation = Evaluation(engine, settings, store, lambda stage, done, total: None)
        evaluation.check()
        origin = origin_of(engine, text)
        for row in evaluation.run(missing(settings, origin, store), text):
            if progress is not None:
                progress(row)
        wanted = {cell.key for cells in _all(settings, origin) for cell in cells}
        rows = tuple(row for row in store.rows if row["key"] in wanted)
    return EvalResult(rows, tuple(_means(rows)))


def _methods(attn: Any) -> tuple[Method, ...]:
    """The methods of an argument `attn`, each checked. Raises MethodError."""
    if isinstance(attn, Mapping):
        return tuple(_given(method, label) for label, method in attn.items())
    several = isinstance(attn, Sequence) and not isinstance(attn, str)
    return tuple(_given(method, None) for method in (attn if several else (attn,)))


def _given(method: Any, label: str | None) -> Method:
    parse_methods(method, DENSE)  # raises for what is no method
    if label is None and isinstance(method, str):
        return method
    name = label or repr(method)
    if name == DENSE:
        raise MethodError(f"{DENSE!r} is the label of dense attention: choose another one")
    selector = parse_method(method, DECODE) if isinstance(method, str) else method
    return Given(name, identity(selector), selector)


def _settings(attn: tuple[Method, ...], tasks: tuple[str, ...], options: EvalOptions) -> Settings:
    known = dict(options)
    known.pop("text", None)
    if wrong := known.keys() - EvalOptions.__annotations__.keys():
        expected = ", ".join(EvalOptions.__annotations__)
        raise TypeError(f"{min(wrong)} is no option of evaluate, expected one of {expected}")
    lengths = tuple(dict.fromkeys(cast(Sequence[int], known.pop("lengths", (4096,)))))
    prefill = tuple(cast(Sequence[str], known.pop("prefill", (DENSE,))))
    more: dict[str, Any] = {"samples": N_SAMPLE, "audit": 3} | known
    return Settings(tasks=tasks, lengths=lengths, attn=attn, prefill=prefill, **more)


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    """The folder of results; a temporary one if none is named."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="tamis-eval-") as name:
        yield Path(name)


def _all(settings: Settings, origin: dict[str, Any]) -> Iterator[Any]:
    from tamis.evals.plan import cells, jobs

    return (cells(settings, origin, job) for job in jobs(settings))


def _means(rows: Sequence[Row]) -> Iterator[MethodResult]:
    """Yield each method's means at each length."""
    for length, at in grouped(rows, lambda row: row["length"]).items():
        answered = [row for row in at if row["task"] != TEXT and not is_rouge(row)]
        for label, own in grouped(at, label_of).items():
            scored = [row for row in answered if row["label"] == label]
            score, apart = overall(scored, answered) if scored else (None, None)
            texts = [row for row in own if row["task"] == TEXT]
            n = sum(row["n"] for row in texts)
            loss = sum(row["loss"] * row["n"] for row in texts) / n if n else None
            yield MethodResult(
                method=label,
                length=length,
                n=len(own),
                score=score,
                to_dense=apart,
                kl=_mean(texts, "kl"),
                perplexity=None if loss is None else exp(loss),
                same_top=_mean(texts, "same_top"),
                read=_mean(own, "read"),
                mass=_mean(own, "mass"),
                step_ms=median(row["step_ms"] for row in own),
            )


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None


def _line(found: MethodResult) -> str:
    parts = [f"{found.method} at {found.length} ({found.n} samples):"]
    if found.score is not None:
        parts.append(f"score {found.score.mean:.3f}")
    if found.to_dense is not None:
        parts.append(f"to dense {found.to_dense.mean:+.3f}")
    for name in ("kl", "perplexity", "read", "mass"):
        value = getattr(found, name)
        parts += [] if value is None else [f"{name} {value:.4g}"]
    return " ".join([*parts, f"{found.step_ms:.1f} ms a step"])
