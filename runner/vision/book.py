"""The pictures that messages of a conversation mark, by number."""

import threading
from collections import OrderedDict

MOST_BYTES = 256 << 20  # of files; those used longest ago are dropped


class Book:
    """Files of pictures by the number of their mark; equal files have one number."""

    def __init__(self) -> None:
        self._files: OrderedDict[int, bytes] = OrderedDict()
        self._numbers: dict[bytes, int] = {}
        self._n_bytes, self._next, self._lock = 0, 0, threading.Lock()

    def add(self, data: bytes) -> int:
        """Keep a file; returns its number."""
        with self._lock:
            if data in self._numbers:
                self._files.move_to_end(self._numbers[data])
                return self._numbers[data]
            number, self._next = self._next, self._next + 1
            self._files[number], self._numbers[data] = data, number
            self._n_bytes += len(data)
            while self._n_bytes > MOST_BYTES and len(self._files) > 1:
                _, old = self._files.popitem(last=False)
                del self._numbers[old]
                self._n_bytes -= len(old)
            return number

    def get(self, number: int) -> bytes:
        """The file of a number. Raises ValueError if it was dropped."""
        with self._lock:
            if number not in self._files:
                raise ValueError("a picture of the conversation is no longer held: give it again")
            self._files.move_to_end(number)
            return self._files[number]
