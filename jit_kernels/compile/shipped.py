"""Kernels that come with the package: object code of a level, or PTX of a target, in one file.

A file is a head (its magic, the size and digest of the index), the index, and blocks: kernels one
after another, compressed together. A start reads the index and the few blocks that it needs, whose
digests are in the index. Files are made by `python -m tamis.tools.release` and are not in a clone.
"""

import hashlib
import json
import lzma
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tamis.jit_kernels.compile.store import sources

FOLDER = Path(__file__).with_name("kernels")
SUFFIX = ".kernels"
_HEAD = struct.Struct("<16sQ32s")  # magic, bytes of the index, its SHA-256
_MARKS = b"tamis kernels 1\n"
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9}]


class ShippedError(RuntimeError):
    """A file of kernels that came with the package is damaged; the message names it."""


class Shipped:
    """The kernels of one file, by symbol. `sources`: the digest of their sources.

    vendor: of the CPU. A kernel whose code differs for it is stored as `SYMBOL@VENDOR`.
    """

    def __init__(self, path: Path, vendor: str = "") -> None:
        self._path, self._vendor, self._blocks = path, vendor, dict[int, _Block]()
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            marks, size, digest = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
            whole = marks == _MARKS and size <= os.fstat(file.fileno()).st_size
            index = file.read(size if whole else 0)
        if hashlib.sha256(index).digest() != digest:
            raise self._damaged("its index")
        found = json.loads(lzma.decompress(index, lzma.FORMAT_RAW, None, _FILTERS))
        self.sources: str = found["sources"]
        self.compiler: str = found["compiler"]
        self._places: dict[str, list[int]] = found["kernels"]
        self._at: list[list[Any]] = found["blocks"]
        self._start = _HEAD.size + size

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, symbol: str) -> bytes | None:
        """The code of a symbol; None if it is not in the file. Raises ShippedError, OSError."""
        place = self._places.get(f"{symbol}@{self._vendor}") or self._places.get(symbol)
        if place is None:
            return None
        number, start, size = place
        if number not in self._blocks:
            self._blocks[number] = _Block(self._block(number))
        code = self._blocks[number].part(start, start + size)
        if len(code) < size:
            raise self._damaged(f"block {number}")
        return code

    def drop(self) -> None:
        """Free the decompressed data: mapped kernels have copies of their own."""
        self._blocks.clear()

    def _block(self, number: int) -> bytes:
        """A compressed block of the file."""
        at, size, digest = self._at[number]
        with self._path.open("rb") as file:
            file.seek(self._start + at)
            data = file.read(size)
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._damaged(f"block {number}")
        return data

    def _damaged(self, what: str) -> ShippedError:
        return ShippedError(
            f"{self._path}: {what} is not what it was when this version was made: install it again"
        )


class _Block:
    """Kernels of a block, decompressed as far as needed."""

    def __init__(self, data: bytes) -> None:
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, None, _FILTERS)
        self._rest, self._done = data, bytearray()

    def part(self, start: int, end: int) -> bytes:
        """Bytes of the block; fewer at its end."""
        while len(self._done) < end and not self._decompressor.eof:
            more = self._decompressor.decompress(self._rest, end - len(self._done))
            if not (more or self._rest):
                break
            self._rest = b""  # the decompressor holds it
            self._done += more
        return bytes(self._done[start:end])


def came_for(name: str) -> bool:
    """Whether kernels of a level or target came with the package."""
    return (FOLDER / f"{name}{SUFFIX}").is_file()


def shipped(kind: str, name: str, vendor: str = "") -> Shipped | None:
    """The shipped kernels of a level or target, `kind` "cpu" or "cuda"; None if there are none.

    None also if the sources of kernels have changed since, as in a clone under development. Raises
    ShippedError, OSError.
    """
    if not came_for(name):
        return None
    found = Shipped(FOLDER / f"{name}{SUFFIX}", vendor)
    return found if sources(kind) in (None, found.sources) else None


def write_shipped(
    path: Path, code: Mapping[str, bytes], *, sources: str, compiler: str, block: int = 1 << 20
) -> None:
    """Write kernels by symbol to a file; the same kernels give the same bytes.

    Neighbours by name are similar: a block has whole kernels, up to `block` bytes or one kernel.
    Larger blocks take less room, but a start has more to decompress: a block up to the kernel that
    it needs.
    """
    places: dict[str, list[int]] = {}
    blocks: list[bytearray] = []
    for symbol in sorted(code):
        if not blocks or len(blocks[-1]) + len(code[symbol]) > block:
            blocks.append(bytearray())
        places[symbol] = [len(blocks) - 1, len(blocks[-1]), len(code[symbol])]
        blocks[-1] += code[symbol]
    packed = [_compressed(bytes(data)) for data in blocks]
    table, at = list[tuple[int, int, str]](), 0
    for data in packed:
        table.append((at, len(data), hashlib.sha256(data).hexdigest()))
        at += len(data)
    text = {"sources": sources, "compiler": compiler, "kernels": places, "blocks": table}
    index = _compressed(json.dumps(text, separators=(",", ":")).encode())
    head = _HEAD.pack(_MARKS, len(index), hashlib.sha256(index).digest())
    path.write_bytes(head + index + b"".join(packed))


def _compressed(data: bytes) -> bytes:
    return lzma.compress(data, lzma.FORMAT_RAW, filters=_FILTERS)
