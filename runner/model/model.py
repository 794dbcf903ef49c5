"""A loaded model as the forward pass needs it: shape, architecture, weights, rotary frequencies."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tamis.model.arch import Arch
from tamis.model.hparams import HParams
from tamis.model.rope import RopeFrequencies
from tamis.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model's graph asks of a workspace, for each row of a chunk."""

    rows: Mapping[str, int] = field(default_factory=dict)  # bytes of a row of each named buffer
    states: Mapping[tuple[int, str], tuple[int, ...]] = field(
        default_factory=dict
    )  # by layer, name
    n_in: int = 0  # elements of the widest row that a product reads


@dataclass(frozen=True, slots=True)
class Model:
    """Fixed and loaded data of a model, shared by all sessions."""

    hp: HParams
    arch: Arch
    weights: Weights
    ropes: tuple[RopeFrequencies, ...]  # of full layers; of sliding-window layers where they differ
    needs: Needs = Needs()

    @property
    def rope(self) -> RopeFrequencies:
        """The rotary frequencies of full layers."""
        return self.ropes[0]

    def window(self, layer: int) -> int:
        """The layer's own sliding window in tokens, 0 = full attention."""
        hp, every = self.hp, self.arch.full_attention_every
        has_window = hp.swa_layers[layer] if hp.swa_layers else (layer + 1) % every
        return hp.sliding_window if has_window else 0

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` a layer's queries and keys are rotated by."""
        return len(self.ropes) - 1 if self.window(layer) else 0

    def frequencies(self, layer: int) -> RopeFrequencies:
        """What a layer's queries and keys are rotated by."""
        return self.ropes[self.rope_of(layer)]
