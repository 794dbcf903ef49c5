"""Grids of bytes and of sums over sixteen rows against NumPy, at every level the CPU can run."""

import numpy as np
import pytest
from levels import EMULATED, call, run_at
from numba import njit

from tamis.jit_kernels.contract.ops import STRIP, strip_block
from tamis.jit_kernels.cpu.lang.byte_tiles import (
    OFFSET,
    add_each,
    add_rows,
    add_times,
    as_row,
    beside,
    both,
    dot_planes,
    dot_signed_planes,
    field,
    load_bytes,
    looked_up,
    no_sums,
    raised,
    rows_at,
    stacked,
    store_bytes,
    store_eights,
    store_rows,
    times_each,
    with_bits,
)
from tamis.jit_kernels.cpu.lang.simd import load_f32x16
from tamis.jit_kernels.cpu.linear.interleaved import OF_TYPE
from tamis.jit_kernels.cpu.runtime.compiler import OPTIONS


@pytest.fixture(params=["generic", "avx2", "avx512", "avx512-vnni", *EMULATED])
def level(request):
    return request.param


def run(kernel, *arrays):
    call(njit(**OPTIONS)(kernel), *arrays)


def random_bytes(*shape, low=0, high=256):
    return np.random.default_rng(len(shape)).integers(low, high, shape).astype(np.uint8)


def check_fields_of_bytes():
    x, masks = random_bytes(2, 64), np.random.default_rng(1).integers(0, 2**63, 4, np.int64)
    out, shift = np.zeros((4, 4, 64), np.uint8), np.full(1, 6, np.int64)
    look_up = looked_up(list(range(-8, 8)))

    def kernel(x, masks, shift, out):
        pair = load_bytes(x, 2)
        low = beside(field(pair, 0, 15), field(pair, 4, 15))
        store_bytes(out, with_bits(low, masks, 16))
        top = raised(field(pair, 2 * 3, 3), 4)
        store_bytes(out + 256, both(field(pair, 0, 15), top))
        store_bytes(out + 512, look_up(low))
        store_eights(out + 768, pair)

    run(kernel, x, masks, shift, out)
    nibbles = np.concatenate([x & 15, x >> 4])
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little").reshape(4, 64)
    np.testing.assert_array_equal(out[0], nibbles + 16 * bits)
    np.testing.assert_array_equal(out[1, :2], (x & 15) | (x >> 6) << 4)
    np.testing.assert_array_equal(out[2].view(np.int8), nibbles.astype(np.int8) - 8)
    eights = x.reshape(2, 16, 4).swapaxes(0, 1)
    np.testing.assert_array_equal(out[3, :2], eights.reshape(2, 64))


def test_fields_of_bytes(level):
    run_at(level, check_fields_of_bytes)


