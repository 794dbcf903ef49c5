"""Steps that change logits and keep all candidates: bias, penalties, temperature. DRY: dry.py."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from tamis.sampling.base import Candidates, SamplerError, Step, check

# Below this, logits differing by one float32 step are further apart than exp can tell, and the
# division might overflow: the limit of small temperatures, the best token alone, is exact.
TEMP_GREEDY = 1e-30


def check_bias(token_id: Any, bias: Any) -> None:
    """Raise SamplerError unless (token_id, bias) is an entry of a logit_bias."""
    if not isinstance(token_id, Integral) or token_id < 0:
        raise SamplerError(f"logit_bias has token id {token_id!r}, expected an integer from 0")
    if not isinstance(bias, Real) or math.isnan(bias) or bias == math.inf:
        raise SamplerError(
            f"logit_bias of token {token_id} is {bias!r}, expected a number or -inf: "
            "a large number like 100 forces a token, -inf forbids it"
        )


@dataclass(frozen=True)
class LogitBias(Step):
    """Adds `bias[token_id]` to the logit of each token named there; -inf forbids it."""

    bias: Mapping[int, float]

    def __post_init__(self) -> None:
        for token_id, bias in self.bias.items():
            check_bias(token_id, bias)

    def apply(self, c: Candidates) -> Candidates:
        """Return `c` with the biases added."""
        tokens = np.array(sorted(self.bias), dtype=np.int64)
        rows, which = c.find(tokens)
        logits = c.logits.copy()
        logits[rows] += np.array([self.bias[int(t)] for t in tokens], dtype=logits.dtype)[which]
        return Candidates(c.ids, logits)


@dataclass(eq=False)
class Penalties(Step):
    """Penalises the tokens among the last `last_n` accepted ones (-1: all, 0: off).

    A logit above 0 is divided by `repeat`, any other multiplied by it; then
    count * `freq` + `present` is taken off. The division alone (Keskar et al. 2019, CTRL, section
    4.1) would make tokens with negative logits more likely; llama.cpp multiplies there, and so do
    we.
    """

    last_n: int = 64
    repeat: float = 1.0
    freq: float = 0.0
    present: float = 0.0
    _window: deque[int] = field(init=False, repr=False)
    _counts: Counter[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check("repeat_last_n", self.last_n)
        check("repeat_penalty", self.repeat)
        check("frequency_penalty", self.freq)
        check("presence_penalty", self.present)
        self.reset()

    def apply(self, c: Candidates) -> Candidates:
        """Return `c` with the penalties taken off."""
        if not self._counts:
            return c
        tokens = np.array(sorted(self._counts), dtype=np.int64)
        rows, which = c.find(tokens)
        counts = np.array([self._counts[int(t)] for t in tokens], dtype=np.float64)[which]
        old = c.logits[rows].astype(np.float64)
        new = np.where(old <= 0, old * self.repeat, old / self.repeat)
        logits = c.logits.copy()
        logits[rows] = new - (counts * self.freq + self.present)
        return Candidates(c.ids, logits)

    def accept(self, token_id: int) -> None:
        """Count `token_id`, and discount the token that leaves the window."""
        if self.last_n == 0:
            return
        if len(self._window) == self.last_n:
            old = self._window.popleft()
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]
        self._window.append(token_id)
        self._counts[token_id] += 1

    def read(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of a prompt that fall within the window."""
        if self.last_n == 0:
            return
        window = [*self._window, *map(int, token_ids)]
        self._window = deque(window if self.last_n < 0 else window[-self.last_n :])
        self._counts = Counter(self._window)

    def reset(self) -> None:
        """Drop all tokens."""
        self._window, self._counts = deque(), Counter()

    def get_state(self) -> dict[str, Any]:
        """Return the window, oldest token first."""
        return {"window": list(self._window)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a window."""
        self.reset()
        for token_id in state["window"]:
            self.accept(int(token_id))


def scaled(c: Candidates, temp: float) -> Candidates:
    """Return `c` with its logits divided by `temp`; only the best token if temp is 0 or less."""
    if temp < TEMP_GREEDY:
        return c.head(1)
    return Candidates(c.ids, np.divide(c.logits, temp, dtype=np.float64), c.sorted)


@dataclass(frozen=True)
class Temp(Step):
    """Divides the logits by `temp`; 0 or less leaves only the best token."""

    temp: float

    def __post_init__(self) -> None:
        check("temp", self.temp)

    def apply(self, c: Candidates) -> Candidates:
        """Return `c` at this temperature."""
        return scaled(c, self.temp)


@dataclass(frozen=True)
class DynaTemp(Step):
    """Divides the logits by a temperature that follows the entropy H of the candidates.

    T = low + (high - low) * (H / log n)^exponent for n candidates, where low = max(temp - range, 0)
    and high = temp + range. So T is low for certain distributions, high for uncertain ones.
    """

    temp: float
    range: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        check("temp", self.temp)
        check("dynatemp_range", self.range)
        check("dynatemp_exponent", self.exponent)

    def apply(self, c: Candidates) -> Candidates:
        """Return `c` at the temperature of its entropy; a single candidate is unchanged."""
        if len(c) < 2:
            return c
        probs = c.probs()
        probs = probs[probs > 0]
        entropy = -float(np.sum(probs * np.log(probs)))
        low, high = max(0.0, self.temp - self.range), self.temp + self.range
        # Rounding can carry H a hair outside [0, log n].
        share = min(max(entropy / math.log(len(c)), 0.0), 1.0)
        return scaled(c, low + (high - low) * share**self.exponent)
