"""The keys and values of one sequence: arrays of pages for each layer and the page table."""

import numpy as np

from tamis.hparams import HParams
from tamis.jit_kernels.types import PAGE, KVView, zeros
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
        self._n_page = -(-n_ctx // PAGE)
        shape = (self._n_page, hp.n_head_kv, PAGE, hp.head_dim)
        self._k = [zeros(shape, np.float16) for _ in range(hp.n_layer)]
        self._v = [zeros(shape, np.float16) for _ in range(hp.n_layer)]
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
        return KVView(self._k[layer], self._v[layer], self._table, self._table)

    def reserve(self, n_tokens: int) -> None:
        """Make the pages of positions 0 .. n_tokens - 1 writable. Raises OutOfPagesError."""
        while self._n_held < -(-n_tokens // PAGE):
            self._table[self._n_held] = self._pool.take()
            self._n_held += 1

    def truncate(self, n_tokens: int) -> None:
        """Give back the pages that hold no position below n_tokens."""
        while self._n_held > -(-n_tokens // PAGE):
            self._n_held -= 1
            self._pool.release(int(self._table[self._n_held]))
            self._table[self._n_held] = -1

    def read(self, layer: int, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of a layer's keys and values, f16 [n_tokens, n_head_kv, head_dim] each."""
        return self._gather(self._k[layer], n_tokens), self._gather(self._v[layer], n_tokens)

    def write(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Set keys and values of positions 0 .. len(k) - 1, shapes as `read` gives them."""
        assert k.shape == v.shape
        self.reserve(len(k))
        for pages, rows in ((self._k[layer], k), (self._v[layer], v)):
            for page in range(-(-len(rows) // PAGE)):
                part = rows[page * PAGE : (page + 1) * PAGE]
                pages[self._table[page], :, : len(part)] = part.transpose(1, 0, 2)

    def copy_from(self, other: "KVCache", n_tokens: int) -> None:
        """Hold what another cache of the same model holds of its first n_tokens positions."""
        self.truncate(0)
        for layer in range(len(self._k)):
            self.write(layer, *other.read(layer, n_tokens))

    def pages_from(self, first: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Copies of every layer's key and value pages that hold positions from `first` on."""
        slots = self._table[first // PAGE : self._n_held]
        return [(k[slots], v[slots]) for k, v in zip(self._k, self._v, strict=True)]

    def put_back(self, first: int, pages: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Undo what was written since `pages_from(first)`; the same pages must be held."""
        slots = self._table[first // PAGE : self._n_held]
        for layer, (k, v) in enumerate(pages):
            self._k[layer][slots], self._v[layer][slots] = k, v

    def _gather(self, pages: np.ndarray, n_tokens: int) -> np.ndarray:
        n_page = -(-n_tokens // PAGE)
        rows = pages[self._table[:n_page]].transpose(0, 2, 1, 3)
        return rows.reshape(n_page * PAGE, *rows.shape[2:])[:n_tokens].copy()
