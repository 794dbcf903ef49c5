"""Arrays of a graph as values: recording tracks which view of a buffer has its newest contents.

Layers share named buffers, and what they return is often read only by an op that is recorded later.
A Value is a view of such a buffer that stands for its contents at one moment. Once the buffer was
written through another view, reading this one is an error of the recording layer.
"""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np

_Line = tuple[CodeType, int]  # the place in the source where something was recorded


class StaleValueError(RuntimeError):
    """A layer reads a value whose buffer was overwritten since; the message names the lines."""


class Buffer:
    """The recording state of one buffer: its last write."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0  # writes so far
        self.writer = ""  # the op that wrote it last
        self.line: list[_Line] = []


class _Taken:
    """The version of a buffer that a view, and views of it, stand for."""

    __slots__ = ("buffer", "line", "version")

    def __init__(self, buffer: Buffer, version: int, line: list[_Line]) -> None:
        self.buffer, self.version, self.line = buffer, version, line


class Value(np.ndarray):
    """A view of a graph's buffer, readable until the buffer is written through another view.

    Slices and reshaped views of a Value stand for the same moment as it does, and what is written
    through one of them is read by the others.
    """

    _taken: _Taken | None

    def __array_finalize__(self, source: Any) -> None:
        is_view = self.base is not None  # an array computed from a Value is not a view
        self._taken = getattr(source, "_taken", None) if is_view else None

    @classmethod
    def of(cls, array: np.ndarray, buffer: Buffer) -> Self:
        """The current contents of a buffer, of which the array is a view."""
        value = array.view(cls)
        value._taken = _Taken(buffer, buffer.version, recorded_at())
        return value

    def taken(self) -> Self:
        """The same contents as a separate value: writing through this one makes it stale.

        It is no newer than this value: the copy of a stale value is stale.
        """
        value = self.view()
        if (own := self._taken) is not None:
            is_stale = own.version != own.buffer.version
            value._taken = _Taken(own.buffer, own.version, own.line if is_stale else recorded_at())
        return value

    def read(self, reader: str) -> None:
        """Note that an op reads it. Raises StaleValueError if its buffer was overwritten."""
        own = self._taken
        if own is None or own.version == own.buffer.version:
            return
        buffer = own.buffer
        raise StaleValueError(
            f"{shown(recorded_at())}: {reader} reads {buffer.name} as it was at "
            f"{shown(own.line)}, but {buffer.writer} overwrote it at {shown(buffer.line)}: use the "
            "value before that line, or take it after it"
        )

    def written(self, writer: str) -> None:
        """Note that an op writes it: from now on this view has the contents of the buffer."""
        if (own := self._taken) is not None:
            buffer = own.buffer
            buffer.version, buffer.writer, buffer.line = buffer.version + 1, writer, recorded_at()
            own.version = buffer.version


def taken(array: np.ndarray) -> np.ndarray:
    """The array as a separate value (see Value.taken); unchanged if it is not a Value."""
    return array.taken() if isinstance(array, Value) else array


def note_read(array: np.ndarray, reader: str) -> None:
    """Note that the array is read, if no recorded op does so. Raises StaleValueError."""
    if isinstance(array, Value):
        array.read(reader)


def note_written(array: np.ndarray, writer: str) -> None:
    """Note that the array is written, if it is a Value and no recorded op does so."""
    if isinstance(array, Value):
        array.written(writer)


LAYER = "record_layer"  # the function that records a layer: above it are engines and sessions
_VOCABULARY, _RECORDER = "tamis.graph", "tamis.jit_kernels.contract"


def recorded_at() -> list[_Line]:
    """The lines of the layer that is being recorded, from its own to the innermost.

    Lines of the vocabulary that it calls are left out. If the layer itself is part of the
    vocabulary, only its own line.
    """
    lines: list[_Line] = []
    innermost = own = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != LAYER:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith((_RECORDER, "dataclasses")):
            own = frame.f_code, frame.f_lineno
            innermost = innermost or own
            if not module.startswith(_VOCABULARY):
                lines.append(own)
        frame = frame.f_back
    if frame is None:  # not within a layer
        return [innermost] if innermost else []
    return lines[::-1] or ([own] if own else [])


def shown(lines: list[_Line]) -> str:
    """Lines for an error message: "toy.py:12", or "toy.py:12 > toy.py:31" for a call."""
    return " > ".join(f"{Path(code.co_filename).name}:{line}" for code, line in lines)
