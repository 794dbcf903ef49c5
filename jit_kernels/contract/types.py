"""The records that both sides of an op use: weights, the KV cache of a layer, a selection."""

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

PAGE = 64  # tokens of a KV page
KV_TYPES = ("f16", "q8_0", "q4_0")  # of keys and of values
KV_BLOCK = 32  # elements of q8_0 and q4_0 that share a scale
LINE = 64  # bytes of a cache line, and of the widest vector


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array like np.zeros that begins at a cache line: vectors of its rows touch one line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)


class QTensor(NamedTuple):
    """A weight matrix in its ggml encoding: n_out rows of n_in elements (n_out of all experts)."""

    data: np.ndarray  # uint8 [n_bytes], read-only view of the file's mapping
    type: str  # the ggml type's name
    n_out: int
    n_in: int
    n_matrix: int = 1  # matrices that the rows belong to: experts, or heads


def kv_row(type: str, head_dim: int) -> np.dtype:
    """The type of one key or value of one head: float16, or q8_0 or q4_0 as in ggml.

    q8_0: q[i] * d[i // KV_BLOCK]. q4_0: (n - 8) * d[i // KV_BLOCK], n a nibble of q: of each block
    of 16 bytes, the low nibbles are the first half, the high ones the second.
    """
    if type == "f16":
        return np.dtype((np.float16, head_dim))
    q = (np.int8, head_dim) if type == "q8_0" else (np.uint8, head_dim // 2)
    return np.dtype([("q", *q), ("d", np.float16, head_dim // KV_BLOCK)])


def kv_type(rows: np.ndarray) -> str:
    """The type of an array of `kv_row`."""
    if rows.dtype == np.float16:
        return "f16"
    return "q8_0" if rows.dtype["q"].base == np.int8 else "q4_0"


class KVView(NamedTuple):
    """One layer's KV cache, as kernels see it."""

    # kv_row [n, n_head_kv, PAGE]: one head's keys of a page are contiguous. Not all of the n pages
    # need belong to this layer.
    k: np.ndarray
    v: np.ndarray
    k_table: np.ndarray  # int32 [n_page]: the index in k of a logical page, -1 = not resident
    v_table: np.ndarray  # int32 [n_page]

    @property
    def types(self) -> tuple[str, str]:
        """The types of keys and of values: constants of the ops that read them."""
        return kv_type(self.k), kv_type(self.v)

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and a value of one head."""
        return (self.k[0, 0].nbytes + self.v[0, 0].nbytes) // PAGE


class Selection(NamedTuple):
    """The blocks of keys that each row of queries reads, as CSR over fixed buffers.

    Row r of query block b is row b * n_row + r; n_row is n_head_kv (one set for the heads that
    share a KV head) or n_head (one set per query head). A row's indices are ascending and unique;
    index i stands for positions [i * block, (i + 1) * block). `attend` applies causality and a
    layer's own sliding window to each position.
    """

    indptr: np.ndarray  # int32 [n_q_block * n_row + 1]
    indices: np.ndarray  # int32 [capacity]
    block: int  # tokens an index stands for
    q_block: int  # queries a row stands for
    n_row: int
    log_weight: np.ndarray | None = None  # float32 [capacity], added to the scores of an index
