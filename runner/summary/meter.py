"""Progress of a long task and the remaining time, estimated from measurements so far.

A token of a prompt costs a + b * position (attention reads what came before it); a token of an
answer costs the mean of those generated. There is no estimate before the first measurement.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """One call of the model: prompt tokens from `at` to `end`, then at most n_answer tokens."""

    end: int
    n_answer: int
    at: int = 0


class WorkMeter:
    """The remaining work, by name of a document; several threads may report to one meter."""

    def __init__(self, n_worker: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._clock, self._n_worker = threading.Lock(), clock, n_worker
        self._left: dict[str, deque[Work]] = {}
        self._since: dict[str, float] = {}
        # Sums over chunks of n tokens, the sum of whose positions is p, in t seconds: the normal
        # equations of t = a * n + b * p.
        self._nn = self._np = self._pp = self._nt = self._pt = 0.0
        self._n_written, self._t_written = 0, 0.0
        self._spent = 0.0

    def expect(self, name: str, works: Iterable[Work]) -> None:
        """Set the remaining work of a document."""
        with self._lock:
            self._left[name] = deque(works)
            self._since[name] = self._clock()

    def begin(self, name: str, work: Work) -> None:
        """Replace the expected next call of a document by the real one."""
        with self._lock:
            left = self._left.setdefault(name, deque())
            if left:
                left.popleft()
            left.appendleft(work)
            self._since[name] = self._clock()

    def read(self, name: str, at: int) -> None:
        """Note that a prompt has been read up to the position `at`."""
        with self._lock:
            work, t = self._left[name][0], self._lap(name)
            n, p = at - work.at, (at**2 - work.at**2) / 2
            self._nn, self._np, self._pp = self._nn + n * n, self._np + n * p, self._pp + p * p
            self._nt, self._pt = self._nt + n * t, self._pt + p * t
            work.at = at

    def wrote(self, name: str) -> None:
        """Note that a token of an answer has been generated."""
        with self._lock:
            self._t_written += self._lap(name)
            self._n_written += 1
            work = self._left[name][0]
            work.n_answer = max(0, work.n_answer - 1)

    def done(self, name: str) -> None:
        """Note that the call is complete, however many tokens were expected of it."""
        with self._lock:
            self._left[name].popleft()

    def finish(self, name: str) -> None:
        """Note that a document has no remaining work."""
        with self._lock:
            self._left.pop(name, None)

    def left(self) -> tuple[float, float] | None:
        """The share done (of 1) and the seconds left; None before the first measurement."""
        with self._lock:
            if not self._nn:
                return None
            a, b = self._rates()
            write = self._t_written / self._n_written if self._n_written else 2 * a
            seconds = 0.0
            for work in (work for left in self._left.values() for work in left):
                n, p = work.end - work.at, (work.end**2 - work.at**2) / 2
                seconds += a * n + b * p + write * work.n_answer
            return self._spent / (self._spent + seconds + 1e-9), seconds / self._n_worker

    def _rates(self) -> tuple[float, float]:
        """The seconds of a prompt token, a, and per position, b; never negative."""
        det = self._nn * self._pp - self._np**2
        if det > 1e-6 * self._nn * self._pp:
            a = (self._nt * self._pp - self._pt * self._np) / det
            b = (self._pt * self._nn - self._nt * self._np) / det
            if a >= 0 and b >= 0:
                return a, b
            if a < 0:
                return 0.0, self._pt / self._pp
        return self._nt / self._nn, 0.0

    def _lap(self, name: str) -> float:
        now = self._clock()
        spent, self._since[name] = now - self._since[name], now
        self._spent += spent
        return spent
