"""The best few of a row of logits, found where the logits are: on a GPU the others stay there."""

import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.platform.memory import huge_zeros

MOST = 128  # that are worth finding so
SPECS = {KernelSpec(ops.LOGIT_PARTS, ()), KernelSpec(ops.LOGIT_BEST, ())}


class Best(NamedTuple):
    """The best logits, by falling value, equal ones by rising id, and the logarithm of all."""

    ids: np.ndarray  # int32 [n]
    logits: np.ndarray  # f32 [n]
    log_sum: float  # log of the sum of exp(logit) over the vocabulary; not finite where one is not


class BestLogits:
    """Finds the n best of a row of logits, n at most MOST and their number."""

    def __init__(self, backend: Backend, logits: np.ndarray, n: int) -> None:
        """logits: f32 [n_vocab], which kernels write."""
        assert 1 <= n <= min(MOST, len(logits))
        n_part, self._backend = backend.n_thread, backend
        parts: dict[str, Any] = {
            "ids": np.zeros((n_part, n), np.int32),
            "values": np.zeros((n_part, n), np.float32),
            "sums": np.zeros((n_part, 2), np.float32),
        }
        _, self._found = huge_zeros((2 * n + 2,), np.dtype(np.float32))
        with contextlib.suppress(MemoryError):  # then it is copied
            self._held = backend.mapped(self._found)
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
        self._linked = backend.link(program)

    def find(self) -> Best:
        """The best of what the logits are now."""
        self._backend.run(self._linked)
        self._backend.fetch(self._found)
        order = np.lexsort((self._ids, -self._values))
        top, total = self._total.astype(np.float64).tolist()
        log_sum = top + math.log(total) if total > 0 else math.nan
        return Best(self._ids[order], self._values[order], log_sum)
