"""Turns for work that clients wait for: the client with the least under way is the next."""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable


class Turns:
    """So many at a time. Of one loop."""

    def __init__(self, n: int) -> None:
        self._free = n
        self._running: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # the last served last

    @property
    def n_waiting(self) -> int:
        """Those without a turn yet."""
        return sum(map(len, self._waiting.values()))

    async def enter(self, owner: Hashable) -> None:
        """Wait for a turn, which `leave` ends."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(owner)
            else:
                self._forget(owner, turn)
            raise

    def leave(self, owner: Hashable) -> None:
        """End a turn."""
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._give()

    def _forget(self, owner: Hashable, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(owner, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]

    def _give(self) -> None:
        while self._free and self._waiting:
            owner = min(self._waiting, key=lambda each: self._running[each])
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if turn.cancelled():
                continue
            self._free -= 1
            self._running[owner] += 1
            turn.set_result(None)
