"""A method per layer: `lfps@0-11+tactic@12-23`. It decides nothing itself.

Each layer is served by the method that names it, other layers by dense attention. A method counts
layers from the model's first, as it does alone (`hip:l_d=3` leaves the first three dense). To each
method, the layers of the others appear to have a sliding window of their own, so that its layers
share data only among themselves. Their phases are combined: a decode Program is recorded for each
combination that occurs.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    Attended,
    Bound,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
)

OTHERS = 1  # the window that layers of other methods appear to have


class Part(NamedTuple):
    """A method and the layers that it serves, in ascending order."""

    method: Selector
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PerLayer:
    """parts: methods with disjoint layers."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if any(getattr(part.method, "all_layers", False) for part in self.parts):
            raise ValueError("metered and auto serve all layers: write metered(hip@0-11+...)")
        named = Counter(layer for part in self.parts for layer in part.layers)
        layer, n_method = named.most_common(1)[0]
        if n_method > 1:
            raise ValueError(f"layer {layer} has {n_method} methods, expected one")

    def open(self, shape: SelectorShape) -> SelectorState:
        """The states of all methods for one sequence.

        Raises ValueError for layers that do not exist.
        """
        last = max(layer for part in self.parts for layer in part.layers)
        if last >= shape.n_layer:
            raise ValueError(
                f"attn names layer {last}, the model has {shape.n_layer}: name layers 0 to "
                f"{shape.n_layer - 1}"
            )
        return _State(self, shape)


class _State(SelectorState):
    """The states of all methods; each hook of a layer calls the layer's own."""

    def __init__(self, params: PerLayer, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._states = [part.method.open(_seen_by(part, shape)) for part in params.parts]
        self._of = [SelectorState(shape)] * shape.n_layer
        for part, state in zip(params.parts, self._states, strict=True):
            for layer in part.layers:
                self._of[layer] = state
        self.n_bytes = sum(state.n_bytes for state in self._states)
        self.sharing = any(state.sharing for state in self._states)
        self.evicting = any(state.evicting for state in self._states)
        self.prepares = any(state.prepares for state in self._states)
        if any(state.lse is not None for state in self._states):
            self.lse = np.zeros((1, shape.n_head), np.float32)
        self.counters = tuple(array for state in self._states for array in state.counters)
        self.planned = tuple(array for state in self._states for array in state.planned)

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        return self._of[layer].select_decode(rec, layer, q, kv)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        return self._of[layer].also_attend(rec, layer, rows)

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        self._of[layer].correct(rec, layer, q, kv, sel, out)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        self._of[layer].observe(rec, layer, q, kv, sel)

    def prepare(self, rec: Recording, layer: int, kv: KVView) -> None:
        self._of[layer].prepare(rec, layer, kv)

    def prepare_due(self, end: int) -> bool:
        due = [state.prepare_due(end) for state in self._states]  # all plan
        return any(due)

    def truncate(self, n_tokens: int) -> None:
        for state in self._states:
            state.truncate(n_tokens)

    def phase(self, step: int) -> str:
        return "+".join(state.phase(step) for state in self._states)

    def reads_all(self, rec: Recording, layer: int, sel: Selection) -> bool:
        return self._of[layer].reads_all(rec, layer, sel)

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        self._of[layer].bracket(rec, layer, q, sel)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        return self._of[layer].bounds(layer, report)

    @property
    def n_recall(self) -> int:
        return max(state.n_recall for state in self._states)


def _seen_by(part: Part, shape: SelectorShape) -> SelectorShape:
    """The shape in which all layers but the part's own have a window."""
    windows = (n if i in part.layers else n or OTHERS for i, n in enumerate(shape.window))
    return replace(shape, window=tuple(windows))
