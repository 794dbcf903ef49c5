"""A semaphore that is fair among clients: the one that holds the fewest permits is served next."""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable


class FairSemaphore:
    """n permits. Used from one event loop only."""

    def __init__(self, n: int) -> None:
        self._free = n
        self._held: Counter[Hashable] = Counter()
        # By owner; an owner that has just received a permit moves to the end.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @property
    def n_waiting(self) -> int:
        """The number of callers that wait for a permit."""
        return sum(map(len, self._waiting.values()))

    async def acquire(self, owner: Hashable) -> None:
        """Wait for a permit; `release` gives it back. A cancelled wait holds none."""
        permit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(permit)
        self._grant()
        try:
            await permit
        except asyncio.CancelledError:
            if permit.done() and not permit.cancelled():
                self.release(owner)
            else:
                self._withdraw(owner, permit)
            raise

    def release(self, owner: Hashable) -> None:
        """Give one of the owner's permits back."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._grant()

    def _withdraw(self, owner: Hashable, permit: "asyncio.Future[None]") -> None:
        permits = self._waiting.get(owner, deque())
        if permit in permits:
            permits.remove(permit)
            if not permits:
                del self._waiting[owner]

    def _grant(self) -> None:
        while self._free and self._waiting:
            owner = min(self._waiting, key=lambda each: self._held[each])
            permits = self._waiting.pop(owner)
            permit = permits.popleft()
            if permits:
                self._waiting[owner] = permits
            if permit.cancelled():
                continue
            self._free -= 1
            self._held[owner] += 1
            permit.set_result(None)
