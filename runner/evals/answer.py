"""A sample's answer: the prompt as tokens, greedy decoding, and the cost of a step."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tamis.evals import scoring
from tamis.evals.own_data import GROUP
from tamis.evals.plan import Settings
from tamis.evals.tasks.base import ROUGE, Draft, Task, fit

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.engine.session import Session


class Prompt(NamedTuple):
    """The tokens of a sample's prompt. The first n_shared are read once, by the prefill method.

    Each attention method decodes the others one by one: for a usual prompt its last token, so that
    no word of the answer comes from dense attention; in fair mode the whole question.
    """

    ids: list[int]
    n_shared: int
    draft: Draft


class Steps:
    """The decode steps of a session, timed."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.seconds: list[float] = []

    def __call__(self, token: int) -> np.ndarray:
        """Decode one more token; returns its logits."""
        start = time.perf_counter()
        logits = self.session.decode(token)
        self.seconds.append(time.perf_counter() - start)
        return logits

    def found(self) -> dict[str, Any]:
        """Milliseconds of the median step, seconds of the first (which may cluster keys)."""
        rest = self.seconds[1:] or self.seconds
        return {
            "step_ms": round(1e3 * statistics.median(rest), 3),
            "first_s": round(self.seconds[0], 4),
            "decode_s": round(sum(self.seconds), 3),
            **_audited(self.session),
        }


def make_prompt(engine: "Engine", task: Task, length: int, seed: str, settings: Settings) -> Prompt:
    """The task's prompt that has at most `length` tokens with its answer. Raises LengthError."""

    def count(draft: Draft) -> int:
        return len(encode(engine, draft, settings.raw))

    fixed = task.group == GROUP
    draft = task.make(seed, 0) if fixed else fit(task, length, seed, count).draft
    ids = encode(engine, draft, settings.raw)
    n_shared = len(ids) - 1
    if settings.fair:
        # The tokens that do not depend on the question.
        without = encode(engine, draft._replace(question="", prefix=""), settings.raw)
        n_shared = min(_n_common(ids, without), n_shared)
    return Prompt(ids, n_shared, draft)


def answer(engine: "Engine", prompt: Prompt, task: Task, session: "Session") -> dict[str, Any]:
    """The answer of a session that holds the shared tokens, and its score.

    Decoding ends at the end of generation, after task.n_predict tokens, or as soon as the answer
    has everything that is expected: more text could not change the score.
    """
    decode, tokenizer = Steps(session), engine.tokenizer
    for token in prompt.ids[prompt.n_shared :]:
        logits = decode(token)
    score = _scorer(task, prompt.draft.expected)
    ids: list[int] = []
    text, finish = "", "length"
    while len(ids) < task.n_predict:
        token = int(logits.argmax())
        if token in tokenizer.eog:
            finish = "stop"
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if task.score not in scoring.FINAL and score(text)["score"] == 1:
            finish = "found"
            break
        if len(ids) < task.n_predict:
            logits = decode(token)
    found = {"answer": text, "finish": finish, "n_answer": len(ids), **score(text)}
    return {"expected": list(prompt.draft.expected), **found, **decode.found()}


def encode(engine: "Engine", draft: Draft, raw: bool) -> list[int]:
    """The tokens of a draft: in the model's chat template with the answer begun, or as text."""
    text = draft.context + draft.question
    if raw:
        return engine.tokenizer.encode(f"{text}\n{draft.prefix}")
    ids = engine.encode_chat([{"role": "user", "content": text}])
    return ids + engine.tokenizer.encode(draft.prefix, add_special=False)


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _scorer(task: Task, expected: tuple[str, ...]) -> Callable[[str], dict[str, float]]:
    if task.score == ROUGE:
        return lambda text: _rouge(text, expected[0])
    match = scoring.MATCHES[task.score]
    return lambda text: {"score": match(text, expected)}


def _rouge(text: str, reference: str) -> dict[str, float]:
    found = {name: round(value, 4) for name, value in scoring.rouge(text, reference).items()}
    return {"score": found["rougeL"], **found}


def _audited(session: "Session") -> dict[str, Any]:
    """Means of the audited steps: share of keys read, mass in total and by layer and KV head."""
    if not session.audit.n_step:
        return {}
    total = session.audit.total()
    groups = session.audit.groups()
    n_layer = 1 + max(found.layer or 0 for found in groups)
    return {
        "n_audited": session.audit.n_step,
        "read": round(total.n_kept / total.n_seen, 5),
        "tokens": round(total.n_kept),
        "mass": round(total.mass, 5),
        "best_mass": round(total.best_mass, 5),
        "recall": round(total.recall, 5),
        "error": round(total.error, 5),
        "mass_by_layer": [
            [round(found.mass, 3) for found in groups if found.layer == layer]
            for layer in range(n_layer)
        ],
    }
