"""CRC-32C of rows: the instruction of SSE4.2 or AArch64, or bit by bit if a CPU lacks it."""

from typing import Any

from numba import njit

from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.intrinsic import (
    I8,
    I32,
    I64,
    call,
    int64,
    load_i64,
    load_u8,
    op,
    pointer,
    store_i32,
)

POLYNOMIAL = 0x82F63B78  # reflected: bit 31 is the term of degree 0
ALL_ONES = 0xFFFFFFFF


@op(int64, int64)
def _load_word(b, p):
    """The 8 bytes at p (any alignment)."""
    return b.load(pointer(b, p, I64), align=1)


@op(int64, int64, int64)
def _crc_word(b, crc, word):
    """The checksum after 8 more bytes."""
    if features.current().dotprod:
        return b.zext(call(b, "llvm.aarch64.crc32cx", I32, [b.trunc(crc, I32), word]), I64)
    return call(b, "llvm.x86.sse42.crc32.64.64", I64, [crc, word])


@op(int64, int64, int64)
def _crc_byte(b, crc, byte):
    """The checksum after one more byte."""
    if features.current().dotprod:
        low = [b.trunc(crc, I32), b.trunc(byte, I32)]
        return b.zext(call(b, "llvm.aarch64.crc32cb", I32, low), I64)
    low = [b.trunc(crc, I32), b.trunc(byte, I8)]
    return b.zext(call(b, "llvm.x86.sse42.crc32.32.8", I32, low), I64)


@njit
def _bits(crc, value, n_bit):
    crc ^= value
    for _ in range(n_bit):
        crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
    return crc


@njit
def _slow_byte(crc, byte):
    return _bits(crc, byte, 8)


@njit
def _slow_word(crc, word):
    for i in range(8):
        crc = _bits(crc, (word >> (8 * i)) & 255, 8)
    return crc


def _steps() -> tuple[Any, Any, Any]:
    """The functions word and byte, which update a checksum by 8 bytes and by one, and rest."""
    fast = features.current().crc32
    word, byte = (_crc_word, _crc_byte) if fast else (_slow_word, _slow_byte)

    @njit
    def rest(crc, p, end):
        while p + 8 <= end:
            crc = word(crc, _load_word(p))
            p += 8
        while p < end:
            crc = byte(crc, load_u8(p))
            p += 1
        return crc

    return word, byte, rest


def summing() -> Any:
    """The function that gives the checksum of n bytes at p."""
    _, _, rest = _steps()

    @njit
    def sum_of(p, n):
        return rest(ALL_ONES, p, p + n) ^ ALL_ONES

    return sum_of


def crc32c() -> Any:
    """Kernel of CRC32C: threads stride over four rows."""
    word, _, rest = _steps()

    def kernel(tid, n_thread, a):
        whole = a.size // 8 * 8
        for i in range(4 * tid, a.n // 4 * 4, 4 * n_thread):
            # The instruction takes three cycles and one can start in each, hence four chains at
            # once.
            p = a.data + a.size * load_i64(a.rows + 8 * i)
            q = a.data + a.size * load_i64(a.rows + 8 * i + 8)
            r = a.data + a.size * load_i64(a.rows + 8 * i + 16)
            s = a.data + a.size * load_i64(a.rows + 8 * i + 24)
            b = c = d = e = ALL_ONES
            for at in range(0, whole, 8):
                b = word(b, _load_word(p + at))
                c = word(c, _load_word(q + at))
                d = word(d, _load_word(r + at))
                e = word(e, _load_word(s + at))
            store_i32(a.sums + 4 * i, rest(b, p + whole, p + a.size) ^ ALL_ONES)
            store_i32(a.sums + 4 * i + 4, rest(c, q + whole, q + a.size) ^ ALL_ONES)
            store_i32(a.sums + 4 * i + 8, rest(d, r + whole, r + a.size) ^ ALL_ONES)
            store_i32(a.sums + 4 * i + 12, rest(e, s + whole, s + a.size) ^ ALL_ONES)
        if tid == 0:
            for i in range(a.n // 4 * 4, a.n):
                p = a.data + a.size * load_i64(a.rows + 8 * i)
                store_i32(a.sums + 4 * i, rest(ALL_ONES, p, p + a.size) ^ ALL_ONES)

    return kernel
