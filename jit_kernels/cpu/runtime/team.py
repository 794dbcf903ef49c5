"""The thread team: runs a tape of kernels together, with a barrier where the tape asks for one.

A waiting thread spins for a bounded time and then sleeps (by futex), so a core taken by another
program costs no more than that core, and an idle team costs nothing. If spinning keeps failing,
because two threads share a core and hinder each other, most waits sleep at once.
"""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.layout import TAPE, TEAM
from tamis.jit_kernels.cpu.lang.intrinsic import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    cycles,
    load_i64,
    pause,
    sleep_or_wake,
    store_i64,
)
from tamis.platform.waiting import WAIT_PRIVATE, WAKE_PRIVATE

EVERYONE = 1 << 30
LOW_32 = 0xFFFFFFFF
BRIEF = 2_000  # cycles of a spin that is not expected to succeed
LAST, SPUN, SLEPT = 0, 1, 2  # how a thread came through a barrier
# failed spins in a row before spins are skipped; the most that are skipped
FAILURES, MAX_SKIP = 3, 63


@njit(error_model="numpy")
def wait_while_equal(word, value, sleepers, spin):
    """Return when the int64 at `word` differs from value: spin for `spin` cycles, then sleep.

    Returns SPUN or SLEPT.
    """
    start, how = cycles(), SPUN
    while atomic_load(word) == value:
        pause()
        if cycles() - start > spin:
            atomic_add(sleepers, 1)
            sleep_or_wake(word, WAIT_PRIVATE, value & LOW_32)
            atomic_add(sleepers, -1)
            how = SLEPT
    return how


@njit(error_model="numpy")
def advance(word, sleepers):
    """Add one to the int64 at `word` and wake its sleepers."""
    atomic_add(word, 1)
    if atomic_load(sleepers) > 0:
        sleep_or_wake(word, WAKE_PRIVATE, EVERYONE)


@njit(error_model="numpy")
def barrier(team, n_thread, spin):
    """Wait until all threads of the team have arrived; returns LAST, SPUN or SLEPT."""
    if n_thread == 1:
        return LAST
    generation = atomic_load(team + TEAM.generation)
    if atomic_add(team + TEAM.arrived, 1) == n_thread - 1:
        atomic_store(team + TEAM.arrived, 0)
        advance(team + TEAM.generation, team + TEAM.barrier_sleepers)
        return LAST
    return wait_while_equal(team + TEAM.generation, generation, team + TEAM.barrier_sleepers, spin)


@njit(error_model="numpy")
def walk(tape, n_op, tid, n_thread, team):
    """Run n_op records of the tape; thread 0 adds the cycles each took to its record."""
    spin, failed, skip = load_i64(team + TEAM.spin), 0, 0
    start = cycles()
    for i in range(n_op):
        record = tape + i * TAPE.size
        call_kernel(load_i64(record + TAPE.kernel), tid, n_thread, load_i64(record + TAPE.args))
        if load_i64(record + TAPE.sync) != 0 or i == n_op - 1:
            how = barrier(team, n_thread, BRIEF if skip > 0 else spin)
            if how != LAST and skip > 0:
                skip -= 1
            elif how == SPUN:
                failed = 0
            elif how == SLEPT:
                failed += 1
                skip = min((1 << min(failed, 62)) >> FAILURES, MAX_SKIP)
        if tid == 0:
            now = cycles()
            spent = record + TAPE.cycles
            store_i64(spent, load_i64(spent) + now - start)
            start = now


def team_run() -> Any:
    """Entry of the submitting thread: run(team, n_thread, 0) walks the job written in the team."""

    def run(team, n_thread, _unused):
        if n_thread > 1:
            advance(team + TEAM.job, team + TEAM.job_sleepers)
        walk(load_i64(team + TEAM.tape), load_i64(team + TEAM.n_op), 0, n_thread, team)

    return run


def team_worker() -> Any:
    """Entry of the other threads: worker(team, n_thread, tid) serves jobs until told to quit."""

    def worker(team, n_thread, tid):
        job = 0
        while True:
            spin = load_i64(team + TEAM.spin)
            wait_while_equal(team + TEAM.job, job, team + TEAM.job_sleepers, spin)
            job += 1
            if load_i64(team + TEAM.quit) != 0:
                return
            walk(load_i64(team + TEAM.tape), load_i64(team + TEAM.n_op), tid, n_thread, team)

    return worker
