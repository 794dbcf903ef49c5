"""Processes: usable processors, and the environment and the end of child processes."""

import ctypes
import math
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from tamis.platform.processor import MACOS, affinity

_CONTROLLER = "cpu"  # of cgroups
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def usable_cpus() -> int:
    """The processors that this process may use at once: its affinity, limited by cgroups.

    A quota such as 2.5 processors counts as 2, which can be kept busy without throttling.
    """
    return max(1, int(min(len(affinity()), granted_cpus(Path("/")))))


def granted_cpus(root: Path) -> float:
    """The processors' time that the cgroups of this process grant it, infinite without a limit.

    root: the folder that contains /proc and /sys. Of nested cgroups the smallest counts; Linux has
    them in two versions (cgroups(7)): one tree, or one for each kind of limit.
    """
    found = [math.inf]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and _CONTROLLER not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / (_CONTROLLER if kinds else "")
        # In a container the path may be the host's: the visible tree begins further down.
        own = Path(path.lstrip("/"))
        for folder in (top, *(top / p for p in (own, *own.parents))):
            found.append(_quota(folder))
    return min(found)


def _quota(folder: Path) -> float:
    """The number of processors that one cgroup grants."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
    except (OSError, ValueError):
        return math.inf
    return int(quota) / int(period) if quota not in ("max", "-1") else math.inf


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process, which imports nothing from the working directory.

    PYTHONPATH keeps only absolute folders: an empty entry is the working directory. Such a process
    is started with -P.
    """
    # OpenBLAS, which nothing here calls, would map memory for a thread per core. This process has
    # already issued the warnings about a model's file.
    env = {"PYTHONWARNINGS": "ignore", **os.environ, "OPENBLAS_NUM_THREADS": "1", **own}
    folders = [p for p in env.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p)]
    return env | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


def end_with(parent: int) -> None:
    """Have the system end this process when the parent of this id ends; at once if it has ended."""
    if MACOS:
        from tamis.platform import darwin

        darwin.end_with(parent)
    else:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start_fork(run: Callable[[], None]) -> int:
    """Fork this process: the child calls `run` and ends, at the latest with this process.

    Returns its id.
    """
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        end_with(parent)
        run()
        code = 0
    finally:
        os._exit(code)


def drop_privileges() -> None:
    """Prevent programs that this process starts from gaining privileges."""
    if not MACOS:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
