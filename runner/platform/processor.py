"""The processor: its instruction sets, by LLVM's names, and what identifies it."""

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

# Linux's names of machines
MACHINE = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
MACOS = sys.platform == "darwin"

_AT_HWCAP, _AT_HWCAP2 = 16, 26  # of getauxval(3)
# By LLVM's name, the bit that Linux sets on AArch64 (arch/arm64/include/uapi/asm/hwcap.h).
_HWCAP = {"neon": 1, "crc": 7, "lse": 8, "dotprod": 20}
_HWCAP2 = {"i8mm": 13}


@cache
def _cpuinfo() -> dict[str, str]:
    """Linux's description of the first processor; importing LLVM to ask takes 30 ms and 40 MB."""
    text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    fields = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


@cache
def _capabilities() -> tuple[int, int]:
    """The two capability words that Linux gives a process on AArch64.

    Also right under an emulator.
    """
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return getauxval(_AT_HWCAP), getauxval(_AT_HWCAP2)


def affinity() -> set[int]:
    """The processors that the calling thread may run on; all if the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def instruction_sets() -> frozenset[str]:
    """LLVM's names of the instruction sets that this processor and its system support."""
    if MACOS:
        from tamis.platform import darwin

        return darwin.instruction_sets()
    if MACHINE != "aarch64":
        return frozenset(_cpuinfo().get("flags", "").replace("_", "").split())
    words = zip(_capabilities(), (_HWCAP, _HWCAP2), strict=True)
    return frozenset(name for word, bits in words for name, i in bits.items() if word >> i & 1)


def vendor() -> str:
    """The processor's vendor in Linux's words; "" if Linux names none, as on AArch64."""
    return _cpuinfo().get("vendor_id", "") if MACHINE != "aarch64" else ""


def identity() -> str:
    """A text that differs between processors of different instruction sets or kinds."""
    if MACOS:
        from tamis.platform import darwin

        return darwin.identity()
    if MACHINE != "aarch64":
        x86 = ("vendor_id", "cpu family", "model", "stepping", "flags")
        return " ".join(_cpuinfo().get(name, "") for name in x86)
    arm = ("CPU implementer", "CPU variant", "CPU part", "CPU revision")
    return " ".join([*(_cpuinfo().get(n, "") for n in arm), *map(hex, _capabilities())])
