"""What the server and the processes that prepare requests share: a start, and frames of bytes."""

import os
import struct
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

HEADER = struct.Struct("<BI")
TOKEN = struct.Struct("<HI")  # choice, token
CHOICE = struct.Struct("<H")
LARGEST = 1 << 30
GRAMMAR_SECONDS = 5  # of processor time to compile a grammar, within that of its request


class Config(NamedTuple):
    """What the helper is started with."""

    path: str
    identity: list[int]  # of the model file: device, inode, bytes, time of its last change
    model: str
    n_ctx: int
    n_choices: int
    seconds: int  # of processor time that preparing a request may take
    n_byte: int  # of memory that it may take
    usual: Mapping[str, Any] = MappingProxyType({})  # fields, for requests that lack them
    template: str | None = None  # of chats, instead of the model file's own


def identity(path: str) -> list[int]:
    """What tells a file from one that has taken its place. Raises OSError."""
    found = os.stat(path)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


class Kind(IntEnum):
    """What a frame has."""

    REQUEST = 1  # to the process: the name of what is asked, a line feed, the body
    RESULT = 2  # JSON
    ERROR = 3  # JSON: status, message, code, param
    MASK = 4  # a choice, and a bit for each token that its grammar allows next
    REFUSED = 5  # a choice, and why its grammar cannot go on
    TOKENS = 6  # to the process: a choice and the token that it went on with
    ENDED = 7  # the signal that ended the process, 0 for none; from its parent
    PROGRESS = 8  # JSON: a stage of loading a model, done, total
    LOADED = 9  # JSON: a Loaded
    FAILED = 10  # JSON: why the model cannot be loaded, and where in the program
    JOBS = 11  # to the process: JSON of jobs
    DROP = 12  # to the process: JSON, numbers of jobs
    EVENTS = 13  # JSON: events of jobs by their numbers, and counts
    COMPILING = 14  # a grammar, from now on for GRAMMAR_SECONDS at most


class Broken(ValueError):
    """Bytes that are no frames."""


def frame(kind: Kind, data: bytes) -> bytes:
    """The bytes of a frame."""
    return HEADER.pack(kind, len(data)) + data


class Frames:
    """Frames of the bytes that come, in whatever parts."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes."""
        self._data += data

    def next(self) -> tuple[Kind, bytes] | None:
        """The next whole frame, if there is one. Raises Broken."""
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
