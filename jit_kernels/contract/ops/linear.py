"""Embedding, matmul, activations: ops that dequantize weights. type: the ggml type's name."""

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract.op import op

FEW_ROWS = 16  # most rows of x that MATMUL multiplies without unpacking the weights
PACKED_ROWS = 16  # PACK_ROWS fills up the rows to a multiple of at most so many
PANEL_SCRATCH = 192 << 10  # bytes of unpacked weights of a thread
STRIP = 16  # rows of weights that ARRANGE puts side by side

# table: [n_vocab] rows of n elements in their ggml encoding; ids int32 [n_tok];
# y f32 [n_tok, n] = row * scale.
EMBED = op("linear.embed", "embed", "type", "step ids table y n scale_f")

# Rows for MATMUL. source: what a row is made of, of x f32 [n_tok, n] from row step.row on: "rows",
# x itself; "norm", x / sqrt(mean(x^2) + eps) * other f32 [n] (Zhang and Sennrich 2019, arXiv
# 1910.07467, Eq. 4); "silu" or "gelu", silu(x) * other or gelu_tanh(x) * other, f32 [n_tok, n].
# packed: packed_bytes(n_tok, n) at a cache line, in a form of the backend's own; form:
# packed_form(type of the weights). scratch as for MATMUL.
PACK_ROWS = op("linear.pack", "pack_rows", "form source", "step x other packed n scratch eps_f")

# y [n_tok, n_out] (+)= x @ w.T + bias. packed: x [n_tok, n_in] as PACK_ROWS left it; w: n_out rows
# of n_in elements in their ggml encoding; bias f32 [n_out] or 0; add: 1 adds to y; y_stride in
# elements; scratch: n_thread * matmul_scratch(n_in) bytes.
MATMUL = op(
    "linear.matmul", "matmul", "type", "step packed w bias y n_in n_out y_stride add scratch"
)

# The rows of w as strips of STRIP rows, for the MATMUL of such a type (STRIP_TYPES): see
# cpu/linear/interleaved.py. n_in is a multiple of 64, n_out of STRIP.
ARRANGE = op("linear.repack", "arrange", "type", "w strips n_in n_out")

# y = silu(gate) * up or gelu_tanh(gate) * up, f32 [n_tok, n]; activation: "silu" or "gelu".
GATE = op("linear.activation", "gate", "activation", "step gate up y n")

# The ggml types that ARRANGE has, by the name that MATMUL knows a matrix in strips by.
STRIP_TYPES = {
    f"{type}x{STRIP}": type
    for type in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    )
}

# Bytes that a row's part of a block grows by: 6-bit scales become bytes, an exponent two, 3 bits 4.
_GROWTH = {"MXFP4": 1, "Q3_K": 36, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}


def strip_block(type: str) -> int:
    """Bytes of a row's part of a block in a strip."""
    return GGMLType[type].type_size + _GROWTH.get(type, 0)


def strip_bytes(type: str, n_out: int, n_in: int) -> int:
    """Bytes of a matrix of a ggml type in strips."""
    return n_out * (n_in // GGMLType[type].block_size) * strip_block(type)


def matmul_scratch(n_in: int) -> int:
    """Bytes of scratch that MATMUL and MOE_MATMUL need a thread."""
    return PANEL_SCRATCH + 8 * n_in + 256


def packed_form(type: str) -> str:
    """Which form of rows weights of a ggml type are multiplied with: "float" or "quantised"."""
    return "float" if type in ("F32", "F16", "BF16") else "quantised"


def packed_bytes(n_tok: int, n: int) -> int:
    """Bytes that PACK_ROWS needs for n_tok rows of n elements."""
    return 4 * (n_tok + PACKED_ROWS) * ((n + 63) // 64 * 64)
