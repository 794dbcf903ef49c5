"""The recurrent states of one sequence: arrays of fixed size per layer, and snapshots.

A KV cache can be truncated; a state cannot, because later tokens have changed it. Snapshots are
kept instead: `go_back` restores one and returns its number of tokens, and the session computes the
tokens from there on again.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.contract.types import zeros

MOST = 8  # snapshots of a sequence


class StateKey(NamedTuple):
    """Identifies a state of a sequence: a layer of the model, and the state's name there."""

    layer: int
    name: str


def state_bytes(shapes: Mapping[tuple[int, str], tuple[int, ...]], most: int = MOST) -> int:
    """Bytes of states of these shapes, with all snapshots that may be kept."""
    return 4 * (1 + most) * sum(math.prod(shape) for shape in shapes.values())


class _Snapshot(NamedTuple):
    n_tokens: int  # the number of tokens after which it was taken
    values: np.ndarray


class RecurrentStates:
    """The states that kernels continue from, at fixed addresses, and at most `most` snapshots.

    The state before the first token is zero and needs no snapshot. While kernels write (`begin` to
    `end`) the live state is invalid; if `end` is not called, `go_back` recovers.
    """

    def __init__(self, shapes: Mapping[tuple[int, str], tuple[int, ...]], most: int = MOST) -> None:
        if most < 1:
            raise ValueError(f"{most} snapshots, expected 1 or more")
        self.shapes = {StateKey(*key): shape for key, shape in shapes.items()}
        self._most = most
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        self.live = zeros(sum(sizes), np.float32)  # all states, one after another
        ends = np.cumsum([0, *sizes]).tolist()
        self._views = {
            key: self.live[first:end].reshape(shape)
            for (key, shape), first, end in zip(self.shapes.items(), ends, ends[1:], strict=False)
        }
        self._n_tokens: int | None = 0  # tokens of the live state; None between begin and end
        self._snapshots: list[_Snapshot] = []  # by n_tokens, ascending

    @property
    def n_tokens(self) -> int | None:
        """The number of tokens of the live state; None while it is invalid."""
        return self._n_tokens

    @property
    def snapshots(self) -> list[int]:
        """The numbers of tokens of the snapshots, ascending."""
        return [snapshot.n_tokens for snapshot in self._snapshots]

    def kept(self) -> list[tuple[int, np.ndarray]]:
        """The snapshots (not copies), each with its number of tokens."""
        return [(snapshot.n_tokens, snapshot.values) for snapshot in self._snapshots]

    def view(self, layer: int, name: str) -> np.ndarray:
        """The state of a layer, float32, that kernels read and write."""
        return self._views[StateKey(layer, name)]

    def views(self, layers: range) -> list[np.ndarray]:
        """All states of some layers."""
        return [view for key, view in self._views.items() if key.layer in layers]

    def begin(self) -> None:
        """Mark the live state as invalid: kernels will write it."""
        self._n_tokens = None

    def end(self, n_tokens: int) -> None:
        """Mark the live state as valid, after n_tokens tokens."""
        self._n_tokens = n_tokens

    def keep(self) -> None:
        """Take a snapshot of the live state, which must be valid.

        If there are too many, one is dropped whose neighbours are close to each other, compared
        with how far back they are: what `go_back` leaves to compute is a bounded share of the
        distance it goes back.
        """
        assert self._n_tokens is not None, "a snapshot of a state that kernels write"
        if self._n_tokens == 0 or self._n_tokens in self.snapshots:
            return
        assert self._n_tokens > max(self.snapshots, default=0), "snapshots are taken in order"
        values = self._spare()
        values[:] = self.live
        self._snapshots.append(_Snapshot(self._n_tokens, values))

    def go_back(self, n_tokens: int) -> int:
        """Restore the newest state of at most n_tokens tokens; returns its number of tokens.

        Snapshots of more than n_tokens tokens are dropped, as the sequence continues differently.
        """
        self._snapshots = [s for s in self._snapshots if s.n_tokens <= n_tokens]
        newest = self._snapshots[-1] if self._snapshots else None
        n_found = 0 if newest is None else newest.n_tokens
        if self._n_tokens is not None and n_found <= self._n_tokens <= n_tokens:
            return self._n_tokens
        self.live[:] = 0 if newest is None else newest.values
        self._n_tokens = n_found
        return n_found

    def copy(self, other: "RecurrentStates", n_tokens: int) -> int:
        """Copy another sequence's states of the same shapes, as of at most n_tokens tokens.

        Returns the live state's number of tokens, as `go_back`, which it calls.
        """
        assert self.shapes == other.shapes
        kept = [s for s in other._snapshots if s.n_tokens <= n_tokens][-self._most :]
        self._snapshots = [_Snapshot(s.n_tokens, s.values.copy()) for s in kept]
        self._n_tokens = None
        if other._n_tokens is not None and other._n_tokens <= n_tokens:
            self.live[:], self._n_tokens = other.live, other._n_tokens
        return self.go_back(n_tokens)

    def load(self, values: np.ndarray, n_tokens: int) -> None:
        """Replace everything by a saved live state, float32 of `live`'s size, without snapshots."""
        assert values.size == self.live.size
        self._snapshots = []
        self.live[:], self._n_tokens = values.reshape(-1), n_tokens

    def _spare(self) -> np.ndarray:
        """An array for one more snapshot: that of a dropped one if there are enough."""
        if len(self._snapshots) < self._most:
            return np.empty_like(self.live)
        at = [0, *self.snapshots, self._n_tokens or 0]
        spread = [
            (after - before) / (at[-1] - before)
            for before, after in zip(at[:-2], at[2:], strict=True)
        ]
        return self._snapshots.pop(int(np.argmin(spread))).values
