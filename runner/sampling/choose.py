"""Steps that end a chain by choosing one token: greedy, sampling, mirostat 1 and 2."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tamis.sampling.base import (
    Candidates,
    RandomStream,
    SamplerError,
    Step,
    check,
    excluded,
    resolve_seed,
)


@dataclass(frozen=True)
class Greedy(Step):
    """Chooses the largest logit; of equal ones the lowest id where ids rise."""

    chooses: ClassVar[bool] = True

    def apply(self, c: Candidates) -> Candidates:
        """Return the best candidate alone."""
        row = int(np.argmax(c.logits))
        if c.logits[row] == -math.inf:
            raise excluded()
        return c.take(slice(row, row + 1), sorted=True)


@dataclass(eq=False)
class Dist(Step):
    """Chooses each candidate with its probability; `seed` None or -1 draws one and records it."""

    seed: int | None = None
    _random: RandomStream = field(init=False, repr=False)
    chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.seed = resolve_seed(self.seed)
        self._random = RandomStream(self.seed)

    def apply(self, c: Candidates) -> Candidates:
        """Return one candidate; always draws one number."""
        row = self._random.choose(c, c.probs())
        return c.take(slice(row, row + 1), sorted=True)

    def reset(self) -> None:
        """Restart the random stream."""
        self._random.reset()

    def get_state(self) -> dict[str, Any]:
        """Return the random stream."""
        return {"random": self._random.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a random stream."""
        self._random.set_state(state["random"])
        self.seed = self._random.seed


@dataclass(eq=False)
class MirostatV2(Step):
    """Keeps the surprise of the text near `tau` bits (Basu et al. 2021), by the simple rule.

    Tokens of surprise -log2 p above mu are dropped, one of the others is drawn, and once it is
    accepted mu moves by -eta * (its surprise among them - tau). mu starts at 2 tau. llama.cpp moves
    mu when the token is drawn; here a draw that is not accepted changes nothing.
    """

    tau: float = 5.0
    eta: float = 0.1
    seed: int | None = None
    mu: float = field(init=False)
    _pending: tuple[int, float] | None = field(init=False, repr=False)  # drawn id, its surprise
    _random: RandomStream = field(init=False, repr=False)
    chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check("mirostat_tau", self.tau)
        check("mirostat_eta", self.eta)
        self.seed = resolve_seed(self.seed)
        self._random = RandomStream(self.seed)
        self.reset()

    def kept(self, c: Candidates) -> Candidates:
        """Return the candidates of surprise up to mu, sorted; at least the best."""
        probs = c.probs()
        keep = probs >= 2.0 ** min(-self.mu, 1.0)  # no probability is above 1, no power overflows
        return c.take(keep, c.sorted).all_sorted() if keep.any() else c.head(1)

    def apply(self, c: Candidates) -> Candidates:
        """Return one candidate; mu changes at `accept`."""
        c = self.kept(c)
        probs = c.probs()
        row = self._random.choose(c, probs)
        self._pending = int(c.ids[row]), -math.log2(probs[row])
        return c.take(slice(row, row + 1), sorted=True)

    def accept(self, token_id: int) -> None:
        """Move mu towards tau if `token_id` is the token last drawn; else do nothing."""
        if self._pending is not None and self._pending[0] == token_id:
            self.mu -= self.eta * (self._pending[1] - self.tau)
        self._pending = None

    def reset(self) -> None:
        """Set mu to 2 tau and restart the random stream."""
        self.mu, self._pending = 2.0 * self.tau, None
        self._random.reset()

    def get_state(self) -> dict[str, Any]:
        """Return mu, the drawn token still to be accepted, and the random stream."""
        pending = list(self._pending) if self._pending else None
        return {"mu": self.mu, "pending": pending, "random": self._random.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of `get_state`."""
        mu, pending = float(state["mu"]), state["pending"]
        if not math.isfinite(mu):
            raise SamplerError(f"mirostat's mu is {mu}, expected a finite number: call reset()")
        self.mu = mu
        self._pending = (int(pending[0]), float(pending[1])) if pending else None
        self._random.set_state(state["random"])
        self.seed = self._random.seed


@dataclass(eq=False)
class Mirostat(MirostatV2):
    """The first version (Basu et al. 2021, algorithm 1): a top-k whose k is estimated.

    The exponent s of Zipf's law is fitted to the best `m` candidates, and k follows from s, mu and
    `n_vocab` (None: the number of candidates).
    """

    m: int = 100
    n_vocab: int | None = None

    def kept(self, c: Candidates) -> Candidates:
        """Return the k best candidates, sorted."""
        return c.head(self._k(c))

    def _k(self, c: Candidates) -> int:
        n = max(self.n_vocab or 0, len(c))
        best = c.head(self.m).logits.astype(np.float64)
        best = best[best > -math.inf]
        if len(best) < 2:
            return 1
        rank = np.arange(1, len(best))
        t = np.log((rank + 1) / rank)
        # log(p_i / p_i+1) is the difference of the logits; a flat distribution has s = 0.
        s = max(float(t @ (best[:-1] - best[1:]) / (t @ t)), 1e-12)
        eps = s - 1.0
        # (1 - n^-eps) / eps tends to log n where eps tends to 0.
        scale = -math.expm1(-eps * math.log(n)) / eps if abs(eps) > 1e-9 else math.log(n)
        # k = (2^mu / scale)^(1/s), in logarithms because it overflows for small s.
        log_k = (self.mu * math.log(2) - math.log(scale)) / s
        return n if log_k >= math.log(n) else max(int(math.exp(log_k)), 1)
