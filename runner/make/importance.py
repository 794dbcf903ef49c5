"""Importance matrices: the mean squares of what each column of a weight is multiplied with.

llama.cpp's `llama-imatrix` writes them, as GGUF files and, before 2025, as files of its own; both
are read. Errors of weights that meet larger inputs count more when they are quantized.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tamis.formats.gguf import GGUFError, GGUFFile


class Importance(NamedTuple):
    """The importance of tensors by their names, f32 [n_matrix, n_in], and the file it is from."""

    values: Mapping[str, np.ndarray]
    origin: str


NONE = Importance({}, "")
SUMS, COUNTS = ".in_sum2", ".counts"  # ends of the names of a GGUF file's tensors
MAX_NAME, MAX_ENTRIES = 1024, 1 << 20


def load(path: Path) -> Importance:
    """The importance matrix in a file.

    Experts that never ran have ones. Raises GGUFError for what is no such file, OSError.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    found = _of_gguf(path) if magic == b"GGUF" else _of_old(path)
    for name, values in found.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise GGUFError("importance below 0, or not finite", path=path, key=name)
    if not found:
        raise GGUFError("not an importance matrix: it has none", path=path)
    return Importance(found, str(path))


def _of_gguf(path: Path) -> dict[str, np.ndarray]:
    with GGUFFile(path) as file:
        found = {}
        for info in file.tensors.values():
            if not info.name.endswith(SUMS):
                continue
            name = info.name.removesuffix(SUMS)
            counts = file.tensors.get(name + COUNTS)
            if counts is None or {info.type.name, counts.type.name} != {"F32"}:
                raise file.error(f"{name} needs {SUMS} and {COUNTS} in float32", key=info.name)
            sums = file.data(info.name).view(np.float32).reshape(-1, info.shape[0])
            calls = file.data(counts.name).view(np.float32)
            if len(calls) != len(sums):
                text = f"{len(sums)} matrices, {len(calls)} counts"
                raise file.error(text, key=info.name)
            found[name] = _means(sums, np.rint(calls)[:, None])
        return found


def _of_old(path: Path) -> dict[str, np.ndarray]:
    """The format before GGUF: counts and lengths as int32, names, sums of squares."""
    data, at = path.read_bytes(), 0

    def take(n: int, what: str) -> bytes:
        nonlocal at
        if not 0 <= n <= len(data) - at:
            text = f"not an importance matrix: {what} needs {n} bytes, {len(data) - at} are left"
            raise GGUFError(text, path=path, offset=at)
        at += n
        return data[at - n : at]

    def number(what: str, most: int) -> int:
        (value,) = struct.unpack("<i", take(4, what))
        if not 1 <= value <= most:
            text = f"not an importance matrix: {what} is {value}, expected 1 to {most}"
            raise GGUFError(text, path=path, offset=at - 4)
        return int(value)

    found: dict[str, Any] = {}
    for _ in range(number("the number of entries", MAX_ENTRIES)):
        name = take(number("the length of a name", MAX_NAME), "a name").decode(errors="replace")
        calls = number(f"the calls of {name!r}", (1 << 31) - 1)
        n = number(f"the columns of {name!r}", (1 << 31) - 1)
        sums = np.frombuffer(take(4 * n, f"{name!r}"), np.float32)
        found[name] = _means(sums[None], np.float32(calls))
    return found


def _means(sums: np.ndarray, counts: Any) -> np.ndarray:
    return np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
