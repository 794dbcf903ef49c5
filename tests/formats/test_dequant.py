"""Decoders of block types: equal to the gguf package bit for bit, and to blocks done by hand."""

import struct

import gguf
import numpy as np
import pytest

from tamis.formats.codebooks import with_parity
from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile

DECODED = [
    GGMLType.F32,
    GGMLType.F16,
    GGMLType.BF16,
    GGMLType.Q4_0,
    GGMLType.Q4_1,
    GGMLType.Q5_0,
    GGMLType.Q5_1,
    GGMLType.Q8_0,
    GGMLType.Q2_K,
    GGMLType.Q3_K,
    GGMLType.Q4_K,
    GGMLType.Q5_K,
    GGMLType.Q6_K,
    GGMLType.IQ4_NL,
    GGMLType.IQ4_XS,
    GGMLType.MXFP4,
    GGMLType.NVFP4,
    GGMLType.TQ1_0,
    GGMLType.TQ2_0,
    GGMLType.IQ1_S,
    GGMLType.IQ1_M,
    GGMLType.IQ2_XXS,
    GGMLType.IQ2_XS,
    GGMLType.IQ2_S,
    GGMLType.IQ3_XXS,
    GGMLType.IQ3_S,
]
# Byte positions of the float16 scales in a block.
SCALES_AT = {
    GGMLType.Q4_0: [0],
    GGMLType.Q4_1: [0, 2],
    GGMLType.Q5_0: [0],
    GGMLType.Q5_1: [0, 2],
    GGMLType.Q8_0: [0],
    GGMLType.Q2_K: [80, 82],
    GGMLType.Q3_K: [108],
    GGMLType.Q4_K: [0, 2],
    GGMLType.Q5_K: [0, 2],
    GGMLType.Q6_K: [208],
    GGMLType.IQ4_NL: [0],
    GGMLType.IQ4_XS: [0],
    GGMLType.TQ1_0: [52],
    GGMLType.TQ2_0: [64],
    GGMLType.IQ1_S: [0],
    GGMLType.IQ2_XXS: [0],
    GGMLType.IQ2_XS: [0],
    GGMLType.IQ2_S: [0],
    GGMLType.IQ3_XXS: [0],
    GGMLType.IQ3_S: [0],
}


def random_blocks(type_: GGMLType, n: int) -> np.ndarray:
    """Blocks [n, type_size] of random bytes whose scales are finite, of both signs."""
    rng = np.random.default_rng(int(type_))
    blocks = rng.integers(0, 256, (n, type_.type_size), dtype=np.uint8)
    if type_ in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        blocks[:, -1] &= 0x3B  # the exponent is never all ones: no infinity, no NaN
    if type_ is GGMLType.MXFP4:
        blocks[:, 0] = np.minimum(blocks[:, 0], 252)  # 12 times 2^124 still is a float32
    if type_ is GGMLType.IQ1_M:
        blocks[:, 55] &= 0xBF  # the upper bits of its scale, as above
    for at in SCALES_AT.get(type_, []):
        scales = (rng.normal(size=(n, 1)) * 10.0 ** rng.integers(-6, 3, (n, 1))).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks


def theirs(rows: np.ndarray, type_: GGMLType) -> np.ndarray:
    decoded = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(type_)))
    return np.asarray(decoded, np.float32)


@pytest.mark.parametrize("type_", DECODED, ids=lambda t: t.name)
def test_random_blocks_decode_bit_for_bit_like_the_gguf_package(type_):
    rows = random_blocks(type_, 96).reshape(3, -1)
    shape = (32 * type_.block_size, 3)
    ours = dequantize(rows.reshape(-1), type_, shape)
    assert ours.shape == (3, 32 * type_.block_size)
    assert ours.dtype == np.float32
    assert np.isfinite(ours).all()
    expected = theirs(rows, type_).reshape(ours.shape)
    # As integers: a zero of the wrong sign would pass a comparison of floats.
    np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type_", DECODED, ids=lambda t: t.name)
