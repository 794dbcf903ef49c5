"""Limits of time that hold on a machine of which others take the most."""

import contextlib
import time
from collections.abc import Iterator

FAST = 0.01  # seconds of `_loop` on a machine that the limits are meant for


def _loop() -> float:
    start, n = time.process_time(), 0
    for i in range(200_000):
        n += i
    return time.process_time() - start


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail where the body takes more of the processor, in proportion to how slow the machine is.

    Its speed is measured before and after, and the slower of the two counts.
    """
    before, start = _loop(), time.process_time()
    yield
    spent = time.process_time() - start
    slower = max(1.0, before / FAST, _loop() / FAST)
    assert spent < seconds * slower, f"{spent:.2f} s on a machine {slower:.1f} times slower"
