"""Which instructions kernels are written with: one record, chosen from the host, read by simd.py.

Object code for another level is made by calling `use` before any kernel module is imported.
"""

from dataclasses import dataclass

import llvmlite.binding as llvm


@dataclass(frozen=True, slots=True)
class Features:
    """Instruction sets that kernels may use; everything else is left to plain LLVM IR."""

    name: str
    avx2: bool = False  # with FMA and F16C, which every such CPU has
    avx512: bool = False  # F, BW, VL and DQ
    vnni: bool = False  # AVX512-VNNI, or AVX-VNNI where avx512 is off


LEVELS = {
    level.name: level
    for level in (
        Features("generic"),
        Features("avx2", avx2=True),
        Features("avx2-vnni", avx2=True, vnni=True),
        Features("avx512", avx2=True, avx512=True),
        Features("avx512-vnni", avx2=True, avx512=True, vnni=True),
    )
}

_chosen: Features | None = None


def host() -> Features:
    """The highest level that this CPU and its operating system support."""
    found = {name for name, on in llvm.get_host_cpu_features().items() if on}
    if not {"avx2", "fma", "f16c"} <= found:
        return LEVELS["generic"]
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= found:
        return LEVELS["avx512-vnni" if "avx512vnni" in found else "avx512"]
    return LEVELS["avx2-vnni" if "avxvnni" in found else "avx2"]


def current() -> Features:
    """The level of this process: what `use` set, else the host's. Fixed from the first call on."""
    global _chosen
    if _chosen is None:
        _chosen = host()
    return _chosen


def use(name: str) -> None:
    """Fix the level of this process by its name in LEVELS.

    Raises KeyError for an unknown name and RuntimeError where another level was read before: vector
    types are made when simd.py is imported, so a later change would mix levels.
    """
    global _chosen
    level = LEVELS[name]
    if _chosen not in (None, level):
        raise RuntimeError(f"kernels of this process are {_chosen.name}, too late for {name}")
    _chosen = level
