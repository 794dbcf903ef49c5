"""Memory for machine code: written first, executable then, never both; functions of the system."""

import contextlib
import ctypes
import mmap
import os
from functools import cache

from tamis.platform.processor import MACHINE

_MATH = "libm.so.6"  # the C library's other half


def code_memory(size: int) -> tuple[mmap.mmap, int]:
    """Memory that can be written, and its address, a multiple of the page size. Raises OSError."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_executable(memory: mmap.mmap, address: int) -> None:
    """Let what was written be run, and not be written any more; it stays until the process ends.

    Raises OSError where the system does not allow it.
    """
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
    """The address of a function of the C library; None where it has none of that name."""
    for library in (None, _MATH):
        with contextlib.suppress(AttributeError):
            function = getattr(ctypes.CDLL(library), name)
            if address := ctypes.cast(function, ctypes.c_void_p).value:
                return address
    return None
