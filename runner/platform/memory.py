"""Memory of the process: large arrays in pages of their own, and how much the machine has."""

import mmap
import os
from pathlib import Path

import numpy as np

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number; Python 3.13 has the name


def physical_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Bytes that can be taken without swapping, as Linux estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def huge_zeros(shape: tuple[int, ...], dtype: np.dtype) -> tuple[mmap.mmap, np.ndarray]:
    """Zeros in pages that hold nothing else; the system is asked for huge pages.

    A device can be shown such memory (Backend.mapped). No memory is taken before it is written to.
    Raises OSError where address space is limited.
    """
    size = dtype.itemsize * int(np.prod(shape))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, max(1, size), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, np.ndarray(shape, dtype, memory)


def drop(memory: mmap.mmap, first: int, last: int) -> None:
    """Give the system back what lies wholly within bytes first .. last - 1; it reads as zeros."""
    first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)
