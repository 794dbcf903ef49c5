"""The KV cache of one sequence whose layers are on several devices: a cache on each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tamis.jit_kernels.contract.types import PAGE, KVView
from tamis.kv.cache import KVCache


class PlacedKV(KVCache):
    """For what concerns the whole sequence; passes run over the caches themselves."""

    def __init__(self, parts: Sequence[tuple[int, KVCache]]) -> None:
        """parts: how many layers, and their cache; layers are counted over all parts."""
        ends = np.cumsum([n for n, _ in parts]).tolist()
        self._parts = [(range(end - n, end), kv) for end, (n, kv) in zip(ends, parts, strict=True)]
        caches = [kv for _, kv in self._parts]
        self.types = caches[0].types
        self.kv_ram = next((kv.kv_ram for kv in caches if kv.kv_ram is not None), None)
        self.kv_vram = next((kv.kv_vram for kv in caches if kv.kv_vram is not None), None)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return min(kv.capacity for _, kv in self._parts)

    @property
    def table(self) -> np.ndarray:
        """That of the first cache: passes run over the caches themselves."""
        return self._parts[0][1].table

    def view(self, layer: int) -> KVView:
        """What kernels see of a layer."""
        kv, own = self._of(layer)
        return kv.view(own)

    def reserve(self, first: int, n_tokens: int) -> None:
        """Make positions first .. n_tokens - 1 writable. Raises OutOfPagesError."""
        for _, kv in self._parts:
            kv.reserve(first, n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Give back the pages that hold no position below n_tokens."""
        for _, kv in self._parts:
            kv.truncate(n_tokens)

    def read(self, layer: int, n_tokens: int, page: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V from a page on to position n_tokens, kv_row [n, n_head_kv]."""
        kv, own = self._of(layer)
        return kv.read(own, n_tokens, page)

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, page: int = 0) -> None:
        """Set K and V from the first position of a page on, converted where they differ."""
        self.reserve(page * PAGE, page * PAGE + len(k))  # where no layer is, too
        kv, own = self._of(layer)
        kv.write(own, k, v, page)

    def pages_from(self, first: int) -> list[Any]:
        """A copy of all layers' pages that hold positions from `first` on, for `put_back`."""
        return [kv.pages_from(first) for _, kv in self._parts]

    def put_back(self, first: int, pages: list[Any]) -> None:
        """Undo what was written since `pages_from(first)`; the same pages must be held."""
        for (_, kv), kept in zip(self._parts, pages, strict=True):
            kv.put_back(first, kept)

    def _of(self, layer: int) -> tuple[KVCache, int]:
        return next((kv, layer - own.start) for own, kv in self._parts if layer in own)
