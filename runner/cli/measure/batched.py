"""`tamis bench -np`: several sequences at once, in the table of llama.cpp's llama-batched-bench.

Each sequence has a prompt of its own; these are read one after another, then all sequences decode
together. Each row of logits is searched for as many best ones as top-k sampling uses by default.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tamis.cli.options import common

TOP_K = 40  # the sampler's default
COLUMNS = {
    "model": "model",
    "threads": "threads",
    "pp": "PP",
    "tg": "TG",
    "b": "B",
    "n_kv": "N_KV",
    "t_pp": "T_PP s",
    "s_pp": "S_PP t/s",
    "t_tg": "T_TG s",
    "s_tg": "S_TG t/s",
    "t": "T s",
    "s": "S t/s",
}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one number of threads: medians; pp and tg count tokens of each sequence."""
    from tamis.engine.batch import Batch

    progress = common.Progress()
    engine = common.load_engine(arguments, progress)
    lengths = list(itertools.product(arguments.n_prompt, arguments.n_gen))
    arguments.ctx = max(max(n_prompt, 1) + n_gen for n_prompt, n_gen in lengths)
    most = max(arguments.parallel)
    sessions = [common.open_session(engine, arguments, progress) for _ in range(most)]
    batch = Batch(engine)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.hp.n_vocab, (most, arguments.ctx))
    for (n_prompt, n_gen), n in itertools.product(lengths, arguments.parallel):
        _once(
            batch, sessions[:n], ids, min(n_prompt, 16), min(n_gen, 2)
        )  # kernels, pages, Programs
        times = [
            _once(batch, sessions[:n], ids, n_prompt, n_gen) for _ in range(arguments.repetitions)
        ]
        read, written = (statistics.median(spent) for spent in zip(*times, strict=True))
        yield {
            "model": engine.path.name,
            "threads": engine.n_threads,
            "attn": arguments.attn,
            "prefill": arguments.prefill,
            "pp": n_prompt,
            "tg": n_gen,
            "b": n,
            "n_kv": n * (n_prompt + n_gen),
            "t_pp": round(read, 3),
            "s_pp": round(n * n_prompt / read, 2) if n_prompt else 0.0,
            "t_tg": round(written, 3),
            "s_tg": round(n * n_gen / written, 2) if n_gen else 0.0,
            "t": round(read + written, 3),
            "s": round(n * (n_prompt + n_gen) / (read + written), 2),
        }
    engine.close()


def _once(
    batch: Any, sessions: list[Any], ids: np.ndarray, n_prompt: int, n_gen: int
) -> tuple[float, float]:
    """The seconds of all prompts, and of all steps."""
    for session in sessions:
        session.truncate(0)
    begin = time.perf_counter()
    if n_prompt:
        for session, own in zip(sessions, ids, strict=False):
            session.prefill(own[:n_prompt])
    read = time.perf_counter()
    for at in range(n_prompt, n_prompt + n_gen):
        batch.step_best({s: int(own[at]) for s, own in zip(sessions, ids, strict=False)}, TOP_K)
    return read - begin, time.perf_counter() - read
