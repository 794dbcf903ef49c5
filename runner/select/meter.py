"""Counters of the retained mass of decode steps, as `metered` estimates it."""

from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.contract.ops.select.metered import ALL, METER, WIDER

N_BIN = 1000  # of masses from 0 to 1: quantiles are exact to a thousandth
NOT_MEASURED = -1.0


class Mass(NamedTuple):
    """Estimates over the steps, layers and query heads in which a method selected."""

    n_step: int
    mass: float  # the mean share of attention that is retained
    mass_p5: float  # the fifth percentile of it, to a thousandth
    chosen: float  # the mean share that the method's own selection retains
    wider: float  # the share of heads that read additional units
    dense: float  # the share of heads that read every position

    @property
    def escalated(self) -> float:
        """The share of heads that read more than the method's selection."""
        return self.wider + self.dense

    def rounded(self) -> dict[str, float]:
        """The rounded values, for JSON."""
        return {
            "steps": self.n_step,
            "mass": round(self.mass, 4),
            "mass_p5": round(self.mass_p5, 4),
            "chosen_mass": round(self.chosen, 4),
            "escalated": round(self.escalated, 4),
            "dense": round(self.dense, 4),
        }

    def __str__(self) -> str:
        return (
            f"holds an estimated {self.mass:.3f} of attention, 95 % of the heads at least "
            f"{self.mass_p5:.3f}; {self.escalated:.0%} of them read more, {self.dense:.0%} all"
        )


class Meter:
    """The masses of a state's decode steps since `reset`.

    report: f32 [n_layer, n_head, len(METER)], which kernels write in each step.
    """

    def __init__(self, n_layer: int, n_head: int) -> None:
        self.report = np.full((n_layer, n_head, len(METER)), NOT_MEASURED, np.float32)
        self.last = self.report.copy()  # of the last counted step
        self.reset()

    def reset(self) -> None:
        """Drop all steps."""
        self._bins = np.zeros(N_BIN + 1, np.int64)
        # sums of the retained and the selected mass, and counts of WIDER and ALL
        self._sums = np.zeros(4)
        self._n_step = 0

    def take(self) -> None:
        """Count the step whose report was written, if one was."""
        rows = self.report[self.report[..., METER.mass] >= 0].astype(np.float64)
        self.last[...] = self.report
        self.report[...] = NOT_MEASURED
        if not len(rows):
            return
        held, needed = rows[:, METER.held], rows[:, METER.needed]
        bins = np.clip((held * N_BIN).astype(np.int64), 0, N_BIN)
        self._bins += np.bincount(bins, minlength=N_BIN + 1)
        sums = held, rows[:, METER.mass], needed == WIDER, needed == ALL
        self._sums += [part.sum() for part in sums]
        self._n_step += 1

    def counts(self) -> tuple[np.ndarray, np.ndarray, int]:
        """The arrays and the number that `mass_of` adds up."""
        return self._bins, self._sums, self._n_step


def mass_of(meters: list[Meter]) -> Mass | None:
    """The sum of the meters of a session's devices; None if nothing was measured."""
    counts = [meter.counts() for meter in meters]
    bins = np.sum([bins for bins, _, _ in counts], axis=0)
    n = int(np.sum(bins))
    if n == 0:
        return None
    held, chosen, wider, dense = np.sum([sums for _, sums, _ in counts], axis=0) / n
    below = int(np.searchsorted(np.cumsum(bins), 0.05 * n, side="right"))
    n_step = max(n_step for _, _, n_step in counts)
    p5 = min(1.0, below / N_BIN)
    return Mass(n_step, float(held), p5, float(chosen), float(wider), float(dense))
