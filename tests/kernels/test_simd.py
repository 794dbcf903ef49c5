"""The SIMD vocabulary against NumPy, operation by operation, at every level the CPU can run."""

import math

import numpy as np
import pytest
from levels import EMULATED, call, run_at
from numba import njit

from tamis.jit_kernels.cpu.lang import features, simd
from tamis.jit_kernels.cpu.lang.intrinsic import (
    load_f16,
    load_f32,
    load_i64,
    store_f16,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cpu.lang.simd import (
    bits_above,
    bits_at_least,
    bits_from,
    bits_to_bytes,
    byte_table,
    bytes_of,
    count_at_least,
    count_bits,
    dot_i8,
    dot_i16,
    dot_u8,
    doubled,
    doubled_halves,
    even_lanes,
    fma,
    high_half,
    hmax,
    hsum,
    join,
    lane,
    load_f32x16,
    load_i32x16,
    low_half,
    lowest_bit,
    nibbles,
    nibbles_in_place,
    nibbles_of_two,
    nibbles_of_two_in_place,
    odd_lanes,
    pack_at_least,
    pairs_of_halves,
    repeat,
    rotated_pairs,
    round_i32,
    shift_left,
    shift_right,
    shift_right_signed,
    sign_like,
    sixteenth_of_odd_runs,
    store_chosen,
    store_i8x8,
    to_f32,
    twice,
    two_eights,
    vabs,
    vexp,
    vmax,
    vmin,
    vsqrt,
    widen,
    widen_unsigned,
)  # fmt: skip
from tamis.jit_kernels.cpu.runtime.compiler import OPTIONS

LEVELS = ["generic", "avx2", "avx2-vnni", "avx512", "avx512-vnni", *EMULATED]
DTYPES = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "f32": np.float32}


def op_of(verb, vec):
    return getattr(simd, f"{verb}_{vec}")


def result(kernel, out, *arrays):
    """The kernel's output; its code must call nothing but itself."""
    call(njit(**OPTIONS)(kernel), out, *arrays)
    return out


def numbers(vec, n_vector=1, seed=0):
    """Random lanes of a vector type named as in simd.py, over its whole range or normal."""
    kind, n = vec.split("x")
    rng = np.random.default_rng(seed)
    if kind == "f32":
        return rng.standard_normal(int(n) * n_vector).astype(np.float32)
    info = np.iinfo(DTYPES[kind])
    return rng.integers(info.min, info.max, int(n) * n_vector, DTYPES[kind], endpoint=True)


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


INTEGERS = ["i8x16", "i8x32", "i8x64", "i16x16", "i16x32", "i32x8", "i32x16"]


