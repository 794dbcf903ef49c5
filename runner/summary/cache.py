"""A cache on disk: sessions after reading a text, and finished answers.

It is a private folder of files, each named by a hash of everything that determined it. A file is
complete or absent; beyond the folder's size limit the least recently used files are removed.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import typing
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tamis.jit_kernels.compile import store
from tamis.platform.private_files import (
    PrivacyError,
    open_private,
    private_folder,
    remove_unfinished,
    write_whole,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

MAX_BYTES = 4 << 30
_ANSWER, _STATE = ".json", ".session"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SAMPLE, _N_SAMPLE, _HEAD = 4096, 64, 1 << 20
_OURS = re.compile(r"[0-9a-f]{32}\.(?:json|session)")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf")


class CacheError(RuntimeError):
    """The folder of the cache cannot be used; the message says why and what to do."""


def default_folder() -> Path:
    """The folder tamis/documents in $XDG_CACHE_HOME or ~/.cache, beside that of the kernels."""
    return store.user_folder().parent / "documents"


def key_of(*values: Any) -> str:
    """The key of values that JSON can encode: 32 hex digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def model_digest(path: Path) -> str:
    """The 64 hex digits that identify a model file without reading all of it.

    They cover, for each part of the model: size, time of the last change, its beginning with the
    metadata, and samples of the weights. Raises OSError.
    """
    digest = hashlib.sha256()
    for part in _parts(path):
        with part.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode() + file.read(_HEAD))
            for i in range(_N_SAMPLE):
                file.seek(i * max(status.st_size - _SAMPLE, 0) // (_N_SAMPLE - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _parts(path: Path) -> list[Path]:
    match = _PART.search(path.name)
    if match is None:
        return [path]
    stem = path.name[: match.start()]
    return sorted(path.parent.glob(f"{glob.escape(stem)}-?????-of-{match[1]}.gguf"))


class Cache:
    """Answers and states by key. Several processes and threads may use one folder.

    say: receives a line for the user if something was removed or could not be stored: a full disk
    is not an error.
    """

    def __init__(
        self,
        folder: Path | None = None,
        max_bytes: int = MAX_BYTES,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.max_bytes, self._say = max_bytes, say
        folder = folder or default_folder()
        try:
            self.folder = private_folder(folder)
        except OSError as error:
            raise CacheError(
                f"cannot make the cache folder {folder}: {error.strerror or error}; "
                "name another with --cache-dir, or use --no-cache"
            ) from error
        remove_unfinished(self.folder)

    def get(self, key: str, kind: "type[T]") -> "T | None":
        """The answer of a key, a dataclass; None if there is none, or it is damaged."""
        path = self.folder / (key + _ANSWER)
        try:
            with open_private(path) as file:
                digest, _, text = file.read().decode().partition("\n")
        except (FileNotFoundError, PrivacyError, UnicodeDecodeError):
            return None
        if digest != _digest(key, text):
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not _is_of(found, kind):
            return None
        self._used(path)
        return kind(**found)

    def put(self, key: str, answer: "DataclassInstance") -> None:
        """Store an answer of strings, numbers and lists; it is on disk when this returns."""
        text = json.dumps(asdict(answer))
        path = self.folder / (key + _ANSWER)
        with self._room(path), write_whole(path) as file:
            file.write(f"{_digest(key, text)}\n{text}".encode())

    def state(self, key: str) -> Path | None:
        """The session file of a key, or None. The reader checks its checksums."""
        path = self.folder / (key + _STATE)
        if not path.exists():
            return None
        self._used(path)
        return path

    def drop_state(self, key: str) -> None:
        """Remove a session file that was found damaged."""
        (self.folder / (key + _STATE)).unlink(missing_ok=True)

    def keep_state(self, key: str, n_bytes: int, save: Callable[[Path], None]) -> None:
        """Store a session of about n_bytes; save(path) writes it whole or not at all."""
        if n_bytes > self.max_bytes:
            self._say(
                f"not kept for more questions: {n_bytes / 1e9:.2f} GB of KV cache, the "
                f"cache may have {self.max_bytes / 1e9:.2f} GB: raise --cache-size"
            )
            return
        path = self.folder / (key + _STATE)
        with self._room(path):
            save(path)

    @contextlib.contextmanager
    def _room(self, path: Path) -> Any:
        """A context for writing a file: reports a full disk, then removes the oldest files."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._say(f"not kept in the cache {self.folder}: {error.strerror}")
        self._evict(keep=path)

    def _evict(self, keep: Path) -> None:
        found = []
        for path in self._files():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total, n_gone = sum(size for _, size, _ in found), 0
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                break
            if path != keep:
                with contextlib.suppress(OSError):  # such as for a folder of that name
                    path.unlink(missing_ok=True)
                    total, n_gone = total - size, n_gone + 1
        if n_gone:
            self._say(
                f"the cache is over {self.max_bytes / 1e9:.2f} GB: removed what was not used for "
                f"longest ({n_gone} files); --cache-size sets its size"
            )

    def _files(self) -> list[Path]:
        """The cache's files in the folder, which may contain others."""
        return [path for path in self.folder.iterdir() if _OURS.fullmatch(path.name)]

    def _used(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)


def _is_of(found: Any, kind: type) -> bool:
    """Whether a record has the fields of a dataclass, each of its type."""
    types = typing.get_type_hints(kind)
    return (
        isinstance(found, dict)
        and found.keys() == types.keys()
        and all(type(value) is _of_json(types[name]) for name, value in found.items())
    )


def _of_json(hint: Any) -> Any:
    """The type that JSON decodes to: for list[Source] a list, whose elements the digest covers."""
    return typing.get_origin(hint) or hint


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()
