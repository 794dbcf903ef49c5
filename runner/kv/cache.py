"""The keys and values of one sequence: pages, and the table that says where each is.

A slot holds a page of tokens of all layers, keys and values by turns. Slots are taken in order, so
memory grows with the tokens, in huge pages: attention reads a few KiB in each of many places, and
with pages of 4 KiB it would wait for address translation.
"""

import mmap

import numpy as np

from tamis.hparams import HParams
from tamis.jit_kernels.types import PAGE, KVView
from tamis.kv.pages import PagePool


def kv_bytes(hp: HParams, n_ctx: int) -> int:
    """Bytes of keys and values of all layers at n_ctx tokens, in f16."""
    n_page = -(-n_ctx // PAGE)
    return 2 * 2 * hp.n_layer * hp.n_embd_kv * n_page * PAGE


class KVCache:
    """Paged f16 keys and values of one sequence of up to n_ctx tokens.

    Memory is reserved as address space and becomes resident page by page, as tokens arrive.
    """

    def __init__(self, hp: HParams, n_ctx: int) -> None:
        self._n_page, self._n_layer = -(-n_ctx // PAGE), hp.n_layer
        self._stride = 2 * hp.n_layer  # from a layer's page in one slot to that in the next
        shape = (self._n_page * self._stride, hp.n_head_kv, PAGE, hp.head_dim)
        self._pages = _huge_zeros(shape)
        # Indices of layer 0's keys; -1: no page.
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
        k, v = self._pages[2 * layer :], self._pages[2 * layer + 1 :]
        return KVView(k, v, self._table, self._table)

    def reserve(self, n_tokens: int) -> None:
        """Make the pages of positions 0 .. n_tokens - 1 writable. Raises OutOfPagesError."""
        while self._n_held < -(-n_tokens // PAGE):
            self._table[self._n_held] = self._pool.take() * self._stride
            self._n_held += 1

    def truncate(self, n_tokens: int) -> None:
        """Give back the pages that hold no position below n_tokens."""
        while self._n_held > -(-n_tokens // PAGE):
            self._n_held -= 1
            self._pool.release(int(self._table[self._n_held]) // self._stride)
            self._table[self._n_held] = -1

    def read(self, layer: int, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a layer's keys and values, f16 [n_tokens, n_head_kv, head_dim] each."""
        view = self.view(layer)
        return self._gather(view.k, n_tokens), self._gather(view.v, n_tokens)

    def write(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Set keys and values of positions 0 .. len(k) - 1, shapes as `read` gives them."""
        assert k.shape == v.shape
        self.reserve(len(k))
        view = self.view(layer)
        for pages, rows in ((view.k, k), (view.v, v)):
            for page in range(-(-len(rows) // PAGE)):
                part = rows[page * PAGE : (page + 1) * PAGE]
                pages[self._table[page], :, : len(part)] = part.transpose(1, 0, 2)

    def copy_from(self, other: "KVCache", n_tokens: int) -> None:
        """Hold what another cache of the same model holds of its first n_tokens positions."""
        self.truncate(0)
        for layer in range(self._n_layer):
            self.write(layer, *other.read(layer, n_tokens))

    def pages_from(self, first: int) -> np.ndarray:
        """A copy of all layers' pages that hold positions from `first` on."""
        return self._slots()[self._held_from(first)]

    def put_back(self, first: int, pages: np.ndarray) -> None:
        """Undo what was written since `pages_from(first)`; the same pages must be held."""
        self._slots()[self._held_from(first)] = pages

    def _slots(self) -> np.ndarray:
        return self._pages.reshape(self._n_page, self._stride, -1)

    def _held_from(self, first: int) -> np.ndarray:
        return self._table[first // PAGE : self._n_held] // self._stride

    def _gather(self, pages: np.ndarray, n_tokens: int) -> np.ndarray:
        n_page = -(-n_tokens // PAGE)
        rows = pages[self._table[:n_page]].transpose(0, 2, 1, 3)
        return rows.reshape(n_page * PAGE, *rows.shape[2:])[:n_tokens].copy()


def _huge_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros, f16, in memory of its own that the kernel is asked to back with huge pages."""
    size = 2 * int(np.prod(shape))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float16).reshape(shape)