def check_integer_operators(vec):
    load, store, splat = op_of("load", vec), op_of("store", vec), op_of("splat", vec)
    n = numbers(vec).nbytes

    def kernel(out, a, b):
        x, y = load(a), load(b)
        z = x + y
        z += x
        store(out, z)
        store(out + n, x - y)
        store(out + 2 * n, x & y)
        store(out + 3 * n, (x | y) ^ splat(3))
        store(out + 4 * n, vmax(x, y))
        store(out + 5 * n, vmin(x, y))
        store(out + 6 * n, vabs(x))
        store(out + 7 * n, shift_right(x, 3))
        store(out + 8 * n, shift_left(x, 3))
        store(out + 9 * n, join(high_half(x), low_half(x)))
        store(out + 10 * n, shift_right_signed(x, 3))

    a, b = numbers(vec, seed=1), numbers(vec, seed=2)
    found = result(kernel, np.empty((11, len(a)), a.dtype), a, b)
    unsigned = a.view(a.dtype.name.replace("int", "uint"))
    expected = [
        a + b + a, a - b, a & b, (a | b) ^ 3, np.maximum(a, b), np.minimum(a, b), np.abs(a),
        (unsigned >> 3).view(a.dtype), a << 3, np.roll(a, len(a) // 2), a >> 3,
    ]  # fmt: skip
    for row, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(row, want)


@pytest.mark.parametrize("vec", INTEGERS)
def test_integer_operators_wrap_as_numpy_does(level, vec):
    run_at(level, check_integer_operators, vec)


def check_count(vec):
    load = op_of("load", vec)

    def kernel(out, a, b):
        store_i64(out, count_at_least(load(a), load(b)))

    for seed in range(5):
        a, b = numbers(vec, seed=seed), numbers(vec, seed=seed + 10)
        a[:2], b[0], b[1] = b[:2], a[0], -(2**31)
        found = result(kernel, np.empty(1, np.int64), a, b)
        assert found[0] == (a >= b).sum()


def check_bits():
    def kernel(out, a, b, x, y):
        store_i64(out, bits_at_least(load_i32x16(a), load_i32x16(b)))
        store_i64(out + 8, bits_above(load_f32x16(x), load_f32x16(y)))
        store_i64(out + 16, bits_from(load_i64(out), load_i64(out + 8), 63))
        store_i64(out + 24, bits_from(-2, 5, 0))
        store_i64(out + 32, lowest_bit(load_i64(out + 8)))
        store_i64(out + 40, count_bits(load_i64(out)))

    def word(lanes):
        return sum(1 << i for i in np.flatnonzero(lanes).tolist())

    a, b = numbers("i32x16", seed=1), numbers("i32x16", seed=2)
    x, y = numbers("f32x16", seed=3), numbers("f32x16", seed=4)
    a[:2], y[:3], x[15], y[15] = b[:2], x[:3], 1, 0
    found = result(kernel, np.empty(6, np.int64), a, b, x, y).tolist()
    first, second = word(a >= b), word(x > y)
    lowest = int(np.flatnonzero(x > y)[0])
    both = (second << 64 | first) >> 63
    assert found == [first, second, both, -2, lowest, int((a >= b).sum())]


def test_comparisons_give_words_of_bits(level):
    run_at(level, check_bits)


def check_chosen(vec, bits):
    load = op_of("load", vec)

    def kernel(out, a, b):
        store_chosen(out + 4, load(a), load_i64(b))

    a = numbers(vec, seed=3)
    found = result(kernel, np.zeros(18, a.dtype), a, np.array([bits]))
    picks = [i for i in range(16) if bits >> i & 1]
    assert found[0] == found[17] == 0, "a whole vector at most"
    np.testing.assert_array_equal(found[1 : 1 + len(picks)], a[picks])


@pytest.mark.parametrize("bits", [0, 1, 0b1000_0110_0000_0101, 0xFFFF])
@pytest.mark.parametrize("vec", ["i32x16", "f32x16"])
def test_chosen_lanes_are_written_one_after_the_other(level, vec, bits):
    run_at(level, check_chosen, vec, bits)


@pytest.mark.parametrize("vec", ["i32x8", "i32x16"])
def test_lanes_at_least_those_of_another_are_counted(level, vec):
    run_at(level, check_count, vec)


def check_packing(vec):
    load, n = op_of("load", vec), int(vec[4:])

    def kernel(out, items, x, bar):
        pack_at_least(out, load(items), load(x), load(bar))

    for seed in range(5):
        items, x, bar = (numbers(vec, seed=seed + i) for i in (0, 10, 20))
        x[0] = bar[0]
        kept = items[x >= bar]
        found = result(kernel, np.full(n, 7, np.int32), items, x, bar)
        np.testing.assert_array_equal(found, [*kept, *[7] * (n - len(kept))])


@pytest.mark.parametrize("vec", ["i32x8", "i32x16"])
def test_kept_items_lie_together(level, vec):
    run_at(level, check_packing, vec)


def check_float_operators(vec):
    load, store, splat = op_of("load", vec), op_of("store", vec), op_of("splat", vec)
    broadcast = getattr(simd, f"broadcast_f32_x{vec[4:]}")
    n = numbers(vec).nbytes

    def kernel(out, a, b):
        x, y = load(a), load(b)
        store(out, x + y - splat(2.0))
        store(out + n, x * y)
        store(out + 2 * n, x / y)
        store(out + 3 * n, fma(x, y, x))
        store(out + 4 * n, vmax(x, y))
        store(out + 5 * n, vmin(x, y))
        store(out + 6 * n, vsqrt(vabs(x)))
        store(out + 7 * n, broadcast(a + 4))
        store(out + 8 * n, x)
        store_f32(out + 8 * n, hsum(x))
        store_f32(out + 8 * n + 4, hmax(x))

    a, b = numbers(vec, seed=1), numbers(vec, seed=2)
    found = result(kernel, np.empty((9, len(a)), np.float32), a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    expected = [
        x + y - 2, x * y, x / y, x * y + x, np.maximum(x, y), np.minimum(x, y), np.abs(x) ** 0.5,
        np.full(len(a), x[1]), np.concatenate([[x.sum(), x.max()], x[2:]]),
    ]  # fmt: skip
    # Two or three roundings of numbers of magnitude 1; a quotient of a small divisor is larger.
    for row, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, want, rtol=5e-7, atol=1e-6)


@pytest.mark.parametrize("vec", ["f32x8", "f32x16"])
def test_float_operators(level, vec):
    run_at(level, check_float_operators, vec)


def check_halves(n):
    load, store = getattr(simd, f"load_f16x{n}"), getattr(simd, f"store_f16x{n}")
    broadcast = getattr(simd, f"broadcast_f16_x{n}")
    load_f, store_f = getattr(simd, f"load_f32x{n}"), getattr(simd, f"store_f32x{n}")
    brain = getattr(simd, f"load_bf16x{n}")

    def widening(out, h, n_half):
        for i in range(0, n_half, n):
            store_f(out + 4 * i, load(h + 2 * i))

    def narrowing(out, x, n_float):
        for i in range(0, n_float, n):
            store(out + 2 * i, load_f(x + 4 * i))

    def others(out, h):
        store_f(out, broadcast(h + 6))
        store_f(out + 4 * n, brain(h))

    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    wide = np.empty(65536, np.float32)
    compiled = njit(**OPTIONS)(widening)
    call(compiled, wide, every, 65536)
    np.testing.assert_array_equal(wide, every.astype(np.float32))

    # Every half, the middle to the next one, and both neighbours of that middle.
    exact = np.sort(wide[np.isfinite(wide)])
    middle = (exact[:-1] / 2 + exact[1:] / 2).astype(np.float32)
    around = [exact, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    extreme = [
        65519.99,
        65520,
        65536,
        1e30,
        -1e30,
        np.inf,
        -np.inf,
        np.nan,
        1e-30,
        -0.0,
        2e-8,
        3e-8,
    ]
    x = np.concatenate([*around, extreme]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % n, np.float32)])
    narrow = np.empty(len(x), np.float16)
    compiled = njit(**OPTIONS)(narrowing)
    call(compiled, narrow, x, len(x))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(narrow, expected)
    np.testing.assert_array_equal(np.signbit(narrow), np.signbit(expected))

    h = numbers("i16x16")
    found = result(others, np.empty((2, n), np.float32), h)
    np.testing.assert_array_equal(found[0], np.full(n, h.view(np.float16)[3], np.float32))
    np.testing.assert_array_equal(found[1], (h[:n].astype(np.int32) << 16).view(np.float32))


