"""`tamis bench` with several methods: attention's time per step, compared with dense attention.

It counts the ops that select keys and those that attend to them, in all layers. Both sides start
from the same context and alternate; a ratio compares the two sides of one round.
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tamis.cli.measure import states
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import audit, note
from tamis.jit_kernels.backends import roofline as ceilings
from tamis.jit_kernels.contract.program import ATTEND, SELECT
from tamis.model.placement import devices

COLUMNS = {
    "model": "model",
    "threads": "threads",
    "attn": "attn",
    "depth": "depth",
    "ms": "ms",
    "dense_ms": "dense",
    "ratio": "ratio",
    "ratio_min": "min",
    "ratio_max": "max",
    "select_share": "select",
    "first_s": "first s",
    "tokens": "tokens",
    "mb_attention": "MB",
    "mb_selection": "MB sel.",
    "mb_dense": "MB dense",
    "bytes_ratio": "by bytes",
    "scanned": "scanned",
    "mass": "mass",
    "best_mass": "best",
    "recall": "recall",
    "error": "error",
}


class Spent(NamedTuple):
    """Cycles, bytes and operations per step, of selecting and of attending."""

    select: np.ndarray
    attend: np.ndarray


def compare(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one number of threads, each as soon as it is measured."""
    engine = common.load_engine(arguments, common.Progress())
    cycles = _clock(engine)
    n_step = max(arguments.n_gen)
    ids = None
    if arguments.text is not None:
        ids = np.array(engine.tokenizer.encode(common.read_text(arguments.text)), np.int64)
    for depth in arguments.depth:
        base, following = states.base_session(engine, arguments, ids, depth, n_step + 1)
        for method, session in states.method_sessions(engine, arguments, base, arguments.attn):
            if session.calls_python:
                note(f"{method} is a function of NumPy: its bytes are counted, its time is not")
            start = time.perf_counter()
            session.decode(int(following[0]))
            first = time.perf_counter() - start
            _go_back(session, base.n_past)
            turns = [
                (_turn(base, following), _turn(session, following))
                for _ in range(arguments.repetitions)
            ]
            names = {"model": engine.path.name, "threads": engine.n_threads, "attn": method}
            row = {**names, "depth": base.n_past, **_row(engine.hp, base.n_past, turns, cycles)}
            row["first_s"] = round(first, 2)
            if session.audit.n_step:
                found = audit.summary(session.audit)
                row |= {key: found[key] for key in ("mass", "best_mass", "recall", "error")}
            yield row
    engine.close()


def _clock(engine: Any) -> float:
    """Cycles per second of the ops' costs. Raises UsageError for a model on two devices."""
    on = [*devices(engine.places)]
    if len(on) > 1:
        raise UsageError(
            f"methods are compared by the time of one device, this model is on {' and '.join(on)}: "
            "leave out -nkvo, and -ngl or all but -ngl -1"
        )
    return engine.backend.clock or ceilings.measure(engine.backend).cycles


def _turn(session: Any, ids: np.ndarray) -> Spent:
    """Decode the ids and count all but the first; the session is then truncated to where it was.

    The first step includes what a method does once after a prompt.
    """
    depth = session.n_past
    session.decode(int(ids[0]))
    session.forward.start_costs()
    for token in ids[1:]:
        session.decode(int(token))
    spent = split(session.forward.take_costs())
    _go_back(session, depth)
    return Spent(spent.select / (len(ids) - 1), spent.attend / (len(ids) - 1))


def _go_back(session: Any, depth: int) -> None:
    session.truncate(depth)
    session.recall()


def split(costs: Iterable[Any]) -> Spent:
    """Cycles, bytes and operations of the ops that select keys, and of those that attend."""
    totals = {SELECT: np.zeros(3), ATTEND: np.zeros(3)}
    for cost in costs:
        if cost.part in totals:
            totals[cost.part] += cost.cycles, cost.n_bytes, cost.n_flop
    return Spent(totals[SELECT], totals[ATTEND])


def _row(hp: Any, n_past: int, turns: list[tuple[Spent, Spent]], cycles: float) -> dict[str, Any]:
    dense = [base.select[0] + base.attend[0] for base, _ in turns]
    own = [method.select[0] + method.attend[0] for _, method in turns]
    ratios = [a / b for a, b in zip(dense, own, strict=True)]
    select, attend = (np.median([method[i] for _, method in turns], axis=0) for i in (0, 1))
    n_dense = turns[0][0].attend[1]
    # For each query head and layer a retained token costs its key and value, a scored one its key.
    product = 2 * hp.head_dim * hp.n_head * hp.n_layer
    return {
        "ms": round(1e3 * statistics.median(own) / cycles, 3),
        "dense_ms": round(1e3 * statistics.median(dense) / cycles, 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        "select_share": round(select[0] / (select[0] + attend[0]), 3),
        "tokens": round(attend[2] / (2 * product)),
        "mb_attention": round(attend[1] / 1e6, 2),
        "mb_selection": round(select[1] / 1e6, 2),
        "mb_dense": round(n_dense / 1e6, 2),
        "bytes_ratio": round(n_dense / (attend[1] + select[1]), 2),
        "scanned": round(select[2] / (product * max(1, n_past)), 4),
    }
