"""Checked arguments of the flat API: numbers in their ranges, texts, and memory.

A buffer is anything with Python's buffer protocol: a NumPy array, bytes, a bytearray, an array or a
number of ctypes.
"""

import ctypes
import math
from numbers import Integral, Real
from typing import Any

import numpy as np

from tamis.bindings.flat.status import INT32_MIN, invalid

INT32_MAX = (1 << 31) - 1


def as_int(value: Any, name: str, low: int = INT32_MIN, high: int = INT32_MAX) -> int:
    """An integer from low to high. Raises Refusal."""
    value = getattr(value, "value", value) if isinstance(value, ctypes._SimpleCData) else value
    if not isinstance(value, Integral) or not low <= int(value) <= high:
        invalid(f"{name} is {value!r}, expected an integer from {low} to {high}")
    return int(value)


def as_float(value: Any, name: str) -> float:
    """A number as a finite float. Raises Refusal."""
    value = getattr(value, "value", value) if isinstance(value, ctypes._SimpleCData) else value
    if not isinstance(value, Real) or not math.isfinite(value):
        invalid(f"{name} is {value!r}, expected a finite number")
    return float(value)


def as_text(value: Any, name: str) -> str:
    """Text of bytes in UTF-8, or of a str. Raises Refusal."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        invalid(f"{name} is {value!r}, expected bytes or str")
    return value


def as_function(value: Any, name: str) -> Any:
    """A function or None. Raises Refusal."""
    if value is not None and not callable(value):
        invalid(f"{name} is {value!r}, expected a function or None")
    return value


def as_array(buffer: Any, dtype: Any, name: str, n: int, *, write: bool = False) -> np.ndarray:
    """The first n elements of a buffer, not copied. Raises Refusal if the buffer is too small."""
    dtype = np.dtype(dtype)
    if isinstance(buffer, list | tuple) and not write:
        return _array_of(buffer, dtype, name, n)
    try:
        view = memoryview(buffer)
    except TypeError:
        invalid(f"{name} is {type(buffer).__name__}, expected a buffer of {n} {dtype}")
    if not view.c_contiguous or (write and view.readonly):
        invalid(f"{name} must be contiguous" + (" and writable" if write else ""))
    if view.nbytes < n * dtype.itemsize:
        invalid(f"{name} has {view.nbytes} bytes, expected at least {n * dtype.itemsize}")
    # Integers of another size would be misread; bytes may hold any elements.
    if view.itemsize != dtype.itemsize and view.itemsize != 1:
        invalid(f"{name} has elements of {view.itemsize} bytes, expected {dtype}")
    return np.frombuffer(buffer, np.uint8)[: n * dtype.itemsize].view(dtype)


def _array_of(values: list | tuple, dtype: np.dtype, name: str, n: int) -> np.ndarray:
    if len(values) < n:
        invalid(f"{name} has {len(values)} elements, expected at least {n}")
    info = np.iinfo(dtype)
    return np.array([as_int(v, name, int(info.min), int(info.max)) for v in values[:n]], dtype)


def write_bytes(data: bytes, buffer: Any, length: Any, name: str) -> int:
    """Copy all of `data` into a buffer of `length` bytes.

    Returns the number of bytes, negative if it is too small.

    buffer None or length 0 asks for the size.
    """
    length = as_int(length, "length", 0)
    if len(data) > INT32_MAX:
        invalid(f"{name} would get {len(data)} bytes, the most is {INT32_MAX}")
    if buffer is None or len(data) > length:
        return -len(data)
    as_array(buffer, np.uint8, name, length, write=True)[: len(data)] = np.frombuffer(data, "u1")
    return len(data)


def write_string(text: str, buffer: Any, size: Any) -> int:
    """Copy a text as C's snprintf does: as much as fits, and a zero byte.

    Returns the full length in bytes.
    """
    data, size = text.encode(), as_int(size, "buf_size", 0)
    if size:
        target = as_array(buffer, np.uint8, "buf", size, write=True)
        part = data[: size - 1] + b"\0"
        target[: len(part)] = np.frombuffer(part, np.uint8)
    return len(data)