def test_any_bytes_decode_like_those_of_the_gguf_package(type_):
    # Scales of every size, infinite and NaN ones too.
    rng = np.random.default_rng(100 + int(type_))
    rows = rng.integers(0, 256, (1024, type_.type_size), dtype=np.uint8)
    ours = dequantize(rows.reshape(-1), type_, (type_.block_size, 1024))
    with np.errstate(all="ignore"):
        expected = theirs(rows, type_).reshape(ours.shape)
    # A NaN's bits are the compiler's choice.
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(expected))
    known = ~np.isnan(ours)
    np.testing.assert_array_equal(ours[known].view(np.uint32), expected[known].view(np.uint32))


def half(x: float) -> bytes:
    return struct.pack("<e", x)


def decode_one(type_: GGMLType, block: bytes) -> list[float]:
    return dequantize(np.frombuffer(block, np.uint8), type_, [type_.block_size]).tolist()


def test_plain_types_by_hand():
    assert decode_one(GGMLType.F32, struct.pack("<f", -2.5)) == [-2.5]
    assert decode_one(GGMLType.F16, half(0.375)) == [0.375]
    assert decode_one(GGMLType.BF16, b"\x40\xc0") == [-3.0]  # 0xc0400000


def test_q4_0_by_hand():
    block = half(0.5) + bytes([0xF0]) + bytes([0x88] * 15)
    expected = [0.0] * 32
    expected[0] = 0.5 * (0 - 8)  # low nibble of byte 0
    expected[16] = 0.5 * (15 - 8)  # its high nibble
    assert decode_one(GGMLType.Q4_0, block) == expected


def test_q4_1_by_hand():
    block = half(2) + half(-1) + bytes([0x21]) + bytes(15)
    expected = [-1.0] * 32
    expected[0], expected[16] = 2 * 1 - 1, 2 * 2 - 1
    assert decode_one(GGMLType.Q4_1, block) == expected


def test_q5_0_by_hand():
    # Fifth bits of elements 0, 16 and 31 only: the others are (0 - 16).
    block = half(1) + struct.pack("<I", 1 | 1 << 16 | 1 << 31) + bytes([0x21]) + bytes(15)
    expected = [-16.0] * 32
    expected[0], expected[16], expected[31] = 1.0, 2.0, 0.0
    assert decode_one(GGMLType.Q5_0, block) == expected


def test_q5_1_by_hand():
    block = half(0.5) + half(3) + struct.pack("<I", 1 << 1) + bytes([0x00, 0x4F]) + bytes(14)
    expected = [3.0] * 32
    expected[1], expected[17] = 0.5 * 31 + 3, 0.5 * 4 + 3
    assert decode_one(GGMLType.Q5_1, block) == expected


def test_q8_0_by_hand():
    block = half(0.25) + struct.pack("<32b", *range(-16, 16))
    assert decode_one(GGMLType.Q8_0, block) == [0.25 * q for q in range(-16, 16)]


def test_q2_k_by_hand():
    # Run 0 has scale 3 and minimum 2, run 2 (elements 32 to 47) scale 1 and minimum 0.
    scales = bytes([0x23, 0x00, 0x01]) + bytes(13)
    quants = bytes([0b0110]) + bytes(63)  # elements 0 and 32 of the first 128
    expected = [0.0] * 256
    expected[:16] = [-2 * 0.5] * 16
    expected[0] = 3 * 1.0 * 2 - 2 * 0.5
    expected[32] = 1 * 1.0 * 1
    assert decode_one(GGMLType.Q2_K, scales + quants + half(1) + half(0.5)) == expected


def test_q3_k_by_hand():
    # All scales are 32 + 0, that is zero, but the first (33: one) and the last (30: minus two).
    scales = bytes([0x01, 0, 0, 0, 0, 0, 0, 0xE0]) + bytes([0xAA, 0xAA, 0xAA, 0x6A])
    third = bytes([0x01]) + bytes(31)  # element 0 has its third bit: not minus 4
    quants = bytes([0x03]) + bytes(63)  # element 0 is 3, the others are 0
    expected = [0.0] * 256
    expected[:16] = [0.5 * (0 - 4)] * 16
    expected[0] = 0.5 * 3
    expected[240:] = [0.5 * -2 * (0 - 4)] * 16
    block = third + quants + scales + half(0.5)
    assert [abs(x) if x == 0 else x for x in decode_one(GGMLType.Q3_K, block)] == expected


