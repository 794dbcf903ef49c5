"""The thread team's entries, and the ops that measure the roofline."""

from tamis.jit_kernels.contract.op import Address, Out, op


class ReadRate:
    """Read x once: the bandwidth that bounds every other op; profiles compare with it."""

    x: Address  # f32 [n]
    # f32 [n_thread]: sums of the threads' shares; a remainder below 128 may be left out
    y: Out[Address]
    n: int


READ_RATE = op("runtime.roofline", ReadRate)


class FmaRate:
    """n products and n sums per thread, in registers; rounded down to whole rounds."""

    y: Out[Address]  # f32 [n_thread]: converges to 1
    n: int


FMA_RATE = op("runtime.roofline", FmaRate)


class TeamRun:
    """The thread team's own entry, without an argument record: see cpu/runtime/team.py."""


class TeamWorker:
    """The entry of a team's other threads, without an argument record."""


TEAM_RUN = op("runtime.team", TeamRun)
TEAM_WORKER = op("runtime.team", TeamWorker)
