"""Sizes of the buffers that CUDA kernels need beside their fields; known without Numba."""

from typing import NamedTuple

from tamis.formats.ggml_types import GGMLType

# The most rows for which products read weights again; for more, weights are unpacked once. CPUs
# have another number in contract/ops: a GPU's matrix units pay off sooner.
FEW_ROWS = 4
SOME_ROWS = 64  # most rows that tensor cores multiply with weights from registers
SOME_AT_ONCE = 16  # rows of them that a staged product multiplies at a time
SOME_MOST = 32  # of them that are multiplied with weights that are read once


def class_of(n_row: int) -> str:
    """The class of kernels for products of n_row rows: "few", "some" or "many"."""
    return "few" if n_row <= FEW_ROWS else "some" if n_row <= SOME_ROWS else "many"


COUNTERS = 4096  # bytes before scratch: int32 counters, 0 whenever no kernel runs
DEPTH = 64  # elements of a row that the matrix product holds at a time
HEADS = 8  # most queries that a warp multiplies keys with at a time: see tile_few.py
CHUNK = 1024  # elements of a row of weights that a warp multiplies at a time
# Of launches that fuse several ops of a Program: warps of a block that multiply, rows whose
# products such a block has at a time, elements of the longest row that they norm.
WORKERS = 16
ROOM = 32 * WORKERS
LONGEST_NORM = 1 << 14
# for MOE_MATMUL: a tile's expert, its first row among those in order, its number of rows
TILE_INTS = 3
# Of launches whose weights all fit in shared memory (matmul_staged.py): warps of a block, rows of
# weights of a tile, bytes before the first one, bytes of all, most tiles of a block.
STAGED_WARPS = 16
STAGED_ROWS = 16
STAGED_HEAD = 128
STAGED_ROOM = 160 << 10
STAGED_TILES = 16


def bundle_of(type: str) -> int:
    """Neighbouring rows of a ggml type that a warp of a fused launch multiplies at a time."""
    kind = GGMLType[type]
    return 2 if kind.type_size > 0.64 * kind.block_size else 4  # 21 to 42 KB for all workers


LONGEST_HEAD = 256  # elements that attention by tiles has shared memory for


def heads_of(group: int) -> int:
    """Heads of a group that attention of few rows takes at a time."""
    return max(n for n in range(1, HEADS + 1) if group % n == 0)


def padded(n_in: int) -> int:
    """The number n_in, rounded up to a multiple of DEPTH."""
    return (n_in + DEPTH - 1) // DEPTH * DEPTH


def staged_width(n_in: int) -> int:
    """Bytes of a row of float16 in shared memory: rows begin in different banks."""
    return 2 * ((n_in + DEPTH - 1) // DEPTH * DEPTH) + 16


def staged_room(n_byte: int, n_in: int, n_tile: int, *, packed: bool) -> int:
    """Bytes of a block's shared memory for tiles whose rows have n_byte, and for rows of x."""
    rows = 0 if packed else SOME_AT_ONCE * staged_width(n_in)
    return STAGED_HEAD + STAGED_ROWS * n_byte * n_tile + rows


def matmul_scratch(n_in: int, n_out: int) -> int:
    """Bytes of MATMUL's scratch: the weights as float16."""
    return 2 * padded(n_in) * n_out


def some_tile(*, big: bool) -> int:
    """Rows of weights of a tile of matmul_some.py; big: blocks have 224 KB of shared memory."""
    return 128 if big else 64


def some_scratch(n_block: int) -> int:
    """Bytes of the sums that n_block blocks leave for others: two tiles of each."""
    return 2 * n_block * 4 * some_tile(big=True) * SOME_MOST


def expert_scratch(n_row: int, n_in: int, n_slot: int) -> int:
    """Bytes of MOE_MATMUL's scratch: rows, packed or as float16, and the plan of its tiles."""
    rows = n_row * max(2 * padded(n_in), FEW_ROW.size * n_in // 4)
    return rows + 4 * (n_slot + 1 + TILE_INTS * n_slot)


class _FewRows(NamedTuple):
    """The offsets of the parts of a row of n elements that PACK_ROWS makes for quantised weights.

    They are in bytes, as multiples of n / 4. An element is 128 * high + low, both signed bytes,
    times the scale of its 16 neighbours; their sum is stored, too, as float32. If products were
    packed for a norm, so is the sum of the squares of the 16 before they were multiplied by its
    weights.
    """

    low: int
    scale: int
    sum: int
    squares: int
    size: int


FEW_ROW = _FewRows(4, 8, 9, 10, 12)
