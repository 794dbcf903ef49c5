"""The cells of an evaluation, and the key under which each result is stored."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tamis.evals.identity import identity
from tamis.evals.store import Store, key_of
from tamis.evals.tasks import TEXT
from tamis.select.base import DECODE, PREFILL
from tamis.select.notation import DENSE, parse_method
from tamis.version import __version__

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.evals.own_data import DataSet
    from tamis.model.hparams import RopeScaling
    from tamis.select.base import Selector
    from tamis.select.kvzip import KVzip

GENERATION = 1  # increased when a task's prompts or a score change: older results are then separate


@dataclass(frozen=True)
class Given:
    """A method given as an object, under the label that its results have.

    identity: of its parameters and code, see evals.identity; equal ones are the same method.
    """

    label: str
    identity: str
    method: "Selector | KVzip" = field(compare=False)


Method = str | Given  # a text as in select.notation, or an object


@dataclass(frozen=True)
class Settings:
    """The settings of an evaluation."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of prompt and answer together
    samples: int  # 0: all examples of the data
    attn: tuple[Method, ...] = ()
    prefill: tuple[str, ...] = (DENSE,)
    seed: int = 0
    fair: bool = False  # the context is read before the question is known
    raw: bool = False  # no chat template
    audit: int = 0  # the interval of audited decode steps; answers do not depend on it
    type_k: str = "f16"
    type_v: str = "f16"
    n_predict: int = 128  # tokens of a text that are predicted
    rope: "RopeScaling | None" = None  # replaces the model's own
    data: tuple["DataSet", ...] = ()  # replaces the tasks; each set has its samples

    def pairs(self) -> list[tuple[str, Method]]:
        """(prefill, attn) in the order in which they run: dense after dense is always first."""
        prefills = list(dict.fromkeys([DENSE, *self.prefill]))
        attns: list[Method] = list(dict.fromkeys([DENSE, *self.attn]))
        return [
            (prefill, attn)
            for prefill in prefills
            for attn in attns
            if prefill in self.prefill or attn == DENSE
        ]


class Job(NamedTuple):
    """One sample, whose prompt is read once for all methods that decode after it."""

    task: str
    length: int
    sample: int


class Cell(NamedTuple):
    """One missing result: a method's on a sample."""

    job: Job
    prefill: str
    attn: Method
    key: str
    settings: dict[str, Any]  # what the key is a digest of


def jobs(settings: Settings) -> Iterator[Job]:
    """Yield every sample.

    Each round has one of each task and length, so that a partial run is balanced.
    """
    for data in settings.data:
        (length,) = settings.lengths
        for sample in range(min(settings.samples or len(data.examples), len(data.examples))):
            yield Job(data.name, length, sample)
    for sample in range(settings.samples):
        for length in settings.lengths:
            for task in settings.tasks:
                yield Job(task, length, sample)


def missing(settings: Settings, origin: dict[str, Any], store: Store) -> list[list[Cell]]:
    """The results that the store lacks, grouped by job. origin: identifies this model and text."""
    found = [
        [cell for cell in cells(settings, origin, job) if cell.key not in store]
        for job in jobs(settings)
    ]
    return [left for left in found if left]


def cells(settings: Settings, origin: dict[str, Any], job: Job) -> list[Cell]:
    """Every method's cell for a sample; equal methods of different spelling are one cell."""
    made: dict[str, Cell] = {}
    for prefill, attn in settings.pairs():
        known = {
            "task": job.task,
            "length": job.length,
            "sample": job.sample,
            "seed": settings.seed,
            "attn": identity_of(attn, DECODE),
            "prefill": identity_of(prefill, PREFILL),
            "fair": settings.fair and job.task != TEXT,
            "raw": settings.raw,
            "types": [settings.type_k, settings.type_v],
            **{name: value for name, value in origin.items() if name != "text_digest"},
        }
        if job.task == TEXT:
            known |= {"text": origin["text_digest"], "n_predict": settings.n_predict}
        if settings.rope is not None:
            known |= {"rope": asdict(settings.rope)}
        for data in settings.data:
            known |= {"data": data.digest} if data.name == job.task else {}
        key = key_of(known)
        made.setdefault(key, Cell(job, prefill, attn, key, known))
    return list(made.values())


def identity_of(method: Method, role: str) -> str:
    """The part of a result's key that a method makes up. Raises MethodError."""
    return method.identity if isinstance(method, Given) else identity(parse_method(method, role))


def origin_of(engine: "Engine", text: str) -> dict[str, Any]:
    """Identifies the model (by all its tensors), device, versions, tasks and the text."""
    devices = [place.device for place in engine.places]
    if len(devices) > 1:
        devices.append(str(len(engine.places[-1].layers)))
    if (kv := engine.places[-1].kv_device) != engine.places[-1].device:
        devices.append(f"kv on {kv}")
    digest = hashlib.sha256()
    for name in sorted(engine.file.tensors):
        digest.update(name.encode())
        digest.update(engine.file.data(name).data)
    return {
        "model": engine.path.name,
        "digest": digest.hexdigest()[:16],
        "device": " ".join(devices),
        "version": f"{__version__}/{GENERATION}",
        "text_digest": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
