"""The memory of pages, which the sessions of an engine share; a page may belong to several.

A slot holds a page of tokens of all layers; K and V, which may be of different types, have separate
arrays. Slots are taken in order, so memory grows with the tokens, in huge pages: attention reads a
few KiB in each of many locations, and with pages of 4 KiB it would wait for address translation.
"""

import numpy as np

from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.pages import PagePool
from tamis.kv.types import KVTypes, kv_bytes
from tamis.model.hparams import HParams
from tamis.platform.memory import drop, huge_zeros, physical_bytes

MOST_ROWS = 1 << 31  # kernels index the rows of all pages in int32


class PageStore:
    """Room for n_slot pages. It reserves address space, which becomes resident as it is used.

    Raises OSError if there is not enough address space.
    """

    def __init__(self, hp: HParams, types: KVTypes, n_slot: int) -> None:
        self.types, self.n_layer, self._n_slot = types, hp.n_layer, n_slot
        self.pool = PagePool(n_slot)
        shape = (n_slot * hp.n_layer, hp.n_head_kv, PAGE)
        stored = types[:1] if hp.latent.n_latent else types  # a latent is both K and V
        self._maps, self._arrays = zip(
            *(huge_zeros(shape, kv_row(type, hp.head_dim)) for type in stored), strict=True
        )
        self.k, self.v = self._arrays[0], self._arrays[-1]  # kv_row [n_slot * n_layer, ...]

    @property
    def slots(self) -> list[np.ndarray]:
        """K and V, kv_row [n_slot, n_layer, n_head_kv, PAGE]; one array of latents."""
        return [x.reshape(self._n_slot, self.n_layer, *x.shape[1:]) for x in self._arrays]

    def copied(self, slot: int) -> int:
        """A new slot with the same contents. Raises OutOfPagesError."""
        copy = self.pool.take()
        for pages in self.slots:
            pages[copy] = pages[slot]
        return copy

    def give_back(self, slots: list[int]) -> None:
        """Release slots; the memory of those that no sequence holds returns to the system."""
        free = sorted(slot for slot in slots if self.pool.release(slot))
        while free:
            n = next((i for i in range(1, len(free)) if free[i] != free[0] + i), len(free))
            for memory, pages in zip(self._maps, self.slots, strict=True):
                drop(memory, free[0] * pages[0].nbytes, (free[0] + n) * pages[0].nbytes)
            free = free[n:]


def most_slots(hp: HParams, types: KVTypes) -> int:
    """The number of pages that the machine's memory could hold."""
    rows = hp.n_layer * hp.n_head_kv * PAGE
    return min(physical_bytes() // kv_bytes(hp, PAGE, types), MOST_ROWS // rows - 1)