@pytest.mark.parametrize("n", [8, 16])
def test_halves_widen_and_round_as_ieee_says(level, n):
    run_at(level, check_halves, n)


def check_conversions(n):
    load_f, store_f = getattr(simd, f"load_f32x{n}"), getattr(simd, f"store_f32x{n}")
    load_i, store_i = getattr(simd, f"load_i32x{n}"), getattr(simd, f"store_i32x{n}")
    low_bytes = getattr(simd, f"store_low_bytes_x{n}")
    low_words = getattr(simd, f"store_low_words_x{n}")

    def kernel(out, x, i):
        rounded = round_i32(load_f(x))
        store_i(out, rounded)
        store_f(out + 4 * n, to_f32(load_i(i)))
        low_bytes(out + 8 * n, rounded)
        low_words(out + 9 * n, rounded)
        store_i32(out + 12 * n, hsum(rounded))
        store_i32(out + 12 * n + 4, hmax(rounded))

    ties = np.array(
        [0.5, 1.5, -0.5, -1.5, 2.5, -2.5, 126.5, -127, 0, -0.49, 0.51, 3, 7.5, -7.5, 9, 1]
    )
    x, i = ties[:n].astype(np.float32), numbers(f"i32x{n}")
    out = result(kernel, np.zeros((4, n), np.int32), x, i)
    want = np.rint(x).astype(np.int32)
    np.testing.assert_array_equal(out[0], want)
    np.testing.assert_array_equal(out[1].view(np.float32), i.astype(np.float32))
    np.testing.assert_array_equal(out[2].view(np.int8)[:n], want.astype(np.int8))
    np.testing.assert_array_equal(out[2].view(np.int8)[n : 3 * n].view(np.int16), want)
    assert list(out[3][:2]) == [want.sum(), want.max()]


