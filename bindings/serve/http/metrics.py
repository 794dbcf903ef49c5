"""Counts in Prometheus' text format."""

from typing import Protocol

from tamis.bindings.serve.jobs import Counts


class Worker(Protocol):
    """The worker's counters: finished, running and waiting jobs."""

    @property
    def counts(self) -> Counts:
        """What was done since the start."""

    @property
    def n_running(self) -> int:
        """The number of jobs that have a slot."""

    @property
    def n_waiting(self) -> int:
        """The number of jobs that wait for a slot."""


def exposition(worker: Worker) -> str:
    """All metrics with help lines: tamis's own, then llama.cpp's names for its dashboards."""
    c = worker.counts
    found = [
        ("jobs_total", "counter", "choices and texts asked for", c.jobs),
        ("jobs_failed_total", "counter", "of these, that ended with an error", c.failed),
        ("jobs_cancelled_total", "counter", "of these, that nobody waited for", c.cancelled),
        ("jobs_refused_total", "counter", "that the full queue had no room for", c.refused),
        ("prompt_tokens_total", "counter", "tokens of prompts that were read", c.prompt_tokens),
        ("cached_tokens_total", "counter", "... that were held already", c.cached_tokens),
        ("moved_tokens_total", "counter", "... of them at other positions", c.moved_tokens),
        ("answer_tokens_total", "counter", "tokens of answers", c.answer_tokens),
        ("steps_total", "counter", "decode steps, of all answers at once", c.steps),
        ("busy_seconds_total", "counter", "time in which the model ran", c.busy_seconds),
        *_cache(c),
        ("jobs_running", "gauge", "slots in use", worker.n_running),
        ("jobs_waiting", "gauge", "jobs without a slot", worker.n_waiting),
    ]
    lines = []
    for prefix, metrics in (("tamis_", found), ("llamacpp:", _llamacpp(worker))):
        for name, kind, text, value in metrics:
            lines += [f"# HELP {prefix}{name} {text}", f"# TYPE {prefix}{name} {kind}"]
            lines.append(f"{prefix}{name} {value}")
    return "\n".join(lines) + "\n"


def _cache(c: Counts) -> list[tuple[str, str, str, float]]:
    """The metrics of the prompt cache."""
    return [
        ("cache_hits_total", "counter", "prompts that it had more of than slots", c.cache_hits),
        ("cache_restored_tokens_total", "counter", "... tokens from it", c.restored_tokens),
        ("cache_restored_bytes_total", "counter", "... bytes from it", c.cache_restored),
        ("cache_kept_bytes_total", "counter", "bytes that it was given", c.cache_kept),
        ("cache_evictions_total", "counter", "pages that it had no room for", c.cache_evicted),
        ("cache_failures_total", "counter", "files not written, or damaged", c.cache_failed),
        ("cache_ram_bytes", "gauge", "what it has in RAM", c.cache_ram),
        ("cache_disk_bytes", "gauge", "what is in its folder", c.cache_disk),
    ]


def _llamacpp(worker: Worker) -> list[tuple[str, str, str, float]]:
    """The metrics of llama.cpp's server, under its names and with its kinds."""
    c = worker.counts
    rates = (c.prompt_tokens, c.prompt_seconds), (c.answer_steps, c.answer_seconds)
    read, predicted = (n / seconds if seconds else 0.0 for n, seconds in rates)
    n_decode = c.steps + c.chunks
    return [
        ("prompt_tokens_total", "counter", "tokens of prompts that were read", c.prompt_tokens),
        ("prompt_tokens_cached_total", "counter", "... that were held already", c.cached_tokens),
        ("prompt_seconds_total", "counter", "time in which prompts were read", c.prompt_seconds),
        ("tokens_predicted_total", "counter", "tokens of answers", c.answer_tokens),
        ("tokens_predicted_seconds_total", "counter", "time of answers", c.answer_seconds),
        ("n_decode_total", "counter", "chunks of prompts and decode steps", n_decode),
        ("n_tokens_max", "counter", "tokens of the longest sequence", c.most_tokens),
        ("spec_decode_num_draft_tokens_total", "counter", "tokens drafted", c.drafted_tokens),
        ("spec_decode_num_accepted_tokens_total", "counter", "... accepted", c.accepted_tokens),
        ("spec_decode_num_drafts_total", "counter", "drafts", c.drafts),
        ("prompt_tokens_seconds", "gauge", "tokens of prompts a second", read),
        ("predicted_tokens_seconds", "gauge", "tokens of answers a second", predicted),
        ("requests_processing", "gauge", "slots in use", worker.n_running),
        ("requests_deferred", "gauge", "jobs without a slot", worker.n_waiting),
        ("n_busy_slots_per_decode", "gauge", "answers a decode step", c.rows / max(c.steps, 1)),
    ]
