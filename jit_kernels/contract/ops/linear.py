"""Embedding, matmul, activations: ops that dequantize weights. type: the ggml type's name."""

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract.op import Address, InOut, Out, op

FEW_ROWS = 16  # most rows of x that MATMUL multiplies without unpacking the weights
PACKED_ROWS = 16  # PACK_ROWS pads the rows to a multiple of at most this many
PANEL_SCRATCH = 192 << 10  # bytes of unpacked weights per thread
EXPERT_ROWS = 64  # rows of one expert that a thread of MOE_MATMUL packs and multiplies at a time
EXPERT_TILE = 32 << 10  # bytes of their sums: float32, of 128 columns at most
STRIP = 16  # rows of weights that REPACK interleaves
STRIP_LAYOUT = 1  # version of REPACK's layout: increased when that changes, for copies on disk


class Embed:
    """Embedding: y[t] = scale * dequantized row ids[t] of the table."""

    step: Address
    ids: Address  # int32 [n_tok, n_id]
    table: Address  # [n_vocab] rows of n elements in their ggml encoding
    y: Out[Address]  # f32 [n_tok, n_id, n]
    n: int
    n_id: int
    scale: float


EMBED = op("linear.embed", Embed, "type")


class PackRows:
    """Rows in the form that MATMUL reads: packed_form(type of the weights).

    source, the content of a row: "rows", x itself; "norm", x / sqrt(mean(x^2) + eps) * other (Zhang
    and Sennrich 2019, arXiv 1910.07467, Eq. 4); "silu" or "gelu", silu(x) * other or gelu_tanh(x) *
    other.

    step.exact_rows: if there are more rows than these, but at most FEW_ROWS, most elements keep 8
    bits in the form "bytes". 0: all bits are kept. The form of a row does not depend on other rows.
    """

    step: Address
    x: Address  # f32 [n_tok, n], from row step.row on
    other: Address  # f32 [n] of "norm", f32 [n_tok, n] of an activation, else 0
    packed: Out[Address]  # packed_bytes(n_tok, n), aligned to a cache line
    n: int
    scratch: Out[Address]  # as for MATMUL
    eps: float


PACK_ROWS = op("linear.pack", PackRows, "form source")


class Matmul:
    """y (+)= x @ w.T + bias."""

    step: Address
    packed: Address  # x [n_tok, n_in] as PACK_ROWS left it
    w: Address  # n_out rows of n_in elements in their ggml encoding
    bias: Address  # f32 [n_out], or 0
    y: InOut[Address]  # f32 [n_tok, n_out]
    n_in: int
    n_out: int
    y_stride: int  # elements from one row of y to the next
    add: int  # 1: adds to y
    scratch: Out[Address]  # n_thread * matmul_scratch(n_in) bytes


MATMUL = op("linear.matmul", Matmul, "type")


class Repack:
    """Interleave STRIP rows of weights, one output row per lane, for MATMUL of STRIP_TYPES.

    The layout is that of cpu/linear/interleaved.py.
    """

    w: Address  # n_out rows of n_in elements in their ggml encoding
    strips: Out[Address]  # strip_bytes(type, n_out, n_in)
    n_in: int  # a multiple of 64
    n_out: int  # a multiple of STRIP


REPACK = op("linear.repack", Repack, "type")


class Gate:
    """y = silu(gate) * up, or gelu_tanh(gate) * up; activation: "silu" or "gelu"."""

    step: Address
    gate: Address  # f32 [n_tok, n]
    up: Address  # f32 [n_tok, n]
    y: Out[Address]  # f32 [n_tok, n]
    n: int


GATE = op("linear.activation", Gate, "activation")


class GateClamped(Gate):
    """GATE with clamped inputs; form: where the gate is clamped.

    "before": silu(min(gate, limit)) * up; "after": min(silu(gate), limit) * up; "gpt_oss", with x =
    min(gate, limit): x / (1 + exp(-1.702 x)) * (up + 1). up is clamped to [-limit, limit].
    """

    limit: float


