"""Auto: HiP with a lower bound on its retained mass, dense while the context is short.

Decides: at decode, everything up to `least` positions; from there on HiP in all layers, each head
metered (see select/metered.py): if the estimate of its retained mass is below `mass`, its row reads
more, and everything if that is not enough. HiP is used because it needs no work before its first
step and was the fastest at any mass; k is a `part`-th of the session's context. State: HiP's and
the meter's.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
    check,
)
from tamis.select.notation import parse_method

if TYPE_CHECKING:
    from tamis.select.metered import Metered

SHORT = "short"  # the phase in which everything is read
LEAST_K = 64
# If a GPU holds the keys. Measured up to 131,072: HiP's search for a 16th takes longer there than
# reading all, and both grow with the context.
LEAST_ON_GPU = 1 << 20


@dataclass(frozen=True)
class Auto:
    """mass: the retained mass of each head, by estimate.

    least: positions up to which all is read.
    """

    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    promise: ClassVar[tuple[str, ...]] = ("estimate", "mass")
    all_layers: ClassVar[bool] = True
    has_floor: ClassVar[bool] = True  # `mass`

    mass: float = 0.95
    least: int = 12288
    part: int = 16
    samples: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "least >= 0",
            "part >= 1",
        )
        # imports the module that checks them
        if (self.mass, self.samples) != (Auto.mass, Auto.samples):
            self._metered(LEAST_K)

    def _metered(self, k: int) -> "Metered":
        """The metered method, with HiP's k. Raises ValueError for a number out of range."""
        from tamis.select.metered import Metered

        inner = _Long(parse_method(f"hip:k={k},l_d=0"), self.least)
        return Metered(inner, mass=self.mass, samples=self.samples, seed=self.seed)

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence; for one that cannot be long, dense attention's."""
        if shape.n_ctx <= self.least:
            return SelectorState(shape)
        return self._metered(max(LEAST_K, shape.n_ctx // self.part // 64 * 64)).open(shape)


@dataclass(frozen=True, slots=True)
class _Long:
    """HiP from position `least` on."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    method: Selector
    least: int

    def open(self, shape: SelectorShape) -> SelectorState:
        return _State(self, shape)


class _State(SelectorState):
    """HiP's state, unused in the phase SHORT."""

    def __init__(self, params: _Long, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._least, self._phase = params.least, ""
        self._inner = params.method.open(shape)
        self.counters = self._inner.counters

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self._phase == SHORT:
            return super().select_decode(rec, layer, q, kv)
        return self._inner.select_decode(rec, layer, q, kv)

    def reads_all(self, rec: Recording, layer: int, sel: Selection) -> bool:
        if self._phase == SHORT:
            return super().reads_all(rec, layer, sel)
        return self._inner.reads_all(rec, layer, sel)

    def phase(self, step: int) -> str:
        # Step 0 is recorded first: the kernels of the other phase must be available in time.
        self._phase = SHORT if 0 < step < self._least else self._inner.phase(step)
        return self._phase

    def truncate(self, n_tokens: int) -> None:
        self._inner.truncate(n_tokens)


METHOD = Auto
