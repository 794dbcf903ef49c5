"""GGUF files, mapped and validated: header, metadata and the position of each tensor's bytes.

Every count, length and offset of the file is checked in Python ints against the file's real size
before anything is allocated for it. The meaning of the tensors is not checked here.
"""

import contextlib
import hashlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, overload

import numpy as np

from tamis.formats.ggml_types import GGMLType, type_name
from tamis.formats.strings import LENGTH, Strings
from tamis.platform.memory import evict_mapped, map_whole

T = TypeVar("T")
D = TypeVar("D")

MAX_STRING = 16 << 20  # bytes
MAX_ARRAY = 64 << 20  # items
MAX_KEY = 65535  # bytes, from the specification
MAX_TENSOR_NAME = 64  # bytes, from the specification
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20  # bytes
MIN_ALIGNMENT = 8  # bytes, from the specification; kernels read 8-byte words
DEFAULT_ALIGNMENT = 32  # bytes
MAX_KEYS = 1 << 16  # real files have fewer than 100
MAX_TENSORS = 1 << 20  # real files have a few thousand

_N_SAMPLE, _SAMPLE = 16, 4096  # bytes of the weights that `identity` reads

# The smallest possible record of each kind: an empty key with a one-byte value; an empty name
# with one dimension.
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_OTHER_FORMATS = {
    b"ggml": "an old ggml file (before GGUF); convert the model again",
    b"lmgg": "an old ggml file (before GGUF); convert the model again",
    b"fmgg": "an old ggml file (before GGUF); convert the model again",
    b"tjgg": "an old ggml file (before GGUF); convert the model again",
    b"vers": "perhaps a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"<!DO": "a web page; download the file itself",
    b"PK\x03\x04": "a ZIP archive, perhaps a PyTorch checkpoint; convert it to GGUF",
}
_REQUIRED: Any = object()


