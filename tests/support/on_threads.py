"""CUDA kernels as the Python that they are, a greenlet for each thread of a block.

Their logic is run without a GPU: indices, bounds, barriers, exchange within warps, atomics. What
Python has no words for is not: matrix units, copies by descriptor, loads of several registers that
are made while IR is built. Blocks run one after the other, in the order that is given. A thread
runs until it waits for others, so that a run is repeatable; the order of threads rises and falls in
alternation, so that a barrier that is missing shows.
"""

import ctypes
import importlib
import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from attention_cases import numbers
from greenlet import getcurrent, greenlet

from tamis.formats.codebooks import SHAPES, grid_of
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract.arrays import evaluate
from tamis.jit_kernels.contract.op import module_of
from tamis.jit_kernels.contract.types import kv_row
from tamis.jit_kernels.cuda.attention.score import ROW
from tamis.jit_kernels.cuda.lang.grid import Launch
from tamis.jit_kernels.cuda.lang.readers import Readers
from tamis.jit_kernels.cuda.lang.scratch import class_of

MOST = 64  # threads of a block: kernels that have more work with any number
PATIENCE = 100  # turns of all threads in which nothing changes: they wait for what never comes
local = types.SimpleNamespace(block=None, thread=0, n_array=0)  # of the thread that runs
memory: list[tuple[int, int]] = []  # what kernels may touch: first byte, the one after the last


class Barrier:
    """A meeting of n threads of a block, over and over."""

    def __init__(self, n: int) -> None:
        self.n = self.missing = n
        self.values: list[Any] = [0] * n
        self.met: list[Any] = []

    def wait(self, place: int = 0, value: Any = 0) -> list[Any]:
        """Wait until n threads have come; return what each of them brought, by place."""
        self.values[place] = value
        self.missing -= 1
        before = self.met
        if self.missing == 0:
            self.missing, self.met = self.n, list(self.values)
            local.block.n_change += 1
        while self.met is before:
            pause()
        return self.met


