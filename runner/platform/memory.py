"""The memory of the process: large arrays in separate pages, machine code, sizes.

Machine code is writable first, executable then, never both.
"""

import contextlib
import ctypes
import mmap
import os
from functools import cache
from pathlib import Path

import numpy as np

from tamis.platform.processor import MACHINE, MACOS

if MACOS:
    from tamis.platform import darwin

_MATH = "libm.so.6"  # the C library's mathematical functions
# The systems' own numbers; Python 3.13 has names for them.
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x40 if MACOS else 0x4000)


def physical_bytes() -> int:
    """The bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Bytes that can be taken without swapping, as Linux estimates them."""
    if MACOS:
        return darwin.available_bytes()
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def held_bytes() -> tuple[int, int]:
    """Bytes of this process's address space, and of memory that it does not share."""
    if MACOS:
        return darwin.held_bytes()
    size, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return size * mmap.PAGESIZE, (resident - shared) * mmap.PAGESIZE


def huge_zeros(shape: tuple[int, ...], dtype: np.dtype) -> tuple[mmap.mmap, np.ndarray]:
    """Zeros in pages of their own; the system is asked for huge pages.

    Such memory can be mapped for a device (Backend.mapped). It is not allocated before it is
    written to; on a machine of several NUMA nodes it is then allocated on all of them. Raises
    OSError if address space is limited.
    """
    from tamis.platform.cores import spread  # not needed before a model is loaded

    size = dtype.itemsize * int(np.prod(shape))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, max(1, size), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    zeros = np.ndarray(shape, dtype, memory)
    spread(zeros)
    return memory, zeros


def drop(memory: mmap.mmap, first: int, last: int) -> None:
    """Return the pages that lie wholly within bytes first .. last - 1; they then read as zeros."""
    first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and MACOS:
        darwin.zero(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first, last - first)
    elif first < last:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def map_file(handle: int, first: int, n_bytes: int) -> np.ndarray:
    """Bytes of an open file as a read-only array, uint8 [n_bytes]; all processes share its pages.

    first: a multiple of the page size. The array keeps them mapped. Raises OSError.
    """
    memory = mmap.mmap(handle, n_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=first)
    return np.frombuffer(memory, np.uint8)


def map_whole(handle: int, size: int) -> mmap.mmap:
    """An open file of `size` bytes, read-only. Raises OSError."""
    return mmap.mmap(handle, size, access=mmap.ACCESS_READ)


def evict_mapped(memory: mmap.mmap) -> None:
    """Let the system decide whether it keeps the pages of a mapped file."""
    memory.madvise(mmap.MADV_DONTNEED)


def map_over(memory: np.ndarray, handle: int, first: int) -> None:
    """Map bytes of an open file, from `first` on, over an array with the same contents.

    memory: uint8, whole pages of `huge_zeros`, which are not written to any more; readers see no
    change. Raises OSError.
    """
    _libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    _libc_mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_SHARED | _MAP_FIXED
    at = memory.ctypes.data
    if _libc_mmap(at, memory.nbytes, mmap.PROT_READ, flags, handle, first) != at:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def read_ahead(handle: int, first: int, n_bytes: int) -> None:
    """Prefetch a part of an open file from the disk."""
    if not MACOS:
        os.posix_fadvise(handle, first, n_bytes, os.POSIX_FADV_WILLNEED)


def read_at_random(handle: int) -> None:
    """Tell the system that reads of an open file are not sequential."""
    if not MACOS:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)


def evict_file(handle: int) -> None:
    """Let the system decide whether it keeps its cached copy of an open file."""
    if not MACOS:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


_MAP_FIXED = 0x10
_libc_mmap = ctypes.CDLL(None, use_errno=True).mmap


def code_memory(size: int) -> tuple[mmap.mmap, int]:
    """Memory that can be written, and its address, a multiple of the page size. Raises OSError."""
    if MACOS:
        return darwin.code_memory(size)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_executable(memory: mmap.mmap, address: int) -> None:
    """Make written code executable and read-only; it stays until the process ends.

    Raises OSError if the system does not allow it.
    """
    if MACOS:
        return darwin.make_executable(memory, address)
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t(len(memory))
    if libc.mprotect(ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_EXEC):
        number = ctypes.get_errno()
        raise OSError(number, f"memory for kernels: {os.strerror(number)}")
    if MACHINE == "aarch64":
        # Instructions are fetched past the cache that they were written to. Linux cleans pages that
        # become executable, but does not promise it; every compiled extension brings this library.
        clear = ctypes.CDLL("libgcc_s.so.1")["__clear_cache"]
        clear(ctypes.c_void_p(address), ctypes.c_void_p(address + len(memory)))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


@cache
def system_function(name: str) -> int | None:
    """The address of a function of the C library; None if it has none of that name."""
    if MACOS:
        return darwin.system_function(name)
    for library in (None, _MATH):
        with contextlib.suppress(AttributeError):
            function = getattr(ctypes.CDLL(library), name)
            if address := ctypes.cast(function, ctypes.c_void_p).value:
                return address
    return None


def shown_bytes(n: int) -> str:
    """A number of bytes for messages, in MiB; below one MiB in bytes."""
    return f"{n / (1 << 20):.1f} MiB" if n >= 1 << 20 else f"{n} bytes"