class GGUFError(ValueError):
    """A GGUF file cannot be used; the only exception for a file's contents.

    ``path`` is the file at fault, ``offset`` the position of the error (None: no single one),
    ``key`` the metadata key or tensor name (None: neither).
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str],
        offset: int | None = None,
        key: str | None = None,
    ):
        self.path = os.fspath(path)
        self.offset = offset
        self.key = key
        where = [] if key is None else [repr(key)]
        where += [] if offset is None else [f"at byte {offset}"]
        super().__init__(f"{self.path}: {message}" + (f" ({', '.join(where)})" if where else ""))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: filled by the reader, already validated.

    ``shape`` has the 1 to 4 dimensions of the file, in ggml order (fastest first). ``part`` is the
    index of the split file, ``offset`` the first byte in it.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    n_bytes: int
    part: int
    offset: int


class GGUFFile:
    """A GGUF model file, or all parts of a split one; a context manager.

    ``version`` is 2 or 3. ``metadata`` is read-only: str, int, float, bool, Strings (arrays of
    strings), read-only ndarray (arrays of numbers); for a split file, the first part's. ``tensors``
    keeps the files' order.

    Text that is not valid UTF-8: keys and tensor names are errors; single strings, which people
    read, get U+FFFD; strings in arrays keep their bytes as surrogate escapes, since vocabularies
    may hold raw bytes: ``token.encode("utf-8", "surrogateescape")`` returns them.

    Raises FileNotFoundError for a missing path and GGUFError for everything about contents,
    including a missing part of a split file. Reading a file that has shrunk while it was mapped is
    undefined: call ``check_unchanged`` before reading it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._parts: list[_Part] = []
        # The checks of data made from the file, called by check_unchanged(thorough=...).
        self.checks: list[Callable[..., None]] = []
        try:
            self._open_parts()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path}>"

    def _open_parts(self) -> None:
        named = _Part(self.path)
        self._parts.append(named)
        count = _split_count(named)
        if count > 1:
            self._parts = _open_split(named, count)
        first = self._parts[0]
        self.version = first.version
        self.metadata: Mapping[str, Any] = MappingProxyType(first.metadata)
        self.tensors: dict[str, TensorInfo] = {}
        for index, part in enumerate(self._parts):
            for info in part.tensors(index):
                if info.name in self.tensors:
                    raise part.error("a tensor of this name appears twice", key=info.name)
                self.tensors[info.name] = info
        if count > 1:
            _check_tensor_total(first, len(self.tensors))

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the mapping; views from ``data`` stay valid and keep their part mapped."""
        for part in self._parts:
            part.close()

    @property
    def n_parts(self) -> int:
        """Number of files; more than 1 for a split model."""
        return len(self._parts)

    @property
    def architecture(self) -> str:
        """``general.architecture``, the prefix of the model's own keys; GGUFError if missing."""
        return self.get("general.architecture", str)

    @overload
    def get(self, key: str, type_: type[T]) -> T: ...
    @overload
    def get(self, key: str, type_: type[T], default: D) -> T | D: ...
    @overload
    def get(self, key: str, type_: tuple[type, ...], default: Any = ...) -> Any: ...
    def get(self, key: str, type_: Any, default: Any = _REQUIRED) -> Any:
        """The value of ``key``, which must be of exactly ``type_`` (or of one type of a tuple).

        Nothing is converted: a bool is not an int and an int is not a float. Raises GGUFError
        naming the key if its type is wrong, or if it is missing without a ``default``.
        """
        return self._parts[0].get(key, type_, default)

    def error(self, message: str, *, key: str | None = None) -> GGUFError:
        """Make the GGUFError for contents that a reader of this file cannot accept."""
        return self._parts[0].error(message, key)

    def record(self, key: str) -> bytes:
        """The value of ``key`` as the file has it: its type, then its bytes. KeyError if absent."""
        return self._parts[0].record(key)

    def data(self, name: str) -> np.ndarray:
        """Bytes of a tensor: uint8 [n_bytes], a read-only view of the mapping, not a copy.

        KeyError for a name that is not in ``tensors``; ValueError once the file is closed.
        """
        info = self.tensors[name]
        return self._parts[info.part].view(info.offset, info.n_bytes)

    def check_unchanged(self, *, thorough: bool = False) -> None:
        """Raise GGUFError if a file was written to or truncated since it was opened.

        Reading a truncated part would end the process. A renamed or replaced file counts as
        unchanged: the old one stays mapped. thorough: data made from it is read again and compared.
        """
        for part in self._parts:
            part.check_unchanged()
        for check in self.checks:
            check(thorough=thorough)

    def identity(self) -> bytes:
        """Bytes that identify this file and change when it is written to.

        They cover, for each part, its size, time of the last change, inode, all bytes before the
        tensors, and samples.
        """
        return b"".join(part.identity() for part in self._parts)

    def release_pages(self) -> None:
        """Release the memory of all pages read so far; reading them again loads them again."""
        for part in self._parts:
            part.release_pages()


