"""Dense attention: every cached position that the model's own mask allows. The reference."""

from dataclasses import dataclass

from tamis.select.base import SelectorShape, SelectorState


@dataclass(frozen=True, slots=True)
class Dense:
    """Attend to everything; no parameters."""

    def open(self, shape: SelectorShape) -> SelectorState:
        """The default hooks."""
        return SelectorState(shape)


METHOD = Dense
