"""Bookkeeping of KV pages: ids, a free list and reference counts; no arrays of keys or values."""

import threading

import numpy as np


class OutOfPagesError(RuntimeError):
    """All pages are taken."""


class PagePool:
    """`n_slot` page slots, handed out by id. A slot returns to the pool when nobody holds it.

    Sessions of several threads may share it.
    """

    def __init__(self, n_slot: int) -> None:
        self._n_fresh = 0  # slots that were ever handed out: these are the first ones
        self._free: list[int] = []  # of these, given back
        self._holders = np.zeros(n_slot, np.int32)
        self._lock = threading.Lock()

    @property
    def n_free(self) -> int:
        """Slots that can still be taken."""
        return len(self._holders) - self._n_fresh + len(self._free)

    def take(self) -> int:
        """A free slot, held once: from 0 up, those given back first. Raises OutOfPagesError."""
        with self._lock:
            if self._free:
                slot = self._free.pop()
            elif self._n_fresh < len(self._holders):
                slot = self._n_fresh
                self._n_fresh += 1
            else:
                raise OutOfPagesError(
                    f"all {len(self._holders)} pages are in use: close a session, or shorten one"
                )
            self._holders[slot] = 1
            return slot

    def share(self, slot: int) -> None:
        """Hold a slot once more."""
        with self._lock:
            assert self._holders[slot] > 0, f"slot {slot} is free"
            self._holders[slot] += 1

    def n_holder(self, slot: int) -> int:
        """How many hold a slot."""
        return int(self._holders[slot])

    def release(self, slot: int) -> bool:
        """Give up one hold of a slot; whether it is free now."""
        with self._lock:
            assert self._holders[slot] > 0, f"slot {slot} is free"
            self._holders[slot] -= 1
            if self._holders[slot] == 0:
                self._free.append(slot)
                return True
            return False
