"""The keys and values of one sequence: pages, and the table that says where each is.

A slot holds a page of tokens of all layers; keys and values, which may be of different types, have
memory of their own. Slots are taken in order, so memory grows with the tokens, in huge pages:
attention reads a few KiB in each of many places, and with pages of 4 KiB it would wait for address
translation.
"""

import mmap
from typing import NamedTuple

import numpy as np

from tamis.hparams import HParams
from tamis.jit_kernels.types import KV_BLOCK, KV_TYPES, PAGE, KVView, kv_row
from tamis.kv.convert import as_type
from tamis.kv.pages import PagePool


class KVTypes(NamedTuple):
    """The types that keys and values are kept in: of KV_TYPES."""

    k: str = "f16"
    v: str = "f16"

    def check(self, head_dim: int) -> None:
        """Raise ValueError where there is no such type, or none for rows of head_dim."""
        for name, type in zip(("type_k", "type_v"), self, strict=True):
            if type not in KV_TYPES:
                raise ValueError(f"{name} is {type!r}, expected one of {', '.join(KV_TYPES)}")
            if type != "f16" and head_dim % KV_BLOCK:
                raise ValueError(
                    f"{name} is {type}, which needs heads of a multiple of {KV_BLOCK} elements; "
                    f"this model's have {head_dim}: use f16"
                )

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a key and a value of one head."""
        return sum(kv_row(type, head_dim).itemsize for type in self)


def kv_bytes(hp: HParams, n_ctx: int, types: KVTypes) -> int:
    """Bytes of keys and values of all layers at n_ctx tokens."""
    n_page = -(-n_ctx // PAGE)
    return types.row_bytes(hp.head_dim) * hp.n_layer * hp.n_head_kv * n_page * PAGE


class KVCache:
    """Paged keys and values of one sequence of up to n_ctx tokens.

    Memory is reserved as address space and becomes resident page by page, as tokens arrive.
    """

    def __init__(self, hp: HParams, n_ctx: int, types: KVTypes) -> None:
        self.types = types
        self._n_page, self._n_layer = -(-n_ctx // PAGE), hp.n_layer
        shape = (self._n_page * hp.n_layer, hp.n_head_kv, PAGE)
        self._k, self._v = (_huge_zeros(shape, kv_row(type, hp.head_dim)) for type in types)
        # Indices of layer 0's pages; -1: no page.
        self._table = np.full(self._n_page, -1, np.int32)
        self._pool = PagePool(self._n_page)
        self._n_held = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self._n_page * PAGE

    @property
    def table(self) -> np.ndarray:
        """The page table of all views: what `reserve` and `truncate` change."""
        return self._table

    def view(self, layer: int) -> KVView:
        """What kernels see of a layer. The arrays stay the same for the cache's life."""
        return KVView(self._k[layer:], self._v[layer:], self._table, self._table)

    def reserve(self, n_tokens: int) -> None:
        """Make the pages of positions 0 .. n_tokens - 1 writable. Raises OutOfPagesError."""
        while self._n_held < -(-n_tokens // PAGE):
            self._table[self._n_held] = self._pool.take() * self._n_layer
            self._n_held += 1

    def truncate(self, n_tokens: int) -> None:
        """Give back the pages that hold no position below n_tokens."""
        while self._n_held > -(-n_tokens // PAGE):
            self._n_held -= 1
            self._pool.release(int(self._table[self._n_held]) // self._n_layer)
            self._table[self._n_held] = -1

    def read(self, layer: int, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a layer's keys and values, kv_row [n_tokens, n_head_kv] each."""
        view = self.view(layer)
        return self._gather(view.k, n_tokens), self._gather(view.v, n_tokens)

    def write(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Set keys and values of positions 0 .. len(k) - 1, as `read` gives them or of other types.

        Rows of another type are converted.
        """
        assert k.shape[:2] == v.shape[:2]
        self.reserve(len(k))
        view = self.view(layer)
        for pages, rows, type in zip((view.k, view.v), (k, v), self.types, strict=True):
            own = as_type(rows, type)
            for page in range(-(-len(rows) // PAGE)):
                part = own[page * PAGE : (page + 1) * PAGE]
                pages[self._table[page], :, : len(part)] = part.swapaxes(0, 1)

    def copy_from(self, other: "KVCache", n_tokens: int) -> None:
        """Hold what another cache of the same model holds of its first n_tokens positions."""
        self.truncate(0)
        for layer in range(self._n_layer):
            self.write(layer, *other.read(layer, n_tokens))

    def pages_from(self, first: int) -> list[np.ndarray]:
        """A copy of all layers' pages that hold positions from `first` on."""
        return [slots[self._held_from(first)] for slots in self._slots()]

    def put_back(self, first: int, pages: list[np.ndarray]) -> None:
        """Undo what was written since `pages_from(first)`; the same pages must be held."""
        for slots, kept in zip(self._slots(), pages, strict=True):
            slots[self._held_from(first)] = kept

    def _slots(self) -> list[np.ndarray]:
        shape = (self._n_page, self._n_layer)
        return [pages.reshape(*shape, *pages.shape[1:]) for pages in (self._k, self._v)]

    def _held_from(self, first: int) -> np.ndarray:
        return self._table[first // PAGE : self._n_held] // self._n_layer

    def _gather(self, pages: np.ndarray, n_tokens: int) -> np.ndarray:
        n_page = -(-n_tokens // PAGE)
        rows = pages[self._table[:n_page]].swapaxes(1, 2)
        return rows.reshape(n_page * PAGE, *rows.shape[2:])[:n_tokens].copy()


def _huge_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros in memory of its own that the kernel is asked to back with huge pages."""
    size = dtype.itemsize * int(np.prod(shape))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.ndarray(shape, dtype, memory)
