"""What a method keeps of attention, measured while it decodes, at dense attention's own cost.

The audit's mass without the rest of it: ATTEND gives the logarithm of the sum of exponentials over
the keys it read; the difference of two, over the chosen keys and over all, is the mass.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Call
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import DECODE, Bound, Recording, Rows, Selector, SelectorShape, SelectorState

ATTENDING = ops.ATTEND, ops.ATTEND_SCORE_MOD

if TYPE_CHECKING:
    from tamis.model.placement import Place


class Weight(NamedTuple):
    """Of some layers, means over steps: the mass kept, bytes as a share of dense attention's."""

    mass: float
    share: float


class Weighed:
    """A decode method that is measured; of one session. `take` after each of its steps."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    def __init__(self, method: Selector) -> None:
        self._method = method
        self._states: list[_State] = []  # one a place, in their order
        self._mass: list[np.ndarray] = []  # f64 [n_layer, n_head] a step
        self._bytes: list[np.ndarray] = []  # f64 [n_layer, 2] a step: read, and dense attention's

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence at a place."""
        self._states.append(_State(self._method.open(shape), shape))
        return self._states[-1]

    def take(self, places: Sequence["Place"], pos: int) -> None:
        """Keep what the step at position pos has shown."""
        shape = self._states[0].shape
        mass, n_bytes = np.ones((shape.n_layer, shape.n_head)), np.ones((shape.n_layer, 2))
        for place, state in zip(places, self._states, strict=True):
            place.backend.fetch(state.lse, *state.told_by)
            for layer, calls in state.calls.items():
                kept, whole = state.lse[:, layer].astype(np.float64)
                mass[layer] = np.exp(kept - whole)
                *own, dense = (call.cost(1, pos)[0] for call in calls)
                n_bytes[layer] = sum(own), dense
        self._mass.append(mass)
        self._bytes.append(n_bytes)

    def of(self, layers: Sequence[int]) -> Weight:
        """What these layers kept and read so far."""
        mass = np.mean(self._mass, axis=0)[list(layers)].mean()
        read, dense = np.sum(self._bytes, axis=0)[list(layers)].sum(axis=0)
        return Weight(float(mass), float(read / dense))


class _State(SelectorState):
    """The method's own, which reads what it chose once more, and everything, for their sums."""

    def __init__(self, inner: SelectorState, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._inner = inner
        self.freezing, self.sharing = inner.freezing, inner.sharing
        self.counters, self.planned = inner.counters, inner.planned
        self.lse = np.zeros((2, shape.n_layer, shape.n_head), np.float32)  # of the chosen, of all
        self._out = np.zeros((1, shape.n_head, shape.head_dim), np.float32)
        # Of each phase and layer: the calls that choose and attend, and dense attention's.
        self._calls: dict[str, dict[int, list[Call]]] = {}
        self._told_by: dict[str, list[np.ndarray]] = {}
        self._phase, self._first = "", 0

    @property
    def calls(self) -> dict[int, list[Call]]:
        """Of the step's Program, by layer: those whose bytes count, and dense attention's."""
        return self._calls[self._phase]

    @property
    def told_by(self) -> list[np.ndarray]:
        """The arrays that their costs are computed from."""
        return self._told_by[self._phase]

    def prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        return self._inner.prefill(rec, layer, q, kv)

    def decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        self._first = len(rec.program)
        return self._inner.decode(rec, layer, q, kv)

    def also_dense(self, rec: Recording, layer: int, sel: Selection) -> list[Rows]:
        found = self._inner.also_dense(rec, layer, sel)
        if rec.n_tok > 1 or self.reads_all(rec, layer, sel):
            return found
        # What a method that samples makes of its weights is not what it keeps.
        kept = sel._replace(log_weight=None)
        whole = self.windowed(rec, 0, self.shape.window[layer])
        return found + [
            Rows(rec.step, 1, each, self._out, lse=lse[layer])
            for each, lse in zip((kept, whole), self.lse, strict=True)
        ]

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        if rec.n_tok == 1:
            of_layer = rec.program.calls[self._first :]
            attending = [call for call in of_layer if call.spec.op in ATTENDING]
            choosing = [call for call in of_layer if call.spec.op not in ATTENDING]
            self.calls[layer] = [*choosing, attending[0], attending[-1]]
            self._told_by[self._phase] = rec.program.named("indptr", "chosen", "meta")
        self._inner.correct(rec, layer, q, kv, sel, out)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        self._inner.observe(rec, layer, q, kv, sel)

    def frozen(self, layer: int, n_prompt: int) -> range:
        return self._inner.frozen(layer, n_prompt)

    def truncate(self, n_tokens: int) -> None:
        self._inner.truncate(n_tokens)

    def phase(self, step: int) -> str:
        self._phase = self._inner.phase(step)
        self._calls.setdefault(self._phase, {})
        self._told_by.setdefault(self._phase, [])
        return self._phase

    def reads_all(self, rec: Recording, layer: int, sel: Selection) -> bool:
        return self._inner.reads_all(rec, layer, sel)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        return self._inner.bounds(layer, report)

    @property
    def n_recall(self) -> int:
        return self._inner.n_recall
