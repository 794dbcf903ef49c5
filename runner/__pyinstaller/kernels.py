"""The compiled kernels that a frozen program takes along."""

from pathlib import Path

from tamis.jit_kernels.compile.shipped import FOLDER, SUFFIX, write_shipped
from tamis.jit_kernels.compile.store import (
    can_compile,
    fingerprint,
    read_object,
    sources,
    user_folder,
    versions,
)
from tamis.jit_kernels.cpu.lang.features import LEVELS


def write_kernels(out: Path, root: Path | None = None) -> list[Path]:
    """Files of kernels: those of the package, or one a level of what was compiled here, in `out`.

    root: the folder of compiled kernels, by default the user's.
    """
    if came := sorted(FOLDER.glob(f"*{SUFFIX}")):
        return came
    if not can_compile("cpu"):
        return []
    found = []
    for level in LEVELS.values():
        folder = (root or user_folder()) / fingerprint(level)
        objects = {path.stem: read_object(folder, path.stem) for path in folder.glob("*.o")}
        code = {symbol: data for symbol, data in objects.items() if data is not None}
        if code:
            path = out / f"{level.name}{SUFFIX}"
            write_shipped(path, code, sources=sources("cpu") or "", compiler=versions())
            found.append(path)
    return found
