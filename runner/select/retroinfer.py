"""RetroInfer: the best clusters read, the next ones estimated (Chen et al. 2025, arXiv 2505.02922).

Decides: at decode, what is read and what is estimated. Keys are clustered, `c` tokens a cluster;
first and last positions are always read (the steady zone). A step ranks the clusters by their
centroids' softmax, summed over the heads that share a KV head; it reads the best `retrieve` of them
(the retrieval zone) and estimates the next `estimate` (the estimation zone): a cluster of size s,
centroid C and values of mean V takes part with weight s e^(q.C) and value V, in one softmax with
what is read. By Jensen's inequality s e^(q.C) is at most the sum of its members' weights.

Departures: the clusters are Tactic's, of one index for several methods: K-means of keys as they
are, by distance, with 10 rounds; the paper's are by inner product, of centred keys. Tokens since
the last clustering are read, up to `period`; the paper clusters 1,024 new ones at a time. Clusters
whose share is 0 in float32 are in no zone.
State: the clusters, and the means of their values.
"""

from dataclasses import dataclass
from typing import ClassVar

from tamis.select.base import DECODE, SelectorShape, SelectorState, check, common
from tamis.select.clusters import MAX_ITER, ZonedState, Zones


@dataclass(frozen=True, slots=True)
class RetroInfer:
    """c: tokens a cluster. retrieve, estimate: the shares of clusters in the two zones."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    all_layers: ClassVar[bool] = True  # it needs the log-sum-exp of attention: see per_layer

    c: int = 16
    retrieve: float = 0.018
    estimate: float = 0.232
    n_iter: int = 10
    period: int = 1024
    sink: int = 4
    local: int = common("recent", 64)
    segment: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "c >= 1",
            "0 <= retrieve <= 1",
            "0 <= estimate <= 1",
            f"1 <= n_iter <= {MAX_ITER}",
            "period >= 1",
            "sink >= 0",
            "local >= 1",
            "segment >= 0",
            "segment % c == 0",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        both = min(1.0, self.retrieve + self.estimate)
        return ZonedState(self, shape, Zones(by_share=False, exact=self.retrieve, both=both))


METHOD = RetroInfer