class Block:
    """What the threads of a block share."""

    def __init__(self, n_thread: int) -> None:
        self.barrier = Barrier(n_thread)
        self.warps = [Barrier(32) for _ in range(n_thread // 32)]
        self.arrays: dict[int, list[Any]] = {}
        self.shared: dict[int, float] = {}
        self.bytes = np.full(1 << 18, 0xA5, np.uint8)  # shared memory that is read by its addresses
        self.some: dict[int, Barrier] = {}  # of so many threads
        self.arrivals: dict[int, Arrivals] = {}  # by address
        self.products: dict[int, tuple[Any, np.ndarray]] = {}  # of each warp: the last one's
        self.copies: dict[int, list[list[Copy]]] = {}  # of each thread: groups, the open one last
        self.n_change = 0  # what waiting threads may wait for


class Copy(NamedTuple):
    """A copy to shared memory that has not been waited for: sixteen bytes, or zeros."""

    to: int
    at: int
    n: int

    def end(self) -> None:
        """Make what was copied visible."""
        there = np.zeros(16, np.uint8)
        if self.n:
            there[: self.n] = np.frombuffer(_at(self.at, ctypes.c_uint8 * self.n), np.uint8)
        local.block.bytes[self.to : self.to + 16] = there


def _copy_async(to: int, at: int, n: int) -> None:
    assert to % 16 == at % 16 == 0 <= n <= 16
    groups = local.block.copies.setdefault(local.thread, [[]])
    groups[-1].append(Copy(int(to), int(at), int(n)))
    local.block.bytes[int(to) : int(to) + 16] = 0x5A  # neither what was there nor what comes


def _copy_commit() -> None:
    local.block.copies.setdefault(local.thread, [[]]).append([])


def _copy_wait(n: int) -> Callable[[], None]:
    def wait() -> None:
        groups = local.block.copies.setdefault(local.thread, [[]])
        while len(groups) > n + 1:
            for copy in groups.pop(0):
                copy.end()

    return wait


def pause() -> None:
    """Let the other threads of the block run until they wait or end."""
    thread, n_array = local.thread, local.n_array
    getcurrent().parent.switch()
    local.thread, local.n_array = thread, n_array


class Arrivals:
    """A barrier in shared memory: a phase ends with so many arrivals and no bytes to come."""

    def __init__(self, n: int) -> None:
        self.n = self.missing = n
        self.n_byte, self.phase = 0, 0

    def come(self, n: int, n_byte: int) -> None:
        """N arrivals, and bytes that are expected or, below 0, there."""
        self.missing -= n
        self.n_byte += n_byte
        assert self.missing >= 0
        if self.missing == self.n_byte == 0:
            self.missing, self.phase = self.n, self.phase ^ 1


def exchanged(value: Any) -> list[Any]:
    """What the lanes of a warp have."""
    warp: Barrier = local.block.warps[local.thread // 32]
    return warp.wait(local.thread % 32, value)


def _at(address: Any, kind: Any) -> Any:
    first = int(address)
    end = first + ctypes.sizeof(kind)
    if first % ctypes.alignment(kind) or not any(a <= first and end <= b for a, b in memory):
        raise IndexError(f"{kind.__name__} at {first} is not what this kernel was given")
    return kind.from_address(first)


def _loading(kind: Any, as_: Any = int) -> Callable[[Any], Any]:
    return lambda address: as_(_at(address, kind).value)


def _storing(kind: Any, as_: Any = int) -> Callable[[Any, Any], None]:
    def store(address: Any, value: Any) -> None:
        _at(address, kind).value = as_(value)

    return store


def _u128(address: Any) -> tuple[int, ...]:
    assert int(address) % 16 == 0
    return tuple(_at(address, ctypes.c_uint32 * 4))


def _store_u128(address: Any, value: Any) -> None:
    assert int(address) % 16 == 0
    _at(address, ctypes.c_uint32 * 4)[:] = list(value)


def _half(address: Any) -> np.ndarray:
    return np.frombuffer(_at(address, ctypes.c_uint16), np.float16)


def _store_f16(address: Any, value: Any) -> None:
    _half(address)[0] = value


def _or_i64(address: Any, bits: Any) -> None:
    _at(address, ctypes.c_uint64).value |= int(bits) & 0xFFFFFFFFFFFFFFFF


def _ordered(x: Any) -> int:
    """See intrinsic.ordered."""
    bits = int(np.float32(x).view(np.int32))
    return _low(-(bits & 0x7FFFFFFF) if bits < 0 else bits) ^ 0x80000000


def _low(x: Any) -> int:
    return int(x) & 0xFFFFFFFF


def _int32(x: Any = 0) -> int:
    return ctypes.c_int32(_low(x)).value


def _barrier_init(address: int, n: int) -> None:
    assert address % 8 == 0
    local.block.arrivals[int(address)] = Arrivals(int(n))


def _come(address: int, n: int, n_byte: int) -> None:
    local.block.arrivals[int(address)].come(n, int(n_byte))
    local.block.n_change += 1


def _barrier_ended(address: int, phase: int) -> int:
    """Whether the phase has ended: as on a GPU it waits a while."""
    found = local.block.arrivals[int(address)]
    if found.phase == phase:
        pause()
    return int(found.phase != phase)


def _copy_bulk(to: int, at: int, n: int, barrier: int) -> None:
    assert to % 16 == at % 16 == n % 16 == 0 < n
    there = np.frombuffer(_at(at, ctypes.c_uint8 * int(n)), np.uint8)
    local.block.bytes[int(to) : int(to) + int(n)] = there
    _come(barrier, 0, -n)


def _sync_threads(n: int) -> None:
    local.block.some.setdefault(int(n), Barrier(int(n))).wait()


def _shared_as(kind: str, n: int = 1) -> Callable[[Any], Any]:
    size = np.dtype(kind).itemsize

    def load(address: Any) -> Any:
        at = int(address)
        assert at % size == 0
        found = local.block.bytes[at : at + n * size].view(kind)
        return found[0] if n == 1 else tuple(found.tolist())

    return load


def _shared_words(n: int, multiple: int) -> Callable[[Any], Any]:
    """N words at a multiple of bytes."""

    def load(address: Any) -> Any:
        at = int(address)
        assert at % multiple == 0
        return tuple(local.block.bytes[at : at + 4 * n].copy().view(np.uint32).tolist())

    return load


def _store_shared(address: Any, words: Any) -> None:
    at = int(address)
    assert at % 16 == 0
    local.block.bytes[at : at + 16] = np.array([_low(w) for w in words], np.uint32).view(np.uint8)


def _shared_block(address: Any) -> Any:
    first, words = _shared_as("u2"), _shared_words(8, 2)
    return (int(first(address)), *words(int(address) + 2))


SHARED = Readers(
    const_f16=lambda address: np.float32(_shared_as("f2")(address)),
    const_i8=lambda address: np.float32(_shared_as("i1")(address)),
    const_u8=lambda address: int(_shared_as("u1")(address)),
    const_u16=lambda address: int(_shared_as("u2")(address)),
    const_u128=_shared_words(4, 16),
    words=_shared_words(4, 4),
    words_even=_shared_words(4, 2),
    words_any=_shared_words(4, 1),
    block_of_34=_shared_block,
)


def _device_words(address: Any) -> tuple[int, ...]:
    """Four words of device memory, at any address."""
    found = bytes(_at(address, ctypes.c_uint8 * 16))
    return tuple(np.frombuffer(found, np.uint32).tolist())


def _halves(words: Any) -> np.ndarray:
    return np.array([_low(w) for w in words], np.uint32).view(np.float16).astype(np.float64)


def _f16x8(values: Any) -> tuple[int, ...]:
    return tuple(np.array(values, np.float32).astype(np.float16).view(np.uint32).tolist())


def _mma_f16(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    """See ptx.mma_f16: every lane has its part of A, B and C."""
    lanes = exchanged((_halves(a), _halves(b)))
    done = local.block.products.get(local.thread // 32)
    if done is None or done[0] is not lanes:  # the first of the lanes multiplies
        done = local.block.products[local.thread // 32] = lanes, _product_of(lanes)
    product, lane = done[1], local.thread % 32
    g, t = lane // 4, 2 * (lane % 4)
    found = *product[g, t : t + 2], *product[g + 8, t : t + 2]
    return tuple(np.float32(x + float(y)) for x, y in zip(found, c, strict=True))


def _product_of(lanes: list[Any]) -> np.ndarray:
    """The product of the parts of A and B that the lanes of a warp have."""
    one, other, i = np.zeros((16, 16)), np.zeros((16, 8)), np.arange(2)
    for lane, (left, right) in enumerate(lanes):
        g, t = lane // 4, 2 * (lane % 4) + i
        for register, (row, column) in enumerate([(g, 0), (g + 8, 0), (g, 8), (g + 8, 8)]):
            one[row, column + t] = left[2 * register : 2 * register + 2]
        for register in range(2):
            other[8 * register + t, g] = right[2 * register : 2 * register + 2]
    return one @ other


def _bytes_f32(kind: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    def floats(low: Any, high: Any) -> tuple[Any, ...]:
        both = np.array([_low(low), _low(high)], np.uint32).view(kind)
        return tuple(both.astype(np.float32))

    return floats


def _bytes_f16(kind: Any, zero: int) -> Callable[..., tuple[Any, ...]]:
    """See ptx.bytes_f16: `zero` is what a float16 has whose last byte is that of 0."""

    def found(words: Any, factor: Any, less: Any, scale: Any, offset: Any) -> tuple[int, ...]:
        numbers = np.array([_low(w) for w in words], np.uint32).view(kind).astype(np.float64)
        times, less_, scale_, offset_ = (_halves([x])[0] for x in (factor, less, scale, offset))
        exact = (numbers + zero) * times + less_
        assert (exact == exact.astype(np.float16)).all()
        return tuple((exact * scale_ + offset_).astype(np.float16).view(np.uint32).tolist())

    return found


def _dot(signed: bool) -> Callable[[Any, Any, Any], int]:
    def dot(one: Any, other: Any, total: Any) -> int:
        bytes_ = (np.array([_low(x)], np.uint32).view(np.uint8) for x in (one, other))
        a, b = (x.view(np.int8).astype(int) for x in bytes_)
        return _int32(((a if signed else a % 256) * b).sum() + int(total))

    return dot


def _bytes_of_two(one: Any, other: Any, chosen: Any) -> int:
    both = _low(one) | _low(other) << 32
    places = [_low(chosen) >> 4 * i & 7 for i in range(4)]
    return sum((both >> 8 * place & 255) << 8 * i for i, place in enumerate(places))


def _bits_to_bytes(w: Any) -> tuple[int, ...]:
    bits = [int(w) >> i & 1 for i in range(16)]
    return tuple(sum(bits[4 * i + j] << 8 * j for j in range(4)) for i in range(4))


def _equal_lanes(x: Any) -> int:
    return sum(1 << i for i, other in enumerate(exchanged(x)) if other == x)


def _atomic_add(array: list[Any], i: int, value: Any) -> Any:
    before = array[i]
    array[i] = before + int(value)
    return before


def _atomic_or(array: list[Any], i: int, value: Any) -> Any:
    before = array[i]
    array[i] = before | int(value)
    return before


def _count_one(address: Any) -> int:
    found = _at(address, ctypes.c_uint32)
    found.value += 1
    return found.value - 1


def _array(shape: int | tuple[int, ...], _dtype: Any) -> Any:
    local.n_array += 1
    # What is in it is anything at first.
    made = [12345] * shape if isinstance(shape, int) else np.full(shape, 12345, object)
    return local.block.arrays.setdefault(local.n_array, made)


def _pairs(address: Any, apart: int, n: int, otherwise: float) -> list[float]:
    """See attend_ends.pairs."""
    there = range(16)
    found = [_at(address + apart * i, ctypes.c_float * 2)[:] if i < n else None for i in there]
    return [x for pair in found for x in (pair if pair is not None else (otherwise, 0.0))]


def _table_word(type_: GGMLType) -> Callable[[Any], int]:
    """See cuda/linear/dequant.py: of IQ1, with 1 added."""
    plus = np.int8(1 if type_.name.startswith("IQ1") else 0)
    words = (grid_of(type_) + plus).reshape(-1).view(np.uint32)
    return lambda i: int(words[int(i)])


def _siblings_of(head_dim: int) -> tuple[Any, Any, Any]:
    """See cuda/select/metered.py."""
    n = head_dim // 16

    def words(address: Any, n_word: int, apart: int) -> np.ndarray:
        at = (int(address) + apart * i for i in range(n))
        return np.array([_at(p, ctypes.c_uint8 * (4 * n_word))[:] for p in at], np.uint8)

    def multiply(four: Any, head: Any) -> tuple[Any, ...]:
        rows = four.view(np.int8).reshape(n, 4, 4).astype(int)
        return tuple((rows * head.view(np.int8).astype(int)[:, None]).sum(axis=(0, 2)).tolist())

    return lambda p: words(p, 4, 64), lambda p: words(p, 1, 16), multiply


def _reading(type_: str, head_dim: int) -> Callable[[Any, Any], tuple[Any, ...]]:
    """See cuda/kv/kv_rows.py."""
    kind = kv_row(type_, head_dim)

    def read(row: Any, d: Any) -> tuple[Any, ...]:
        found = np.frombuffer(_at(row, ctypes.c_uint8 * kind.itemsize), kind)
        return tuple(numbers(found)[0, int(d) : int(d) + 8].astype(np.float32))

    return read


def _staging(n: int, heads: int, row_of: Any, type: str = "f16") -> Any:
    """See cuda/attention/score.py: a key a thread, in place of matrix units."""
    read, f32 = _reading(type, n), _loading(ctypes.c_float, float)

    def stage(shared: int, q: int, n_q: int, rows: Any, start: int) -> None:
        row = row_of(rows, start + local.thread)
        key = [float(x) for d in range(0, n, 8) for x in read(row, d)] if row else [0.0] * n
        for i in range(n_q):
            product = sum(f32(q + 4 * (n * i + d)) * key[d] for d in range(n))
            local.block.shared[shared + ROW * i + 4 * local.thread] = product
        local.block.barrier.wait()

    return stage


def _loading_words(n: int) -> Callable[[Any], tuple[int, ...]]:
    """See cuda/select/key_copy.py."""
    return lambda address: tuple(_at(address, ctypes.c_uint32 * n))


def _loading_heads(n: int) -> Callable[[Any], tuple[int, ...]]:
    """See cuda/select/key_copy.py."""
    return lambda address: tuple(_low(local.block.shared[int(address) + 128 * i]) for i in range(n))


def _multiplying_heads(n_word: int, bits: int) -> Callable[..., tuple[int, ...]]:
    """See cuda/select/key_copy.py: every lane has its part of heads and keys."""

    def numbers_of(words: Any, bits: int) -> np.ndarray:
        bytes_ = np.array([_low(w) for w in words], np.uint32).view(np.uint8).reshape(-1, 4)
        if bits == 4:
            bytes_ = np.stack([bytes_ & 15, bytes_ >> 4], axis=1)
        return (bytes_ if bits == 4 else bytes_.view(np.int8)).reshape(-1).astype(int)

    def multiply(heads: Any, first: Any, second: Any, key: Any, other: Any) -> tuple[int, ...]:
        parts = [numbers_of(heads, 8), numbers_of(key, bits), numbers_of(other, bits)]
        lanes = exchanged(parts)
        head, one, two = (
            np.array([np.concatenate([lanes[4 * g + t][i] for t in range(4)]) for g in range(8)])
            for i in range(3)
        )
        assert head.shape == one.shape == (8, 32 * n_word)
        (g, t), sums = divmod(local.thread % 32, 4), (int(first), int(second))
        found = [sums[i] + head[2 * t + i] @ keys[g] for keys in (one, two) for i in range(2)]
        return tuple(map(int, found))

    return multiply


def _add_i32(address: Any, value: Any) -> int:
    there = _at(address, ctypes.c_int32)
    there.value += int(value)
    return int(there.value) - int(value)


MEANINGS: dict[str, Any] = {
    "loading_words": _loading_words,
    "loading_heads": _loading_heads,
    "multiplying_heads": _multiplying_heads,
    "add_i32": _add_i32,
    "pack_f16": lambda low, high: int(np.array([low, high], np.float16).view(np.uint32)[0]),
    "device": lambda function: function,
    "staging": _staging,
    "thread": lambda: local.thread,
    "threads": lambda: 32 * len(local.block.warps),
    "lane": lambda: local.thread % 32,
    "warp": lambda: local.thread // 32,
    "sync_block": lambda: local.block.barrier.wait(),
    "fence": lambda: None,
    "equal_lanes": _equal_lanes,
    "count_one": _count_one,
    "count_bits": lambda x: _low(x).bit_count(),
    "address": int,
    "load_i32": _loading(ctypes.c_int32),
    "load_i64": _loading(ctypes.c_int64),
    "load_f16": lambda address: np.float32(_half(address)[0]),
    "load_f32": _loading(ctypes.c_float, np.float32),
    "load_f64": _loading(ctypes.c_double, float),
    "load_u128": _u128,
    "load_f32x8": lambda address: tuple(map(np.float32, _at(address, ctypes.c_float * 8))),
    "const_i64": _loading(ctypes.c_int64),
    "const_f32": _loading(ctypes.c_float, np.float32),
    "const_u128": _u128,
    "const_f16": lambda address: np.float32(_half(address)[0]),
    "const_i8": _loading(ctypes.c_int8, np.float32),
    "const_u8": _loading(ctypes.c_uint8),
    "const_u16": _loading(ctypes.c_uint16),
    **dict.fromkeys(("words", "words_even", "words_any"), _device_words),
    "bytes_f32": _bytes_f32(np.uint8),
    "signed_bytes_f32": _bytes_f32(np.int8),
    "bytes_f16": _bytes_f16(np.uint8, 1024),
    "signed_bytes_f16": _bytes_f16(np.int8, 1152),
    "copy_async": _copy_async,
    "copy_commit": _copy_commit,
    **{f"wait_for_{name}": _copy_wait(n) for n, name in enumerate(("all", "one", "two"))},
    "affine8": lambda x, d, m: tuple(np.float32(each * d + m) for each in x),
    "f16x8": _f16x8,
    "mma_f16": _mma_f16,
    "store_i32": _storing(ctypes.c_int32),
    "store_i64": _storing(ctypes.c_int64),
    "store_f32": _storing(ctypes.c_float, float),
    "store_f16": _store_f16,
    "store_i8": lambda address, value: setattr(_at(address, ctypes.c_uint8), "value", int(value)),
    "store_u128": _store_u128,
    "or_i64": _or_i64,
    "SHARED": SHARED,
    "sync_warp": lambda: exchanged(0),
    "sync_threads": _sync_threads,
    "barrier_init": _barrier_init,
    "barrier_shown": lambda: None,
    "barrier_expect": lambda address, n_byte: _come(address, 1, n_byte),
    "barrier_arrive": lambda address: _come(address, 1, 0),
    "barrier_ended": _barrier_ended,
    "copy_bulk": _copy_bulk,
    "dot_s8": _dot(True),
    "dot_u8": _dot(False),
    "bytes_of_two": _bytes_of_two,
    "field": lambda w, shift, mask: _low(w) >> int(shift) & mask,
    "fields": lambda w, shift, mask: tuple(_low(x) >> int(shift) & mask for x in w),
    "join": lambda w, other, shift: _low(_low(w) | _low(other) << int(shift)),
    "joined": lambda w, other, shift: tuple(
        _low(x | y << int(shift)) for x, y in zip(w, other, strict=True)
    ),
    "bits_to_bytes": _bits_to_bytes,
    **{f"{type_.name.lower()}_word": _table_word(type_) for type_ in SHAPES},
    "half_f32": lambda w: np.float32(np.array([_low(w) & 0xFFFF], np.uint16).view(np.float16)[0]),
    "bits_f32": lambda w: np.array([_low(w)], np.uint32).view(np.float32)[0],
    "reciprocal": lambda x: np.float32(1) / np.float32(x),
    "inverse_root": lambda x: np.float32(1 / math.sqrt(x)),
    "rounded": lambda x: int(np.rint(x)),
    "reading": _reading,
    "siblings_of": _siblings_of,
    **dict.fromkeys(("keep", "keep_u32", "keep_f32"), lambda x: x),
    "shared_address": lambda _array: 0,
    "load_shared": lambda address: np.float32(local.block.shared[int(address)]),
    "store_shared_f32": lambda address, value: local.block.shared.update({int(address): value}),
    "load_shared_f32x8": lambda address: tuple(
        np.float32(local.block.shared[int(address) + 4 * i]) for i in range(8)
    ),
    "store_shared_f32x8": lambda address, values: local.block.shared.update(
        {int(address) + 4 * i: value for i, value in enumerate(values)}
    ),
    "store_f32x8": lambda address, values: _at(address, ctypes.c_float * 8).__setitem__(
        slice(None), list(map(float, values))
    ),
    "load_shared_u128": _shared_words(4, 16),
    "store_shared_u128": _store_shared,
    "load_shared_i32": lambda address: int(local.block.shared[int(address)]),
    "store_shared_i32": lambda address, value: local.block.shared.update(
        {int(address): _int32(value)}
    ),
    "shuffle": lambda x, other: exchanged(x)[int(other) % 32],
    "shuffle_xor": lambda x, other: exchanged(x)[local.thread % 32 ^ int(other)],
    "shuffle_i32": lambda x, other: exchanged(x)[int(other) % 32],
    "ballot": lambda x: sum(1 << i for i, other in enumerate(exchanged(x)) if other),
    "lowest_of_warp": lambda x: min(exchanged(x)),
    "quotient": lambda x, y: _low(x) // _low(y),
    "remainder": lambda x, y: _low(x) % _low(y),
    "ordered": _ordered,
    "exp2": lambda x: np.float32(2.0 ** float(x)) if x > -126 else np.float32(0),
    "pairs": _pairs,
    "int32": _int32,
    "int64": lambda x: ctypes.c_int64(int(x)).value,
    "uint32": _low,
    "float32": np.float32,
    "float64": float,
    "math": math,
    "cuda": types.SimpleNamespace(
        syncwarp=lambda: exchanged(0),
        shared=types.SimpleNamespace(array=_array),
        atomic=types.SimpleNamespace(add=_atomic_add, or_=_atomic_or),
    ),
}


@contextmanager
def as_python(*modules: Any) -> Iterator[None]:
    """Give what these modules of kernels name the meaning that it has in Python."""
    kept = [(module, dict(vars(module))) for module in modules]
    cells: list[tuple[Any, Any]] = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in MEANINGS:
                setattr(module, name, MEANINGS[name])
            elif hasattr(value, "py_func"):
                setattr(module, name, _plain(value, cells))
            elif isinstance(value, dict) and any(hasattr(x, "py_func") for x in value.values()):
                setattr(module, name, {k: _plain(x, cells) for k, x in value.items()})
    try:
        yield
    finally:
        for module, names in kept:
            vars(module).update(names)
        for cell, value in cells:
            cell.cell_contents = value


def _plain(value: Any, cells: list[tuple[Any, Any]]) -> Any:
    """The Python of a device function, and of those that it was made with."""
    for cell in value.py_func.__closure__ or ():
        made_with = cell.cell_contents
        if hasattr(made_with, "py_func"):
            cells.append((cell, made_with))
            cell.cell_contents = _plain(made_with, cells)
    return value.py_func


def run_block(body: Callable[[], Any], n_thread: int, arrays: Sequence[np.ndarray]) -> None:
    """Run a block's threads over these arrays. Raises what the first of them that fails raises."""
    memory[:] = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays]
    block = local.block = Block(n_thread)

    def run(thread: int) -> None:
        local.thread, local.n_array = thread, 0
        with np.errstate(all="ignore"):
            body()
        block.n_change += 1

    waiting, n_change, n_idle = [(greenlet(run), i) for i in range(n_thread)], 0, 0
    for one, thread in waiting:
        one.switch(thread)
    while waiting := [(one, thread) for one, thread in reversed(waiting) if not one.dead]:
        n_idle = n_idle + 1 if block.n_change == n_change else 0
        assert n_idle < PATIENCE, f"threads {sorted(i for _, i in waiting)} wait for ever"
        n_change = block.n_change
        for one, _ in waiting:
            one.switch()


def _both(launch: Any, *given: Any) -> None:
    handed = launch.start(*given) if launch.start is not None else None
    launch.kernel(*given, *([handed] if launch.hands_on else []))


ELEMENTS = {
    "f16": None, "f32": ctypes.c_float, "f64": ctypes.c_double, "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
}  # fmt: skip
BYTES = {"f16": 2, "f32": 4, "f64": 8, "i8": 1, "u8": 1, "u16": 2, "i32": 4, "i64": 8}


class Viewed(int):
    """See jit_kernels/common/view.py: an address that [] reads and writes elements at."""

    element: str
    strides: tuple[int, ...]

    @classmethod
    def of(cls, address: int, element: str, strides: Sequence[int]) -> "Viewed":
        """The View at an address; strides: of all dimensions, in elements."""
        view = cls(address)
        view.element, view.strides = element, tuple(strides)
        return view

    def _at(self, index: Any) -> tuple[int, tuple[int, ...]]:
        each = index if isinstance(index, tuple) else (index,)
        apart = zip(each, self.strides[: len(each)], strict=True)
        offset = sum(int(i) * stride for i, stride in apart)
        return int(self) + BYTES[self.element] * offset, self.strides[len(each) :]

    def __getitem__(self, index: Any) -> Any:
        at, rest = self._at(index)
        if rest:
            return Viewed.of(at, self.element, rest)
        if self.element == "f16":
            return np.float32(_half(at)[0])
        value = _at(at, ELEMENTS[self.element]).value
        return np.float32(value) if self.element == "f32" else value

    def __setitem__(self, index: Any, value: Any) -> None:
        at, rest = self._at(index)
        assert not rest
        if self.element == "f16":
            _half(at)[0] = value
        else:
            as_ = float if self.element[0] == "f" else int
            _at(at, ELEMENTS[self.element]).value = as_(value)


def of_workers(kernel: Any) -> Launch:
    """The launch of a kernel of common/, whose workers are threads."""

    def each_thread(tid: int, n_thread: int, a: Any) -> None:
        n = 32 * len(local.block.warps)
        kernel(n * tid + local.thread, n * n_thread, a)

    return Launch(each_thread)


def record_of(call: Any, constants: dict[str, Any]) -> Any:
    """The record of a call as kernels take it: typed arrays are Views."""
    op = call.spec.op
    fields = dict(zip(op.fields, call.values, strict=True))

    def known(size: Any) -> int:
        return int((constants | fields)[size] if isinstance(size, str) else size)

    for name, kind in op.arrays.items():
        sizes = [evaluate(size, known) for size in kind.shape[1:]]
        strides = [math.prod(sizes[i:]) for i in range(len(kind.shape))]
        fields[name] = Viewed.of(fields[name], kind.element, strides)
    return op.values(**fields)


class OnThreads:
    """What op tests ask of a backend: see guarded.on_gpu. The ops' files must be `as_python`."""

    def __init__(self, n_block: int = 2) -> None:
        self._n_block = n_block

    def link(self, program: Any) -> Any:
        """The Program itself."""
        return program

    def run(self, program: Any) -> None:
        """Run its ops, a block after the other: of their launches those for so many rows."""
        arrays = list(program.arrays.values())
        for call in program.calls:
            module = importlib.import_module(module_of("cuda", call.spec.op))
            constants = dict(zip(call.spec.op.constants, call.spec.constants, strict=True))
            fields = dict(zip(call.spec.op.fields, call.values, strict=True))
            step = program.arrays.get(fields.get("step", 0))
            rows = class_of(1 if step is None else int(step.reshape(-1)[0]))
            found = getattr(module, call.spec.op.name)(**constants)
            for launch in found if isinstance(found, list) else [of_workers(found)]:
                if launch.rows != "any" and rows not in launch.rows.split():
                    continue
                for tid in range(self._n_block):
                    record = record_of(call, constants)
                    body = partial(_both, launch, tid, self._n_block, record)
                    run_block(body, MOST if launch.any_size else launch.threads, arrays)

    def fetch(self, *arrays: np.ndarray) -> None:
        """Nothing: it is the same memory."""
