"""Copies of a GGUF file: in several parts, in one, or with other metadata. Tensors do not change.

A file gets its name only once all of it is on disk; nothing that exists is written over.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tamis.formats.gguf import MAX_ALIGNMENT, MIN_ALIGNMENT, GGUFFile
from tamis.formats.gguf_writer import ALIGNMENT, NewTensor, head, number, parts_of, records, write
from tamis.platform.private_files import write_whole

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
SPLIT_KEYS = (SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS)
MOST_PARTS = 0xFFFF  # split.count is a u16
Each = Callable[[int, int], None]  # (bytes written, bytes in all)


class Part(NamedTuple):
    """A part of a split model: the names of its tensors, and its size in bytes."""

    tensors: tuple[str, ...]
    n_bytes: int


def planned(
    file: GGUFFile, most_tensors: int = 0, most_bytes: int = 0, *, apart: bool = False
) -> list[Part]:
    """The parts into which a model is split, as gguf-split does.

    A part has at most most_tensors, or at most most_bytes of tensors, if these are not 0; a tensor
    that is larger has a part of its own. apart: the first part has the metadata alone. Raises
    ValueError if there would be more parts than names can count.
    """
    groups: list[list[str]] = [[], []] if apart else [[]]
    size = 0
    for name, tensor in file.tensors.items():
        full = most_tensors and len(groups[-1]) == most_tensors
        if groups[-1] and (full or (most_bytes and size + tensor.n_bytes > most_bytes)):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.n_bytes
    if len(groups) > MOST_PARTS:
        raise ValueError(
            f"{len(groups)} parts, at most {MOST_PARTS} can be counted: make them larger"
        )
    return [Part(tuple(names), _size(file, groups, no)) for no, names in enumerate(groups)]


def part_path(prefix: str, no: int, n_part: int) -> Path:
    """The file of part `no` (from 0), as llama.cpp names it."""
    return Path(f"{prefix}-{no + 1:05}-of-{n_part:05}.gguf")


def split(file: GGUFFile, prefix: str, parts: Sequence[Part], each: Each) -> list[Path]:
    """Write the parts of a model, as `planned`; returns their files.

    An error removes those that are written. Raises FileExistsError, OSError.
    """
    paths = [part_path(prefix, no, len(parts)) for no in range(len(parts))]
    for path in paths:
        check_new(path)
    written: list[Path] = []
    total, done = sum(part.n_bytes for part in parts), 0
    try:
        for no, (path, part) in enumerate(zip(paths, parts, strict=True)):
            keys = _part_keys(file, no, len(parts))
            _write(path, file, keys, part.tensors, _from(done, total, each))
            written.append(path)
            done += part.n_bytes
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return paths


def merge(file: GGUFFile, path: Path, each: Each) -> None:
    """Write a model of several parts as one file. Raises ValueError if it is one, OSError."""
    if file.n_parts == 1:
        raise ValueError(f"{file.path} is one file already: name the first part of a split model")
    keys = {key: value for key, value in records(file).items() if key not in SPLIT_KEYS}
    edited(file, path, keys, each)


def edited(file: GGUFFile, path: Path, keys: Mapping[str, bytes], each: Each) -> None:
    """Write a model with these keys, in this order, as one file. Raises OSError."""
    check_new(path)
    total = sum(tensor.n_bytes for tensor in file.tensors.values())
    _write(path, file, keys, tuple(file.tensors), _from(0, total, each))


def changed(file: GGUFFile, sets: Mapping[str, bytes], removes: Iterable[str]) -> dict[str, bytes]:
    """The keys of a file after some are set to records and others removed.

    A key that exists keeps its place. Raises ValueError for a key that cannot be removed or set.
    """
    keys = records(file)
    for key in removes:
        if key not in keys:
            raise ValueError(f"the file has no key {key!r}: `tamis inspect` lists them")
        if key == "general.architecture":
            raise ValueError(f"{key} cannot be removed: it says how the model is run")
        del keys[key]
    for key, value in sets.items():
        if key in SPLIT_KEYS:
            raise ValueError(f"{key} cannot be set: `tamis split` and `tamis merge` write it")
        if not re.fullmatch(r"[a-z0-9_.\-]{1,65535}", key):
            raise ValueError(f"{key!r} is no key: expected lower-case words joined by dots")
        keys[key] = value
    for key in SPLIT_KEYS:
        keys.pop(key, None)
    if ALIGNMENT in sets:
        _check_alignment(keys[ALIGNMENT])
    return keys


def check_new(path: Path) -> None:
    """Raise FileExistsError if there is something under this name."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists: name a new file, or remove it first")


def new_tensors(file: GGUFFile, names: Iterable[str]) -> list[NewTensor]:
    """Tensors of a file as they are."""
    return [NewTensor(name, file.tensors[name].shape, file.tensors[name].type) for name in names]


def _check_alignment(value: bytes) -> None:
    step = int.from_bytes(value[4:], "little")
    if value[:4] != number("u32", 0)[:4] or step & (step - 1):
        step = 0
    if not MIN_ALIGNMENT <= step <= MAX_ALIGNMENT:
        raise ValueError(
            f"{ALIGNMENT} must be a u32, a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        )


def _part_keys(file: GGUFFile, no: int, n_part: int) -> dict[str, bytes]:
    """The metadata of a part: the first has all of the model's."""
    keys = records(file) if no == 0 else {}
    if no and ALIGNMENT in file.metadata:
        keys[ALIGNMENT] = file.record(ALIGNMENT)
    for key in SPLIT_KEYS:
        keys.pop(key, None)
    return keys | {
        SPLIT_NO: number("u16", no),
        SPLIT_COUNT: number("u16", n_part),
        SPLIT_TENSORS: number("i32", len(file.tensors)),
    }


def _size(file: GGUFFile, groups: Sequence[Sequence[str]], no: int) -> int:
    keys = _part_keys(file, no, min(len(groups), 0xFFFF))
    tensors = new_tensors(file, groups[no])
    return len(head(keys, tensors)[0]) + sum(tensor.n_bytes for tensor in tensors)


def _from(at: int, total: int, each: Each) -> Callable[[int], None]:
    """The function (bytes) for a part that begins after `at` bytes of all."""
    return lambda n: each(at + n, total)


def _write(
    path: Path,
    file: GGUFFile,
    keys: Mapping[str, bytes],
    names: Sequence[str],
    then: Callable[[int], None],
) -> None:
    """Write some tensors of a file; then(bytes) is called after each part of their data."""
    done = 0

    def data(name: str) -> Iterator[memoryview]:
        nonlocal done
        for part in parts_of(file.data(name)):
            yield part
            done += len(part)
            then(done)
        file.release_pages()

    with write_whole(path, shared=True) as out:
        write(out, keys, new_tensors(file, names), map(data, names))
        file.check_unchanged()
