"""Byte offsets of the records that Python writes and the team's kernels read."""

from typing import NamedTuple


class _Team(NamedTuple):
    job: int  # number of submitted jobs: the word that idle workers sleep on
    job_sleepers: int
    arrived: int  # threads at the barrier
    generation: int  # number of passed barriers: the word that waiting threads sleep on
    barrier_sleepers: int
    tape: int
    n_op: int
    quit: int
    spin: int  # cycles to spin before sleeping
    size: int


class _Tape(NamedTuple):
    kernel: int  # address of the kernel
    args: int  # address of its argument struct
    sync: int  # 1: the team waits after it
    cycles: int  # cycles spent so far, summed over replays
    size: int


# Words that different threads write are on separate cache lines (64 bytes).
TEAM = _Team(0, 64, 128, 192, 256, tape=320, n_op=328, quit=336, spin=344, size=512)
TAPE = _Tape(0, 8, 16, 24, 32)

# Bytes before an op's fields in its argument struct: the number of units of work that were taken,
# for kernels with dynamic scheduling (work_sharing). It is 0 while no thread is in the kernel.
TURNS = 8
