"""Safetensors files, the format of Hugging Face's models: a JSON header, then tensors' bytes.

Nothing is mapped: a tensor's bytes are read when they are asked for.
"""

import json
import os
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_HEADER = 100 << 20  # bytes, as the reference implementation allows
# Bytes of an element of each type. The 4- and 6-bit types of the format are not among them.
TYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_WHOLE = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


class SafetensorsError(ValueError):
    """A file that is no safetensors file, or a damaged one; the message names it."""


class Stored(NamedTuple):
    """Where a tensor lies. shape: from the outer to the inner dimension."""

    type: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def n_bytes(self) -> int:
        """The size of its data."""
        return TYPES[self.type] * prod(self.shape)

    def raw(self) -> np.ndarray:
        """Its bytes: uint8 [n_bytes]. Raises SafetensorsError if the file has become shorter."""
        data = np.fromfile(self.path, np.uint8, self.n_bytes, offset=self.offset)
        if len(data) != self.n_bytes:
            raise SafetensorsError(
                f"{self.path} has {len(data)} of {self.n_bytes} bytes at {self.offset}: it changed"
            )
        return data

    def values(self) -> np.ndarray:
        """Its values, in float16 if it is of that type, else in float32."""
        raw = self.raw()
        if self.type == "BF16":
            bits = raw.view("<u2").astype(np.uint32) << np.uint32(16)
            values = bits.view(np.float32)
        elif self.type == "F8_E5M2":
            values = (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
        elif self.type == "F8_E4M3":
            values = _E4M3[raw]
        else:
            values = raw.view(_WHOLE[self.type])
            if self.type != "F16":
                values = values.astype(np.float32)
        return values.reshape(self.shape)


def read(paths: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of files by name, file by file, sorted within one.

    Raises SafetensorsError for damage and for a name that two files have, OSError.
    """
    found: dict[str, Stored] = {}
    for path in paths:
        for name, stored in sorted(_header(path).items()):
            if name in found:
                raise SafetensorsError(f"{name} is in {found[name].path.name} and in {path.name}")
            found[name] = stored
    return found


def _header(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        n = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= n <= min(MAX_HEADER, size - 8):
            raise SafetensorsError(f"{path} is no safetensors file: its header has {n} bytes")
        try:
            entries = json.loads(file.read(n))
        except ValueError as error:
            raise SafetensorsError(f"{path} is no safetensors file: {error}") from None
    if not isinstance(entries, dict):
        raise SafetensorsError(f"{path} is no safetensors file: its header is no JSON object")
    found = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            found[name] = _stored(path, name, entry, begin=8 + n, end=size)
    return found


def _stored(path: Path, name: str, entry: object, *, begin: int, end: int) -> Stored:
    try:
        assert isinstance(entry, dict)
        type, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, first, last]
        assert all(isinstance(n, int) and n >= 0 for n in sizes)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise SafetensorsError(
            f"{path}: {name} needs dtype, shape and two data_offsets, it has {str(entry)[:120]}"
        ) from None
    if type not in TYPES:
        raise SafetensorsError(f"{path}: {name} is of type {type}: expected {', '.join(TYPES)}")
    stored = Stored(type, tuple(shape), path, begin + first)
    if last - first != stored.n_bytes or begin + last > end:
        raise SafetensorsError(
            f"{path}: {name} has the bytes {first} to {last} of {end - begin}, its shape "
            f"{shape} of {type} needs {stored.n_bytes}: fetch the file anew"
        )
    return stored


def _e4m3() -> np.ndarray:
    """The 256 values of F8_E4M3, which has no infinities and one NaN of each sign."""
    bits = np.arange(256)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    small = fraction * 2.0**-9
    values = np.where(exponent == 0, small, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    values[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -values, values).astype(np.float32)


_E4M3 = _e4m3()
