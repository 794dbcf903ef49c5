"""Logits of a model read in several ways, and which of them are not those expected."""

from typing import Any

import numpy as np

from tamis.engine.batch import Batch
from tamis.engine.engine import Engine

MOST = 1e-4  # normalised mean squared error: llama.cpp's own limit between its backends
HOW = ("whole", "chunks", "steps", "saved", "batch")
Array = np.ndarray[Any, Any]


def run(engine: Engine, ids: list[int], how: str, folder: Any) -> Array:
    """The logits of the last tokens of ids, as many as this way of running gives."""
    if how in ("whole", "chunks"):
        session = engine.session(n_ctx=256, n_ubatch=96 if how == "whole" else 17)
        return np.concatenate(list(session.logits(ids)))
    session = engine.session(n_ctx=256, n_ubatch=64)
    session.prefill(ids[:40])
    if how == "saved":
        session.save(folder / "s.session")
        session = engine.session(n_ctx=256, n_ubatch=64)
        session.load(folder / "s.session")
    if how != "batch":
        return np.array([session.decode(i) for i in ids[40:]])
    others, batch = [engine.session(n_ctx=256) for _ in range(2)], Batch(engine)
    others[0].prefill(ids[:7])
    others[1].prefill(ids[9:70])
    tokens = [{session: i, others[0]: 5, others[1]: 6} for i in ids[40:52]]
    return np.array([batch.step(each)[session] for each in tokens])


def nmse(found: Array, expected: Array) -> Array:
    """The normalised mean squared error of each position's logits."""
    error = np.square(found.astype(np.float64) - expected).mean(axis=1)
    return np.asarray(error / np.square(expected.astype(np.float64)).mean(axis=1))


def far_off(found: Array, expected: Array) -> Array:
    """Which positions' logits differ."""
    return ~(nmse(found, expected) <= MOST)
