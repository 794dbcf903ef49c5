"""Copies of a session's KV pages as rows of bytes, for any backend and tier, in both directions.

A row is one page of all layers: for each layer its keys, then its values, of PAGE positions and all
KV heads.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tamis.engine.loaded import LoadedModel
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.cache import KVCache
from tamis.kv.types import KVTypes


class _Part(NamedTuple):
    """Where the keys or values of a layer are within a page's bytes."""

    layer: int  # counted from 0 over the layers that have a KV cache
    value: bool
    n_head_kv: int
    row: np.dtype
    first: int  # the first of its bytes
    end: int


def _parts(loaded: LoadedModel, types: KVTypes) -> Iterator[_Part]:
    first = 0
    for i, layer in enumerate(loaded.model.kv_layers):
        hp = loaded.hp.of_cache(layer)
        for value, type in enumerate(types):
            row = kv_row(type, hp.head_dim)
            end = first + PAGE * hp.n_head_kv * row.itemsize
            yield _Part(i, bool(value), hp.n_head_kv, row, first, end)
            first = end


def page_bytes(loaded: LoadedModel, types: KVTypes) -> int:
    """Bytes of a page: K and V of all layers."""
    return max((part.end for part in _parts(loaded, types)), default=0)


def read_pages(kv: KVCache, loaded: LoadedModel, first: int, n_tokens: int) -> np.ndarray:
    """Copies of the pages from page `first` on that hold positions below n_tokens.

    uint8 [n_page, page_bytes]; positions that are not held are 0. Raises KVFileError, MemoryError.
    """
    n_page = -(-n_tokens // PAGE) - first
    pages = np.empty((n_page, page_bytes(loaded, kv.types)), np.uint8)
    held: tuple[np.ndarray, np.ndarray] | None = None
    for part in _parts(loaded, kv.types):
        if not part.value:
            held = kv.read(part.layer, n_tokens, first)
        assert held is not None
        data = np.ascontiguousarray(held[part.value]).reshape(-1).view(np.uint8)
        to = pages[:, part.first : part.end]
        n_whole, size = len(data) // to.shape[1], to.shape[1]
        to[:n_whole] = data[: n_whole * size].reshape(-1, size)
        if n_whole < n_page:
            rest = data[n_whole * size :]
            to[n_whole, : len(rest)], to[n_whole, len(rest) :] = rest, 0
    return pages


def write_pages(
    kv: KVCache, loaded: LoadedModel, first: int, n_tokens: int, pages: Sequence[np.ndarray]
) -> None:
    """Write the pages from page `first` on, up to position n_tokens, as `read_pages` returned them.

    Raises OutOfPagesError, KVFileError.
    """
    n = n_tokens - first * PAGE
    keys = np.empty(0)
    for part in _parts(loaded, kv.types):
        data = np.concatenate([page[part.first : part.end] for page in pages])
        rows = np.ndarray((len(pages) * PAGE, part.n_head_kv), part.row, data)[:n]
        if part.value:
            kv.write(part.layer, keys, rows, first)
        else:
            keys = rows
