"""What every sampler uses: candidates, the step interface, ranges, the random stream.

Nothing here depends on tokenizers or models; the only import besides the standard library is NumPy.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np

RANDOM_SEEDS = (None, -1, 0xFFFFFFFF)  # llama.h's LLAMA_DEFAULT_SEED is the last


class SamplerError(ValueError):
    """A parameter, a chain, a saved state or logits cannot be used; the message says what can."""


class LogitsError(SamplerError):
    """No token can be chosen by these logits: the fault of the model, not of parameters."""


@dataclass(frozen=True)
class Range:
    """The values a parameter may have: low <= value <= high, or low < value where `above`."""

    low: float = -math.inf
    high: float = math.inf
    remedy: str = "give a finite number"
    integer: bool = False
    above: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise SamplerError with value, expectation and remedy unless `value` is in the range."""
        kind = Integral if self.integer else Real
        fits = isinstance(value, kind) and not isinstance(value, bool)
        # Written so that NaN fails: no comparison with it holds.
        fits = fits and (self.integer or math.isfinite(value)) and self.low <= value <= self.high
        if not fits or (self.above and value == self.low):
            raise SamplerError(f"{name} is {value!r}, expected {self}: {self.remedy}")

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a finite number"
        if self.low == -math.inf:
            return kind
        if self.high == math.inf:
            return f"{kind} {'above' if self.above else 'of at least'} {self.low}"
        return f"{kind} from {self.low} to {self.high}"


RANGES = {
    "temp": Range(remedy="0 or less is greedy, the default is 0.8"),
    "dynatemp_range": Range(0.0, remedy="0 switches dynamic temperature off"),
    "dynatemp_exponent": Range(0.0, remedy="the default is 1"),
    "top_k": Range(remedy="0 or less switches it off, the default is 40", integer=True),
    "top_p": Range(0.0, 1.0, "1 switches it off, the default is 0.95"),
    "min_p": Range(0.0, 1.0, "0 switches it off, the default is 0.05"),
    "typical_p": Range(0.0, 1.0, "1 switches it off"),
    "top_n_sigma": Range(remedy="0 or less switches it off"),
    "xtc_probability": Range(0.0, 1.0, "0 switches it off"),
    "xtc_threshold": Range(0.0, 1.0, "above 0.5 switches it off, the default is 0.1"),
    "repeat_last_n": Range(-1, remedy="0 is off, -1 is all tokens, default 64", integer=True),
    "repeat_penalty": Range(0.0, remedy="1 switches it off", above=True),
    "frequency_penalty": Range(remedy="0 switches it off"),
    "presence_penalty": Range(remedy="0 switches it off"),
    "dry_multiplier": Range(0.0, remedy="0 switches DRY off, 0.8 is usual"),
    "dry_base": Range(0.0, remedy="below 1 switches DRY off, the default is 1.75"),
    "dry_allowed_length": Range(1, remedy="the default is 2", integer=True),
    "dry_penalty_last_n": Range(-1, remedy="0 is off, -1 is all tokens", integer=True),
    "mirostat": Range(0, 2, "0 is off, 1 and 2 are the versions", integer=True),
    "mirostat_tau": Range(0.0, remedy="the target surprise in bits, the default is 5"),
    "mirostat_eta": Range(0.0, remedy="the learning rate, the default is 0.1"),
    "min_keep": Range(0, remedy="0 keeps at least one", integer=True),
    "seed": Range(-(1 << 63), (1 << 63) - 1, "-1 or None draws one", integer=True),
}


