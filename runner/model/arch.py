"""What the graph must know of an architecture, beyond what the presence of a tensor tells."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tamis.model.hparams import HParams


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture. Biases, QK norms and post norms follow from the file's tensors."""

    neox: bool  # rotary pairs are (i, i + n/2), else (2i, 2i + 1)
    activation: str = "silu"  # of the feed-forward gate: "silu" or "gelu" (tanh form)
    scale_embedding: bool = False  # token embeddings times sqrt(n_embd)
    full_attention_every: int = 1  # layer i is full where (i + 1) % this == 0, else sliding window
    rope_base_window: float = 0.0  # rotary base of sliding-window layers; 0 = the model's own
    normalize_experts: bool = True  # weights of the chosen experts divided by their sum
    rope_factors: bool = True  # rope_freqs.weight, where the file has it, divides frequencies
    keys: tuple[str, ...] = ()  # keys of hparams.py that the architecture reads
    refused: tuple[str, ...] = ()  # keys that llama.cpp reads there and no graph here
    unread: tuple[str, ...] = ()  # tensors that llama.cpp has no use for: "attn_output.bias"
    derived: Callable[[HParams], dict[str, Any]] | None = None  # fields of HParams to be set
    nope_every: int = 0  # layer i has no rotary positions where (i + 1) % this == 0; 0: all have
    # layer(g, il) records a layer in the vocabulary of graph/; None: graph/layer.py, llama's.
    layer: Callable[[Any, int], None] | None = None
    # tensors(hp): those of a layer beside weights.LAYER_TENSORS, and their shapes.
    tensors: Callable[[Any], Mapping[str, tuple[int, ...]]] | None = None
    # recurrent(hp): the layers with a state, where the file has no list of them.
    recurrent: Callable[[Any], tuple[int, ...]] | None = None
