"""DRY: a penalty on tokens that would extend a repetition (P. E. Weidmann, 2024).

The sampler sees token ids only. The texts that end a repetition (a line end, a quote) are converted
to id sequences once by the caller, with `breaker_sequences`.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tamis.sampling.base import Candidates, SamplerError, Step, check

LOG_FLOAT_MAX = 88.7228391  # base^exponent stays within float32, as in llama.cpp


def breaker_sequences(
    breakers: Iterable[str],
    pieces: Sequence[bytes],
    encode: Callable[[str], Sequence[int]],
) -> tuple[tuple[int, ...], ...]:
    r"""Return the token id sequences that contain or spell one of `breakers`, for `Dry`.

    pieces[id] are the bytes of token id; encode(text) are the ids of a text, without special
    tokens. A token that contains a breaker is one by itself ('."' for '"'); one that ends with the
    start of a breaker is one together with the ids of the rest. A rest that starts inside a UTF-8
    character is left out: no text has it as its start.
    """
    found: dict[tuple[int, ...], None] = {}
    for breaker in breakers:
        text = breaker.encode()
        if not text:
            raise SamplerError("a DRY sequence breaker is empty, expected text: leave it out")
        for token_id, piece in enumerate(pieces):
            if text in piece:
                found[(token_id,)] = None
                continue
            for i in range(1, min(len(text), len(piece) + 1)):
                if piece.endswith(text[:i]) and text[i] & 0xC0 != 0x80:
                    found[(token_id, *encode(text[i:].decode()))] = None
    return tuple(found)


@dataclass(eq=False)
class Dry(Step):
    """Takes multiplier * base^(n - allowed_length) off a token that would extend a repetition.

    n >= allowed_length is the length of the longest suffix of the history that occurred earlier,
    followed by that token. The history is the last `last_n` tokens (-1: all, 0: off). A match does
    not reach across a sequence of `breakers`; a breaker of one token is itself never penalised.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: Sequence[Sequence[int]] = ()
    _history: "array[int]" = field(init=False, repr=False)
    _tails: dict[int, list[tuple[int, ...]]] = field(init=False, repr=False)  # first id: the rests

    def __post_init__(self) -> None:
        check("dry_multiplier", self.multiplier)
        check("dry_base", self.base)
        check("dry_allowed_length", self.allowed_length)
        check("dry_penalty_last_n", self.last_n)
        self._tails = {}
        for sequence in self.breakers:
            if not len(sequence):
                raise SamplerError("dry_breakers has an empty sequence, expected ids: leave it out")
            head, *tail = (int(t) for t in sequence)
            self._tails.setdefault(head, []).append(tuple(tail))
        self.reset()

    @property
    def _max_exponent(self) -> int | None:
        """The exponent above which the penalty no longer grows; None: it has no such limit."""
        return int(LOG_FLOAT_MAX / math.log(self.base)) if self.base > 1.000001 else None

    def apply(self, c: Candidates) -> Candidates:
        """Return `c` with the penalties taken off."""
        if self.multiplier == 0 or self.base < 1 or self.last_n == 0:
            return c
        lengths = self._repetitions(self._recent())
        lengths = {t: n for t, n in lengths.items() if () not in self._tails.get(t, ())}
        if not lengths:
            return c
        tokens = np.array(sorted(lengths), dtype=np.int64)
        rows, which = c.find(tokens)
        exponents = np.array([lengths[int(t)] for t in tokens])[which] - self.allowed_length
        logits = c.logits.astype(np.float64)
        logits[rows] -= self.multiplier * np.power(float(self.base), exponents)
        return Candidates(c.ids, logits)

    def _repetitions(self, recent: "array[int]") -> dict[int, int]:
        """Token -> longest repetition that it would extend, of allowed_length or more."""
        limit = self._limit(recent)
        if len(recent) <= self.allowed_length or limit < self.allowed_length:
            return {}
        h = np.array(recent, dtype=np.int32)
        # [i]: how much of the history's end also ends at i
        lengths = np.zeros(len(h), dtype=np.int64)
        ends = np.flatnonzero(h[:-1] == h[-1])
        n = 1
        while len(ends):
            lengths[ends] = n
            if n >= limit:
                break
            ends = ends[ends >= n]
            ends = ends[h[ends - n] == h[-1 - n]]
            n += 1
        repeats = np.flatnonzero(lengths >= self.allowed_length)
        # By rising length, so that the longest of a token's entries stays in the dict.
        repeats = repeats[np.argsort(lengths[repeats], kind="stable")]
        return dict(zip(h[repeats + 1].tolist(), lengths[repeats].tolist(), strict=True))

    def _limit(self, recent: "array[int]") -> int:
        """Return the longest length that counts: since the last breaker, while penalties grow."""
        cap = len(recent)
        if self._max_exponent is not None:
            cap = min(cap, self.allowed_length + self._max_exponent)
        reach = max((len(t) for tails in self._tails.values() for t in tails), default=0)
        for back in range(min(len(recent), cap + reach + 1)):
            after = len(recent) - back
            tails = self._tails.get(recent[after - 1], ())
            whole = [len(t) for t in tails if tuple(recent[after : after + len(t)]) == t]
            if whole:
                return min(cap, back - max(whole))
        return cap

    def _recent(self) -> "array[int]":
        return self._history if self.last_n < 0 else self._history[-self.last_n :]

    def accept(self, token_id: int) -> None:
        """Append `token_id` to the history."""
        self._history.append(token_id)
        # Dropping old tokens only now and then keeps the cost per token constant.
        if self.last_n >= 0 and len(self._history) > 2 * self.last_n + 64:
            del self._history[: len(self._history) - self.last_n]

    def read(self, token_ids: Sequence[int]) -> None:
        """Append the tokens of a prompt to the history."""
        self._history.extend(map(int, token_ids))
        if self.last_n >= 0:
            del self._history[: max(len(self._history) - self.last_n, 0)]

    def reset(self) -> None:
        """Drop all tokens."""
        self._history = array("i")

    def get_state(self) -> dict[str, Any]:
        """Return the history, oldest token first."""
        return {"history": list(self._recent()) if self.last_n else []}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a history."""
        self._history = array("i", state["history"])
