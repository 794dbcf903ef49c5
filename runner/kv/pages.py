"""Bookkeeping of KV pages: ids, a free list and reference counts; no arrays of keys or values."""

import numpy as np


class OutOfPagesError(RuntimeError):
    """All pages are taken."""


class PagePool:
    """`n_slot` page slots, handed out by id. A slot returns to the pool when nobody holds it."""

    def __init__(self, n_slot: int) -> None:
        # Reversed, so that slots are handed out from 0 up and neighbours stay neighbours.
        self._free = list(range(n_slot - 1, -1, -1))
        self._holders = np.zeros(n_slot, np.int32)

    @property
    def n_free(self) -> int:
        """Slots that can still be taken."""
        return len(self._free)

    def take(self) -> int:
        """A free slot, held once. Raises OutOfPagesError."""
        if not self._free:
            raise OutOfPagesError(f"all {len(self._holders)} pages are in use")
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Hold a slot once more."""
        assert self._holders[slot] > 0, f"slot {slot} is free"
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Give up one hold of a slot."""
        assert self._holders[slot] > 0, f"slot {slot} is free"
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._free.append(slot)
