"""What the graph must know of an architecture, beyond what a tensor's presence shows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tamis.model.hparams import HParams
from tamis.model.keys import ArchKeys


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture. Biases, QK norms and post norms follow from the file's tensors."""

    neox: bool  # rotary pairs are (i, i + n/2), else (2i, 2i + 1)
    activation: str = "silu"  # of the feed-forward part, one of contract/ops/linear: ACTIVATIONS
    gated: bool = True  # the feed-forward part has a gate; else down(activation(up(x)))
    norm: str = "rms"  # "rms"; or "layer", for LayerNorm
    weighted: bool = True  # norms have weights
    norms_output: bool = True  # the head reads the normed rows of the last layer
    norm_bias: bool = False  # RMS norms have a bias, too
    # The norm of token embeddings: "weighted", by token_embd_norm, or "plain".
    norm_embedding: str = ""
    index_neox: bool = True  # as neox, for an indexer's queries and keys
    norm_after_rope: bool = False  # heads of q and k are normed after rotation
    scale_embedding: bool = False  # token embeddings times sqrt(n_embd)
    full_attention_every: int = 1  # layer i is full where (i + 1) % this == 0, else sliding window
    full_first: bool = False  # layer i is full where i % full_attention_every == 0
    rope_base_window: float = 0.0  # rotary base of sliding-window layers; 0 = the model's own
    normalize_experts: bool = True  # weights of the chosen experts divided by their sum
    score_experts: str = "softmax"  # as for MOE_ROUTE, if the file has no key for it
    clamp: str = "after"  # form of gates with a limit, as for GATE_CLAMPED
    clamp_always: float = 0.0  # their limit, if no key of the file has it
    rope_factors: bool = True  # rope_freqs.weight, where the file has it, divides frequencies
    # Rotary pairs of time, height and width alternate; otherwise each has a contiguous run.
    interleaved_sections: bool = False
    shares_expert: bool = False  # a layer with experts has a shared one, which all rows read
    # n_ff is the sum of the chosen experts' widths, if the file has no key for one expert's
    shared_ff: bool = False
    # LongRoPE: beyond the first training context other factors divide frequencies
    long_factors: bool = False
    keys: tuple[str, ...] = ()  # keys of hparams.py that the architecture reads
    declares: type[ArchKeys] | None = None  # the record of keys that only this architecture reads
    refused: tuple[str, ...] = ()  # keys that llama.cpp reads and no graph here supports
    # keys that may be absent, but not 0, which would be another graph
    nonzero: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # tensors that llama.cpp does not use: "attn_output.bias"
    derived: Callable[[HParams], dict[str, Any]] | None = None  # sets fields of HParams
    # facts(hp): sets fields of this record that depend on the file.
    facts: Callable[[HParams], dict[str, Any]] | None = None
    # Learned positions are added to the token embeddings: "all" files have them, or "some".
    positions: str = ""
    chunked: bool = False  # sliding-window layers attend within chunks: a session holds one at most
    nope_every: int = 0  # layer i has no rotary positions where (i + 1) % this == 0; 0: all have
    nope_full: bool = False  # layers without a window have no rotary positions
    window_scaled: bool = False  # rotary scaling applies to sliding-window layers, too
    one_device: bool = False  # layers read more than g.x of earlier ones
    # Its rows are embeddings of texts: attention is in both directions, and nothing is predicted.
    is_encoder: bool = False
    # layer(g, il) records a layer in the vocabulary of graph/; None: graph/layer.py, llama's.
    layer: Callable[[Any, int], None] | None = None
    # tensors(hp): shapes of a layer's tensors in addition to weights.LAYER_TENSORS.
    tensors: Callable[[Any], Mapping[str, tuple[int | str, ...]]] | None = None
    # block(hp, il): the block whose tensors a layer uses, if layers share them; None: its own.
    block: Callable[[Any, int], int] | None = None
    # recurrent(hp): the layers with a state, if the file does not list them.
    recurrent: Callable[[Any], tuple[int, ...]] | None = None
