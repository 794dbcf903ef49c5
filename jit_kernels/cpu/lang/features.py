"""Which instructions kernels are written with: one record, chosen from the host, read by simd.py.

AVX2 is the floor of real use; generic is for every other CPU, and slow. A lower level than the
host's is forced by KernelLibrary(level=...), whose compile workers call `use` before any kernel
module is imported.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Features:
    """Instruction sets that kernels may use; everything else is left to plain LLVM IR."""

    name: str
    needs: tuple[str, ...] = ()  # LLVM's names of what a CPU must have
    avx2: bool = False  # with FMA and F16C, which every such CPU has
    avx512: bool = False  # F, BW, VL and DQ
    vnni: bool = False  # AVX512-VNNI, or AVX-VNNI where avx512 is off
    vendor: str = ""  # of the CPUs that kernels are made for, as Linux calls it; "": the host's


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
# From the lowest to the one that is chosen first.
LEVELS = {
    level.name: level
    for level in (
        Features("generic"),
        Features("avx2", _AVX2, avx2=True),
        Features("avx2-vnni", (*_AVX2, "avxvnni"), avx2=True, vnni=True),
        Features("avx512", _AVX512, avx2=True, avx512=True),
        Features("avx512-vnni", (*_AVX512, "avx512vnni"), avx2=True, avx512=True, vnni=True),
    )
}

VENDORS = ("GenuineIntel", "AuthenticAMD")  # whose CPUs read ahead unlike each other's

_chosen: Features | None = None


@cache
def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor; importing LLVM to ask takes 30 ms and 40 MB."""
    text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    fields = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def missing(level: Features) -> list[str]:
    """LLVM's names of the instruction sets of a level that this machine lacks."""
    found = _cpuinfo().get("flags", "").replace("_", "").split()
    return [name for name in level.needs if name not in found]


def host() -> Features:
    """The highest level that this CPU and its operating system support."""
    return next(level for level in reversed(LEVELS.values()) if not missing(level))


def vendor() -> str:
    """Who made this CPU, as Linux calls it."""
    return _cpuinfo().get("vendor_id", "")


def made_for(name: str) -> Features:
    """A level by its name, or `NAME@VENDOR`: for any CPU of a vendor that has what it needs.

    Raises KeyError.
    """
    name, _, vendor = name.partition("@")
    level = LEVELS[name]
    return replace(level, name=f"{name}@{vendor}", vendor=vendor) if vendor else level


def target(level: Features) -> tuple[str, str]:
    """LLVM's CPU and features that code of a level is made for; for compile workers.

    The host's level is made for the host, with all it has; a lower one for any CPU that has what
    the level needs.
    """
    if level == host():
        import llvmlite.binding as llvm

        return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    # LLVM has the CRC-32C instruction of SSE4.2, which every CPU with AVX2 has, apart.
    names = [*level.needs, *(["crc32"] if level.avx2 else [])]
    return "x86-64", ",".join(f"+{name}" for name in names)


def reads_ahead() -> tuple[int, int]:
    """Software prefetch of sequential reads: LLVM's locality (3: L1, 2: L2), distance in bytes.

    The distance is from the prefetch to the use. AMD's L1 has too few outstanding misses: 24
    lines on Zen 4, which at 100 ns are 15 GB/s of 30. There L2 is prefetched, from further away: on
    two threads products with repacked weights are 1.1 to 1.5 times as fast, attention over 4096
    keys 1.6 times.
    """
    return (2, 8192) if (current().vendor or vendor()) == "AuthenticAMD" else (3, 2048)


def identity(level: Features) -> str:
    """What object code of a level depends on beside its sources, as text: CPU and features."""
    if level != host():
        return " ".join([level.vendor or vendor(), *target(level)])
    names = ("vendor_id", "cpu family", "model", "stepping", "flags")
    return " ".join(_cpuinfo().get(name, "") for name in names)


def current() -> Features:
    """The level of this process: what `use` set, else the host's. Fixed from the first call on."""
    global _chosen
    if _chosen is None:
        _chosen = host()
    return _chosen


def use(name: str) -> None:
    """Fix the level of this process by its name: see `made_for`.

    Raises KeyError for an unknown name and RuntimeError where another level was read before: vector
    types are made when simd.py is imported, so a later change would mix levels.
    """
    global _chosen
    level = made_for(name)
    if _chosen not in (None, level):
        raise RuntimeError(f"kernels of this process are {_chosen.name}, too late for {name}")
    _chosen = level
