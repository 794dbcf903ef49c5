"""The platform layer of macOS on Apple's processors, where it differs. Experimental.

It follows Apple's headers and has not run on such a machine: its tests play the system's part on
Linux. Kernels are those of Linux on AArch64 (ELF, no use of x18, which macOS reserves); the
functions of Linux's C library that they call are found here under their own names or as code of a
few instructions.

Sources: <sys/mman.h>, <pthread.h>, <libkern/OSCacheControl.h>, <sys/proc_info.h>, <sys/sysctl.h>;
xnu's bsd/sys/ulock.h for the sleep on a word of memory.
"""

import contextlib
import ctypes
import mmap
import os
import select
import struct
import threading
from functools import cache
from typing import Any

from tamis.platform.waiting import WAKE_PRIVATE

# The sysctl(3) name of each instruction set, by LLVM's name.
_FEATURES = {
    "dotprod": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "lse": "hw.optional.arm.FEAT_LSE",
    "crc": "hw.optional.armv8_crc32",
}
_MAP_JIT, _MAP_FIXED = 0x800, 0x10
_TASK_INFO, _TASK_INFO_BYTES = 4, 96  # PROC_PIDTASKINFO; two words first: address space, resident
_COMPARE_AND_WAIT, _WAKE_ALL = 1, 0x100  # of ulock.h
# Functions of Linux's C library that this one has under another name.
_NAMES = {"pread64": "pread", "preadv2": "preadv", "sincos": "__sincos"}
# A function without effect that returns 0: mov w0, #0; ret. posix_fadvise only advises.
_NOTHING = struct.pack("<2I", 0x52800000, 0xD65F03C0)


@cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _number(name: str) -> int:
    """A number of sysctl(3); 0 if the system does not have that name."""
    value = (ctypes.c_uint32 * 2)()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    refused = _library().sysctlbyname(name.encode(), value, ctypes.byref(size), None, 0)
    return 0 if refused else value[0] | value[1] << 32


def instruction_sets() -> frozenset[str]:
    """LLVM's names of the instruction sets that kernels ask for."""
    return frozenset({"neon", *(llvm for llvm, name in _FEATURES.items() if _number(name))})


def identity() -> str:
    """A text that differs between kinds of processors."""
    return " ".join(["apple", hex(_number("hw.cpufamily")), *sorted(instruction_sets())])


def available_bytes() -> int:
    """Bytes of memory that are free, or can be read again from disk."""
    names = ("free", "speculative", "purgeable")
    return sum(_number(f"vm.page_{name}_count") for name in names) * mmap.PAGESIZE


def held_bytes() -> tuple[int, int]:
    """Bytes of this process's address space, and of its memory."""
    info = ctypes.create_string_buffer(_TASK_INFO_BYTES)
    _library().proc_pidinfo(os.getpid(), _TASK_INFO, ctypes.c_uint64(0), info, len(info))
    size, resident = struct.unpack_from("<2Q", info)
    return size, resident


def zero(address: int, size: int) -> None:
    """Replace whole pages of private memory by zeros. Raises OSError.

    MADV_DONTNEED would keep their content.
    """
    call = _library().mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_int64]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if call(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def code_memory(size: int) -> tuple[mmap.mmap, int]:
    """Memory for code and its address; the calling thread may write it until `make_executable`.

    Raises OSError.
    """
    # allocated first: they have memory of their own, and a thread either writes code or runs it
    _functions()
    return _code_memory(size)


def _code_memory(size: int) -> tuple[mmap.mmap, int]:
    every = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_JIT
    memory = mmap.mmap(-1, size, flags, every)
    _library().pthread_jit_write_protect_np(0)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_executable(memory: mmap.mmap, address: int) -> None:
    """Let the calling thread run what it wrote; it stays until the process ends."""
    _library().pthread_jit_write_protect_np(1)
    _library().sys_icache_invalidate(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def system_function(name: str) -> int | None:
    """The address of a function that kernels call by its name on Linux; None: there is none."""
    if name in (own := _functions()):
        return own[name]
    return _address(_NAMES.get(name, name))


def _address(name: str) -> int | None:
    try:
        return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value
    except AttributeError:
        return None


@cache
def _functions() -> dict[str, int]:
    """Addresses of functions that macOS lacks."""
    wait, wake = _address("__ulock_wait"), _address("__ulock_wake")
    if wait is None or wake is None:
        raise OSError("this macOS has no __ulock_wait: kernels cannot sleep")
    code = {"syscall": futex_code(wait, wake), "posix_fadvise64": _NOTHING}
    memory, address = _code_memory(sum(map(len, code.values())))
    found, at = {}, 0
    for name, words in code.items():
        memory[at : at + len(words)] = words
        found[name], at = address + at, at + len(words)
    make_executable(memory, address)
    return found


def futex_code(wait: int, wake: int) -> bytes:
    """The AArch64 code of syscall(number, word, operation, value), as kernels call it for futex(2).

    wait, wake: addresses of __ulock_wait(operation, word, value, microseconds) and
    __ulock_wake(operation, word, value). Waking wakes all.
    """
    words = (
        0xF100001F | WAKE_PRIVATE << 10 | 2 << 5,  # cmp x2, #WAKE_PRIVATE
        0x54000000 | 6 << 5,  # b.eq to the wake part, 6 words on
        0xAA0303E2,  # mov x2, x3
        0x52800003,  # mov w3, #0: for ever
        0x52800000 | _COMPARE_AND_WAIT << 5,  # mov w0, #COMPARE_AND_WAIT
        0x58000010 | 7 << 5,  # ldr x16, wait
        0xD61F0200,  # br x16
        0x52800000 | (_COMPARE_AND_WAIT | _WAKE_ALL) << 5,  # mov w0, #...
        0xD2800002,  # mov x2, #0
        0x58000010 | 5 << 5,  # ldr x16, wake
        0xD61F0200,  # br x16
        0xD503201F,  # nop
    )
    return struct.pack(f"<{len(words)}I2Q", *words, wait, wake)


def end_with(parent: int) -> None:
    """Start a thread that ends this process when its parent ends."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    queue: Any = select
    events = queue.kqueue()
    flags = queue.KQ_EV_ADD | queue.KQ_EV_ONESHOT
    ended = queue.kevent(parent, queue.KQ_FILTER_PROC, flags, queue.KQ_NOTE_EXIT)
    with contextlib.suppress(ProcessLookupError):  # it may have ended before
        events.control([ended], 1)
    os._exit(1)
