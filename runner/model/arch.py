"""What the graph must know of an architecture, beyond what the presence of a tensor tells."""

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
    norm: str = "rms"  # "rms", or "layer": by mean and variance
    weighted: bool = True  # norms have weights
    norms_output: bool = True  # the head reads a norm of the last layer's rows
    norm_bias: bool = False  # norms of root mean squares have a bias too
    # Token embeddings are normed: "weighted", by token_embd_norm, or "plain".
    norm_embedding: str = ""
    index_neox: bool = True  # as neox, of an indexer's queries and keys
    norm_after_rope: bool = False  # heads of q and k are normed after they are rotated
    scale_embedding: bool = False  # token embeddings times sqrt(n_embd)
    full_attention_every: int = 1  # layer i is full where (i + 1) % this == 0, else sliding window
    full_first: bool = False  # layer i is full where i % full_attention_every == 0
    rope_base_window: float = 0.0  # rotary base of sliding-window layers; 0 = the model's own
    normalize_experts: bool = True  # weights of the chosen experts divided by their sum
    score_experts: str = "softmax"  # as for MOE_ROUTE, where the file has no key for it
    clamp: str = "after"  # form of gates with a limit, as for GATE_CLAMPED
    clamp_always: float = 0.0  # their limit, where no key of the file gives it
    rope_factors: bool = True  # rope_freqs.weight, where the file has it, divides frequencies
    # Rotary pairs of time, height and width follow each other in turn; else each has a run.
    interleaved_sections: bool = False
    shares_expert: bool = False  # a layer with experts has one that all rows read
    shared_ff: bool = False  # where the file lacks experts' width, those chosen share that of n_ff
    long_factors: bool = False  # LongRoPE: others divide them beyond the first training context
    keys: tuple[str, ...] = ()  # keys of hparams.py that the architecture reads
    declares: type[ArchKeys] | None = None  # the record of keys that it alone reads
    refused: tuple[str, ...] = ()  # keys that llama.cpp reads there and no graph here
    nonzero: tuple[str, ...] = ()  # keys that may be absent, but not 0: that is another graph
    unread: tuple[str, ...] = ()  # tensors that llama.cpp has no use for: "attn_output.bias"
    derived: Callable[[HParams], dict[str, Any]] | None = None  # fields of HParams to be set
    # facts(hp): fields of this record that depend on the file.
    facts: Callable[[HParams], dict[str, Any]] | None = None
    # Learned positions are added to the token embeddings: "all" files have them, or "some".
    positions: str = ""
    chunked: bool = False  # what has a window attends within chunks: a session holds one at most
    nope_every: int = 0  # layer i has no rotary positions where (i + 1) % this == 0; 0: all have
    nope_full: bool = False  # layers without a window have no rotary positions
    window_scaled: bool = False  # rotary scaling is that of layers with a window too
    one_device: bool = False  # layers read more of the ones before than g.x
    # Its rows are embeddings of texts: all tokens see each other, and nothing is predicted.
    is_encoder: bool = False
    # layer(g, il) records a layer in the vocabulary of graph/; None: graph/layer.py, llama's.
    layer: Callable[[Any, int], None] | None = None
    # tensors(hp): those of a layer beside weights.LAYER_TENSORS, and their shapes.
    tensors: Callable[[Any], Mapping[str, tuple[int | str, ...]]] | None = None
    # block(hp, il): whose tensors a layer has, where layers share them; None: each has its own.
    block: Callable[[Any, int], int] | None = None
    # recurrent(hp): the layers with a state, where the file has no list of them.
    recurrent: Callable[[Any], tuple[int, ...]] | None = None
