"""Integers that stand for objects. A handle that was freed, or never existed, is detected."""

import threading
from numbers import Integral
from typing import Any, TypeVar

from tamis.bindings.flat.status import invalid

T = TypeVar("T")
# index bits of a handle; the generation is above them, so that any handle fits 63 bits
INDEX_BITS = 24


class HandleTable:
    """Objects by handle. A reused index gets a new generation, so that old handles stay stale.

    0 is llama.h's NULL and never a handle.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: list[Any] = [None]
        self._generation = [0]
        self._free: list[int] = []

    def add(self, thing: Any) -> int:
        """A handle for `thing`."""
        with self._lock:
            index = self._free.pop() if self._free else len(self._things)
            if index >= 1 << INDEX_BITS:
                invalid(f"{index} objects are held: free some")
            if index == len(self._things):
                self._things.append(None)
                self._generation.append(0)
            self._things[index] = thing
            self._generation[index] += 1
            return self._generation[index] << INDEX_BITS | index

    def get(self, handle: Any, kind: type[T]) -> T:
        """The object of a handle. Raises Refusal if it is not of this kind, or was freed."""
        with self._lock:
            thing = self._find(handle)
        name = kind.__name__.lower()
        if thing is None:
            invalid(f"{handle!r} is no handle of a {name}, or it was freed")
        if not isinstance(thing, kind):
            invalid(f"handle {handle} is of a {type(thing).__name__.lower()}, expected a {name}")
        return thing

    def remove(self, handle: Any, kind: type[T]) -> T:
        """The object of a handle, which is stale from then on. Raises Refusal."""
        thing = self.get(handle, kind)
        with self._lock:
            if self._find(handle) is not thing:
                invalid(f"handle {handle} was freed by another thread")
            index = int(handle) & ((1 << INDEX_BITS) - 1)
            self._things[index] = None
            self._free.append(index)
        return thing

    def __len__(self) -> int:
        """The number of objects held."""
        with self._lock:
            return sum(thing is not None for thing in self._things)

    def _find(self, handle: Any) -> Any:
        if not isinstance(handle, Integral) or isinstance(handle, bool) or handle <= 0:
            return None
        index = int(handle) & ((1 << INDEX_BITS) - 1)
        if index >= len(self._things) or self._generation[index] != int(handle) >> INDEX_BITS:
            return None
        return self._things[index]


TABLE = HandleTable()
