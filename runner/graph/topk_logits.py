"""The best few of a row of logits, found on their device: on a GPU the others stay there."""

import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.platform.memory import huge_zeros

MOST = 128  # the most for which this saves time
SPECS = {KernelSpec(ops.LOGIT_PARTS, ()), KernelSpec(ops.LOGIT_BEST, ())}


class Best(NamedTuple):
    """The best logits in descending order, equal ones by ascending id, with the log-sum of all."""

    ids: np.ndarray  # int32 [n]
    logits: np.ndarray  # f32 [n]
    log_sum: float  # log of the sum of exp(logit) over the vocabulary; not finite if a logit is not


class BestLogits:
    """Finds the n best of a row of logits; n is at most MOST and their number."""

    def __init__(
        self, backend: Backend, logits: np.ndarray, n: int, found: np.ndarray | None = None
    ) -> None:
        """Prepare the search; logits: f32 [n_vocab], which kernels write.

        found: f32 [2 n + 2], memory of the caller.
        """
        assert 1 <= n <= min(MOST, len(logits))
        n_part, self._backend = backend.n_thread, backend
        parts: dict[str, Any] = {
            "ids": np.zeros((n_part, n), np.int32),
            "values": np.zeros((n_part, n), np.float32),
            "sums": np.zeros((n_part, 2), np.float32),
        }
        self._held: Any = None
        if found is None:
            found, self._held = mapped_zeros(backend, (2 * n + 2,))
        self._found = found
        self._ids, self._values = self._found[:n].view(np.int32), self._found[n : 2 * n]
        self._total = self._found[2 * n :]
        program = Program()
        program.add(
            ops.LOGIT_PARTS, logits=logits, n_vocab=len(logits), n_best=n, n_part=n_part, **parts
        )
        program.add(
            ops.LOGIT_BEST,
            best_ids=self._ids,
            best_values=self._values,
            total=self._total,
            n_best=n,
            n_part=n_part,
            **parts,
        )
        self.linked = backend.link(program)

    def find(self) -> Best:
        """The best of the current logits."""
        self._backend.run(self.linked)
        self._backend.fetch(self._found)
        return self.found()

    def found(self) -> Best:
        """The best of the logits at the time when `linked` ran, once they were fetched."""
        order = np.lexsort((self._ids, -self._values))
        top, total = self._total.astype(np.float64).tolist()
        log_sum = top + math.log(total) if total > 0 else math.nan
        return Best(self._ids[order], self._values[order], log_sum)


def mapped_zeros(backend: Backend, shape: tuple[int, ...]) -> tuple[np.ndarray, Any]:
    """Zeros, f32, in host memory that kernels write, and the object that keeps them mapped.

    If the system does not allow it, they are copied when they are fetched.
    """
    _, found = huge_zeros(shape, np.dtype(np.float32))
    held = None
    with contextlib.suppress(MemoryError):
        held = backend.mapped(found)
    return found, held


class BestOfRows:
    """Finds the n best of the first rows of logits, all of them at once."""

    def __init__(self, backend: Backend, logits: np.ndarray, n: int) -> None:
        """Prepare the search; logits: f32 [n_row, n_vocab], which kernels write."""
        self._backend = backend
        self._found, self._held = mapped_zeros(backend, (len(logits), 2 * n + 2))
        self._rows = [
            BestLogits(backend, row, n, found)
            for row, found in zip(logits, self._found, strict=True)
        ]
        self._joined: tuple[int, Any] = 0, None  # the number of rows, and its Program

    def start(self, n_row: int) -> None:
        """Start the search for the best of n_row rows."""
        if self._joined[0] != n_row:
            step = [(row.linked, range(len(row.linked))) for row in self._rows[:n_row]]
            self._joined = n_row, self._backend.join([step], self._joined[1])
        self._backend.run(self._joined[1])

    def found(self, n_row: int, n: int) -> list[Best]:
        """The n best of each of n_row rows."""
        self._backend.fetch(self._found)
        most = self._found.shape[1] // 2 - 1
        ids = self._found[:n_row, :most].view(np.int32)
        values, ends = self._found[:n_row, most : 2 * most], self._found[:n_row, 2 * most :]
        order = np.lexsort((ids, -values), axis=-1)[:, :n]
        ids, values = (np.take_along_axis(x, order, axis=-1) for x in (ids, values))
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = ends[:, 0].astype(np.float64) + np.log(ends[:, 1].astype(np.float64))
        return [Best(*row) for row in zip(ids, values, sums.tolist(), strict=True)]
