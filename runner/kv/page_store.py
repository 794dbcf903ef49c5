"""The memory that pages lie in, which the sessions of an engine share: a page may be of several.

A slot holds a page of tokens of all layers; keys and values, which may be of different types, have
memory of their own. Slots are taken in order, so memory grows with the tokens, in huge pages:
attention reads a few KiB in each of many places, and with pages of 4 KiB it would wait for address
translation.
"""

import mmap
import os

import numpy as np

from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.pages import PagePool
from tamis.kv.types import KVTypes, kv_bytes
from tamis.model.hparams import HParams

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's number; Python 3.13 has the name
MOST_ROWS = 1 << 31  # kernels number the rows of all pages in int32


class PageStore:
    """Room for n_slot pages. Memory is reserved as address space and becomes resident as used.

    Raises OSError where there is no such address space.
    """

    def __init__(self, hp: HParams, types: KVTypes, n_slot: int) -> None:
        self.types, self.n_layer, self._n_slot = types, hp.n_layer, n_slot
        self.pool = PagePool(n_slot)
        shape = (n_slot * hp.n_layer, hp.n_head_kv, PAGE)
        self._maps, arrays = zip(
            *(huge_zeros(shape, kv_row(type, hp.head_dim)) for type in types), strict=True
        )
        self.k, self.v = arrays  # kv_row [n_slot * n_layer, n_head_kv, PAGE]

    @property
    def slots(self) -> list[np.ndarray]:
        """Keys and values, kv_row [n_slot, n_layer, n_head_kv, PAGE]."""
        return [x.reshape(self._n_slot, self.n_layer, *x.shape[1:]) for x in (self.k, self.v)]

    def copied(self, slot: int) -> int:
        """A slot of its own with the same contents. Raises OutOfPagesError."""
        own = self.pool.take()
        for pages in self.slots:
            pages[own] = pages[slot]
        return own

    def give_back(self, slots: list[int]) -> None:
        """Release slots for good: the memory of those that nobody holds goes back to the system."""
        free = sorted(slot for slot in slots if self.pool.release(slot))
        while free:
            n = next((i for i in range(1, len(free)) if free[i] != free[0] + i), len(free))
            for memory, pages in zip(self._maps, self.slots, strict=True):
                _drop(memory, free[0] * pages[0].nbytes, (free[0] + n) * pages[0].nbytes)
            free = free[n:]


def most_slots(hp: HParams, types: KVTypes) -> int:
    """How many pages the machine's memory could hold."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = hp.n_layer * hp.n_head_kv * PAGE
    return min(memory // kv_bytes(hp, PAGE, types), MOST_ROWS // rows - 1)


def huge_zeros(shape: tuple[int, ...], dtype: np.dtype) -> tuple[mmap.mmap, np.ndarray]:
    """Zeros in pages that hold nothing else, which the kernel is asked to make huge ones.

    A device can be shown such memory (Backend.mapped).
    """
    size = dtype.itemsize * int(np.prod(shape))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, max(1, size), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, np.ndarray(shape, dtype, memory)


def _drop(memory: mmap.mmap, first: int, last: int) -> None:
    """Give the system back what lies wholly within bytes first .. last - 1; it reads as zeros."""
    first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        memory.madvise(mmap.MADV_DONTNEED, first, last - first)