@pytest.mark.parametrize("n", [8, 16])
def test_rounding_is_to_nearest_even(level, n):
    run_at(level, check_conversions, n)


def check_single_halves():
    def widening(out, h):
        for i in range(65536):
            store_f32(out + 4 * i, load_f16(h + 2 * i))

    def narrowing(out, x):
        for i in range(4096):
            store_f16(out + 2 * i, load_f32(x + 4 * i))

    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    wide = result(widening, np.empty(65536, np.float32), every)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    # Magnitudes from below the smallest half to above the largest, and ties between two.
    x = np.geomspace(1e-9, 1e6, 4096).astype(np.float32) * np.tile([1, -1], 2048).astype("f4")
    x[:8] = [1 + 2**-11, 1 + 3 * 2**-11, 65519.99, 65520, np.inf, -np.inf, 0, -0.0]
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    found = result(narrowing, np.empty(4096, np.float16), x)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_single_halves_widen_and_round_the_same(level):
    run_at(level, check_single_halves)


def check_lane(n):
    load = op_of("load", f"f32x{n}")

    def kernel(out, x, order):
        store_f32(out, lane(load(x), 0))
        store_f32(out + 4, lane(load(x), n - 1))
        for i in range(n):
            store_f32(out + 8 + 4 * i, lane(load(x), load_i64(order + 8 * i)))

    x, order = numbers(f"f32x{n}"), np.random.default_rng(6).permutation(n)
    out = result(kernel, np.empty(n + 2, np.float32), x, order)
    np.testing.assert_array_equal(out, x[[0, n - 1, *order]])


@pytest.mark.parametrize("n", [8, 16])
def test_a_lane_is_found_by_a_literal_or_a_variable(level, n):
    run_at(level, check_lane, n)


