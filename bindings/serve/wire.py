"""What the server and the processes that prepare requests share: their start, and frames."""

import os
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

HEADER = struct.Struct("<BI")
TOKEN = struct.Struct("<HI")  # choice, token
CHOICE = struct.Struct("<H")
LARGEST = 1 << 30
GRAMMAR_SECONDS = 5  # of processor time to compile a grammar, within the request's own limit


class Config(NamedTuple):
    """The configuration of the helper."""

    path: str
    identity: list[int]  # of the model file: device, inode, bytes, time of its last change
    model: str
    n_ctx: int
    n_choices: int
    seconds: int  # of processor time that preparing a request may take
    n_byte: int  # bytes of memory that it may take
    usual: Mapping[str, Any] = MappingProxyType({})  # default fields of requests
    template: str | None = None  # replaces the model file's chat template
    media: Sequence[Any] = ()  # media.Rules


def identity(path: str) -> list[int]:
    """Numbers that change when a file is replaced. Raises OSError."""
    found = os.stat(path)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


class Kind(IntEnum):
    """The content of a frame."""

    REQUEST = 1  # to the process: the name of a reader, a line feed, the body
    RESULT = 2  # JSON
    ERROR = 3  # JSON: status, message, code, param
    MASK = 4  # a choice, and one bit for each token, set if its grammar allows it next
    REFUSED = 5  # a choice, and the reason why its grammar cannot continue
    TOKENS = 6  # to the process: a choice and its next token
    ENDED = 7  # the signal that ended the process, 0 for none; sent by its parent
    PROGRESS = 8  # JSON: a stage of loading a model, done, total
    LOADED = 9  # JSON: a Loaded
    FAILED = 10  # JSON: why the model cannot be loaded, and where in the code
    JOBS = 11  # to the process: JSON of jobs
    DROP = 12  # to the process: JSON, numbers of jobs
    EVENTS = 13  # to the process: JSON, the numbers of jobs
    COMPILING = 14  # a grammar is being compiled, for at most GRAMMAR_SECONDS from now on


class Broken(ValueError):
    """Bytes that are not frames."""


def frame(kind: Kind, data: bytes) -> bytes:
    """A frame as bytes."""
    return HEADER.pack(kind, len(data)) + data


class Frames:
    """Splits arriving bytes, in any parts, into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes."""
        self._data += data

    def next(self) -> tuple[Kind, bytes] | None:
        """The next complete frame, or None. Raises Broken."""
        if len(self._data) < HEADER.size:
            return None
        number, n = HEADER.unpack_from(self._data)
        if number not in Kind.__members__.values() or n > LARGEST:
            raise Broken(f"frame of kind {number} and {n} bytes")
        end = HEADER.size + n
        if len(self._data) < end:
            return None
        data = bytes(self._data[HEADER.size : end])
        del self._data[:end]
        return Kind(number), data
