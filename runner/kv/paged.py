"""The KV cache of one sequence: a table of the store's pages that it uses."""

import weakref
from typing import Any

import numpy as np

from tamis.jit_kernels.contract.types import PAGE, KVView
from tamis.kv.cache import KVCache
from tamis.kv.page_store import PageStore
from tamis.model.hparams import HParams


class PagedKV(KVCache):
    """The paged KV cache of one sequence of up to n_ctx tokens.

    A page that another sequence also holds is copied before this one writes to it.
    """

    resident = True

    def __init__(self, hp: HParams, n_ctx: int, store: PageStore) -> None:
        self._store, self._n_layer, self.types = store, hp.n_layer, store.types
        # Indices of layer 0's pages; -1: no page.
        self._table = np.full(-(-n_ctx // PAGE), -1, np.int32)
        self._held: list[int] = []  # the slots of its pages
        weakref.finalize(self, store.give_back, self._held).atexit = False

    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return len(self._table) * PAGE

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """The page table of all views, which `reserve` and `truncate` change."""
        return (self._table,)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that `read` and `write` use: to be fetched before, and sent after."""
        return self._store.k, self._store.v

    def view(self, layer: int) -> KVView:
        """The view of a layer that kernels use. The arrays stay the same for the cache's life."""
        return KVView(self._store.k[layer:], self._store.v[layer:], self._table, self._table)

    def reserve(self, first: int, n_tokens: int) -> None:
        """Make positions first .. n_tokens - 1 writable. Raises OutOfPagesError."""
        pool = self._store.pool
        for page in range(first // PAGE, -(-n_tokens // PAGE)):
            if page == len(self._held):
                self._held.append(pool.take())
            elif pool.n_holder(self._held[page]) > 1:
                shared = self._held[page]
                self._held[page] = self._store.copied(shared)
                pool.release(shared)
            self._table[page] = self._held[page] * self._n_layer

    def truncate(self, n_tokens: int) -> None:
        """Release the pages that hold no position below n_tokens."""
        while len(self._held) > -(-n_tokens // PAGE):
            self._store.pool.release(self._held.pop())
            self._table[len(self._held)] = -1

    def share(self, other: KVCache, n_tokens: int) -> bool:
        """Hold the first n_tokens positions of another sequence, without copying.

        Returns False, without a change, if its pages are in another store.
        """
        if not isinstance(other, PagedKV) or other._store is not self._store:
            return False
        held = other._held[: -(-n_tokens // PAGE)]
        for slot in held:
            self._store.pool.share(slot)
        self.truncate(0)
        self._held += held
        self._table[: len(held)] = np.array(held, np.int32) * self._n_layer
        return True

    def read(self, layer: int, n_tokens: int, page: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V from a page on to position n_tokens, kv_row [n, n_head_kv]."""
        view = self.view(layer)
        return self._gather(view.k, n_tokens, page), self._gather(view.v, n_tokens, page)

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, page: int = 0) -> None:
        """Set K and V from the first position of a page on, in the form that `read` returns.

        Rows of another type are converted.
        """
        from tamis.kv.convert import as_type

        assert k.shape[:2] == v.shape[:2]
        self.reserve(page * PAGE, page * PAGE + len(k))
        view = self.view(layer)
        for pages, rows, type in zip((view.k, view.v), (k, v), self.types, strict=True):
            converted = as_type(rows, type)
            for start in range(0, len(rows), PAGE):
                part = converted[start : start + PAGE]
                pages[self._table[page + start // PAGE], :, : len(part)] = part.swapaxes(0, 1)

    def pages_from(self, first: int) -> list[Any]:
        """A copy of all layers' pages that hold positions from `first` on, for `put_back`."""
        return [pages[self._held[first // PAGE :]] for pages in self._store.slots]

    def put_back(self, first: int, pages: list[Any]) -> None:
        """Undo the writes since `pages_from(first)`; the same pages must be held."""
        for slots, kept in zip(self._store.slots, pages, strict=True):
            slots[self._held[first // PAGE :]] = kept

    def _gather(self, pages: np.ndarray, n_tokens: int, page: int) -> np.ndarray:
        rows = pages[self._table[page : -(-n_tokens // PAGE)]].swapaxes(1, 2)
        return rows.reshape(-1, *rows.shape[2:])[: n_tokens - page * PAGE].copy()
