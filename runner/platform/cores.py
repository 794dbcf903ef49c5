"""Physical cores and NUMA nodes: the placement of a team's threads and of memory.

Linux describes them below /sys. If each processor is a core of its own and all share one memory,
nothing here has an effect.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tamis.platform.processor import MACHINE, affinity

_ROOT = Path("/")
_DEFAULT, _INTERLEAVE = 0, 3  # policies of numa(7)
# Numbers of mbind, set_mempolicy, get_mempolicy; the generic ones apply to most machines.
_MBIND, _SET, _GET = {"x86_64": (237, 238, 239)}.get(MACHINE, (235, 237, 236))


class Topology(NamedTuple):
    """The processors that a process may use."""

    order: tuple[int, ...]  # one of each physical core first, their siblings (SMT) last
    n_core: int  # physical cores
    nodes: tuple[int, ...]  # NUMA nodes with memory and at least one of these processors

    def places(self, n_thread: int) -> tuple[int, ...]:
        """The processor of each thread of a team; () to leave the choice to the system.

        The system chooses if the team leaves cores free, since other programs may run on some of
        them, and if all choices are equivalent.
        """
        alike = self.n_core == len(self.order) and len(self.nodes) < 2
        if alike or not self.n_core <= n_thread <= len(self.order):
            return ()
        return self.order[:n_thread]


def topology(cpus: set[int], root: Path = _ROOT) -> Topology:
    """The system's description of these processors. root: the folder that contains /sys."""
    siblings = {
        i: _numbers(root / f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") or {i}
        for i in cpus
    }
    # The number of usable processors of the same core with lower numbers.
    rank = {i: sum(j in cpus for j in siblings[i] if j < i) for i in cpus}
    order = sorted(cpus, key=lambda i: (rank[i], i))
    return Topology(tuple(order), list(rank.values()).count(0), memory_nodes(cpus, root))


def memory_nodes(cpus: set[int], root: Path = _ROOT) -> tuple[int, ...]:
    """NUMA nodes with memory and at least one of these processors."""
    top = root / "sys/devices/system/node"
    nodes = sorted(_numbers(top / "has_memory"))
    return tuple(n for n in nodes if _numbers(top / f"node{n}/cpulist") & cpus)


def _numbers(path: Path) -> set[int]:
    """The numbers of a list such as 0-3,8; empty if there is no such file."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",") if part]
        return {i for part in parts for i in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def places(n_thread: int) -> tuple[int, ...]:
    """The processor of each thread of a team of this process.

    () to leave the choice to the system.
    """
    return topology(affinity()).places(n_thread)


def pin(cpu: int) -> None:
    """Restrict the calling thread to this processor, if the system allows it."""
    _run_on({cpu})


@contextlib.contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """Restrict the calling thread to this processor within the block, then restore its affinity.

    Processes that a pinned thread starts would inherit the restriction.
    """
    before = affinity()
    pin(cpu)
    try:
        yield
    finally:
        _run_on(before)


def _run_on(cpus: set[int]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)


def spread(memory: np.ndarray) -> None:
    """Distribute pages of mapped memory over all of the process's NUMA nodes.

    Otherwise they are on the node of the thread that first writes to them, and all threads would
    read one node's memory. Does nothing if there is one node, or if a policy was chosen, as with
    numactl. memory: of `huge_zeros`, not written to yet.
    """
    mask = _node_mask()
    if mask is not None and memory.nbytes:
        at, n = ctypes.c_void_p(memory.ctypes.data), ctypes.c_ulong(memory.nbytes)
        _system_call(_MBIND, at, n, _INTERLEAVE, mask, 8 * ctypes.sizeof(mask) + 1, 0)


def spread_files() -> None:
    """Distribute pages of files that the calling thread reads or writes, as `spread` does."""
    mask = _node_mask()
    if mask is not None:
        _system_call(_SET, _INTERLEAVE, mask, 8 * ctypes.sizeof(mask) + 1)


def policy(memory: np.ndarray | None = None) -> int | None:
    """The number of the policy of mapped memory, or of the calling thread; see numa(7).

    None if the system does not report it, as in some containers.
    """
    mode, of_address = ctypes.c_int(_DEFAULT), 2
    at = ctypes.c_void_p(None if memory is None else memory.ctypes.data)
    flags = 0 if memory is None else of_address
    refused = _system_call(_GET, ctypes.byref(mode), None, 0, at, flags)
    return None if refused else mode.value


@cache
def _nodes() -> tuple[int, ...]:
    return memory_nodes(affinity())


def _node_mask() -> ctypes.Array | None:
    """One bit for each node to allocate on; None to leave the choice to the system."""
    nodes = _nodes()
    if len(nodes) < 2 or policy() != _DEFAULT:
        return None
    mask = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    return mask


def _system_call(number: int, *values: object) -> int:
    """The result of a system call; -1 if it is refused: memory then lies as it did without."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    as_long = [ctypes.c_long(v) if isinstance(v, int) else v for v in values]
    return call(ctypes.c_long(number), *as_long)
