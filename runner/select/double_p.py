"""Double-P: clusters by top-p, and of them by top-p which are read (Ni et al. 2026, 2602.05191).

Decides: at decode, what is read and what is estimated, both by shares of attention. Keys are
clustered; a cluster of size s and centroid C is estimated to hold s e^(q.C) of a head's weight. The
fewest clusters that hold `p1` of that take part, the others are left out; of them the fewest that
hold `p2` are read, token by token, and the rest is estimated by centroid, size and mean value, in
one softmax with what is read (see `retroinfer`). How many that are follows from how attention is
spread, in each KV head and step.

Departures: the clusters are Tactic's, of one index for several methods. One split serves the heads
that share a KV head, by the mean of their shares. Shares are of the clusters alone: the first
`sink` and last `local` positions are always read. Defaults of `p1` and `p2` are ours.
State: the clusters, and the means of their values.
"""

from dataclasses import dataclass
from typing import ClassVar

from tamis.select.base import DECODE, SelectorShape, SelectorState, check, common
from tamis.select.clusters import MAX_ITER, ZonedState, Zones


@dataclass(frozen=True, slots=True)
class DoubleP:
    """p1: the share of clusters that take part. p2: the share of those that are read."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    all_layers: ClassVar[bool] = True  # it needs the log-sum-exp of attention: see per_layer

    p1: float = 0.95
    p2: float = 0.7
    c: int = 16
    n_iter: int = 10
    period: int = 1024
    sink: int = 4
    local: int = common("recent", 64)
    segment: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "0 < p1 <= 1",
            "0 <= p2 <= p1",
            "c >= 1",
            f"1 <= n_iter <= {MAX_ITER}",
            "period >= 1",
            "sink >= 0",
            "local >= 1",
            "segment >= 0",
            "segment % c == 0",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return ZonedState(self, shape, Zones(by_share=True, exact=self.p2, both=self.p1))


METHOD = DoubleP
