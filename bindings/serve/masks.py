"""The tokens that grammars allow, computed by processes of the helper."""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from tamis.bindings.serve.wire import CHOICE, TOKEN, Broken, Frames, Kind, frame
from tamis.sampling.base import Candidates, SamplerError, Step
from tamis.sampling.grammar import allowed

MASK_SECONDS = 10  # the time that one token's mask may take


class Masks:
    """The masks that a process computes for the choices of one request; for one thread."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel, self._frames = channel, Frames()
        self._found: dict[int, deque[bytes | SamplerError]] = {}
        self._end: SamplerError | None = None

    def step(self, choice: int, n_vocab: int) -> "MaskStep":
        """The sampler's step of a choice."""
        return MaskStep(self, choice, n_vocab)

    def send(self, choice: int, token: int) -> None:
        """Advance a choice by a token; the next mask arrives when it is computed."""
        try:
            self._channel.send(frame(Kind.TOKENS, TOKEN.pack(choice, token)))
        except OSError:
            self._end = self._end or _ended()

    def take(self, choice: int, seconds: float) -> bytes | None:
        """The next mask of a choice, None if it has not arrived yet. Raises SamplerError."""
        end = time.monotonic() + seconds
        found = self._found.setdefault(choice, deque())
        self._read()
        while not found and self._end is None and (left := end - time.monotonic()) > 0:
            poll = select.poll()
            with contextlib.suppress(OSError, ValueError):  # the loop has closed it
                poll.register(self._channel, select.POLLIN)
                poll.poll(1000 * left)
            self._read()
        if found:
            mask = found.popleft()
            if isinstance(mask, SamplerError):
                raise mask
            return mask
        if self._end is not None:
            raise self._end
        return None

    def close(self) -> None:
        """Disconnect from the process; callable from any thread."""
        self._channel.close()

    def _read(self) -> None:
        while self._end is None:
            try:
                while (found := self._frames.next()) is not None:
                    self._sort(*found)
            except Broken:
                self._end = _ended()
                return
            try:
                data = self._channel.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end = _ended()
                return
            self._frames.feed(data)

    def _sort(self, kind: Kind, data: bytes) -> None:
        (choice,) = CHOICE.unpack_from(data)
        text = data[CHOICE.size :]
        refused = kind is Kind.REFUSED
        item = SamplerError(text.decode("utf-8", "replace")) if refused else text
        self._found.setdefault(choice, deque()).append(item)


def _ended() -> SamplerError:
    return SamplerError("grammar: the process that follows it has ended: make it smaller")


class MaskStep(Step):
    """Keeps the tokens that a grammar allows, which another process follows."""

    def __init__(self, masks: Masks, choice: int, n_vocab: int) -> None:
        self._masks, self._choice, self._n_vocab = masks, choice, n_vocab
        self._mask: bytes | None = None
        self._asked = time.monotonic()

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether `apply` can run without waiting, after at most so many seconds.

        Raises SamplerError.
        """
        if self._mask is None:
            self._mask = self._masks.take(self._choice, seconds)
        if self._mask is None and time.monotonic() > self._asked + MASK_SECONDS:
            raise SamplerError(f"grammar: a token takes over {MASK_SECONDS} s: make it smaller")
        return self._mask is not None

    def apply(self, c: Candidates) -> Candidates:
        """The candidates that the grammar allows. Raises SamplerError."""
        while not self.ready(MASK_SECONDS):
            pass
        assert self._mask is not None
        if 8 * len(self._mask) < self._n_vocab:
            raise _ended()
        return allowed(c, self._mask, self._n_vocab)

    def read(self, token_ids: Sequence[int]) -> None:
        """Do nothing: a grammar covers the answer alone."""

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a token."""
        self._mask, self._asked = None, time.monotonic()
        self._masks.send(self._choice, token_id)
