"""Bookkeeping of KV pages: ids, a free list and reference counts, without their contents."""

import threading

import numpy as np


class OutOfPagesError(RuntimeError):
    """All pages are taken."""


class PagePool:
    """`n_slot` page slots, handed out by id.

    A slot returns to the pool when its last holder releases it.

    Sessions of several threads may share it.
    """

    def __init__(self, n_slot: int) -> None:
        self._n_fresh = 0  # slots that were ever handed out; they are the first ones
        self._free: list[int] = []  # those of them that were returned
        self._holders = np.zeros(n_slot, np.int32)
        self._lock = threading.Lock()

    @property
    def n_free(self) -> int:
        """The number of slots that can still be taken."""
        return len(self._holders) - self._n_fresh + len(self._free)

    def take(self) -> int:
        """Take a free slot with one holder: returned ones first, else the next.

        Raises OutOfPagesError.
        """
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
        """Add a holder to a slot."""
        with self._lock:
            assert self._holders[slot] > 0, f"slot {slot} is free"
            self._holders[slot] += 1

    def n_holder(self, slot: int) -> int:
        """The number of a slot's holders."""
        return int(self._holders[slot])

    def release(self, slot: int) -> bool:
        """Remove a holder from a slot; returns whether it is free now."""
        with self._lock:
            assert self._holders[slot] > 0, f"slot {slot} is free"
            self._holders[slot] -= 1
            if self._holders[slot] == 0:
                self._free.append(slot)
                return True
            return False