def check_sums_of_rows():
    """Three of four rows of x, in planes, times eight elements of two strips of weights."""
    rng = np.random.default_rng(3)
    weights, signed = random_bytes(2, 2, 16, 4, high=128), random_bytes(2, 2, 16, 4)
    signed[signed == 128] = 0
    planes = rng.integers(-127, 128, (3, 2, 8)).astype(np.int8)
    scales, by_lane = rng.normal(size=(3, 2)), rng.normal(size=(2, 2, 16))
    scales, by_lane = scales.astype(np.float32), by_lane.astype(np.float32)
    before = rng.normal(size=(3, 35)).astype(np.float32)
    out = np.stack([before, before, before])

    def kernel(weights, signed, planes, scales, by_lane, out):
        d = beside(as_row(load_f32x16(by_lane)), as_row(load_f32x16(by_lane + 64)))
        m = beside(as_row(load_f32x16(by_lane + 128)), as_row(load_f32x16(by_lane + 192)))
        q = stacked(load_bytes(weights, 2), load_bytes(weights + 128, 2))
        s = stacked(load_bytes(signed, 2), load_bytes(signed + 128, 2))
        x, factors, y = rows_at(planes, 16, 3, 4), rows_at(scales, 8, 3, 4), rows_at(out, 140, 3, 4)
        whole = times_each(dot_planes(q, x, 0, 8, 127), factors, 0)
        sums = add_each(add_times(no_sums(4, 2), whole, d), m, factors, 4)
        store_rows(y, 64, add_rows(sums, y, 64))
        y = rows_at(out + 420, 140, 3, 4)
        store_rows(y, 76, dot_signed_planes(s, x, 0, 8, 128))
        y = rows_at(out + 840, 140, 3, 4)
        store_rows(y, 64, dot_planes(q, x, 0, 0, 127))

    run(kernel, weights, signed, planes, scales, by_lane, out)
    x = planes[:, 0].astype(np.float64) * 128 + planes[:, 1]

    def product(w, i):
        return x @ w[i].transpose(1, 0, 2).reshape(16, 8).T.astype(np.float64)

    want = np.stack([before, before, before])
    for i in (0, 1):
        scaled = product(weights, i) * scales[:, :1] * by_lane[0, i]
        want[0, :, 16 * i : 16 * i + 16] += scaled + scales[:, 1:] * by_lane[1, i]
        want[1, :, 19 * i : 19 * i + 16] = product(signed.view(np.int8) + OFFSET, i)
        high = 128.0 * planes[:, 0]  # alone
        want[2, :, 16 * i : 16 * i + 16] = high @ weights[i].transpose(1, 0, 2).reshape(16, 8).T
    np.testing.assert_allclose(out[0], want[0], rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(out[1:], want[1:])


def test_sums_of_rows(level):
    run_at(level, check_sums_of_rows)


def check_largest_products(most):
    """Eight vectors of the largest values times the largest planes: no sum on the way wraps."""
    weights = np.full((8, 16, 4), most, np.uint8)
    signed = np.where(np.arange(16)[:, None] % 2, most, -most).astype(np.int8) * np.ones(
        (8, 1, 4), np.int8
    )
    planes = np.zeros((2, 64), np.int8)
    planes[:, :32] = [[127], [-127]]  # high
    planes[:, 32:] = [[63], [-64]]  # low
    out = np.zeros((2, 2, 16), np.float32)

    def kernel(weights, signed, planes, out):
        x = rows_at(planes, 64, 2, 2)
        store_rows(rows_at(out, 64, 2, 2), 0, dot_planes(load_bytes(weights, 8), x, 0, 32, most))
        y = dot_signed_planes(load_bytes(signed, 8), x, 0, 32, most)
        store_rows(rows_at(out + 128, 64, 2, 2), 0, y)

    run(kernel, weights, signed, planes, out)
    x = planes[:, :32].astype(np.float64) * 128 + planes[:, 32:]
    for found, w in ((out[0], weights), (out[1], signed + OFFSET)):
        np.testing.assert_array_equal(found, x @ w.swapaxes(0, 1).reshape(16, 32).T.astype(float))


@pytest.mark.parametrize("most", [3, 15, 63, 127])
def test_the_largest_products_fit(level, most):
    run_at(level, check_largest_products, most)


@pytest.mark.parametrize("type_", OF_TYPE)
def test_values_are_within_their_bound(type_):
    """Of random bytes in a strip, no value is above the type's bound, and one reaches a third."""
    of, size = OF_TYPE[type_], strip_block(type_)
    strip = random_bytes(STRIP * size)
    n_unit, n_vector = of.block // of.unit, of.unit // 4
    out = np.zeros((n_unit, n_vector * 64), np.uint8)
    values = of.values

    def kernel(strip, out):
        for i in range(n_unit):
            store_bytes(out + n_vector * 64 * i, values(strip, i))

    run(kernel, strip, out)
    found = out.view(np.int8).astype(int) if of.signed else out.astype(int)
    assert of.most / 3 <= np.abs(found).max() <= of.most