GATE_CLAMPED = op("linear.activation", GateClamped, "form")


class MapRows:
    """y (+)= outer * activation(inner * x); it adds to y if the constant add is 1.

    activation: one of ACTIVATIONS.
    """

    step: Address
    x: Address  # f32 [n_tok, n]
    y: InOut[Address]  # f32 [n_tok, n], may be x
    n: int
    inner: float
    outer: float


MAP_ROWS = op("linear.activation", MapRows, "activation add")

# The activations of MAP_ROWS and GATE_ROWS; gelu is its tanh form, gelu_erf the exact one, relu2
# the square of relu, clamp(x) is limited to [-1, 1], curve is exp(x) - 1 - x for negative x, else
# 0, exp is that of min(x, 87).
ACTIVATIONS = (
    *("none", "silu", "sigmoid", "gelu", "gelu_erf", "relu", "relu2", "tanh", "clamp", "curve"),
    "exp",
)


def strip_type(type: str, exact: bool = False) -> str:
    """MATMUL's name for a matrix of a ggml type in strips.

    exact: many rows of activations have 14 bits instead of 8.
    """
    return f"{type}x{STRIP}" + ("_exact" if exact else "")


# The ggml types that REPACK supports, with the names of their matrices in strips.
STRIP_TYPES = {
    strip_type(type, exact): type
    for exact in (False, True)
    for type in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0", "NVFP4", "Q2_0"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    )
}
# Those of them whose tiles are always int16, as sixteen elements share a minimum.
_NEVER_BYTES = ("Q2_K",)

# Bytes by which a row's part of a block grows: 6-bit scales become bytes, an exponent two, 3 bits
# 4, codes of a codebook the values that they stand for.
_GROWTH = {
    "MXFP4": 1,
    "Q3_K": 36,
    "Q4_K": 4,
    "Q5_K": 4,
    "IQ4_XS": 2,
    "TQ1_0": 12,
    "NVFP4": 4,
    "IQ1_S": 24,
    "IQ1_M": 30,
    "IQ2_XXS": 40,
    "IQ2_XS": 40,
    "IQ2_S": 32,
    "IQ3_XXS": 40,
    "IQ3_S": 28,
}


def strip_block(type: str) -> int:
    """The bytes of a row's part of a block in a strip."""
    return GGMLType[type].type_size + _GROWTH.get(type, 0)


def strip_bytes(type: str, n_out: int, n_in: int) -> int:
    """The bytes of a matrix of a ggml type in strips."""
    return n_out * (n_in // GGMLType[type].block_size) * strip_block(type)


def matmul_scratch(n_in: int) -> int:
    """The bytes of scratch that MATMUL needs per thread."""
    return PANEL_SCRATCH + 8 * n_in + 256


def packed_form(type: str) -> str:
    """The form of rows that weights of a type are multiplied by: "float", "quantised" or "bytes".

    type: a ggml type or one of STRIP_TYPES. The last two differ for many rows.
    """
    if type in ("F32", "F16", "BF16"):
        return "float"
    in_strips = STRIP_TYPES.get(type)
    if in_strips and type == strip_type(in_strips) and in_strips not in _NEVER_BYTES:
        return "bytes"
    return "quantised"


def packed_bytes(n_tok: int, n: int) -> int:
    """The bytes that PACK_ROWS needs for n_tok rows of n elements."""
    return 4 * (n_tok + PACKED_ROWS) * ((n + 255) // 256 * 256)


def expert_scratch(n_in: int, n_slot: int, n_expert: int) -> int:
    """The bytes of scratch that MOE_MATMUL needs per thread, for n_slot rows of y."""
    rows = 4 * (EXPERT_ROWS + PACKED_ROWS) * ((n_in + 255) // 256 * 256) + EXPERT_TILE
    lists = 4 * (n_slot + n_expert + 1)
    return PANEL_SCRATCH + 8 * n_in + 256 + rows + (lists + 127) // 64 * 64
