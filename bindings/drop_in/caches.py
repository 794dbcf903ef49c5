"""Saved states of a Llama, and caches of them by the tokens they hold."""

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class LlamaState(NamedTuple):
    """What Llama.save_state gives: tokens, and the session as Session.save writes it."""

    input_ids: np.ndarray  # int32 [n_tokens]
    scores: np.ndarray  # f32 [n_tokens, n_vocab] with logits_all, else [0, n_vocab]
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int


def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differs[0]) if len(differs) else n


class BaseLlamaCache(ABC):
    """States by tokens; a look-up finds the state that shares the longest beginning."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes of all states."""

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> LlamaState: ...

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None: ...


class LlamaRAMCache(BaseLlamaCache):
    """States in memory; the one used longest ago goes first where they are too many."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self.cache_state: OrderedDict[tuple[int, ...], LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
        """Bytes of all states."""
        return sum(state.llama_state_size for state in self.cache_state.values())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        found = _closest(key, self.cache_state)
        if found is None:
            raise KeyError("no state begins with these tokens")
        self.cache_state.move_to_end(found)
        return self.cache_state[found]

    def __contains__(self, key: Sequence[int]) -> bool:
        return _closest(key, self.cache_state) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        self.cache_state.pop(tuple(key), None)
        self.cache_state[tuple(key)] = value
        while self.cache_state and self.cache_size > self.capacity_bytes:
            self.cache_state.popitem(last=False)


LlamaCache = LlamaRAMCache


class LlamaDiskCache(BaseLlamaCache):
    """States in files of a folder, which must be this user's own; none of them are pickles."""

    def __init__(
        self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30
    ) -> None:
        super().__init__(capacity_bytes)
        self._folder = Path(cache_dir)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def cache_size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self._folder.glob("*.npz"))

    def _keys(self) -> dict[tuple[int, ...], Path]:
        found = {}
        for path in sorted(self._folder.glob("*.npz"), key=lambda p: p.stat().st_mtime_ns):
            with np.load(path, allow_pickle=False) as file:
                found[tuple(file["key"].tolist())] = path
        return found

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        keys = self._keys()
        found = _closest(key, keys)
        if found is None:
            raise KeyError("no state begins with these tokens")
        keys[found].touch()
        with np.load(keys[found], allow_pickle=False) as file:
            n_tokens, size, seed = file["numbers"].tolist()
            state = file["state"].tobytes()
            return LlamaState(file["input_ids"], file["scores"], n_tokens, state, size, seed)

    def __contains__(self, key: Sequence[int]) -> bool:
        return _closest(key, self._keys()) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        tokens = np.array(key, np.int64)
        name = hashlib.sha256(tokens.tobytes()).hexdigest()
        partial = self._folder / f".{name}"
        with partial.open("wb") as file:
            np.savez(
                file,
                key=tokens,
                input_ids=value.input_ids,
                scores=value.scores,
                numbers=np.array([value.n_tokens, value.llama_state_size, value.seed], np.int64),
                state=np.frombuffer(value.llama_state, np.uint8),
            )
        partial.replace(self._folder / f"{name}.npz")
        for path in list(self._keys().values()):
            if self.cache_size <= self.capacity_bytes:
                break
            path.unlink()


def _closest(key: Sequence[int], keys: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    best, best_length = None, 0
    for candidate in keys:
        length = longest_token_prefix(candidate, key)
        if length > best_length:
            best, best_length = candidate, length
    return best
