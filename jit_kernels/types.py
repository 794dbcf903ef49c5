"""The records that both sides of an op see: weights, the KV cache of a layer, a selection."""

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

PAGE = 64  # tokens a KV page
LINE = 64  # bytes of a cache line, and of the widest vector


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """As np.zeros, with its start on a cache line: vectors of its rows touch one line, not two."""
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


class KVView(NamedTuple):
    """What a kernel sees of one layer's keys and values."""

    # float16 [n, n_head_kv, PAGE, head_dim]: one head's keys of a page lie together. Not all of the
    # n pages need be this layer's.
    k: np.ndarray
    v: np.ndarray
    k_table: np.ndarray  # int32 [n_page]: where in k a logical page is, -1 = not resident
    v_table: np.ndarray  # int32 [n_page]


class Selection(NamedTuple):
    """Which blocks of keys each row of queries reads, as CSR over fixed buffers.

    Row r of query block b is row b * n_row + r; n_row is n_head_kv (one set for the heads that
    share a KV head) or n_head (one set a query head). A row's indices are ascending and unique;
    index i stands for positions [i * block, (i + 1) * block). Causality and a layer's own sliding
    window are applied by `attend` to each position.
    """

    indptr: np.ndarray  # int32 [n_q_block * n_row + 1]
    indices: np.ndarray  # int32 [capacity]
    block: int  # tokens an index stands for
    q_block: int  # queries a row stands for
    n_row: int
    log_weight: np.ndarray | None = None  # float32 [capacity], added to the scores of an index