def check(name: str, value: Any) -> None:
    """Raise SamplerError unless `value` is in the range of the parameter `name`."""
    RANGES[name].check(name, value)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The tokens that can still be chosen.

    Arrays are shared and never written to: steps make new ones.

    ids int32 [n] · logits float32 or float64 [n], of which -inf can never be chosen · sorted: by
    falling logits, equal ones by rising id.
    """

    ids: np.ndarray
    logits: np.ndarray
    sorted: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Any, sorted: bool) -> "Candidates":
        """Return the candidates at `rows` (a slice, a mask or indices), in that order."""
        return Candidates(self.ids[rows], self.logits[rows], sorted)

    def head(self, k: int) -> "Candidates":
        """Return the k best (all, where there are fewer), sorted."""
        n = len(self)
        if self.sorted or k == 0:  # nothing to search: there is no 0th value to partition by
            return self.take(slice(k), sorted=True)
        if k >= n:
            return self.take(np.lexsort((self.ids, -self.logits)), sorted=True)
        # A partition finds the k-th value in O(n); the sort then sees only k and its ties, so
        # that equal logits fall in the same order as after a full sort.
        kth = np.partition(self.logits, n - k)[n - k]
        best = self.take(np.flatnonzero(self.logits >= kth), sorted=False)
        return best.take(np.lexsort((best.ids, -best.logits))[:k], sorted=True)

    def all_sorted(self) -> "Candidates":
        """Return all of them, sorted."""
        return self.head(len(self))

    def probs(self) -> np.ndarray:
        """Return the softmax, float64 [n]; SamplerError where every logit is -inf."""
        x = self.logits.astype(np.float64)
        top = x[0] if self.sorted else x.max()
        if top == -math.inf:
            raise excluded()
        # In place: for a whole vocabulary, fresh memory costs more than the arithmetic.
        x -= top
        np.exp(x, out=x)
        x /= x.sum()
        return x

    def find(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, which): ids[rows] == tokens[which]; `tokens` int [m] rising, no doubles.

        Tokens that are no candidates are left out.
        """
        if not len(tokens):
            return np.empty(0, np.intp), np.empty(0, np.intp)
        if tokens[-1] < len(self) and (self.ids[tokens] == tokens).all():
            # the whole vocabulary, in order: no search is needed
            return tokens, np.arange(len(tokens))
        which = np.searchsorted(tokens, self.ids).clip(max=len(tokens) - 1)
        rows = np.flatnonzero(tokens[which] == self.ids)
        return rows, which[rows]


def excluded() -> SamplerError:
    """Return the error of a chain in which no token is left."""
    return SamplerError(
        "every token has logit -inf, expected at least one that can be chosen: "
        "loosen logit_bias or ignore_eos"
    )


class Step:
    """One element of a chain. All hooks but `apply` have defaults.

    A step that keeps state (history, random stream, mu) returns it from `get_state`, as a dict of
    ints, floats, strings and lists. A grammar is one more Step: `apply` sets the logits it forbids
    to -inf, `accept` advances it.
    """

    chooses: ClassVar[bool] = False  # leaves exactly one candidate; ends a chain

    def apply(self, c: Candidates) -> Candidates:
        """The candidates that this step leaves; never empty, never writing to the arrays of `c`."""
        raise NotImplementedError

    def accept(self, token_id: int) -> None:
        """Append `token_id` to the history."""

    def read(self, token_ids: Sequence[int]) -> None:
        """Append the tokens of a prompt to the history, as `accept` does for each, but faster.

        A step that follows the answer alone, as a grammar does, ignores them.
        """
        if type(self).accept is not Step.accept:
            for token_id in token_ids:
                self.accept(token_id)

    def reset(self) -> None:
        """Restore the state just after construction."""

    def get_state(self) -> dict[str, Any]:
        """The state that `set_state` restores."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""


def resolve_seed(seed: int | None) -> int:
    """Return `seed`, or a fresh one of 32 bits for None and -1; SamplerError outside 64 bits."""
    if seed is not None:
        check("seed", seed)
    if seed not in RANDOM_SEEDS:
        assert seed is not None
        return int(seed)
    return int.from_bytes(os.urandom(4), "little") % 0xFFFFFFFF


class RandomStream:
    """Uniform numbers from a seed: the same on every machine and with every version of NumPy.

    Only PCG64's raw output is used, because NumPy keeps that stable, unlike the distributions of
    its Generator. `lane` keeps two users of one seed (XTC and Dist) apart.
    """

    def __init__(self, seed: int, lane: int = 0) -> None:
        self.seed, self.lane = seed, lane
        self.reset()

    def reset(self) -> None:
        """Restart at the first number."""
        unsigned = self.seed % (1 << 64)
        self._bits = np.random.PCG64(np.random.SeedSequence([unsigned, self.lane]))

    def uniform(self) -> float:
        """Return the next number, 0 <= u < 1, in steps of 2^-53."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def get_state(self) -> dict[str, Any]:
        """Return seed and position as plain ints."""
        raw = self._bits.state["state"]
        return {"seed": self.seed, "state": int(raw["state"]), "inc": int(raw["inc"])}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of `get_state`."""
        self.seed = int(state["seed"])
        self.reset()
        whole: Any = self._bits.state
        whole["state"] = {"state": int(state["state"]), "inc": int(state["inc"])}
        self._bits.state = whole

    def choose(self, c: Candidates, probs: np.ndarray) -> int:
        """Return a row of `c`, row i with probability probs[i]; never one of probability 0."""
        total = np.cumsum(probs)
        u = self.uniform() * total[-1]
        # u may round up to the whole sum: then the row that completes it, not one past the end.
        last = np.searchsorted(total, total[-1], side="left")
        return int(min(np.searchsorted(total, u, side="right"), last))
