"""Beyond: dense attention up to a position, another prefill method from there on.

Decides: everything in chunks of a prompt that begin before position `least`; later chunks use the
inner method. So a key depends only on the tokens before it, however long its prompt is, and prompts
with a common prefix can share it. State: the inner method's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    PREFILL,
    Attended,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
    check,
)

SHORT, LONG = "short", "long"


@dataclass(frozen=True, slots=True)
class Beyond:
    """inner: the method of later chunks. least: positions of the dense ones."""

    roles: ClassVar[tuple[str, ...]] = (PREFILL,)

    inner: Selector
    least: int = 8192

    def __post_init__(self) -> None:
        check(self, "least >= 0")

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence; for one that cannot be long, dense attention's."""
        if shape.n_ctx <= self.least:
            return SelectorState(shape)
        return _State(self, shape)


class _State(SelectorState):
    """The inner method's state, unused in the phase SHORT."""

    def __init__(self, params: Beyond, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._least, self._phase = params.least, LONG
        inner = self._inner = params.inner.open(shape)
        self.freezing, self.counters, self.n_bytes = inner.freezing, inner.counters, inner.n_bytes
        self.sharing = inner.sharing

    def prompt_phase(self, pos: int) -> str:
        self._phase = SHORT if pos < self._least else LONG
        return self._phase

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self._phase == SHORT:
            return super().select_prefill(rec, layer, q, kv)
        return self._inner.select_prefill(rec, layer, q, kv)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        return [] if self._phase == SHORT else self._inner.also_attend(rec, layer, rows)

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        if self._phase == LONG:
            self._inner.correct(rec, layer, q, kv, sel, out)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        self._inner.observe(rec, layer, q, kv, sel)

    def reads_all(self, rec: Recording, layer: int, sel: Selection) -> bool:
        if self._phase == SHORT:
            return super().reads_all(rec, layer, sel)
        return self._inner.reads_all(rec, layer, sel)

    def frozen(self, layer: int, n_prompt: int) -> range:
        return self._inner.frozen(layer, n_prompt)

    def truncate(self, n_tokens: int) -> None:
        self._inner.truncate(n_tokens)

    @property
    def n_recall(self) -> int:
        """The inner method's number."""
        return self._inner.n_recall


METHOD = Beyond
