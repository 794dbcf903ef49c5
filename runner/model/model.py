"""A loaded model for the forward pass: shape, architecture, weights, rotary frequencies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tamis.model.arch import Arch
from tamis.model.hparams import HParams
from tamis.model.rope import RopeFrequencies
from tamis.model.weights import Weights

if TYPE_CHECKING:
    from tamis.model.heads import Heads


@dataclass(frozen=True, slots=True)
class Needs:
    """The buffers that a model's graph needs, for each row of a chunk."""

    rows: Mapping[str, int] = field(default_factory=dict)  # bytes of a row of each named buffer
    states: Mapping[tuple[int, str], tuple[int, ...]] = field(
        default_factory=dict
    )  # by layer, name
    n_in: int = 0  # width of the widest row that a product reads
    # Of products whose matrices are selected by rows: the widest row, the most matrices of a row,
    # and their number.
    experts: tuple[int, int, int] = (0, 0, 0)
    kv_layers: tuple[int, ...] = ()  # layers that append keys, and so have a KV cache


def own_window(hp: HParams, arch: Arch, layer: int) -> int:
    """A layer's sliding window in tokens, or the size of its chunks; 0: none."""
    at = layer if arch.full_first else layer + 1
    has_window = hp.swa_layers[layer] if hp.swa_layers else at % arch.full_attention_every
    return hp.sliding_window if has_window else 0


@dataclass(frozen=True)
class Model:
    """The fixed and loaded data of a model, shared by all sessions."""

    hp: HParams
    arch: Arch
    weights: Weights
    # of full layers; then of sliding-window layers if they differ
    ropes: tuple[RopeFrequencies, ...]
    heads: "Heads"  # for embeddings of whole texts
    needs: Needs = Needs()
    control: Mapping[int, np.ndarray] = field(default_factory=dict)  # by layer, f32 [1, n_embd]
    adapters: str = ""  # identifies the adapters of this model, "" for none

    @property
    def rope(self) -> RopeFrequencies:
        """The rotary frequencies of full layers."""
        return self.ropes[0]

    def window(self, layer: int) -> int:
        """The layer's own sliding window in tokens, 0 = full attention."""
        return 0 if self.arch.chunked else self._window(layer)

    def _window(self, layer: int) -> int:
        return own_window(self.hp, self.arch, layer)

    def rope_of(self, layer: int) -> int:
        """The index in `ropes` of the frequencies of a layer's queries and keys."""
        return len(self.ropes) - 1 if self._window(layer) else 0

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that have a KV cache, ascending: those that append keys of their own."""
        return self.needs.kv_layers

    def kv_layer(self, layer: int) -> int:
        """The layer whose KV cache a layer reads: its own, or the last of its kind."""
        first = self.hp.n_layer_kv
        if not first or layer < first:
            return layer
        return first - (2 if self.window(layer) else 1)

    @cached_property
    def slopes(self) -> np.ndarray | None:
        """ALiBi's slopes, by which scores fall per position of distance, f32 [n_head]; None: none.

        Press et al. 2021 (arXiv 2108.12409): a geometric sequence for a power of two of heads, and
        every second one of the next power's for the others.
        """
        most, n_head = self.hp.max_alibi_bias, self.hp.n_head
        if most == 0:
            return None
        n = 1 << (n_head.bit_length() - 1)
        first = -most / n * np.arange(1, n + 1)
        others = -most / (2 * n) * np.arange(1, 2 * n + 1, 2)
        return np.exp2(np.concatenate([first, others])[:n_head]).astype(np.float32)

    @property
    def has_score_mod(self) -> bool:
        """Whether attention differs from a softmax of products over earlier positions."""
        return self.slopes is not None or self.hp.attention_softcap > 0

    @property
    def norms_output(self) -> bool:
        """Whether the head reads normed rows: some encoders' last rows are normed already."""
        if not self.arch.norms_output:
            return False
        return not self.arch.is_encoder or self.weights.output_norm.name != "token_embd_norm"

    def is_nope(self, layer: int) -> bool:
        """Whether a layer's queries and keys are not rotated."""
        every = self.arch.nope_every
        full = self.arch.nope_full and not self.window(layer)
        full = full or layer in self.hp.nope_layers
        return full or (every > 0 and (layer + 1) % every == 0)

    def frequencies(self, layer: int) -> RopeFrequencies:
        """The rotary frequencies of a layer's queries and keys."""
        return self.ropes[self.rope_of(layer)]