# Scale 0 is 1, minimum 0 is 2; scale 7 is 0x25 (5 and upper bits 2), minimum 7 is 0x13.
SCALES_K4 = bytes([1, 0, 0, 0x80, 2, 0, 0, 0x40, 0, 0, 0, 0x35])


def test_q4_k_by_hand():
    quants = bytes([0x0F]) + bytes(126) + bytes([0x20])  # elements 0 and 255
    expected = [0.0] * 256
    expected[:32] = [-2 * 0.5] * 32
    expected[0] = 1 * 15 - 2 * 0.5
    expected[224:] = [-0x13 * 0.5] * 32
    expected[255] = 0x25 * 2 - 0x13 * 0.5
    assert decode_one(GGMLType.Q4_K, half(1) + half(0.5) + SCALES_K4 + quants) == expected


def test_q5_k_by_hand():
    high = bytes([0x01]) + bytes(30) + bytes([0x80])  # fifth bits of elements 0 and 255
    quants = bytes([0x0F]) + bytes(126) + bytes([0x20])
    expected = [0.0] * 256
    expected[:32] = [-2 * 0.5] * 32
    expected[0] = 1 * 31 - 2 * 0.5
    expected[224:] = [-0x13 * 0.5] * 32
    expected[255] = 0x25 * 18 - 0x13 * 0.5
    assert decode_one(GGMLType.Q5_K, half(1) + half(0.5) + SCALES_K4 + high + quants) == expected


def test_q6_k_by_hand():
    # Element 0: nibble 5, upper bits 3. Element 64 has the high nibble of the same byte and bits
    # 4 and 5 of the same upper byte. All others are 0 - 32.
    low = bytes([0x15]) + bytes(127)
    high = bytes([0b00_10_00_11]) + bytes(63)
    scales = struct.pack("<16b", 1, 0, 0, 0, -1, *[0] * 11)
    expected = [0.0] * 256
    expected[:16] = [0.5 * 1 * -32] * 16
    expected[0] = 0.5 * (5 + 48 - 32)
    expected[64:80] = [0.5 * -1 * -32] * 16
    expected[64] = 0.5 * -1 * (1 + 32 - 32)
    values = decode_one(GGMLType.Q6_K, low + high + scales + half(0.5))
    assert [abs(x) if x == 0 else x for x in values] == expected


def test_iq4_nl_by_hand():
    block = half(2) + bytes([0xF0]) + bytes([0x88] * 15)
    expected = [2.0 * 1] * 32  # level 8 is 1
    expected[0], expected[16] = 2.0 * -127, 2.0 * 113
    assert decode_one(GGMLType.IQ4_NL, block) == expected


def test_iq4_xs_by_hand():
    # Upper bits 2 for every scale, low nibbles 0, but 1 for run 1 (high nibble) and 15 for run 6.
    upper, low = bytes([0xAA, 0xAA]), bytes([0x10, 0, 0, 0x0F])
    block = half(0.5) + upper + low + bytes([0x88] * 128)  # level 8 is 1
    expected = [0.0] * 256
    expected[32:64] = [0.5 * 1] * 32
    expected[192:224] = [0.5 * 15] * 32
    assert decode_one(GGMLType.IQ4_XS, block) == expected


def test_mxfp4_by_hand():
    # Exponent 127 is a scale of 1: nibbles 1, 7 and 15 are 0.5, 6 and -6.
    block = bytes([127, 0x71, 0x0F]) + bytes(14)
    expected = [0.0] * 32
    expected[0], expected[16], expected[1] = 0.5, 6.0, -6.0
    assert decode_one(GGMLType.MXFP4, block) == expected


def test_the_result_is_in_numpy_order_and_fresh():
    data = np.arange(6, dtype=np.float32).view(np.uint8)
    result = dequantize(data, GGMLType.F32, (2, 3))
    assert result.tolist() == [[0, 1], [2, 3], [4, 5]]
    result[0, 0] = 9
    assert data.view(np.float32)[0] == 0


