"""Decoders from ggml's block types to float32, vectorised over blocks with NumPy.

They are the reference that kernels are tested against: exact, not fast. Each docstring gives the
bytes of a block in order; ``d`` is a float16 scale, ``m`` or ``dmin`` a float16 minimum.
"""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from tamis.formats.ggml_types import GGMLType

# The 16 levels of the non-linear 4-bit types.
IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# The 16 values of E2M1 (4-bit floats), doubled to be whole; the scale is halved to match.
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def decodable() -> tuple[GGMLType, ...]:
    """The types of weights that can be dequantized."""
    return tuple(_DECODERS)


def dequantize(data: np.ndarray, type_: GGMLType, shape: Sequence[int]) -> np.ndarray:
    """Decode a tensor's bytes to float32.

    ``data`` is uint8 [n_bytes], contiguous; ``shape`` is in ggml order (fastest dimension first)
    and the result is in NumPy order, ``shape`` reversed: row i of a matrix is ``result[i]``. The
    result is always a new array. Raises ValueError if the type has no decoder, or if bytes, type
    and shape do not fit one another.
    """
    decode = _DECODERS.get(type_)
    if decode is None:
        known = ", ".join(t.name for t in _DECODERS)
        raise ValueError(f"no decoder for {type_.name}; there is one for {known}")
    n = prod(shape)
    if not shape or min(shape) < 1 or shape[0] % type_.block_size:
        raise ValueError(
            f"shape {tuple(shape)}: dimensions must be 1 or more, and {type_.name} has rows of a"
            f" multiple of {type_.block_size} elements"
        )
    if data.dtype != np.uint8 or data.size != type_.n_bytes(n):
        raise ValueError(
            f"{data.size} items of {data.dtype}, expected {type_.n_bytes(n)} of uint8 for"
            f" {type_.name} {tuple(shape)}"
        )
    blocks = np.ascontiguousarray(data).reshape(-1, type_.type_size)
    # Scales of a damaged file may be infinite or NaN: that shows in the values, not on stderr.
    with np.errstate(over="ignore", invalid="ignore"):
        return decode(blocks).reshape(tuple(reversed(shape)))


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at byte ``at`` of each block as float32 [n, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _fields(packed: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Unpack bytes [n, k] into fields [n, k * 8 / bits] of ``bits`` bits.

    The bytes are taken ``group`` at a time: first the lowest field of each, then the next.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, group) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _spread(factors: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Repeat factors [n, k] over values [n, m]: each for m / k values in a row."""
    return np.repeat(factors, values.shape[1] // factors.shape[1], axis=1)


def _f32(blocks: np.ndarray) -> np.ndarray:
    """Bytes: one little-endian float32."""
    return blocks.view("<f4").astype(np.float32)


def _half(blocks: np.ndarray) -> np.ndarray:
    """Bytes: one little-endian float16."""
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    """Bytes: the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | nibbles 16: value = d (q - 8); byte i holds elements i and i + 16."""
    q = _fields(blocks[:, 2:], 4, 16).astype(np.float32) - 8
    return _f16(blocks, 0) * q


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | m 2 | nibbles 16: value = d q + m."""
    q = _fields(blocks[:, 4:], 4, 16).astype(np.float32)
    return _f16(blocks, 0) * q + _f16(blocks, 2)


def _fifth_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Join nibbles [n, 32] with bit i of the 4 bytes ``high`` as bit 4 of element i."""
    return low | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | fifth bits 4 | nibbles 16: value = d (q - 16)."""
    q = _fifth_bits(_fields(blocks[:, 6:], 4, 16), blocks[:, 2:6])
    return _f16(blocks, 0) * (q.astype(np.float32) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | m 2 | fifth bits 4 | nibbles 16: value = d q + m."""
    q = _fifth_bits(_fields(blocks[:, 8:], 4, 16), blocks[:, 4:8])
    return _f16(blocks, 0) * q.astype(np.float32) + _f16(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | int8 32: value = d q."""
    return _f16(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    """Bytes: scales 16 | 2-bit 64 | d 2 | dmin 2.

    A scale byte is for 16 elements: scale in the low nibble, minimum in the high one;
    value = (d scale) q - (dmin minimum); 32 bytes hold 4 runs of 32 elements.
    """
    scales, q = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32).astype(np.float32)
    scale = _f16(blocks, 80) * (scales & 15).astype(np.float32)
    minimum = _f16(blocks, 82) * (scales >> 4).astype(np.float32)
    return _spread(scale, q) * q - _spread(minimum, q)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    """Bytes: third bits 32 | 2-bit 64 | 6-bit scales 12 | d 2: value = d (scale - 32) (q - 4).

    Bit j of third-bit byte i belongs to element 32 j + i. The scales' low nibbles are 8 bytes
    (scales i and i + 8), their upper 2 bits 4 bytes (scales i, i + 4, i + 8, i + 12).
    """
    q = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << np.uint8(2)
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << np.uint8(4)
    scale = _f16(blocks, 108) * (scales.astype(np.float32) - 32)
    return _spread(scale, q) * (q.astype(np.float32) - 4)


def _scales_k4(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack eight 6-bit scales and eight 6-bit minima out of 12 bytes, each float32 [n, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low 6 bits; bytes 8-11 hold the
    low nibbles of scales 4-7 (low) and minima 4-7 (high), whose upper 2 bits are the upper 2 bits
    of bytes 0-3 and 4-7.
    """
    upper = packed[:, :8] >> 6 << 4
    scales = np.hstack([packed[:, :4] & 63, packed[:, 8:] & 15 | upper[:, :4]])
    minima = np.hstack([packed[:, 4:8] & 63, packed[:, 8:] >> 4 | upper[:, 4:]])
    return scales.astype(np.float32), minima.astype(np.float32)


def _affine_k(blocks: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Decode (d scale) q - (dmin minimum) for Q4_K and Q5_K, whose blocks start alike."""
    scales, minima = _scales_k4(blocks[:, 4:16])
    scale, minimum = _f16(blocks, 0) * scales, _f16(blocks, 2) * minima
    return _spread(scale, q) * q.astype(np.float32) - _spread(minimum, q)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | dmin 2 | scales and minima 12 | nibbles 128.

    32 bytes of nibbles hold 2 runs of 32 elements.
    """
    return _affine_k(blocks, _fields(blocks[:, 16:], 4, 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | dmin 2 | scales and minima 12 | fifth bits 32 | nibbles 128.

    Bit j of fifth-bit byte i belongs to element 32 j + i.
    """
    high = _fields(blocks[:, 16:48], 1, 32)
    return _affine_k(blocks, _fields(blocks[:, 48:], 4, 32) | high << np.uint8(4))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Bytes: nibbles 128 | upper 2 bits 64 | int8 scales 16 | d 2: value = (d scale) (q - 32).

    64 bytes of nibbles and 32 bytes of upper bits hold 128 elements.
    """
    q = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << np.uint8(4)
    scale = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _spread(scale, q) * (q.astype(np.float32) - 32)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | nibbles 16: value = d level[q]."""
    return _f16(blocks, 0) * IQ4_LEVELS[_fields(blocks[:, 2:], 4, 16)]


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | scales' upper 2 bits 2 | their low nibbles 4 | nibbles 128.

    value = (d (scale - 32)) level[q]; a scale is for 32 elements, 16 bytes hold 32 elements.
    """
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << np.uint8(4)
    levels = IQ4_LEVELS[_fields(blocks[:, 8:], 4, 16)]
    return _spread(_f16(blocks, 0) * (scales.astype(np.float32) - 32), levels) * levels


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    """Bytes: exponent 1 | nibbles 16: value = 2^(exponent - 128) level[q] (levels are doubled)."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale * MXFP4_LEVELS[_fields(blocks[:, 1:], 4, 16)]


def _ue4m3(codes: np.ndarray) -> np.ndarray:
    """Half of each 8-bit float (4 bits of exponent, bias 7, 3 of mantissa; bit 7 is ignored).

    As in ggml, 0x7F is 0.
    """
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float32)
    normal = np.ldexp(mantissa + 8, exponent.astype(np.int32) - 11)
    values = np.where(exponent == 0, np.ldexp(mantissa, -10), normal).astype(np.float32)
    return np.where(codes == 0x7F, np.float32(0), values)


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    """Bytes: UE4M3 scales 4 | nibbles 32: value = (scale / 2) level[q] (levels are doubled).

    A scale is for 16 elements: the low nibbles of 8 bytes, then the high ones.
    """
    levels = MXFP4_LEVELS[_fields(blocks[:, 4:], 4, 8)]
    return _spread(_ue4m3(blocks[:, :4]), levels) * levels


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | bits 16, in order: value = d where the bit is set, else -d."""
    signs = _fields(blocks[:, 2:], 1, 1).astype(np.float32) * 2 - 1
    return _f16(blocks, 0) * signs


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | 2-bit 16, in order: value = d (q - 1)."""
    return _f16(blocks, 0) * (_fields(blocks[:, 2:], 2, 1).astype(np.float32) - 1)


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: 2-bit 64 | d 2: value = d (q - 1); 32 bytes hold 4 runs of 32 elements."""
    return _f16(blocks, 64) * (_fields(blocks[:, :64], 2, 32).astype(np.float32) - 1)


def _trits(packed: np.ndarray, group: int, n: int) -> np.ndarray:
    """Unpack n base-3 digits of each byte; the first digits of `group` bytes come first.

    A byte is the fraction 0.abcde in base 3, times 256: a digit is the carry of 3 times it.
    """
    powers = np.array([3**i for i in range(n)], np.uint8)[:, None]
    rest = packed.reshape(len(packed), -1, 1, group) * powers
    return (rest.astype(np.uint16) * 3 >> 8).reshape(len(packed), -1)


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    """Bytes: five base-3 digits in each of 32 bytes, then of 16; four in each of 4 | d 2.

    value = d (digit - 1); the digits of a run of bytes are ordered by significance.
    """
    runs = ((blocks[:, :32], 32, 5), (blocks[:, 32:48], 16, 5), (blocks[:, 48:52], 4, 4))
    digits = np.hstack([_trits(*run) for run in runs])
    return _f16(blocks, 52) * (digits.astype(np.float32) - 1)


def _codebook(type_: GGMLType, codes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Look up rows [n, k] of a type's grid; signs: one bit per element, set if it is negative."""
    from tamis.formats.codebooks import grid_of

    values = grid_of(type_)[codes].reshape(len(codes), -1).astype(np.float32)
    return values * (1 - 2 * _fields(signs, 1, 1).astype(np.float32))


def _u16(packed: np.ndarray) -> np.ndarray:
    """View bytes [n, 2 k] as uint16 [n, k]."""
    return np.ascontiguousarray(packed).view("<u2")


def _u32(packed: np.ndarray) -> np.ndarray:
    """View bytes [n, 4 k] as uint32 [n, k]."""
    return np.ascontiguousarray(packed).view("<u4")


def _seven_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The upper 4 bits of uint32 [n, k] as float32, and signs [n, 4 k] made of 7 bits each."""
    from tamis.formats.codebooks import with_parity

    fields = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    signs = with_parity(fields.reshape(len(words), -1).astype(np.uint8))
    return (words >> 28).astype(np.float32), signs


def _iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | 8 of each 32 elements: 4 codes, then 4 times 7 signs and 4 bits of scale.

    value = d (scale + 1/2) / 4 sign grid[code].
    """
    parts = blocks[:, 2:].reshape(len(blocks), 8, 8)
    scale, signs = _seven_signs(_u32(parts[:, :, 4:].reshape(len(blocks), -1)))
    values = _codebook(GGMLType.IQ2_XXS, parts[:, :, :4].reshape(len(blocks), -1), signs)
    return _spread(_f16(blocks, 0) * (scale + 0.5) * 0.25, values) * values


def _iq2_xs(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | uint16 32: 9 bits of code and 7 signs | 4-bit scales 8.

    value = d (scale + 1/2) / 4 sign grid[code]; a scale is for 16 elements.
    """
    from tamis.formats.codebooks import with_parity

    words = _u16(blocks[:, 2:66])
    signs = with_parity((words >> 9).astype(np.uint8))
    values = _codebook(GGMLType.IQ2_XS, words & 511, signs)
    scale = _fields(blocks[:, 66:], 4, 1).astype(np.float32)
    return _spread(_f16(blocks, 0) * (scale + 0.5) * 0.25, values) * values


def _iq2_s(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | codes 32 | signs 32 | codes' upper 2 bits 8 | 4-bit scales 8.

    value = d (scale + 1/2) / 4 sign grid[code]; a scale is for 16 elements.
    """
    codes = blocks[:, 2:34] | _fields(blocks[:, 66:74], 2, 1).astype(np.uint16) << 8
    values = _codebook(GGMLType.IQ2_S, codes, blocks[:, 34:66])
    scale = _fields(blocks[:, 74:], 4, 1).astype(np.float32)
    return _spread(_f16(blocks, 0) * (scale + 0.5) * 0.25, values) * values


def _iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | codes 64 | 4 of each 32 elements: 4 times 7 signs and 4 bits of scale.

    value = d (scale + 1/2) / 2 sign grid[code].
    """
    scale, signs = _seven_signs(_u32(blocks[:, 66:]))
    values = _codebook(GGMLType.IQ3_XXS, blocks[:, 2:66], signs)
    return _spread(_f16(blocks, 0) * (scale + 0.5) * 0.5, values) * values


def _iq3_s(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | codes 64 | codes' ninth bits 8 | signs 32 | 4-bit scales 4.

    value = d (2 scale + 1) sign grid[code]; a scale is for 32 elements.
    """
    codes = blocks[:, 2:66] | _fields(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    values = _codebook(GGMLType.IQ3_S, codes, blocks[:, 74:106])
    scale = _fields(blocks[:, 106:], 4, 1).astype(np.float32)
    return _spread(_f16(blocks, 0) * (2 * scale + 1), values) * values


def _shifted(type_: GGMLType, codes: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Look up rows of IQ1's grid and add 1/8 to each element, or -1/8 where `down` is set."""
    from tamis.formats.codebooks import grid_of

    values = grid_of(type_)[codes].reshape(len(codes), -1).astype(np.float32)
    return values + _spread(np.where(down, np.float32(-0.125), np.float32(0.125)), values)


def _iq1_s(blocks: np.ndarray) -> np.ndarray:
    """Bytes: d 2 | codes 32 | uint16 8: four times 3 upper bits of a code, scale 3, down 1.

    value = d (2 scale + 1) (grid[code] +- 1/8); a uint16 is for 32 elements.
    """
    words = _u16(blocks[:, 34:])
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    values = _shifted(GGMLType.IQ1_S, blocks[:, 2:34] | high << 8, words >> 15 != 0)
    scale = (words >> 12 & 7).astype(np.float32)
    return _spread(_f16(blocks, 0) * (2 * scale + 1), values) * values


def _iq1_m(blocks: np.ndarray) -> np.ndarray:
    """Bytes: codes 32 | nibbles 16: 3 upper bits of a code and down | uint16 4: four scales of 3.

    value = d (2 scale + 1) (grid[code] +- 1/8); a scale is for 16 elements. The upper nibbles of
    the four uint16 are d, the first one lowest.
    """
    words, nibbles = _u16(blocks[:, 48:]), _fields(blocks[:, 32:48], 4, 1)
    codes = blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8
    values = _shifted(GGMLType.IQ1_M, codes, nibbles >> 3 != 0)
    scale = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    top = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(top, axis=1, keepdims=True).view("<f2").astype(np.float32)
    return _spread(d * (2 * scale.astype(np.float32) + 1), values) * values


_DECODERS: dict[GGMLType, Callable[[np.ndarray], np.ndarray]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _half,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.NVFP4: _nvfp4,
    GGMLType.Q1_0: _q1_0,
    GGMLType.Q2_0: _q2_0,
    GGMLType.TQ1_0: _tq1_0,
    GGMLType.TQ2_0: _tq2_0,
    GGMLType.IQ1_S: _iq1_s,
    GGMLType.IQ1_M: _iq1_m,
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ2_XS: _iq2_xs,
    GGMLType.IQ2_S: _iq2_s,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
}
