"""Processes: usable processors, and the environment and the end of child processes."""

import ctypes
import os
import signal
from collections.abc import Mapping

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: it imports nothing from the working directory.

    PYTHONPATH keeps its absolute folders only: an empty entry is the working directory. Such a
    process is started with -P.
    """
    # OpenBLAS, which nothing here calls, would map memory for a thread a core.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **own}
    folders = [p for p in env.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p)]
    return env | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


def end_with(parent: int) -> None:
    """Have the system end this process when its parent, of this id, ends; at once if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def drop_privileges() -> None:
    """Nothing that this process starts gets more rights than it has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
