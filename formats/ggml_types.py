"""The table of ggml tensor types: identifiers, and the elements and bytes of a block."""

from enum import IntEnum


class GGMLType(IntEnum):
    """A tensor type that can be read; the value is ggml's identifier in the file.

    ``block_size`` is the number of elements of one block, ``type_size`` its bytes; plain types
    have blocks of one element. A row of a tensor is a whole number of blocks.
    """

    block_size: int
    type_size: int

    # The defaults are never used: they let type checkers accept the lookup GGMLType(type_id).
    def __new__(cls, type_id: int, block_size: int = 0, type_size: int = 0) -> "GGMLType":
        """Make the member for one line of the table."""
        member = int.__new__(cls, type_id)
        member._value_ = type_id
        member.block_size = block_size
        member.type_size = type_size
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 36  # an activation type, in no model file: two halves and 32 bytes
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292  # an activation type, in no model file: float, 256 bytes, 16 sums
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18

    def n_bytes(self, n_elements: int) -> int:
        """Bytes of ``n_elements`` (a multiple of ``block_size``), exact for any Python int."""
        assert n_elements % self.block_size == 0, (self.name, n_elements)
        return n_elements // self.block_size * self.type_size


# Identifiers that ggml once gave to types that are no longer in use.
_REMOVED = {
    4: "Q4_2 (removed from ggml)",
    5: "Q4_3 (removed from ggml)",
    31: "Q4_0_4_4 (removed from ggml)",
    32: "Q4_0_4_8 (removed from ggml)",
    33: "Q4_0_8_8 (removed from ggml)",
    36: "IQ4_NL_4_4 (removed from ggml)",
    37: "IQ4_NL_4_8 (removed from ggml)",
    38: "IQ4_NL_8_8 (removed from ggml)",
}


def type_name(type_id: int) -> str:
    """The name of a ggml type for a message, including unsupported types."""
    try:
        return GGMLType(type_id).name
    except ValueError:
        return _REMOVED.get(type_id, f"unknown type {type_id}")
