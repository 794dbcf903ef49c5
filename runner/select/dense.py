"""Dense attention: every cached position that the model's own mask allows. The reference."""

from dataclasses import dataclass
from typing import ClassVar

from tamis.select.base import DECODE, PREFILL, SelectorShape, SelectorState


@dataclass(frozen=True, slots=True)
class Dense:
    """Attend to everything; no parameters."""

    roles: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)
    promise: ClassVar[tuple[str, ...]] = ("exact",)

    def open(self, shape: SelectorShape) -> SelectorState:
        """The default hooks."""
        return SelectorState(shape)


METHOD = Dense
