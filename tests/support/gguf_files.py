"""Small GGUF files for tests, right ones and wrong ones.

``write_gguf`` makes a right file with the reference writer of the ``gguf`` package. The other
functions make files byte by byte, so that any field can be wrong::

    record = tensor("a", shape=[4], offset=0)                  # 4 float32, at the data's start
    file = gguf_bytes([kv("n", u32(7))], [record], bytes(16))
    file = gguf_bytes([], [record], b"", n_tensors=2**63)      # and one that lies

A metadata value is a ``Value``, made by ``u32(7)``, ``f32(0.5)``, ``boolean(True)``,
``text("abc")``, ``array(u32, [1, 2])`` or by hand: ``Value(type_id, payload)``.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np


class Value(NamedTuple):
    """A metadata value: its type identifier and its bytes."""

    type_id: int
    payload: bytes


def u8(x: int) -> Value:
    return Value(0, struct.pack("<B", x))


def u16(x: int) -> Value:
    return Value(2, struct.pack("<H", x))


def u32(x: int) -> Value:
    return Value(4, struct.pack("<I", x))


def i32(x: int) -> Value:
    return Value(5, struct.pack("<i", x))


def f32(x: float) -> Value:
    return Value(6, struct.pack("<f", x))


def boolean(x: bool) -> Value:
    return Value(7, bytes([x]))


def text(x: str | bytes) -> Value:
    raw = x.encode() if isinstance(x, str) else x
    return Value(8, struct.pack("<Q", len(raw)) + raw)


def u64(x: int) -> Value:
    return Value(10, struct.pack("<Q", x))


def array(item: Callable[[Any], Value], items: Sequence[Any], *, n: int | None = None) -> Value:
    """An array of ``items``, each made by ``item``; ``n`` is the count it claims."""
    type_id = item(items[0] if items else "" if item is text else 0).type_id
    count = len(items) if n is None else n
    head = struct.pack("<IQ", type_id, count)
    return Value(9, head + b"".join(item(x).payload for x in items))


def kv(key: str | bytes, value: Value) -> bytes:
    """One metadata record."""
    return text(key).payload + struct.pack("<I", value.type_id) + value.payload


def tensor(
    name: str | bytes,
    shape: Sequence[int],
    *,
    type_id: int = 0,
    offset: int = 0,
    n_dims: int | None = None,
) -> bytes:
    """One tensor record; ``shape`` is in ggml order, ``offset`` from the data's start."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape) if n_dims is None else n_dims, *shape)
    return text(name).payload + dims + struct.pack("<IQ", type_id, offset)


def gguf_bytes(
    kvs: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file: the counts are those of the records unless given, ``data`` is aligned."""
    kvs, tensors = list(kvs), list(tensors)
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(kvs) if n_keys is None else n_keys,
    )
    head += b"".join(kvs) + b"".join(tensors)
    padding = bytes(-len(head) % alignment) if data else b""
    return head + padding + data


def write_bytes(path: Path, raw: bytes) -> Path:
    """Write ``raw`` and return ``path``, for ``GGUFFile(write_bytes(...))``."""
    path.write_bytes(raw)
    return path


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    arch: str = "llama",
    split_max_tensors: int = 0,
) -> Path:
    """Write a file with the reference writer.

    Metadata: bool, int (as uint32), float (as float32), str and lists of these. Tensors are in
    NumPy order; one named in ``types`` is quantised to that type first. With
    ``split_max_tensors`` the parts get the usual -00001-of-0000N names beside ``path``.
    """
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, values in (tensors or {}).items():
        type_ = (types or {}).get(name)
        if type_ is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
