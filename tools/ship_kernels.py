"""Compile the kernels that a release ships, for any CPU of each level and vendor, and any GPU.

Object code is stored beside the user's kernels under digests of its sources: a second call compiles
what the first one had no time for, and what has changed since (see kernel_sources). Vendors differ
only in kernels that prefetch cache lines; only those are compiled twice.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tamis.jit_kernels.backends.fusion import candidates
from tamis.jit_kernels.compile.code import compiler_of
from tamis.jit_kernels.compile.shipped import SUFFIX, Shipped, write_shipped
from tamis.jit_kernels.compile.store import (
    KernelStoreError,
    open_folder,
    read_object,
    sources,
    user_folder,
    versions,
    write_object,
)
from tamis.jit_kernels.compile.workers import Command, compile_specs
from tamis.jit_kernels.contract.ops import STRIP_TYPES
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cpu.lang.features import VENDORS, made_for
from tamis.jit_kernels.cuda import OPS
from tamis.jit_kernels.cuda.lang.target import TARGETS
from tamis.tools.kernel_sources import digest_of

OF_X86 = ("avx2", "avx2-vnni", "avx512", "avx512-vnni")
OF_ARM = ("neon", "neon-dotprod", "neon-i8mm")
LEVELS = OF_X86 + OF_ARM
# AMD has no CPU of the other levels.
BOTH_VENDORS = ("avx2", "avx512-vnni")
PTX_BLOCK = 8 << 20  # bytes that are compressed together: half the size that 1 MiB blocks give
_PREFETCH = re.compile(rb"\x0f\x18")  # without it, the code is the same for all vendors
_STRIPS = {(name,) for name in STRIP_TYPES}  # the layout of weights on a CPU
Progress = Callable[[str, int, int], None]


def vendors_of(level: str) -> Sequence[str]:
    """The vendors of a level's CPUs."""
    if level in OF_ARM:
        return ("ARM",)  # for all: Linux names no vendor there
    return VENDORS if level in BOTH_VENDORS else VENDORS[:1]


def ship_kernels(
    folder: Path,
    specs: Iterable[KernelSpec],
    levels: Iterable[str] = LEVELS,
    *,
    vendors: Sequence[str] = (),
    n_worker: int = 2,
    progress: Progress = lambda name, done, total: None,
) -> list[Path]:
    """Write a file of kernels for each level; vendors: a part of each level's, for a trial.

    Raises CompileError, KernelStoreError.
    """
    specs, written = list(specs), []
    folder.mkdir(parents=True, exist_ok=True)
    made_of = sources("cpu")
    assert made_of is not None
    for level in levels:
        code: dict[str, bytes] = {}
        first, *others = [v for v in vendors_of(level) if not vendors or v in vendors]
        code |= _compiled("cpu", f"{level}@{first}", specs, n_worker, progress)
        for vendor in others:
            ahead = [spec for spec in specs if _PREFETCH.search(code[spec.symbol])]
            found = _compiled("cpu", f"{level}@{vendor}", ahead, n_worker, progress)
            code |= {f"{name}@{vendor}": o for name, o in found.items() if o != code[name]}
        path = folder / f"{level}{SUFFIX}"
        write_shipped(path, code, sources=made_of, compiler=versions())
        written.append(path)
    return written


def ship_ptx(
    folder: Path,
    specs: Iterable[KernelSpec],
    targets: Iterable[str] = tuple(TARGETS),
    *,
    n_worker: int = 2,
    progress: Progress = lambda name, done, total: None,
) -> list[Path]:
    """Write a file of PTX for each target, with the kernels that a GPU has; no GPU is needed.

    Raises CompileError, KernelStoreError.
    """
    written, made_of = [], sources("cuda")
    folder.mkdir(parents=True, exist_ok=True)
    assert made_of is not None
    has = {s for s in specs if s.op.name in OPS and s.constants[:1] not in _STRIPS}
    for name in targets:
        wanted = has | (candidates(has) if TARGETS[name].overlaps else set())
        ordered = sorted(wanted, key=lambda spec: spec.symbol)
        code = _compiled("cuda", name, ordered, n_worker, progress)
        path = folder / f"{name}{SUFFIX}"
        write_shipped(path, code, sources=made_of, compiler=versions(), block=PTX_BLOCK)
        written.append(path)
    return written


def _compiled(
    kind: str, name: str, specs: list[KernelSpec], n_worker: int, progress: Progress
) -> dict[str, bytes]:
    """Code of kernels by symbol, for any CPU of `LEVEL@VENDOR` or GPU of a target."""
    level = TARGETS[name] if name in TARGETS else made_for(name)
    root = user_folder().with_name("release")
    now, kept = open_folder(root, level), open_folder(root, level, made_of="kept")
    names = {spec: f"{spec.symbol}-{digest_of(kind, spec.op)}" for spec in specs}
    found = {spec: read_object(kept, names[spec]) for spec in specs}
    missing = [spec for spec, code in found.items() if code is None]
    # Left by an earlier call that was ended.
    if wanted := [spec for spec in missing if read_object(now, spec.symbol) is None]:
        module, environment = compiler_of(kind)
        command = Command(now, module, name, environment)
        compile_specs(command, wanted, n_worker, lambda done, n: progress(name, done, n))
    for spec in missing:
        if (code := read_object(now, spec.symbol)) is None:
            raise KernelStoreError(f"{now} has no whole file of {spec.symbol}: run this again")
        write_object(kept, names[spec], code)
        found[spec] = code
    return {spec.symbol: code for spec, code in found.items() if code is not None}


def check_shipped(paths: Iterable[Path]) -> list[str]:
    """The reasons why files of kernels cannot be shipped with these sources; empty if they can.

    Raises ShippedError, OSError.
    """
    now, wrong = {kind: sources(kind) for kind in ("cpu", "cuda")}, []
    for path in paths:
        kind = "cuda" if path.stem in TARGETS else "cpu"
        if Shipped(path).sources != now[kind]:
            wrong.append(f"{path.name}: made of other kernel sources: make its kernels again")
    return wrong
