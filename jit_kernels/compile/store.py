"""The kernel library on disk: a private folder of object files, named by their sources."""

import errno
import hashlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.features import Features
from tamis.platform.private_files import PrivacyError, open_private, private_folder, write_whole

if TYPE_CHECKING:
    from tamis.jit_kernels.cuda.lang.target import Target

SOURCES = Path(__file__).parents[1]  # jit_kernels
FORMATS = SOURCES.with_name("formats")
# Sources of kernels in addition to the folders of their kind: tables of the file formats.
_TABLES = ("codebook_tables.py", "codebooks.py", "dequant.py", "ggml_types.py")


class KernelStoreError(RuntimeError):
    """The folder of compiled kernels cannot be used; the message says why and what to do."""


def sources(kind: str) -> str | None:
    """The 64 hex digits of the digest of kernel sources, "cpu" or "cuda"; None without sources.

    A program in one file has no sources: its kernels cannot differ from them.
    """
    paths = [
        p for name in ("contract", "common", kind) for p in sorted((SOURCES / name).rglob("*.py"))
    ]
    if not paths:
        return None
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes() + b"\0")
    for name in _TABLES:
        digest.update(name.encode() + b"\0" + (FORMATS / name).read_bytes() + b"\0")
    return digest.hexdigest()


def fingerprint(level: "Features | Target | None" = None, made_of: str | None = None) -> str:
    """The 32 hex digits of everything that object code depends on: sources, versions, CPU features.

    level: of the kernels, by default the host's; or the target of CUDA kernels. made_of: replaces
    the digest of the sources, for files that are named by their own.
    """
    level = level or features.host()
    words = [_version_file("numba"), _version_file("llvmlite"), level.name]
    on_cpu = isinstance(level, Features)
    words.append((sources("cpu" if on_cpu else "cuda") or "") if made_of is None else made_of)
    if not isinstance(level, Features):
        from importlib.metadata import version

        words += [version("numba-cuda"), level.ptx]
    else:
        words.append(features.identity(level))
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:32]


def versions() -> str:
    """The versions of what makes object code.

    Numba compiles bytecode, which depends on Python's.
    """
    import platform
    from importlib.metadata import version

    made_by = [f"{name} {version(name)}" for name in ("numba", "llvmlite")]
    return " ".join([*made_by, f"python {platform.python_version()}"])


def remedy() -> str:
    """What to do about a kernel that is not there, where nothing compiles it."""
    if getattr(sys, "frozen", False):
        return "run the program once with this model and method before it is frozen"
    return "pip install 'tamis[compile]' compiles what this model and attn need"


def can_compile(kind: str) -> bool:
    """Whether there is a compiler for kernels of a kind, "cpu" or "cuda"; it is not imported.

    A program that PyInstaller has frozen has none: compilers run in processes of Python.
    """
    if getattr(sys, "frozen", False):
        return False
    return bool(find_spec({"cpu": "numba", "cuda": "numba_cuda"}[kind]))


def _version_file(package: str) -> str:
    """The text that names a package's version: importing importlib.metadata takes 30 ms."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise KernelStoreError(f"no package {package}, which compiles kernels: {remedy()}")
    return Path(spec.origin).with_name("_version.py").read_text()


def user_folder() -> Path:
    """The folder of compiled kernels: tamis/kernels in $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return root / "tamis" / "kernels"


def open_folder(
    root: Path, level: "Features | Target | None" = None, made_of: str | None = None
) -> Path:
    """The folder of a level (default: the host's), made with mode 0700. Raises KernelStoreError.

    made_of: see `fingerprint`.

    A folder that others may write to, or replace by way of a parent, is refused: its files would be
    run as code.
    """
    folder = root / fingerprint(level, made_of)
    try:
        return private_folder(folder)
    except PrivacyError as error:
        raise KernelStoreError(
            f"kernel folder {folder} is not safe: {error}; mend the mode or the owner of "
            f"{error.path}, or set XDG_CACHE_HOME to an absolute folder elsewhere"
        ) from error
    except OSError as error:
        raise KernelStoreError(
            f"cannot make the kernel folder {folder}: {error.strerror}; "
            "set XDG_CACHE_HOME to an absolute folder that you may write to"
        ) from error


def write_object(folder: Path, symbol: str, code: bytes) -> None:
    """Store object code under its symbol, whole or not at all."""
    # A file damaged by a power failure is compiled again: nothing waits for the disk.
    with write_whole(folder / f"{symbol}.o", durable=False) as file:
        file.write(_digest(symbol, code) + code)


def read_object(folder: Path, symbol: str) -> bytes | None:
    """Object code of a symbol, or None if it is missing or damaged (it is compiled again).

    A renamed file of another symbol's code counts as damaged, and so does a link or a file that
    others may write to.
    """
    try:
        with open_private(folder / f"{symbol}.o") as file:
            data = file.read()
    except OSError as error:
        if isinstance(error, PrivacyError) or error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    digest, code = data[:32], data[32:]
    return code if _digest(symbol, code) == digest else None


def _digest(symbol: str, code: bytes) -> bytes:
    return hashlib.sha256(symbol.encode() + b"\0" + code).digest()
