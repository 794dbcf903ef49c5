"""Saved states of a Llama, and caches of them by the tokens they hold."""

import contextlib
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tamis.platform.private_files import open_private, private_folder, write_whole

# The type and the number of dimensions of each array of a file.
_KINDS = {
    "key": (np.int64, 1),
    "input_ids": (np.int32, 1),
    "scores": (np.float32, 2),
    "numbers": (np.int64, 1),  # n_tokens, llama_state_size, seed
    "state": (np.uint8, 1),
}


class LlamaState(NamedTuple):
    """The result of Llama.save_state: the tokens, and the session as Session.save writes it."""

    input_ids: np.ndarray  # int32 [n_tokens]
    scores: np.ndarray  # f32 [n_tokens, n_vocab] with logits_all, else [0, n_vocab]
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int


def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two sequences, in tokens."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differs[0]) if len(differs) else n


class BaseLlamaCache(ABC):
    """A mapping of tokens to states; a look-up finds the longest common prefix."""

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
    """States in memory; beyond its capacity the least recently used one is dropped."""

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
    """States in files of a folder, which must be this user's own; no file is a pickle.

    A damaged file counts as missing and is removed. Raises OSError if others may write to the
    folder, or replace it.
    """

    def __init__(
        self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = 2 << 30
    ) -> None:
        super().__init__(capacity_bytes)
        self._folder = private_folder(Path(cache_dir))

    @property
    def cache_size(self) -> int:
        """Bytes of all files."""
        return sum(status.st_size for _, status in self._files())

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The files, least recently used first. Another process may remove some meanwhile."""
        found = []
        for path in self._folder.glob("*.npz"):
            with contextlib.suppress(OSError):
                if stat.S_ISREG((status := path.stat()).st_mode):
                    found.append((path, status))
        return sorted(found, key=lambda item: item[1].st_mtime_ns)

    def _keys(self) -> dict[tuple[int, ...], Path]:
        found = {}
        for path, _ in self._files():
            if (arrays := _arrays(path, ["key"])) is not None:
                found[tuple(arrays["key"].tolist())] = path
        return found

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        while (found := _closest(key, keys := self._keys())) is not None:
            if (arrays := _arrays(path := keys[found], list(_KINDS))) is None:
                continue
            n_tokens, size, seed = arrays["numbers"].tolist()
            path.touch()
            state = arrays["state"].tobytes()
            return LlamaState(arrays["input_ids"], arrays["scores"], n_tokens, state, size, seed)
        raise KeyError("no state begins with these tokens")

    def __contains__(self, key: Sequence[int]) -> bool:
        return _closest(key, self._keys()) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        tokens = np.array(key, np.int64)
        path = self._folder / f"{hashlib.sha256(tokens.tobytes()).hexdigest()}.npz"
        with write_whole(path, durable=False) as file:
            np.savez(
                file,
                key=tokens,
                input_ids=value.input_ids,
                scores=value.scores,
                numbers=np.array([value.n_tokens, value.llama_state_size, value.seed], np.int64),
                state=np.frombuffer(value.llama_state, np.uint8),
            )
        for path, _ in self._files():
            if self.cache_size <= self.capacity_bytes:
                break
            path.unlink(missing_ok=True)


def _arrays(path: Path, names: list[str]) -> dict[str, np.ndarray] | None:
    """Arrays of a file by name; None if it is gone or damaged. A damaged file is removed."""
    try:
        with open_private(path) as file, np.load(file, allow_pickle=False) as entries:
            found = {name: entries[name] for name in names}
        if all(_fits(name, array, found) for name, array in found.items()):
            return found
    except FileNotFoundError:
        return None
    except Exception:  # zipfile and NumPy raise many types of exceptions for a damaged file
        pass
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def _fits(name: str, array: np.ndarray | bytes, found: dict[str, np.ndarray]) -> bool:
    dtype, n_dim = _KINDS[name]
    # np.load returns bytes for a member that is not an array.
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != n_dim:
        return False
    if name != "numbers":
        return True
    return array.tolist()[:2] == [len(found["input_ids"]), len(found["state"])] and len(array) == 3


def _closest(key: Sequence[int], keys: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    best, best_length = None, 0
    for candidate in keys:
        length = longest_token_prefix(candidate, key)
        if length > best_length:
            best, best_length = candidate, length
    return best