def check_odd_runs():
    load, store = simd.load_f32x16, simd.store_f32x16

    def kernel(out, x):
        store(out, sixteenth_of_odd_runs(load(x), 4))
        store(out + 64, sixteenth_of_odd_runs(load(x), 8))

    x = numbers("f32x16")
    out = result(kernel, np.empty((2, 16), np.float32), x)
    for row, run in zip(out, (4, 8), strict=True):
        factors = np.where(np.arange(16) // run % 2, 1 / 16, 1).astype(np.float32)
        np.testing.assert_array_equal(row, x * factors)


def test_odd_runs_of_lanes_are_divided_by_16(level):
    run_at(level, check_odd_runs)


def check_scales_of_blocks():
    store, store_four = simd.store_f32x16, simd.store_f32x4

    def kernel(out, x, h):
        four = doubled(load_f32(x), load_f32(x + 4))
        store_four(out, four)
        store_four(out + 16, doubled_halves(h + 2, 10, 2))
        store_four(out + 32, pairs_of_halves(h + 4, 24, 2))
        simd.store_f32x8(out + 48, doubled_halves(h + 2, 6, 4))
        simd.store_f32x8(out + 80, pairs_of_halves(h + 2, 6, 4))
        store(out + 112, two_eights(pairs_of_halves(h + 4, 24, 2), 0))
        store(out + 176, two_eights(pairs_of_halves(h + 2, 6, 4), 4))

    x, h = numbers("f32x8"), numbers("f32x16").astype(np.float16)
    h[1] = 2.0**-24  # the smallest
    out = result(kernel, np.empty(60, np.float32), x, h)
    expected = [*x[[0, 0, 1, 1]], *h[[1, 1, 6, 6]], *h[[2, 3, 14, 15]]]
    expected += [*np.repeat(h[[1, 4, 7, 10]], 2), *h[[1, 2, 4, 5, 7, 8, 10, 11]]]
    np.testing.assert_array_equal(out[:28], np.array(expected, np.float32))
    np.testing.assert_array_equal(out[28:44], np.repeat(h[[2, 14]], 8).astype(np.float32))
    np.testing.assert_array_equal(out[44:], np.repeat(h[[7, 10]], 8).astype(np.float32))


def test_scales_of_blocks_are_spread(level):
    run_at(level, check_scales_of_blocks)


def check_two_blocks():
    def kernel(out, a, word):
        simd.store_i8x64(out, nibbles_of_two(a + 1, a + 30))
        simd.store_i8x64(out + 64, bits_to_bytes(load_i64(word), 16))
        simd.store_i8x64(out + 128, nibbles_of_two_in_place(a + 1, a + 30))

    a = numbers("i8x64", seed=3)
    word = np.array([0x8421_F00D_1234_ABCD], np.uint64).view(np.uint8)
    out = result(kernel, np.zeros((3, 64), np.int8), a, word)
    blocks = [a[at : at + 16].view(np.uint8) for at in (1, 30)]
    expected = [part for block in blocks for part in (block & 15, block >> 4)]
    np.testing.assert_array_equal(out[0], np.concatenate(expected))
    np.testing.assert_array_equal(out[1], 16 * np.unpackbits(word, bitorder="little"))
    in_place = [part for block in blocks for part in (block & 15, block & 0xF0)]
    np.testing.assert_array_equal(out[2].view(np.uint8), np.concatenate(in_place))


def test_nibbles_and_fifth_bits_of_two_blocks(level):
    run_at(level, check_two_blocks)


def check_alternate_lanes(n):
    load, store = op_of("load", f"f32x{n}"), op_of("store", f"f32x{n // 2}")

    def kernel(out, x):
        store(out, even_lanes(load(x)))
        store(out + 2 * n, odd_lanes(load(x)))

    x = numbers(f"f32x{n}")
    out = result(kernel, np.empty(n, np.float32), x)
    np.testing.assert_array_equal(out, np.concatenate([x[::2], x[1::2]]))


@pytest.mark.parametrize("n", [8, 16])
def test_every_other_lane(level, n):
    run_at(level, check_alternate_lanes, n)


def check_rotation():
    load, store = simd.load_f32x16, simd.store_f32x16

    def kernel(out, x, c, s):
        store(out, rotated_pairs(load(x), simd.load_f32x8(c), simd.load_f32x8(s)))

    x, angle = numbers("f32x16"), np.linspace(-3, 3, 8)
    c, s = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = result(kernel, np.empty(16, np.float32), x, c, s)
    rotated = (x[::2] + 1j * x[1::2].astype(np.float64)) * (c + 1j * s.astype(np.float64))
    # Two products and a sum of magnitude 1.
    np.testing.assert_allclose(out[::2], rotated.real, rtol=0, atol=3e-7)
    np.testing.assert_allclose(out[1::2], rotated.imag, rtol=0, atol=3e-7)


def test_neighbours_are_turned_as_complex_numbers_are(level):
    run_at(level, check_rotation)


LOOKUP = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def check_bytes(n):
    load, store, splat = (op_of(verb, f"i8x{n}") for verb in ("load", "store", "splat"))
    load_half, lookup = op_of("load", f"i8x{n // 2}"), byte_table(LOOKUP)
    quarter = n // 4

    def kernel(out, a, word):
        x = nibbles(load_half(a))
        store(out, x)
        store(out + n, lookup(x))
        store(out + 2 * n, repeat(load(a), 3, quarter, n))
        store(out + 3 * n, twice(load_half(a)))
        store(out + 4 * n, sign_like(splat(7), load(a) | splat(1)))
        store(out + 5 * n, nibbles_in_place(load_half(a)))
        store_i8x8(out + 6 * n, bytes_of(load_i64(word)))

    a = numbers(f"i8x{n}", seed=3)
    word = np.array([0x8421_F00D_1234_ABCD], np.uint64).view(np.uint8)
    out = result(kernel, np.zeros((7, n), np.int8), a, word)
    packed = a[: n // 2].view(np.uint8)
    low_high = np.concatenate([packed & 15, packed >> 4])
    np.testing.assert_array_equal(out[0], low_high)
    np.testing.assert_array_equal(out[1], np.array(LOOKUP)[low_high])
    np.testing.assert_array_equal(out[2], np.repeat(a[3:7], n // 4))
    np.testing.assert_array_equal(out[3], np.tile(a[: n // 2], 2))
    np.testing.assert_array_equal(out[4], 7 * np.sign(a | 1))
    in_place = np.concatenate([packed & 15, packed & 0xF0])
    np.testing.assert_array_equal(out[5].view(np.uint8), in_place)
    np.testing.assert_array_equal(out[6][:8].view(np.uint8), word)


@pytest.mark.parametrize("n", [32, 64])
def test_bytes_are_unpacked_and_looked_up(level, n):
    run_at(level, check_bytes, n)


def check_widening():
    load8, load16 = simd.load_i8x16, simd.load_i16x16
    store16, store32 = simd.store_i16x16, simd.store_i32x16

    def kernel(out, a, b):
        store16(out, widen(load8(a)))
        store16(out + 64, widen_unsigned(load8(a)))
        store32(out + 128, widen(load16(b)))
        store32(out + 192, widen_unsigned(load16(b)))

    a, b = numbers("i8x16"), numbers("i16x16")
    out = result(kernel, np.zeros((4, 16), np.int32), a, b)
    np.testing.assert_array_equal(out[0].view(np.int16)[:16], a)
    np.testing.assert_array_equal(out[1].view(np.int16)[:16], a.view(np.uint8))
    np.testing.assert_array_equal(out[2], b)
    np.testing.assert_array_equal(out[3], b.view(np.uint16))


def test_widening(level):
    run_at(level, check_widening)


def check_dots(n):
    load_w, store_w = op_of("load", f"i32x{n}"), op_of("store", f"i32x{n}")
    load_b, load_h = op_of("load", f"i8x{4 * n}"), op_of("load", f"i16x{2 * n}")

    def kernel(out, acc, u, x, y, h, k):
        start = load_w(acc)
        store_w(out, dot_u8(start, load_b(u), load_b(y)))
        store_w(out + 4 * n, dot_i8(start, load_b(x), load_b(y)))
        store_w(out + 8 * n, dot_i16(start, load_h(h), load_h(k)))

    rng = np.random.default_rng(5)
    acc = rng.integers(-(2**20), 2**20, n, np.int32)
    most = 127 if simd.CPU.neon else 128
    u = rng.integers(0, most, 4 * n, np.uint8, endpoint=True)
    x = numbers(f"i8x{4 * n}")
    y = rng.integers(-127, 127, 4 * n, np.int8, endpoint=True)
    # The largest magnitudes beside each other: sums of two are just inside 16 bits.
    u[:4], x[:4], y[:8] = most, -128, [127, 127, -127, -127, 127, 127, 127, 127]
    h, k = (numbers(f"i16x{2 * n}", seed=s).clip(-32767) for s in (1, 2))
    out = result(kernel, np.zeros((3, n), np.int32), acc, u, x, y, h, k)
    for row, (p, q) in zip(out, ((u, y), (x, y), (h, k)), strict=True):
        products = p.astype(np.int64) * q
        np.testing.assert_array_equal(row, (acc + products.reshape(n, -1).sum(1)).astype(np.int32))


@pytest.mark.parametrize("n", [8, 16])
def test_integer_dots_are_exact(level, n):
    run_at(level, check_dots, n)


def check_exp(n):
    load, store = op_of("load", f"f32x{n}"), op_of("store", f"f32x{n}")

    def kernel(out, x, n_float):
        for i in range(0, n_float, n):
            store(out + 4 * i, vexp(load(x + 4 * i)))

    x = np.linspace(-87.2, 88, 1 << 16).astype(np.float32)
    x[:4] = [0, -1e9, -87.4, -np.inf]
    out = np.empty(len(x), np.float32)
    compiled = njit(**OPTIONS)(kernel)
    call(compiled, out, x, len(x))
    np.testing.assert_array_equal(out[:4], [1, 0, 0, 0])
    # Half a unit in the last place each of the last product and the polynomial, and its own error.
    want = np.exp(x[4:].astype(np.float64))
    assert np.max(np.abs(out[4:] / want - 1)) < 2.0e-7
    assert math.isclose(float(out[-1]), math.exp(88), rel_tol=2e-7)


@pytest.mark.parametrize("n", [8, 16])
def test_exp_is_good_to_two_units(level, n):
    run_at(level, check_exp, n)


def set_the_level_twice():
    features.use(features.current().name)  # the same again is fine
    with pytest.raises(RuntimeError, match="too late for generic"):
        features.use("generic")


def test_a_level_cannot_change_once_read(level):
    if level == "generic":
        pytest.skip("it is the level that the test asks for")
    run_at(level, set_the_level_twice)


def test_unknown_levels_are_refused():
    with pytest.raises(KeyError):
        features.use("avx1024")
