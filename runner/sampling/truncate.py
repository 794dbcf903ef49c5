"""Steps that drop candidates and do not change the logits of the others."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tamis.sampling.base import Candidates, RandomStream, Step, check, resolve_seed

# TopP of an unsorted vocabulary sorts this many of the best, and more only if their mass is too
# small: language models rarely need as many, and a full sort costs 50 times the partition.
TOP_P_HEAD = 2048
TOP_P_GROWTH = 8
XTC_LANE = 1  # XTC's coin must not follow the draw of Dist that shares its seed


@dataclass(frozen=True)
class TopNSigma(Step):
    """Keeps the logits within `n` standard deviations of the largest (Tang et al. 2024, eq. 5).

    Deviation and mean are those of all logits above -inf. llama.cpp masks the others with -inf and
    keeps them in the list; here they are dropped. The probabilities are the same.
    """

    n: float

    def __post_init__(self) -> None:
        check("top_n_sigma", self.n)

    def apply(self, c: Candidates) -> Candidates:
        """Return the candidates within n sigma."""
        if self.n <= 0 or len(c) < 2:
            return c
        top = float(c.logits.max())
        if top == -math.inf:
            return c
        finite = c.logits[c.logits > -math.inf]
        sigma = float(finite.std(dtype=np.float64))
        return c.take(c.logits >= top - self.n * sigma, c.sorted)


@dataclass(frozen=True)
class TopK(Step):
    """Keeps the `k` best candidates; 0 or less keeps all."""

    k: int

    def __post_init__(self) -> None:
        check("top_k", self.k)

    def apply(self, c: Candidates) -> Candidates:
        """Return the k best, sorted."""
        return c.head(self.k) if self.k > 0 else c


@dataclass(frozen=True)
class Typical(Step):
    """Keeps the candidates whose surprise is nearest to the entropy (Meister et al. 2022).

    They are taken by rising |-log p - H| until their mass exceeds `p` and there are `min_keep`.
    The most likely token may be dropped. p = 1 keeps all.
    """

    p: float
    min_keep: int = 0

    def __post_init__(self) -> None:
        check("typical_p", self.p)
        check("min_keep", self.min_keep)

    def apply(self, c: Candidates) -> Candidates:
        """Return the typical candidates, most typical first."""
        if self.p >= 1:
            return c
        c = c.all_sorted()
        probs = c.probs()
        with np.errstate(divide="ignore"):
            surprise = -np.log(probs)
        possible = probs > 0  # the others add 0 to the entropy, not 0 * inf
        entropy = float(probs[possible] @ surprise[possible])
        # Stable: of two equally typical tokens the likelier comes first.
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        n = int(np.searchsorted(np.cumsum(probs[order]), self.p, side="right")) + 1
        return c.take(order[: max(n, self.min_keep)], sorted=False)


@dataclass(frozen=True)
class TopP(Step):
    """Keeps the fewest best candidates whose mass reaches `p` (Holtzman et al. 2020).

    At least one and at least `min_keep`. p = 1 keeps all.
    """

    p: float
    min_keep: int = 0

    def __post_init__(self) -> None:
        check("top_p", self.p)
        check("min_keep", self.min_keep)

    def apply(self, c: Candidates) -> Candidates:
        """Return the nucleus, sorted."""
        if self.p >= 1:
            return c
        if c.sorted:
            return c.head(self._count(c.probs()))
        mass = 1.0 / c.probs().max()  # the sum of exp(logit - top) over all
        k = TOP_P_HEAD
        while True:
            best = c.head(k)
            x = best.logits.astype(np.float64)
            n = self._count(np.exp(x - x[0]) / mass)
            if n <= len(best) or len(best) == len(c):
                return best.head(n)
            k *= TOP_P_GROWTH

    def _count(self, probs: np.ndarray) -> int:
        """The number of candidates to keep; more than there are if their mass is below p."""
        n = int(np.searchsorted(np.cumsum(probs), self.p, side="left")) + 1
        return max(n, self.min_keep)


@dataclass(frozen=True)
class MinP(Step):
    """Keeps the candidates with at least `p` times the probability of the best (Nguyen 2024).

    At least `min_keep` of the best. p = 0 keeps all.
    """

    p: float
    min_keep: int = 0

    def __post_init__(self) -> None:
        check("min_p", self.p)
        check("min_keep", self.min_keep)

    def apply(self, c: Candidates) -> Candidates:
        """Return the candidates above the floor; the order stays unless min_keep needs a sort."""
        if self.p <= 0:
            return c
        # The ratio of two probabilities is that of the logits: no softmax is needed.
        top = c.logits[0] if c.sorted else c.logits.max()
        keep = c.logits >= float(top) + math.log(self.p)
        if np.count_nonzero(keep) < self.min_keep:
            return c.head(self.min_keep)
        return c.take(keep, c.sorted)


@dataclass(eq=False)
class Xtc(Step):
    """With chance `probability` drops all but the last of those with p >= `threshold`.

    "Exclude top choices" (P. E. Weidmann, 2024). Nothing is dropped if fewer than two reach the
    threshold, if fewer than `min_keep` would be left, or with a threshold above 0.5.
    """

    probability: float
    threshold: float = 0.1
    min_keep: int = 0
    seed: int | None = None
    _random: RandomStream = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check("xtc_probability", self.probability)
        check("xtc_threshold", self.threshold)
        check("min_keep", self.min_keep)
        self.seed = resolve_seed(self.seed)
        self._random = RandomStream(self.seed, XTC_LANE)

    def apply(self, c: Candidates) -> Candidates:
        """Return `c`, perhaps without its top choices; draws one number unless it is off."""
        if self.probability <= 0 or self.threshold > 0.5 or len(c) < 2:
            return c
        if self._random.uniform() >= self.probability:
            return c
        c = c.all_sorted()
        dropped = int(np.count_nonzero(c.probs() >= self.threshold)) - 1
        if dropped < 1 or len(c) - dropped < self.min_keep:
            return c
        return c.take(slice(dropped, None), sorted=True)

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