@pytest.mark.parametrize(
    ("n_bytes", "type_", "shape", "message"),
    [
        (36, GGMLType.Q8_1, (32,), "no decoder for Q8_1"),
        (18, GGMLType.Q4_0, (16,), "rows of a multiple of 32"),
        (18, GGMLType.Q4_0, (64,), "18 items of uint8, expected 36"),
        (18, GGMLType.Q4_0, (), "rows of a multiple of 32"),
        (18, GGMLType.Q4_0, (-32, -1), "1 or more"),
    ],
)
def test_what_does_not_fit_is_refused(n_bytes, type_, shape, message):
    with pytest.raises(ValueError, match=message):
        dequantize(np.zeros(n_bytes, np.uint8), type_, shape)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_first_rows_of_real_tensors_decode_like_the_gguf_package(model_path, name):
    with GGUFFile(model_path(name)) as f:
        # One tensor of each type the file has, and 8 rows of it: the whole would take minutes.
        for info in {info.type: info for info in f.tensors.values()}.values():
            n_rows = min(8, info.n_bytes // info.type.n_bytes(info.shape[0]))
            rows = f.data(info.name)[: n_rows * info.type.n_bytes(info.shape[0])]
            ours = dequantize(rows, info.type, (info.shape[0], n_rows))
            expected = theirs(rows.reshape(n_rows, -1), info.type).reshape(ours.shape)
            np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


def test_q1_0_by_hand():
    block = half(0.5) + bytes([0b101]) + bytes(14) + bytes([0x80])  # elements 0, 2 and 127
    expected = [-0.5] * 128
    expected[0] = expected[2] = expected[127] = 0.5
    assert decode_one(GGMLType.Q1_0, block) == expected


def test_q2_0_by_hand():
    block = half(2) + bytes([0b11_10_01_00]) + bytes(15)
    assert decode_one(GGMLType.Q2_0, block) == [-2.0, 0.0, 2.0, 4.0] + [-2.0] * 60


def test_nvfp4_by_hand():
    # 0x38 is 1, 0x01 the smallest, 2^-9, 0x7E the largest, 448; 0x7F stands for 0.
    scales = bytes([0x38, 0x01, 0x7E, 0x7F])
    quants = bytes([0x71] * 8) + bytes([0x02] * 8) + bytes([0xF0] * 8) + bytes([0x77] * 8)
    expected = [0.5] * 8 + [6.0] * 8 + [2.0**-9] * 8 + [0.0] * 16 + [-6.0 * 448] * 8 + [0.0] * 16
    assert decode_one(GGMLType.NVFP4, scales + quants) == expected


def test_tq1_0_by_hand():
    # 0.20000 in base 3 of 256 is 171, 0.12000 is 143, both rounded up; 0 has the digits 0.
    block = bytes([171]) + bytes(46) + bytes([143]) + bytes(3) + bytes([171]) + half(0.5)
    expected = [-0.5] * 256
    expected[0] = 0.5  # the first digit of byte 0
    expected[160 + 15], expected[160 + 31] = 0.0, 0.5  # the first two of byte 47
    expected[240 + 3] = 0.5  # the first of the last byte
    assert decode_one(GGMLType.TQ1_0, block) == expected


def test_the_eighth_sign_makes_their_number_even():
    signs = with_parity(np.arange(128, dtype=np.uint8))
    assert (signs & 127).tolist() == list(range(128))
    assert all(int(s).bit_count() % 2 == 0 for s in signs)


def test_iq2_xxs_by_hand():
    # Code 0 is eight times 8; the first 32 elements have scale 3, the sign of element 1, and so
    # that of element 7.
    block = half(2) + bytes(4) + struct.pack("<I", 3 << 28 | 2) + bytes(56)
    expected = [2 * 0.5 / 4 * 8.0] * 256
    expected[:32] = [2 * 3.5 / 4 * 8.0] * 32
    expected[1] = expected[7] = -14.0
    assert decode_one(GGMLType.IQ2_XXS, block) == expected
