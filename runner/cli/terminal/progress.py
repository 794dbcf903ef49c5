"""Progress on standard error: on a terminal one line that is erased at the end.

Elsewhere a stage that takes long is a line, once.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
# Texts for the stages that the library names.
STAGES = {
    "load": "opening the model",
    "repack": "preparing the weights",
    "compile": "compiling once per processor (ahead: tamis warmup)",
    "download": "downloading",
    "check": "checking the file",
    "join": "joining the parts",
    "write": "writing",
    "calibrate": "reading the text",
    "measure": "measuring each tensor",
    "wait": "waiting for another download of it",
}
TELLS = ("compile", "download", "repack", "wait")  # stages that are reported without a terminal
LONG = 10.0  # seconds after which they are
FIRST_ESTIMATE = 2.0  # seconds of measuring before an estimate is shown
CHUNKS = 3  # of a prompt, measured before the first estimate: each costs more than the one before


class Progress:
    """A progress line on standard error; without a terminal a line for a stage that is long."""

    def __init__(self) -> None:
        self._shown = False
        self._stage = ""
        self._start = time.monotonic()
        self._told: set[str] = set()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show stage, share done and time left; the line is erased when the stage is complete.

        The time counts from the stage's first call; progress before it is not counted.
        """
        if stage != self._stage or done == 0:
            self._stage, self._start = stage, time.monotonic()
        if not sys.stderr.isatty():
            self._tell(stage)
            return
        share = f"{100 * done // total:3d} %" if total else f"{done / MIB:.1f} MiB"
        spent = time.monotonic() - self._start
        left = ""
        if total and done and spent >= FIRST_ESTIMATE:
            left = f", {duration(spent * (total - done) / done)} left"
        if total and done >= total:
            self.clear()
            return
        self._draw(STAGES.get(stage, stage), f": {share}{left}")

    def _tell(self, stage: str) -> None:
        """Without a terminal: say once what takes long."""
        if stage in TELLS and stage not in self._told and time.monotonic() - self._start >= LONG:
            self._told.add(stage)
            sys.stderr.write(f"{STAGES[stage]}\n")

    def of(self, stage: str) -> Callable[[int, int], None]:
        """The function (done, total) that shows one stage."""
        return lambda done, total: self(stage, done, total)

    def reading(self, total: int, n_past: int = 0) -> Callable[[int, int], None]:
        """A function to call with (done, total) while a prompt is read, from now on.

        n_past: tokens that are held already. The time left is shown once three chunks have shown
        the cost of a token and how it grows with its position.
        """
        if not sys.stderr.isatty():
            return _nothing
        from tamis.summary.meter import Work, WorkMeter

        meter, n_chunk = WorkMeter(clock=time.monotonic), 0
        meter.begin("", Work(n_past + total, 0, at=n_past))
        self._draw(f"reading {total} tokens")

        def told(done: int, total: int) -> None:
            nonlocal n_chunk
            n_chunk += 1
            meter.read("", n_past + done)
            found = meter.left() if n_chunk >= CHUNKS else None
            left = "" if found is None else f", {duration(found[1])} left"
            if done >= total:
                self.clear()
            else:
                self._draw(f"reading {total} tokens", f": {100 * done // total:3d} %{left}")

        return told

    def clear(self) -> None:
        """Erase the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False

    def _draw(self, text: str, share: str = "") -> None:
        """Draw the line; where it is too long, the text is shortened and the share stays."""
        room = max(columns() - 1 - len(share), 0)
        sys.stderr.write(f"\r\x1b[K{text[:room]}{share[: columns() - 1]}")
        sys.stderr.flush()
        self._shown = True


def columns() -> int:
    """The columns of the terminal of standard error."""
    n = 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stand-in has no number
        n = os.get_terminal_size(sys.stderr.fileno()).columns
    return n or 80  # 0: a terminal that does not report it


def duration(seconds: float) -> str:
    """A time in readable form."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _nothing(*_: Any) -> None:
    """Do nothing: there is no terminal."""
