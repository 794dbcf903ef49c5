"""Writing of GGUF files: metadata, the table of tensors, and their bytes one after another."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import DEFAULT_ALIGNMENT, GGUFFile

VERSION = 3
ALIGNMENT = "general.alignment"
Chunk = bytes | memoryview
# The types of values by the names that people write; llama.cpp's --override-kv has the last four.
KINDS = {
    "u8": (0, "<B"),
    "i8": (1, "<b"),
    "u16": (2, "<H"),
    "i16": (3, "<h"),
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "u64": (10, "<Q"),
    "i64": (11, "<q"),
    "f64": (12, "<d"),
    "bool": (7, "<?"),
    "str": (8, ""),
    "int": (4, "<I"),
    "float": (6, "<f"),
}
_ARRAY = 9


class NewTensor(NamedTuple):
    """A tensor to be written. shape: its dimensions in ggml's order, fastest first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def n_bytes(self) -> int:
        """The size of its data."""
        return self.type.n_bytes(prod(self.shape))


def records(file: GGUFFile) -> dict[str, bytes]:
    """The metadata of a file as it stands there, in its order: each value's type and bytes."""
    return {key: file.record(key) for key in file.metadata}


def record(kind: str, text: str) -> bytes:
    """The record of a value written as text.

    kind: one of KINDS, or one in brackets for an array, whose text is a JSON list. Raises
    ValueError, which says what was expected.
    """
    if kind.startswith("[") and kind.endswith("]") and kind[1:-1] in KINDS:
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if not isinstance(items, list):
            raise ValueError(f"{text!r} is not a JSON list such as [1, 2]")
        parts = [_encoded(kind[1:-1], item) for item in items]
        head = struct.pack("<IIQ", _ARRAY, KINDS[kind[1:-1]][0], len(parts))
        return head + b"".join(parts)
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no type of a value: expected one of {', '.join(KINDS)}")
    return struct.pack("<I", KINDS[kind][0]) + _encoded(kind, _parsed(kind, text))


def number(kind: str, value: float) -> bytes:
    """The record of a number, or of a bool."""
    return struct.pack("<I", KINDS[kind][0]) + _encoded(kind, value)


def string(text: str | bytes) -> bytes:
    """The record of a text; bytes are written as they are."""
    return struct.pack("<I", KINDS["str"][0]) + _string(text)


def array(kind: str, items: Sequence[Any]) -> bytes:
    """The record of a list of texts, numbers or bools."""
    code, format = KINDS[kind]
    start = struct.pack("<IIQ", _ARRAY, code, len(items))
    if kind == "str":
        return start + b"".join(map(_string, items))
    return start + struct.pack(f"<{len(items)}{format[1:]}", *items)


def head(keys: Mapping[str, bytes], tensors: Sequence[NewTensor]) -> tuple[bytes, list[int]]:
    """All bytes before the tensors' data, and the offset in the file of each tensor's.

    keys: the record of each key; an alignment among them is followed.
    """
    step = _alignment(keys)
    found = [struct.pack("<4sIQQ", b"GGUF", VERSION, len(tensors), len(keys))]
    for key, value in keys.items():
        found += [_string(key), value]
    offsets, end = [], 0
    for tensor in tensors:
        found += [_string(tensor.name), struct.pack("<I", len(tensor.shape))]
        found.append(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
        found.append(struct.pack("<IQ", tensor.type, end))
        offsets.append(end)
        end += -(-tensor.n_bytes // step) * step
    text = b"".join(found)
    text += bytes(-len(text) % step)
    return text, [len(text) + offset for offset in offsets]


def write(
    out: BinaryIO,
    keys: Mapping[str, bytes],
    tensors: Sequence[NewTensor],
    data: Iterable[Iterable[Chunk]],
) -> None:
    """Write a file: keys, then each tensor's data as it comes, in parts.

    No more than one part of the data is asked for at a time. Raises ValueError if a tensor gets
    more or fewer bytes than its shape and type need, OSError.
    """
    text, offsets = head(keys, tensors)
    out.write(text)
    at = len(text)
    for tensor, offset, parts in zip(tensors, offsets, data, strict=True):
        out.write(bytes(offset - at))
        at = offset
        for part in parts:
            at += out.write(part)
        if at - offset != tensor.n_bytes:
            raise ValueError(
                f"{tensor.name} got {at - offset} bytes, its shape and type need {tensor.n_bytes}"
            )
    out.write(bytes(-at % _alignment(keys)))


def parts_of(data: np.ndarray, n_bytes: int = 16 << 20) -> Iterator[memoryview]:
    """Yield uint8 [n] in parts of at most n_bytes."""
    for first in range(0, len(data), n_bytes):
        yield data[first : first + n_bytes].data


def _alignment(keys: Mapping[str, bytes]) -> int:
    # Of whatever width: files are read whose alignment is no u32.
    return int.from_bytes(keys[ALIGNMENT][4:], "little") if ALIGNMENT in keys else DEFAULT_ALIGNMENT


def _parsed(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return float(text) if kind in ("f32", "f64", "float") else int(text)
    except ValueError:
        return text


def _encoded(kind: str, value: Any) -> bytes:
    """The bytes of a value without its type. Raises ValueError."""
    if kind == "str" and isinstance(value, str):
        return _string(value)
    whole = isinstance(value, int) and (isinstance(value, bool) == (kind == "bool"))
    if whole or (isinstance(value, float) and kind in ("f32", "f64", "float")):
        try:
            return struct.pack(KINDS[kind][1], value)
        except (struct.error, OverflowError):
            pass
    raise ValueError(f"{value!r} is no value of the type {kind}")


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw
