"""Levels of CPU features that kernels are compiled for; simd.py reads the chosen one.

AVX2 is the lowest level on x86-64 in practice; every AArch64 has NEON. generic is for every other
CPU, and slow. KernelLibrary(level=...) forces a lower level than the host's: its compile workers
call `use` before any kernel module is imported. Code of a level of the other machine is compiled
here too, and cannot run.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from tamis.platform import processor


@dataclass(frozen=True, slots=True)
class Features:
    """Instruction sets that kernels may use; everything else is left to plain LLVM IR."""

    name: str
    needs: tuple[str, ...] = ()  # LLVM's names of required CPU features
    avx2: bool = False  # with FMA and F16C, which every such CPU has
    avx512: bool = False  # F, BW, VL and DQ
    vnni: bool = False  # AVX512-VNNI, or AVX-VNNI where avx512 is off
    neon: bool = False  # of AArch64: 32 vectors of 128 bits, as 16 of 256
    dotprod: bool = False  # SDOT, LSE and CRC32, which every such CPU has
    i8mm: bool = False  # USDOT and SMMLA, with dotprod
    vendor: str = ""  # of the CPUs that kernels are made for, as Linux calls it; "": the host's

    @property
    def machine(self) -> str:
        """The machine that code of this level runs on, as the system calls it."""
        if self.neon:
            return "aarch64"
        return "x86_64" if self.avx2 else processor.MACHINE

    @property
    def fused(self) -> bool:
        """Whether multiply-adds are one instruction, and conversions of float16 are."""
        return self.avx2 or self.neon

    @property
    def mixed_bytes(self) -> bool:
        """Whether products of unsigned and signed bytes are one instruction that is exact."""
        return self.vnni or self.i8mm

    @property
    def crc32(self) -> bool:
        """Whether there is an instruction for CRC-32C."""
        return self.avx2 or self.dotprod


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_DOTPROD = ("neon", "dotprod", "lse", "crc")
# Of each machine from the lowest to the one that is chosen first.
LEVELS = {
    level.name: level
    for level in (
        Features("generic"),
        Features("avx2", _AVX2, avx2=True),
        Features("avx2-vnni", (*_AVX2, "avxvnni"), avx2=True, vnni=True),
        Features("avx512", _AVX512, avx2=True, avx512=True),
        Features("avx512-vnni", (*_AVX512, "avx512vnni"), avx2=True, avx512=True, vnni=True),
        Features("neon", ("neon",), neon=True),
        Features("neon-dotprod", _DOTPROD, neon=True, dotprod=True),
        Features("neon-i8mm", (*_DOTPROD, "i8mm"), neon=True, dotprod=True, i8mm=True),
    )
}

VENDORS = ("GenuineIntel", "AuthenticAMD")  # vendors whose CPUs differ in prefetching

_chosen: Features | None = None


class Target(NamedTuple):
    """What LLVM makes code for. triple: "" is this machine's."""

    triple: str
    cpu: str
    features: str


def missing(level: Features) -> list[str]:
    """LLVM's names of the instruction sets of a level that this machine lacks."""
    found = processor.instruction_sets()
    return [name for name in level.needs if name not in found]


def host() -> Features:
    """The highest level that this CPU and its operating system support."""
    return next(level for level in reversed(LEVELS.values()) if not missing(level))


def vendor() -> str:
    """Who made this CPU, as Linux calls it; "" on AArch64, where kernels are the same for all."""
    return processor.vendor()


def made_for(name: str) -> Features:
    """A level by its name, or `NAME@VENDOR`: for any CPU of a vendor that has what it needs.

    Raises KeyError.
    """
    name, _, vendor = name.partition("@")
    level = LEVELS[name]
    return replace(level, name=f"{name}@{vendor}", vendor=vendor) if vendor else level


def target(level: Features) -> Target:
    """The target of a level's code, for compile workers.

    The host's level is compiled for the host, with all its features; a lower one, or one of
    AArch64, for any CPU that has what the level needs. AArch64's code does not use x18, which macOS
    reserves.
    """
    if level == host() and not level.neon:
        import llvmlite.binding as llvm

        return Target("", llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    if level.neon:
        names = [*level.needs, "reserve-x18"]
        return Target("aarch64-unknown-linux-gnu", "generic", ",".join(f"+{n}" for n in names))
    # LLVM lists the CRC-32C instruction of SSE4.2 separately; every CPU with AVX2 has it.
    names = [*level.needs, *(["crc32"] if level.avx2 else [])]
    cpu = "x86-64" if level.needs or processor.MACHINE == "x86_64" else "generic"
    return Target("", cpu, ",".join(f"+{name}" for name in names))


def reads_ahead() -> tuple[int, int]:
    """Software prefetch of sequential reads: LLVM's locality (3: L1, 2: L2), distance in bytes.

    The distance is from the prefetch to the use. AMD's L1 has too few outstanding misses: 24
    lines on Zen 4, which at 100 ns are 15 GB/s of 30. There L2 is prefetched, from further away: on
    two threads products with repacked weights are 1.1 to 1.5 times as fast, attention over 4096
    keys 1.6 times. On AArch64 nothing was measured.
    """
    return (2, 8192) if (current().vendor or vendor()) == "AuthenticAMD" else (3, 2048)


def identity(level: Features) -> str:
    """The text that object code depends on beside its sources: CPU and features."""
    if level != host():
        return " ".join([level.vendor or vendor(), *target(level)])
    return processor.identity()


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
