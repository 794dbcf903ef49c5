"""The ceilings of this machine: bytes read and multiply-adds per second, with n threads."""

import time
from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program

READ_BYTES = 128 << 20  # far more than caches hold
FMA_COUNT = 400_000_000  # per thread: some ten milliseconds
N_RUN = 5


class Ceiling(NamedTuple):
    """Rates per second; cycles are the tape's, which may not be the core's clock."""

    read_bytes: float
    flop: float
    cycles: float

    def seconds(self, n_bytes: float, n_flop: float) -> float:
        """The least time that so many bytes and operations can take."""
        return max(n_bytes / self.read_bytes, n_flop / self.flop)


def measure(backend: CpuBackend) -> Ceiling:
    """Measure the best of a few runs of two small kernels with all threads.

    It takes about half a second.
    """
    n_thread = backend.n_thread
    x, y = np.ones(READ_BYTES // 4, np.float32), np.zeros(n_thread, np.float32)
    reading, adding = Program(), Program()
    reading.add(ops.READ_RATE, x=x, y=y, n=len(x))
    adding.add(ops.FMA_RATE, y=y, n=FMA_COUNT)
    read, _ = _fastest(backend, reading)
    fma, cycles = _fastest(backend, adding)
    return Ceiling(READ_BYTES / read, 2 * FMA_COUNT * n_thread / fma, cycles / fma)


def _fastest(backend: CpuBackend, program: Program) -> tuple[float, int]:
    """The seconds and cycles of the fastest run of a Program of one op."""
    linked, runs = backend.link(program), []
    for _ in range(N_RUN):
        linked.reset_costs()
        start = time.perf_counter()
        backend.run(linked)
        runs.append((time.perf_counter() - start, linked.costs()[0].cycles))
    return min(runs)