class _Part:
    """One mapped file, with its header and metadata read; tensors are read on request."""

    def __init__(self, path: Path):
        self.path = path
        self._map: mmap.mmap | None = None
        self._map, self._file, self._written = _map_file(path)
        try:
            cursor = _Cursor(self._map, path)
            self.version, self.n_tensors, n_keys = _read_header(cursor)
            self._records: dict[str, slice] = {}
            self.metadata = _read_metadata(cursor, n_keys, self._records)
            self._tensors_at = cursor.pos
        except BaseException:
            self.close()
            raise

    def error(self, message: str, key: str | None = None, offset: int | None = None) -> GGUFError:
        return GGUFError(message, path=self.path, key=key, offset=offset)

    def close(self) -> None:
        if self._map is None:
            return
        # BufferError: a view is in use; the mapping is released with the last one.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._map = None
        os.close(self._file)

    def check_unchanged(self) -> None:
        if self._map is None:
            return
        status = os.fstat(self._file)
        if (status.st_size, status.st_mtime_ns) == self._written:
            return
        size = self._written[0]
        what = f"cut off or grown from {size} to {status.st_size} bytes"
        if status.st_size == size:
            what = "written to"
        raise self.error(f"the file was {what} while it was in use: load the model again")

    def get(self, key: str, type_: Any, default: Any = _REQUIRED) -> Any:
        types = type_ if isinstance(type_, tuple) else (type_,)
        if key not in self.metadata:
            if default is _REQUIRED:
                raise self.error("the metadata lacks a key that is needed", key=key)
            return default
        value = self.metadata[key]
        if type(value) not in types:
            expected = " or ".join(t.__name__ for t in types)
            raise self.error(f"expected {expected}, got {type(value).__name__}", key=key)
        return value

    def record(self, key: str) -> bytes:
        assert self._map is not None
        return self._map[self._records[key]]

    def identity(self) -> bytes:
        assert self._map is not None
        status, size = os.fstat(self._file), self._written[0]
        digest = hashlib.sha256(b"%d %d %d " % (*self._written, status.st_ino))
        digest.update(self._map[: self._tensors_at])
        for i in range(_N_SAMPLE):
            digest.update(
                os.pread(self._file, _SAMPLE, i * max(size - _SAMPLE, 0) // (_N_SAMPLE - 1))
            )
        return digest.digest()

    def release_pages(self) -> None:
        if self._map is not None:
            evict_mapped(self._map)

    def view(self, offset: int, n_bytes: int) -> np.ndarray:
        if self._map is None:
            raise ValueError(f"{self.path} is closed: take tensor data before leaving its block")
        return np.frombuffer(self._map, np.uint8, n_bytes, offset)

    def tensors(self, index: int) -> list[TensorInfo]:
        """Read and validate this part's tensors, in file order."""
        assert self._map is not None
        alignment = _alignment(self)
        cursor = _Cursor(self._map, self.path, self._tensors_at)
        raw = [_read_tensor(cursor) for _ in range(self.n_tensors)]
        base = -(-cursor.pos // alignment) * alignment
        infos = []
        for at, name, shape, type_, offset in raw:
            n_bytes = type_.n_bytes(prod(shape))
            if offset % alignment:
                raise self.error(f"offset {offset} is not a multiple of {alignment}", name, at)
            if base + offset + n_bytes > cursor.size:
                raise self.error(
                    f"the tensor ends at byte {base + offset + n_bytes}, the file at {cursor.size}:"
                    " an incomplete download or a damaged file",
                    name,
                    at,
                )
            infos.append(TensorInfo(name, shape, type_, n_bytes, index, base + offset))
        self._check_overlap(infos)
        return infos

    def _check_overlap(self, infos: list[TensorInfo]) -> None:
        for a, b in pairwise(sorted(infos, key=lambda info: info.offset)):
            if a.offset + a.n_bytes > b.offset:
                raise self.error(f"the tensor overlaps {a.name!r}", b.name, b.offset)


class _Cursor:
    """A position in a mapped file; each read first checks that the bytes are there."""

    def __init__(self, buffer: mmap.mmap, path: Path, pos: int = 0):
        self.buffer = buffer
        self.size = len(buffer)
        self.path = path
        self.pos = pos
        self.key: str | None = None  # what is being read, for messages

    def error(self, message: str, offset: int | None = None) -> GGUFError:
        at = self.pos if offset is None else offset
        return GGUFError(message, path=self.path, offset=at, key=self.key)

    def need(self, n_bytes: int, what: str) -> None:
        left = self.size - self.pos
        if n_bytes > left:
            raise self.error(
                f"{what} needs {n_bytes} bytes, {left} are left: an incomplete download or a"
                " damaged file"
            )

    def scalar(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.buffer, self.pos)
        self.pos += layout.size
        return value

    def raw(self, cap: int, what: str) -> bytes:
        """Bytes of a string that is at most ``cap`` bytes long."""
        length = self.scalar(_U64, f"length of {what}")
        if length > cap:
            raise self.error(f"{what} of {length} bytes, at most {cap} are accepted", self.pos - 8)
        self.need(length, what)
        self.pos += length
        return self.buffer[self.pos - length : self.pos]

    def name(self, cap: int, what: str) -> str:
        """Return a string that must be valid UTF-8."""
        at = self.pos
        raw = self.raw(cap, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} {raw[:64]!r} is not valid UTF-8", at) from None


def _map_file(path: Path) -> tuple[mmap.mmap, int, tuple[int, int]]:
    """The mapping, the open file, and its size and time of the last change."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no such GGUF file: {path}") from None
    # Checked before open(): opening a FIFO would wait for a writer.
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise GGUFError(f"{kind}: give the path of a .gguf file", path=path)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        if size < 4:
            raise GGUFError(
                f"not a GGUF file: it has {size} bytes, perhaps a failed download",
                path=path,
                offset=0,
            )
        return map_whole(file.fileno(), size), os.dup(file.fileno()), (size, status.st_mtime_ns)


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors and number of metadata keys."""
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        hint = _OTHER_FORMATS.get(magic, "give the path of a .gguf file")
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}, not b'GGUF': {hint}")
    cursor.pos = 4
    version = cursor.scalar(_U32, "version")
    if version & 0xFFFF == 0 and version:
        raise cursor.error(
            "a big-endian GGUF file, only little-endian ones are read: convert it with"
            " gguf-convert-endian of the gguf package",
            4,
        )
    if version not in (2, 3):
        raise cursor.error(
            f"GGUF version {version}, only 2 and 3 are read: "
            + ("convert the model again" if version < 2 else "a newer tamis may read it"),
            4,
        )
    n_tensors = cursor.scalar(_U64, "number of tensors")
    n_keys = cursor.scalar(_U64, "number of metadata keys")
    _check_count(cursor, 8, n_tensors, what="tensors", cap=MAX_TENSORS, n_min=_MIN_TENSOR_BYTES)
    _check_count(cursor, 16, n_keys, what="metadata keys", cap=MAX_KEYS, n_min=_MIN_KEY_BYTES)
    return version, n_tensors, n_keys


def _check_count(cursor: _Cursor, at: int, n: int, *, what: str, cap: int, n_min: int) -> None:
    left = cursor.size - cursor.pos
    if n > cap:
        raise cursor.error(f"{n} {what}, at most {cap} are accepted", at)
    if n * n_min > left:
        raise cursor.error(f"{n} {what} need {n * n_min} bytes or more, {left} are left", at)


def _read_metadata(cursor: _Cursor, n_keys: int, records: dict[str, slice]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        at = cursor.pos
        key = cursor.name(MAX_KEY, "key")
        if key in metadata:
            raise GGUFError("the key appears twice", path=cursor.path, offset=at, key=key)
        cursor.key, first = key, cursor.pos
        metadata[key] = _read_value(cursor, cursor.scalar(_U32, "value type"))
        records[key] = slice(first, cursor.pos)
        cursor.key = None
    return metadata


def _read_value(cursor: _Cursor, type_id: int) -> Any:
    if type_id in _SCALARS:
        return cursor.scalar(_SCALARS[type_id], "value")
    if type_id == _BOOL:
        value = cursor.scalar(_SCALARS[0], "value")
        if value > 1:
            raise cursor.error(f"a bool must be 0 or 1, not {value}", cursor.pos - 1)
        return bool(value)
    if type_id == _STRING:
        return cursor.raw(MAX_STRING, "string").decode(errors="replace")
    if type_id == _ARRAY:
        return _read_array(cursor)
    raise cursor.error(f"unknown value type {type_id}, expected 0 to 12", cursor.pos - 4)


def _read_array(cursor: _Cursor) -> Strings | np.ndarray:
    at = cursor.pos
    type_id = cursor.scalar(_U32, "array item type")
    n = cursor.scalar(_U64, "array length")
    if type_id == _ARRAY:
        raise cursor.error("arrays of arrays are not accepted", at)
    if type_id not in _SCALARS and type_id not in (_BOOL, _STRING):
        raise cursor.error(f"unknown array item type {type_id}, expected 0 to 12", at)
    if n > MAX_ARRAY:
        raise cursor.error(f"array of {n} items, at most {MAX_ARRAY} are accepted", at + 4)
    if type_id == _STRING:
        cursor.need(8 * n, f"array of {n} strings")
        return _read_strings(cursor, n)
    dtype = np.dtype("?") if type_id == _BOOL else np.dtype(_SCALARS[type_id].format)
    cursor.need(dtype.itemsize * n, f"array of {n} items")
    # The copy is aligned, which the file is not, and does not keep the mapping alive.
    raw = np.frombuffer(cursor.buffer, np.uint8, dtype.itemsize * n, cursor.pos).copy()
    if type_id == _BOOL and raw.size and raw.max() > 1:
        raise cursor.error(f"a bool must be 0 or 1, not {raw.max()}", cursor.pos)
    cursor.pos += raw.size
    array = raw.view(dtype)
    array.flags.writeable = False
    return array


def _read_strings(cursor: _Cursor, n: int) -> Strings:
    # A vocabulary has some 300,000 strings: this loop is much of the time to open a file, so the
    # bound that needs no message is left to unpack_from and the last one is checked at the end.
    buffer, pos, length_at = cursor.buffer, cursor.pos, LENGTH.unpack_from
    starts = np.empty(n + 1, np.int64)
    try:
        for i in range(n):
            (length,) = length_at(buffer, pos)
            if length > MAX_STRING:
                raise cursor.error(
                    f"string {i} of the array has {length} bytes, at most {MAX_STRING}"
                    " are accepted",
                    pos,
                )
            starts[i] = pos
            pos += 8 + length
    except struct.error:
        pos = cursor.size + 1
    if pos > cursor.size:
        raise cursor.error(
            f"the array of {n} strings runs past the end of the file ({cursor.size} bytes): an"
            " incomplete download or a damaged file"
        )
    starts[n] = pos
    starts += LENGTH.size - cursor.pos
    data = cursor.buffer[cursor.pos : pos]
    cursor.pos = pos
    return Strings(data, starts)


def _alignment(part: _Part) -> int:
    value: int = part.get("general.alignment", int, DEFAULT_ALIGNMENT)
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise part.error(
            f"alignment {value}, expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
            key="general.alignment",
        )
    return value


def _read_tensor(cursor: _Cursor) -> tuple[int, str, tuple[int, ...], GGMLType, int]:
    """Position of the record, then name, shape, type and offset in the data section."""
    at = cursor.pos
    cursor.key = None
    name = cursor.key = cursor.name(MAX_TENSOR_NAME, "tensor name")
    n_dims = cursor.scalar(_U32, "number of dimensions")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"{n_dims} dimensions, expected 1 to {MAX_DIMS}", cursor.pos - 4)
    shape = tuple(cursor.scalar(_U64, "dimension") for _ in range(n_dims))
    type_id = cursor.scalar(_U32, "tensor type")
    offset = cursor.scalar(_U64, "tensor offset")
    try:
        type_ = GGMLType(type_id)
    except ValueError:
        raise cursor.error(
            f"tensor type {type_name(type_id)} is not supported: take a file with another"
            " quantisation, such as Q4_K_M",
            at,
        ) from None
    if 0 in shape or prod(shape) >= 1 << 63:
        raise cursor.error(f"shape {shape}: dimensions must be 1 or more, below 2^63 in all", at)
    if shape[0] % type_.block_size:
        raise cursor.error(
            f"rows of {shape[0]} elements, {type_.name} needs a multiple of {type_.block_size}", at
        )
    return at, name, shape, type_, offset


def _split_count(part: _Part) -> int:
    """Return the number of files the model is split into; 1 if it is not."""
    return max(1, part.get("split.count", int, 1))


def _open_split(named: _Part, count: int) -> list[_Part]:
    """All parts of a split model in order, including ``named``; on an error all are closed."""
    match = _SPLIT_NAME.fullmatch(named.path.name)
    if match is None or int(match["count"]) != count:
        raise named.error(
            f"one of {count} parts, whose names must end in -00001-of-{count:05}.gguf and so on:"
            " give the files their names back",
            key="split.count",
        )
    parts: list[_Part] = []
    try:
        for no in range(count):
            path = named.path.with_name(f"{match['stem']}-{no + 1:05}-of-{count:05}.gguf")
            parts.append(named if path == named.path else _open_part(path, count))
            if (found := parts[-1].get("split.no", int)) != no or _split_count(parts[-1]) != count:
                raise parts[-1].error(
                    f"says to be part {found + 1} of {_split_count(parts[-1])}, its name says"
                    f" {no + 1} of {count}",
                    key="split.no",
                )
    except BaseException:
        for part in parts:
            part.close()
        raise
    return parts


def _open_part(path: Path, count: int) -> _Part:
    try:
        return _Part(path)
    except FileNotFoundError:
        raise GGUFError(
            f"this part of a model split into {count} files is missing: put all parts in one"
            " folder",
            path=path,
            key="split.count",
        ) from None


def _check_tensor_total(first: _Part, n_tensors: int) -> None:
    total = first.get("split.tensors.count", int, n_tensors)
    if total != n_tensors:
        raise first.error(
            f"the parts hold {n_tensors} tensors, not {total}: they do not belong together",
            key="split.tensors.count",
        )
