"""Counts in Prometheus' text format."""

from typing import Protocol

from tamis.bindings.serve.jobs import Counts


class Worker(Protocol):
    """What has run, runs and waits."""

    @property
    def counts(self) -> Counts:
        """Since the start."""

    @property
    def n_running(self) -> int:
        """Jobs that have a slot."""

    @property
    def n_waiting(self) -> int:
        """Jobs that have none."""


def exposition(worker: Worker) -> str:
    """All metrics, with a line of help each."""
    c = worker.counts
    found = [
        ("jobs_total", "counter", "choices and texts asked for", c.jobs),
        ("jobs_failed_total", "counter", "of these, that ended with an error", c.failed),
        ("jobs_cancelled_total", "counter", "of these, that nobody waited for", c.cancelled),
        ("jobs_refused_total", "counter", "that the full queue had no room for", c.refused),
        ("prompt_tokens_total", "counter", "tokens of prompts that were read", c.prompt_tokens),
        ("cached_tokens_total", "counter", "... that a slot held already", c.cached_tokens),
        ("answer_tokens_total", "counter", "tokens of answers", c.answer_tokens),
        ("steps_total", "counter", "decode steps, of all answers at once", c.steps),
        ("busy_seconds_total", "counter", "time in which the model ran", c.busy_seconds),
        ("jobs_running", "gauge", "slots in use", worker.n_running),
        ("jobs_waiting", "gauge", "jobs without a slot", worker.n_waiting),
    ]
    lines = []
    for name, kind, text, value in found:
        lines += [f"# HELP tamis_{name} {text}", f"# TYPE tamis_{name} {kind}"]
        lines.append(f"tamis_{name} {value:.6g}" if kind == "gauge" else f"tamis_{name} {value}")
    return "\n".join(lines) + "\n"
