"""KVzip: keep the keys that reconstruct a text (Kim et al. 2025, arXiv 2505.23416).

This is not a method of `--attn`: a KV cache is compressed once, and every question after that finds
it smaller. The model reads its text again, in chunks after the request to repeat it; a key counts
as much as the largest attention weight that any query of these chunks gives it (their Eq. 2, over
the keys of the chunk and of the input, and over the sinks, as in their program). This file has the
parameters, what a session must note of the queries, and the scores; `engine/reuse/compressing.py`
reads the chunks and compresses.

Departures. Every KV head keeps the same number of keys, as pages hold all heads (the paper spends
one budget on all heads and layers); the first `sink` positions are kept. Layers with a sliding
window of their own keep their last keys.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    PREFILL,
    LastQueries,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    common,
)

NAME = "kvzip"


def _number(text: str, name: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a number") from None


@dataclass(frozen=True, slots=True)
class KVzip:
    """keep: the share of positions whose K and V stay. chunk: tokens repeated."""

    keep: float = 1 / 3
    chunk: int = 1024  # the paper's is 2048
    hint: int = 8  # last tokens of the chunk before, which say where to begin
    sink: int = common("sink", 4)

    def __post_init__(self) -> None:
        check(self, "0 < keep <= 1", "chunk >= 16", "0 <= hint <= chunk", "sink >= 0")

    @classmethod
    def parse(cls, text: str) -> "KVzip":
        """Read a share such as 0.33, or kvzip, or kvzip:keep=0.33,chunk=2048.

        Raises ParameterError, ValueError.
        """
        name, _, rest = text.partition(":")
        if name != NAME:
            return cls(keep=_number(text, "keep", float))
        kinds = {"keep": float, "chunk": int, "hint": int, "sink": int}
        given = {}
        for part in filter(None, rest.split(",")):
            key, sign, value = part.partition("=")
            if not sign or key not in kinds:
                raise ValueError(f"{text!r} has {part!r}, expected one of {', '.join(kinds)} = N")
            given[key] = _number(value, key, kinds[key])
        return cls(**given)

    def n_kept(self, n_tokens: int) -> int:
        """The number of positions that stay of n_tokens."""
        return min(n_tokens, max(round(self.keep * n_tokens), self.sink, 1))


@dataclass(frozen=True, slots=True)
class LastPrompt:
    """Dense attention that notes the last n queries of prompts."""

    roles: ClassVar[tuple[str, ...]] = (PREFILL,)

    n: int

    def open(self, shape: SelectorShape) -> "LastPromptState":
        """The state of one sequence."""
        return LastPromptState(shape, self.n)


class LastPromptState(SelectorState):
    """The last queries of each layer."""

    def __init__(self, shape: SelectorShape, n: int) -> None:
        super().__init__(shape)
        self.queries = LastQueries(shape, n)
        self.counters = self.queries.counters

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        """Record that the call's queries are stored."""
        self.queries.record(rec, layer, q)

    def truncate(self, n_tokens: int) -> None:
        """Drop the queries from n_tokens on."""
        self.queries.truncate(n_tokens)

    def noted_queries(self) -> LastQueries:
        """The queries of the last positions."""
        return self.queries


def importance(
    q: np.ndarray, keys: np.ndarray, own_keys: np.ndarray, sinks: np.ndarray, scale: float
) -> np.ndarray:
    """The largest log attention weight that queries give each key of a chunk.

    q f32 [n_in, n_head, head_dim], of an input whose own keys are `own_keys` f32 [n_in, n_head_kv,
    head_dim], of which a query sees those up to itself; keys f32 [m, n_head_kv, head_dim], of the
    chunk; sinks f32 [n_sink, n_head_kv, head_dim], those of the text's first positions before the
    chunk. They share the softmax: a query that looks for nothing rests on them, and without them
    its weights would count as much as those of one that has found its key. Returns f32 [n_head_kv,
    m].
    """
    n_in, n_head, _ = q.shape
    m, n_head_kv, _ = keys.shape
    group = n_head // n_head_kv
    later = np.triu(np.ones((n_in, n_in), bool), 1)
    weights = np.empty((n_head_kv, m), np.float32)
    for head in range(n_head_kv):
        seen = np.concatenate([keys[:, head], sinks[:, head], own_keys[:, head]])
        best = np.full(m, -np.inf, np.float32)
        for row in range(head * group, (head + 1) * group):
            scores = (np.float32(scale) * q[:, row]) @ seen.T
            scores[:, -n_in:][later] = -np.inf
            top = scores.max(axis=1, keepdims=True)
            total = np.exp(scores - top).sum(axis=1, keepdims=True)
            best = np.maximum(best, (scores[:, :m] - (top + np.log(total))).max(axis=0))
        weights[head] = best
    return weights


def chosen(p: KVzip, scores: np.ndarray, n_kept: int) -> np.ndarray:
    """The positions that each KV head keeps, ascending: int64 [n_head_kv, n_kept].

    scores f32 [n_head_kv, n]. The sinks are kept; of equal ones the first.
    """
    ranked = scores.copy()
    ranked[:, : p.sink] = np.inf
    best = np.argsort(-ranked, axis=1, kind="stable")[:, :n_kept]
    return np.sort(best, axis=1)
