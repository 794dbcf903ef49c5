"""The shape of a model by its metadata: read once, checked, never changed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from tamis.formats.gguf import GGUFFile
from tamis.formats.strings import Strings
from tamis.model.keys import ArchKeys, Key, Keys, declared

LEAST_HEAD_DIM = 16  # elements that kernels read at once
MAX_LAYER, MAX_EMBD, MAX_CTX = 1024, 1 << 18, 1 << 28
# Kernels are compiled for these sizes, and larger ones take longer: twice the largest known.
MAX_HEAD_DIM, MAX_GROUP, MAX_EXPERT, MAX_EXPERT_USED = 1024, 128, 4096, 64


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions are stretched beyond the training context.

    kind: "none", "linear" (Chen et al. 2023, arXiv 2306.15595), "yarn" (Peng et al. 2023, arXiv
    2309.00071) or "longrope" (Ding et al. 2024, arXiv 2402.13753), whose factors are tensors.
    """

    kind: str = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    ext_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Ssm:
    """The shapes of recurrent layers; the meaning of each depends on the architecture."""

    n_tap: int = 0  # of the convolution
    n_inner: int = 0  # channels, or the values of all heads
    n_state: int = 0  # elements of a channel's state, or of a key
    n_rank: int = 0  # of the time step (Mamba), or the number of heads
    n_group: int = 0  # heads of keys
    n_key: int = 0  # elements of a head (Kimi Delta Attention)


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are selected and weighted, if the architecture reads the key for it."""

    score: str = ""  # as for MOE_ROUTE; "": the architecture's
    # whether weights are divided by their sum; None: the architecture's rule
    norm: bool | None = None
    scale: float = 1.0  # of the weights
    n_group: int = 1  # of experts; 1: no groups
    n_group_used: int = 1


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434, 2.1): its widths.

    The KV cache holds, for each token, its latent and one rotated key, which all heads share.
    """

    n_latent: int = 0  # elements of a latent; 0: the model has no such layers
    n_query: int = 0  # width of the input of queries; 0: they are made from the rows directly
    n_key: int = 0  # width of a head's query and key, including the rotated elements
    n_value: int = 0  # width of a head's value


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes in which layers may differ."""

    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """The sizes that layers must share to share a KV cache."""
        return self.n_head, self.n_head_kv, self.head_dim


@dataclass(frozen=True, slots=True)
class Indexer:
    """The built-in selection of keys in a sparse model (DeepSeek-V3.2, 2025, 2.1)."""

    n_head: int = 0
    n_key: int = 0  # elements of a query or a key
    top_k: int = 0  # the most positions that a token attends to; 0: there is no indexer
    block: int = 1  # positions that are selected together
    n_local: int = 0  # last blocks that are always selected, if each head selects for a KV head
    first: int = 0  # layers before this one are dense


@dataclass(frozen=True, slots=True)
class Compressed:
    """Attention to a window and to compressed entries (DeepSeek-V4): its widths.

    An entry stands for a block of positions; a position belongs to the entry of the block that ends
    at or after it.
    """

    # positions of a block, for each layer; 0: the layer has no entries
    ratios: tuple[int, ...] = ()
    n_head: int = 0  # query heads; hp.n_head counts those of windows, then those of entries
    width: int = 0  # of a head
    n_query: int = 0  # width of the input of queries
    n_group: int = 0  # groups of heads, each projected to n_out elements
    n_out: int = 0
    rope_base: float = 0.0  # for layers with entries


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyper-connections (Zhu et al. 2024, arXiv 2409.19606): residual streams of a token."""

    n_stream: int = 0  # 0: one, as usual
    n_turn: int = 0  # normalisations of the matrix that mixes streams
    eps: float = 0.0
    magnitude: float = 2.0  # factor of the weights that add a part's output to the streams
    n_low: int = 0  # width of the input of the streams' gates, if they have gates


@dataclass(frozen=True, slots=True)
class Ngrams:
    """Embeddings of n-grams: rows of a table, selected by hashes."""

    layer: int = -1  # the layer that adds them; -1: none
    n_gram: int = 0  # tokens, at most
    n_each: int = 0  # rows for each length of n-grams
    n_tap: int = 0  # of the convolution
    eos: int = 0  # tokens before the last one of this id are ignored
    n_row: int = 0  # of the table
    factors: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    first: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HParams:
    """The shapes and constants of a model. Counts in elements; n_ctx_train in tokens."""

    arch: str
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_rot: int
    rms_eps: float
    rope_base: float
    rope_scaling: RopeScaling
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    sliding_window: int
    n_ff_shared: int = 0  # width of the shared expert
    recurrent: tuple[int, ...] = ()  # for each layer, whether it has a state
    ssm: Ssm = Ssm()
    routing: Routing = Routing()
    latent: Latent = Latent()
    index_eps: float = 0.0  # epsilon of the norm of an indexer's keys
    indexer: Indexer = Indexer()
    index_last: bool = False  # whether the rotated elements of its heads are the last ones
    hyper: Hyper = Hyper()
    compressed: Compressed = Compressed()
    ngrams: Ngrams = Ngrams()
    # What only some architectures have, read if their record names the key; 0: absent.
    clamp_experts: tuple[float, ...] = ()  # limits of gates, for each layer; 0: none
    clamp_shared: tuple[float, ...] = ()
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    rope_base_swa: float = 0.0  # of sliding-window layers
    full_every: int = 0  # one of this many layers has attention; 0: not named
    temperature: tuple[int, float, float] = field(
        default=(0, 0.0, 0.0), repr=False
    )  # SCALE_BY_POSITION's
    most_ctx: int = 0  # the longest context for which the graph is correct; 0: any
    swa_layers: tuple[int, ...] = ()  # 1: the layer has a window
    rope_sections: tuple[int, ...] = ()  # rotary pairs of each section
    residual_scale: float = 0.0  # factor of what a layer's parts add; 0: 1
    embedding_scale: float = 0.0  # 0: 1
    logit_scale: float = 0.0  # 0: 1
    logit_softcap: float = 0.0  # cap: cap * tanh(logit / cap)
    n_ctx_orig: int = 0  # context beyond which LongRoPE has other factors
    attention_softcap: float = 0.0  # of scores, likewise
    max_alibi_bias: float = 0.0  # ALiBi: see Model.slopes
    # If layers differ, the shape of each; n_head, n_head_kv and head_dim are then those of layers
    # without a window, n_ff is the largest.
    layers: tuple[LayerShape, ...] = ()
    one_cache: bool = False  # one KV cache with as many heads as any layer has
    nope_layers: tuple[int, ...] = ()  # without rotary positions
    n_token_type: int = 0  # rows of token_types
    n_rot_swa: int = 0  # of sliding-window layers; 0: n_rot
    n_layer_kv: int = 0  # later layers read the KV cache of earlier ones; 0: all have their own
    n_embd_layer: int = 0  # width of each layer's own embeddings
    clamp_qkv: float = 0.0  # limit of Q, K and V; 0: none
    gate_least: float = 0.0  # lower bound of the decays of Kimi Delta Attention
    yarn_log: float = 0.0  # a tenth of YaRN's mscale_all_dim
    n_hash: int = 0  # first layers whose experts are selected by the token's id
    parallel: bool = False  # both parts of a layer read the layer's input
    activation: str = ""  # of gates, in the file's name
    declared: ArchKeys | None = None  # the values of the keys that its architecture declares

    def keys(self, kind: type[Keys]) -> Keys:
        """The values of the keys that the model's architecture declares as this record."""
        assert isinstance(self.declared, kind), f"{self.arch} declares no {kind.__name__}"
        return self.declared

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return self.n_head // self.n_head_kv

    def of(self, layer: int) -> "HParams":
        """The shape of a layer, as hyperparameters."""
        if not self.layers:
            return self
        own = self.layers[layer]
        return replace(
            self,
            n_head=own.n_head,
            n_head_kv=own.n_head_kv,
            head_dim=own.head_dim,
            n_ff=own.n_ff,
        )

    def has_own_heads(self, layer: int) -> bool:
        """Whether a layer with a window has other heads than the model's."""
        own = self.n_head, self.n_head_kv, self.head_dim
        return bool(self.layers) and self.layers[layer].heads != own and not self.padded

    @property
    def padded(self) -> bool:
        """Whether the KV cache has more or wider heads than a layer, which uses some of them."""
        own = self.n_head, self.n_head_kv, self.head_dim
        return self.one_cache or (
            bool(self.layers) and all(layer.heads != own for layer in self.layers)
        )

    def of_cache(self, layer: int) -> "HParams":
        """The shape of a layer with the heads of its KV cache."""
        return self if self.padded else self.of(layer)

    @property
    def kinds(self) -> tuple["HParams", ...]:
        """The model's shape, and that of layers with other heads, if there are any."""
        apart = next(filter(self.has_own_heads, range(len(self.layers))), None)
        return (self,) if apart is None else (self, self.of(apart))

    @property
    def head_dim_indexed(self) -> int:
        """Elements of a head of a KV cache whose rows end with an indexer's keys.

        Those keys come after the rotated elements, unless they are as wide as a row.
        """
        n_key, n = self.indexer.n_key, LEAST_HEAD_DIM
        if n_key == self.head_dim and n_key % n == 0:
            return n_key
        return -(-max(self.head_dim, self.n_rot + n_key) // n) * n

    @property
    def n_embd_q(self) -> int:
        """Width of all query heads together."""
        return self.n_head * self.head_dim

    @property
    def n_embd_kv(self) -> int:
        """Width of all keys of one token."""
        return self.n_head_kv * self.head_dim

    @property
    def n_stream(self) -> int:
        """The number of residual streams of a token, 0 if there is only one."""
        return self.hyper.n_stream

    @property
    def n_low(self) -> int:
        """The width of the input of the residual streams' gates."""
        return self.hyper.n_low

    @property
    def n_hashed(self) -> int:
        """The number of rows in the table of n-gram embeddings."""
        return self.ngrams.n_row

    @property
    def n_embd_qkv(self) -> int:
        """Width of Q, K and V of one token together."""
        return self.n_embd_q + 2 * self.n_embd_kv

    @property
    def scale(self) -> float:
        """The scale of attention scores."""
        return self.attention_scale or self.head_dim**-0.5

    @staticmethod
    def from_gguf(
        file: GGUFFile,
        keys: Collection[str] = (),
        refused: Collection[str] = (),
        nonzero: Collection[str] = (),
        *,
        full_first: bool = False,
        declares: type[ArchKeys] | None = None,
    ) -> "HParams":
        """Read and check the hyperparameters. Raises GGUFError naming the key.

        keys: those of OPTIONAL_KEYS that this architecture reads. refused: keys that it has in
        llama.cpp, but not here: an error if they have an effect. nonzero: keys that are an error if
        the file says 0. full_first: if a period of windows is given, whether its first layer has no
        window, rather than its last. declares: the record of the architecture's own keys.
        """
        reader = _Reader(file, keys, full_first=full_first, declares=declares)
        reader.refuse(refused)
        reader.refuse_zero(nonzero)
        return reader.hparams()


# Keys that an architecture may name.
BASE_SWA = "rope.freq_base_swa"
SECTIONS = "rope.dimension_sections"
PATTERN = "attention.sliding_window_pattern"
LAYER_NORM_EPS = "attention.layer_norm_epsilon"  # replaces the epsilon of RMS norms
PARALLEL = "use_parallel_residual"
# If an architecture names these, heads and feed-forward parts may differ between layers.
HEAD_SWA, ROT_SWA = "attention.key_length_swa", "rope.dimension_count_swa"
HEADS_EACH = "attention.head_count"  # for each layer
SHARED_KV = "attention.shared_kv_layers"  # the number of layers that read another layer's KV cache
EMBD_LAYER = "embedding_length_per_layer_input"
# Which layers have rotary positions; and whether any has.
ROPE_PATTERN, FINETUNED = "attention.rope_pattern", "rope.scaling.finetuned"
# the context beyond which LongRoPE has other factors
CTX_ORIG = "rope.scaling.original_context_length"
RMS_EPS = "attention.layer_norm_rms_epsilon"
# The beginning and the end of YaRN's ramp, and its strength.
YARN = tuple(f"rope.scaling.yarn_{name}" for name in ("ext_factor", "beta_fast", "beta_slow"))
FULL_EVERY = "full_attention_interval"
HEAT = "attention.temperature_scale"
GATE_LEAST = "kda.gate_lower_bound"
ACTIVATION = "hidden_activation"
# And the keys of one number each, with the field of HParams.
NUMBERS = {
    BASE_SWA: "rope_base_swa",
    "attention.scale": "attention_scale",
    "attention.output_scale": "attention_scale",
    "residual_scale": "residual_scale",
    "embedding_scale": "embedding_scale",
    "logit_scale": "logit_scale",
    "final_logit_softcapping": "logit_softcap",
    "attn_logit_softcapping": "attention_softcap",
    "attention.max_alibi_bias": "max_alibi_bias",
    "attention.clamp_kqv": "clamp_qkv",
    "rope.scaling.yarn_log_multiplier": "yarn_log",
    GATE_LEAST: "gate_least",
}
SCORE, NORM, SCALE = "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
LATENT = "attention.kv_lora_rank"  # stands also for the other widths of latent attention
TOP_K = "attention.indexer.top_k"
STREAMS = "hyper_connection.count"  # stands also for the other keys of residual streams
INDEX_BLOCK, INDEX_LOCAL = "attention.indexer.block_size", "attention.indexer.local_blocks"
DENSE_LEAD = "leading_dense_block_count"  # the number of first layers without an indexer
KPOOL = "attention.indexer.kpool"  # neighbours whose indexer keys are pooled
RATIOS = "attention.compress_ratios"
# Keys of n-gram embeddings (the first stands for all), and of the gates of residual streams.
NGRAM_LAYERS, LOW_RANK = "ple.layers", "hyper_connection.low_rank"
# Of attention to compressed entries: see Compressed.
OUT_GROUPS, OUT_RANK = "attention.output_group_count", "attention.output_lora_rank"
BASE_ENTRIES = "attention.compress_rope_freq_base"
HASH_LAYERS = "hash_layer_count"
CLAMPS, CLAMPS_SHARED = "swiglu_clamp_exp", "swiglu_clamp_shexp"
OPTIONAL_KEYS = {
    *(SECTIONS, PATTERN, CTX_ORIG, LAYER_NORM_EPS, PARALLEL, *YARN, *NUMBERS),
    *(SCORE, NORM, SCALE, CLAMPS, CLAMPS_SHARED),
    *(LATENT, FULL_EVERY, HEAT, TOP_K, ACTIVATION, HASH_LAYERS, STREAMS, KPOOL),
    *(INDEX_BLOCK, INDEX_LOCAL, DENSE_LEAD),
    *(RATIOS, OUT_GROUPS, OUT_RANK, BASE_ENTRIES, NGRAM_LAYERS, LOW_RANK),
    *(HEAD_SWA, HEADS_EACH, ROT_SWA, SHARED_KV, EMBD_LAYER, ROPE_PATTERN, FINETUNED),
}
SCORES = ("", "softmax", "sigmoid", "chosen", "softplus")  # the meaning of the file's number
MAX_EXPERT_GROUP = 32  # the limit of the kernel
MAX_STREAM = 16


class UnsupportedKey(ValueError):
    """A key has a value that no graph of the architecture supports."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key} {what}")
        self.key, self.what = key, what


class _Reader:
    """Typed access to the keys of the file's architecture, with ranges."""

    def __init__(
        self,
        file: GGUFFile,
        keys: Collection[str],
        *,
        full_first: bool = False,
        declares: type[ArchKeys] | None = None,
    ) -> None:
        assert set(keys) <= OPTIONAL_KEYS, set(keys) - OPTIONAL_KEYS
        self._file, self._keys, self._full_first = file, keys, full_first
        self._declares = declares
        self._arch: str = file.get("general.architecture", str)

    def refuse(self, keys: Collection[str]) -> None:
        """Raise GGUFError if one of these keys has a value other than 0."""
        for key in keys:
            value = self._file.metadata.get(f"{self._arch}.{key}")
            if value is not None and np.any(np.asarray(value) != 0):
                self._fail(key, f"is {value!r}, which is not supported; only 0 is")

    def refuse_zero(self, keys: Collection[str]) -> None:
        """Raise GGUFError if the file has one of these keys with the value 0."""
        for key in keys:
            value = self._file.metadata.get(f"{self._arch}.{key}")
            if value is not None and not np.any(np.asarray(value) != 0):
                self._fail(key, "is 0, which is not supported: leave it out, or give it a value")

    def hparams(self) -> HParams:
        n_embd = self._count("embedding_length", MAX_EMBD)
        layers = self._layers(n_embd) if self._layers_may_differ() else ()
        n_head, n_head_kv, head_dim, one_cache = self._heads_of_cache(n_embd, layers)
        n_rot = self._n_rot(head_dim)
        eps = LAYER_NORM_EPS if LAYER_NORM_EPS in self._keys else RMS_EPS
        n_ff = max((own.n_ff for own in layers), default=0) or self._count(
            "feed_forward_length", 1 << 22, default=0, least=0
        )
        n_ff_expert = self._count("expert_feed_forward_length", 1 << 22, default=0, least=0)
        n_expert = self._count("expert_count", MAX_EXPERT, default=0, least=0)
        most_used = min(n_expert, MAX_EXPERT_USED)
        return HParams(
            arch=self._arch,
            n_ctx_train=self._count("context_length", MAX_CTX),
            n_embd=n_embd,
            n_layer=self._n_layer(),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_ff=n_ff,
            n_vocab=self._n_vocab(),
            n_rot=n_rot,
            rms_eps=self._number(eps, 0.0, 1.0),
            rope_base=self._number("rope.freq_base", 1.0, 1e12, default=10000.0),
            rope_scaling=self._rope_scaling(),
            n_expert=n_expert,
            n_expert_used=self._count("expert_used_count", most_used, default=0, least=0),
            n_ff_expert=n_ff_expert,
            sliding_window=self._count("attention.sliding_window", MAX_CTX, default=0, least=0),
            n_ff_shared=self._n_ff_shared(),
            routing=self._routing(n_expert),
            latent=self._latent(),
            indexer=self._indexer(),
            hyper=self._hyper(),
            compressed=self._compressed(n_head, head_dim),
            ngrams=self._ngrams(),
            index_eps=self._number(LAYER_NORM_EPS, 0, 1, default=0) if KPOOL in self._keys else 0.0,
            clamp_experts=self._clamps(CLAMPS),
            clamp_shared=self._clamps(self._key_of_shared_clamps()),
            recurrent=self._recurrent(),
            ssm=self._ssm(),
            swa_layers=self._swa_layers(),
            n_ctx_orig=self._n_ctx_orig() if CTX_ORIG in self._keys else 0,
            rope_sections=self._rope_sections(),
            layers=layers,
            one_cache=one_cache,
            nope_layers=self._nope_layers(),
            n_token_type=self._n_token_type(),
            n_rot_swa=self._n_rot_swa(head_dim),
            n_layer_kv=self._n_layer_kv(),
            n_embd_layer=self._option(EMBD_LAYER, MAX_EMBD),
            full_every=self._option(FULL_EVERY, MAX_LAYER),
            n_hash=self._option(HASH_LAYERS, MAX_LAYER),
            temperature=self._temperature(),
            parallel=self._flag(PARALLEL),
            activation=self._get(ACTIVATION, str, "") if ACTIVATION in self._keys else "",
            declared=self._declared(self._declares) if self._declares else None,
            **self._numbers(),
        )

    def _ssm(self) -> Ssm:
        return Ssm(
            n_tap=self._count("ssm.conv_kernel", 64, default=0, least=0)
            or self._count("shortconv.l_cache", 64, default=0, least=0),
            n_inner=self._count("ssm.inner_size", MAX_EMBD, default=0, least=0),
            n_state=self._count("ssm.state_size", 1 << 12, default=0, least=0),
            n_rank=self._count("ssm.time_step_rank", MAX_EMBD, default=0, least=0),
            n_group=self._count("ssm.group_count", MAX_EMBD, default=0, least=0),
            n_key=self._count("kda.head_dim", MAX_HEAD_DIM, default=0, least=0)
            or self._count("wkv.head_size", MAX_HEAD_DIM, default=0, least=0),
        )

    def _option(self, key: str, most: int) -> int:
        """A number that only some architectures read; 0 if this one does not."""
        return self._count(key, most, default=0, least=0) if key in self._keys else 0

    def _n_rot(self, head_dim: int) -> int:
        """The number of rotated elements of a head, if there are heads."""
        if not self._attends():
            return head_dim
        n_rot = self._count("rope.dimension_count", head_dim, default=head_dim, least=0)
        return n_rot - n_rot % 2

    def _n_rot_swa(self, head_dim: int) -> int:
        """The file's n_rot of sliding-window layers; 0: none."""
        windows = self._count("attention.sliding_window", MAX_CTX, default=0, least=0)
        if not windows and ROT_SWA not in self._keys:
            return 0
        n_rot = self._count(ROT_SWA, head_dim, default=0, least=0)
        return n_rot - n_rot % 2

    def _flag(self, key: str) -> bool:
        """Whether this architecture reads the key, and the file sets it."""
        return key in self._keys and bool(self._get(key, bool, False))

    def _numbers(self) -> dict[str, Any]:
        """The fields of NUMBERS that this architecture reads."""
        return {
            name: self._number(key, -1e12 if key == GATE_LEAST else 0.0, 1e12, default=0.0)
            for key, name in NUMBERS.items()
            if key in self._keys
        }

    def _heads(self, n_embd: int) -> tuple[int, int, int]:
        """Heads, KV heads and elements of a head."""
        has_state = self._count("ssm.state_size", 1 << 12, default=0, least=0) > 0
        may_be_none = has_state or not self._attends()
        n_head = self._count("attention.head_count", MAX_EMBD, least=0 if may_be_none else 1)
        if n_head == 0 or not self._attends():
            return 1, 1, LEAST_HEAD_DIM  # all layers are recurrent: none has a KV cache
        if LATENT in self._keys:
            # What all heads share: the rotated key, then the latent.
            n_rot = self._count("rope.dimension_count", MAX_HEAD_DIM, default=0, least=0)
            n = n_rot + self._count(LATENT, MAX_HEAD_DIM - n_rot)
            n_key = self._indexer().n_key  # lies behind
            if n_key and n % LEAST_HEAD_DIM:
                self._fail(LATENT, f"with {n_rot} rotated elements is {n}, no multiple of 16")
            return n_head, 1, n + n_key
        n_head_kv = self._count("attention.head_count_kv", n_head, default=n_head)
        if n_head % n_head_kv:
            self._fail("attention.head_count_kv", f"{n_head_kv} does not divide {n_head} heads")
        if n_head // n_head_kv > MAX_GROUP:
            self._fail(
                "attention.head_count",
                f"{n_head} heads for {n_head_kv} KV heads: at most {MAX_GROUP} may share one",
            )
        head_dim = self._count("attention.key_length", MAX_HEAD_DIM, default=n_embd // n_head)
        value_dim = self._count("attention.value_length", MAX_HEAD_DIM, default=head_dim)
        if value_dim != head_dim:
            self._fail("attention.value_length", f"{value_dim} differs from {head_dim}, the key's")
        return n_head, n_head_kv, head_dim

    def _attends(self) -> bool:
        """Whether any layer has attention."""
        return any(".attn_output" in name for name in self._file.tensors)

    def _n_layer(self) -> int:
        """The number of layers that lead to the logits; those behind predict further tokens."""
        n_layer = self._count("block_count", MAX_LAYER)
        n_after = self._count("nextn_predict_layers", n_layer - 1, default=0, least=0)
        return n_layer - n_after

    def _n_ff_shared(self) -> int:
        """The rows of the first shared expert's tensor: architectures use its key differently."""
        for name, tensor in self._file.tensors.items():
            if name.endswith("ffn_up_shexp.weight"):
                return tensor.shape[-1]
        return 0

    def _routing(self, n_expert: int) -> Routing:
        """The routing of experts. Raises GGUFError for groups that do not divide the experts."""
        n_group = self._count("expert_group_count", n_expert, default=0, least=0)
        n_used = self._count("expert_group_used_count", n_expert, default=0, least=0)
        if n_group > 1 and (n_expert % n_group or n_group > MAX_EXPERT_GROUP):
            what = f"is {n_group}, expected at most {MAX_EXPERT_GROUP} that divide {n_expert}"
            self._fail("expert_group_count", what)
        if n_group > 1 and not 0 < n_used < n_group:
            self._fail("expert_group_used_count", f"is {n_used}, expected 1 to {n_group - 1}")
        n_best = self._count("expert_used_count", MAX_EXPERT_USED, default=0, least=0)
        if n_group > 1 and n_best > (n_left := n_used * n_expert // n_group):
            what = f"is {n_best}, but the chosen groups have {n_left} experts"
            self._fail("expert_used_count", what)
        score = self._count(SCORE, len(SCORES) - 1, default=0, least=0)
        return Routing(
            score=SCORES[score] if SCORE in self._keys else "",
            norm=self._get(NORM, bool, False) if NORM in self._keys else None,
            scale=(self._number(SCALE, 0.0, 1e6, default=1.0) or 1.0)
            if SCALE in self._keys
            else 1.0,
            n_group=max(n_group, 1),
            n_group_used=n_used if n_group > 1 else 1,
        )

    def _clamps(self, key: str) -> tuple[float, ...]:
        """The gates' limits, one for each layer; () if no gate is clamped."""
        value = self._file.metadata.get(f"{self._arch}.{key}") if key in self._keys else None
        n_layer = self._n_layer()
        if isinstance(value, float | int):
            value = np.full(n_layer, value)
        if not isinstance(value, np.ndarray) or not np.any(value):
            return ()
        if len(value) < n_layer or not np.isfinite(value).all() or np.min(value) < 0:
            self._fail(key, f"is {value!r}, expected {n_layer} finite numbers from 0 up")
        return tuple(map(float, value[:n_layer]))

    def _key_of_shared_clamps(self) -> str:
        """The key of shared experts' limits; some files have only that of experts."""
        said = f"{self._arch}.{CLAMPS_SHARED}" in self._file.metadata
        return CLAMPS if KPOOL in self._keys and not said else CLAMPS_SHARED

    def _temperature(self) -> tuple[int, float, float]:
        """The temperature's step in tokens, its scale, and its offset of positions."""
        scale = self._number(HEAT, 0.0, 1e6, default=0.0) if HEAT in self._keys else 0.0
        if not scale:
            return 0, 0.0, 0.0
        n_ctx = self._n_ctx_orig()
        length = self._count("attention.temperature_length", MAX_CTX, default=0, least=0)
        return length or n_ctx, scale, 0.0

    def _indexer(self) -> Indexer:
        top_k = self._option(TOP_K, MAX_CTX)
        if not top_k:
            return Indexer()
        n_key = self._count("attention.indexer.key_length", MAX_HEAD_DIM)
        if n_key % LEAST_HEAD_DIM:
            what = f"is {n_key}, expected a multiple of {LEAST_HEAD_DIM}"
            self._fail("attention.indexer.key_length", what)
        return Indexer(
            n_head=self._count("attention.indexer.head_count", MAX_EMBD),
            n_key=n_key,
            top_k=top_k,
            block=self._option(KPOOL, MAX_CTX) or self._option(INDEX_BLOCK, MAX_CTX) or 1,
            n_local=self._option(INDEX_LOCAL, MAX_CTX),
            first=self._option(DENSE_LEAD, MAX_LAYER),
        )

    def _hyper(self) -> Hyper:
        if STREAMS not in self._keys:
            return Hyper()
        key = "hyper_connection.sinkhorn_iterations"
        return Hyper(
            n_stream=self._count(STREAMS, MAX_STREAM),
            n_turn=self._count(key, MAX_LAYER, default=0, least=0),
            eps=self._number("hyper_connection.epsilon", 0.0, 1.0, default=0.0),
            magnitude=self._number("hyper_connection.magnitude", 0.0, 1e6, default=0.0) or 2.0,
            n_low=self._option(LOW_RANK, MAX_EMBD),
        )

    def _ngrams(self) -> Ngrams:
        """The n-gram embeddings.

        Raises GGUFError for more than one layer, and for rows beyond the table.
        """
        layers = self._integers(NGRAM_LAYERS, 0) if NGRAM_LAYERS in self._keys else ()
        if not layers:
            return Ngrams()
        if len(layers) > 1 or not 0 <= layers[0] < self._n_layer():
            self._fail(NGRAM_LAYERS, f"is {layers}, expected one layer")
        n_gram, n_each = (
            self._count(f"ple.{name}", most, least=least)
            for name, most, least in (("ngram_size", 16, 2), ("heads_per_ngram", 64, 1))
        )
        n = (n_gram - 1) * n_each
        table = self._file.tensors.get("per_layer_token_embd.weight")
        n_row = 0 if table is None else table.shape[-1]
        sizes = self._integers("ple.head_vocab_sizes", n)
        first = self._integers("ple.head_offsets", n)
        if not all(a > 0 and b >= 0 and a + b <= n_row for a, b in zip(sizes, first, strict=True)):
            what = f"is {first}, with sizes {sizes}: the table has {n_row} rows"
            self._fail("ple.head_offsets", what)
        return Ngrams(
            layer=layers[0],
            n_gram=n_gram,
            n_each=n_each,
            n_tap=self._count("ple.conv_kernel", 64),
            eos=self._count("ple.eos_token_id", self._n_vocab() - 1, least=0),
            n_row=n_row,
            factors=self._integers("ple.layer_multipliers", n_gram),
            sizes=sizes,
            first=first,
        )

    def _integers(self, key: str, least: int) -> tuple[int, ...]:
        """At least `least` first numbers of a list; all of it if `least` is 0."""
        value = self._file.metadata.get(f"{self._arch}.{key}")
        if value is None and least == 0:
            return ()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) < least:
            self._fail(key, f"is {value!r}, expected {least} whole numbers")
        return tuple(int(each) for each in value[: least or None])

    def _compressed(self, n_head: int, head_dim: int) -> Compressed:
        if RATIOS not in self._keys:
            return Compressed()
        ratios = tuple(self._each(RATIOS, MAX_CTX, [0] * self._n_layer(), least=0))
        if OUT_GROUPS not in self._keys:
            return Compressed(ratios)
        n_group = self._count(OUT_GROUPS, n_head)
        if n_head % n_group:
            self._fail(OUT_GROUPS, f"{n_group} does not divide {n_head} heads")
        return Compressed(
            ratios=ratios,
            n_head=n_head,
            width=self._width("attention.key_length") or head_dim,
            n_query=self._count("attention.q_lora_rank", MAX_EMBD),
            n_group=n_group,
            n_out=self._count(OUT_RANK, MAX_EMBD),
            rope_base=self._number(BASE_ENTRIES, 1.0, 1e12),
        )

    def _latent(self) -> Latent:
        if LATENT not in self._keys:
            return Latent()
        n_key = self._count("attention.key_length", MAX_HEAD_DIM)
        n_value = self._count("attention.value_length", MAX_HEAD_DIM)
        return Latent(
            n_latent=self._width(LATENT) or self._count(LATENT, MAX_HEAD_DIM),
            n_query=self._count("attention.q_lora_rank", MAX_EMBD, default=0, least=0),
            n_key=self._width("attention.key_length_mla") or n_key,
            n_value=self._width("attention.value_length_mla") or n_value,
        )

    def _width(self, key: str) -> int:
        """A width of latent attention, 0: not named.

        Raises GGUFError if windows have another one.
        """
        n = self._count(key, MAX_HEAD_DIM, default=0, least=0)
        swa = self._count(f"{key}_swa", MAX_HEAD_DIM, default=0, least=0)
        if swa not in (0, n):
            self._fail(f"{key}_swa", f"is {swa}, but {key} is {n}: only equal ones are supported")
        return n

    def _layers_may_differ(self) -> bool:
        """Whether the architecture reads each layer's shape, so that layers may differ."""
        keys = (HEADS_EACH, "attention.head_count_kv", "feed_forward_length")
        found = (self._file.metadata.get(f"{self._arch}.{key}") for key in keys)
        lists = any(isinstance(value, np.ndarray) for value in found)
        return HEAD_SWA in self._keys or (HEADS_EACH in self._keys and lists)

    def _layers(self, n_embd: int) -> tuple[LayerShape, ...]:
        """The shape of each layer, if a file may have one value per layer.

        Layers without attention get the heads of another one.
        """
        least = 0 if HEADS_EACH in self._keys else 1
        n_head = self._each(HEADS_EACH, MAX_EMBD, least=least)
        n_head_kv = self._each("attention.head_count_kv", MAX_EMBD, n_head, least=least)
        n_ff = self._each("feed_forward_length", 1 << 22, [0] * len(n_head), least=0)
        heads = list(zip(n_head, n_head_kv, strict=True))
        usual = next(((h, kv) for h, kv in heads if kv), (0, 0))
        heads = [(h, kv) if kv else usual for h, kv in heads]
        for h, kv in heads:
            if not kv or not h or h % kv or h // kv > MAX_GROUP:
                self._fail("attention.head_count_kv", f"{kv} for {h} heads: expected a divisor")
        full = self._count("attention.key_length", MAX_HEAD_DIM, default=n_embd // heads[0][0])
        swa, widths = full, [("attention.value_length", "attention.key_length", full)]
        if HEAD_SWA in self._keys:
            swa = self._count(HEAD_SWA, MAX_HEAD_DIM, default=full)
            widths.append(("attention.value_length_swa", HEAD_SWA, swa))
        for name, key, n in widths:
            if (value := self._count(name, MAX_HEAD_DIM, default=n)) != n:
                self._fail(name, f"{value} differs from {n}, which is {key}")
        windows = self._windows(len(n_head))
        return tuple(
            LayerShape(h, kv, swa if window else full, ff)
            for (h, kv), ff, window in zip(heads, n_ff, windows, strict=True)
        )

    def _windows(self, n_layer: int) -> tuple[int, ...]:
        return self._swa_layers() or (0,) * n_layer

    def _kinds_of_heads(
        self, layers: Sequence[LayerShape]
    ) -> tuple[set[tuple[int, int, int]], set[tuple[int, int, int]]]:
        """The heads of layers without a window, and of those with one."""
        windows = self._windows(len(layers))[: len(layers)]
        full, others = (
            {own.heads for own, window in zip(layers, windows, strict=True) if bool(window) is kind}
            for kind in (False, True)
        )
        return full, others

    def _heads_of_cache(
        self, n_embd: int, layers: Sequence[LayerShape]
    ) -> tuple[int, int, int, bool]:
        """Heads, KV heads and head width, and whether one KV cache holds layers that differ."""
        full, others = self._kinds_of_heads(layers)
        odd = len(full | others) > 1 and any(own.head_dim % LEAST_HEAD_DIM for own in layers)
        if max(len(full), len(others)) > 1 or odd:
            return *self._most_heads(layers), True
        return *(next(iter(full or others)) if layers else self._heads(n_embd)), False

    def _most_heads(self, layers: Sequence[LayerShape]) -> tuple[int, int, int]:
        """Heads, KV heads and head width of a KV cache that holds any layer's heads.

        Raises GGUFError for heads of several widths.
        """
        widths = {own.head_dim for own in layers}
        if len(widths) > 1:
            what = f"of layers {[own.heads[:2] for own in layers]} and widths {sorted(widths)}"
            self._fail("attention.head_count_kv", f"heads {what} together are not supported")
        n_head_kv = max(own.n_head_kv for own in layers)
        group = max(own.n_head // own.n_head_kv for own in layers)
        return group * n_head_kv, n_head_kv, widths.pop()

    def _declared(self, kind: type[ArchKeys]) -> ArchKeys:
        values: dict[str, Any] = {}
        for f, key in declared(kind):
            if key.each_layer:
                values[f.name] = tuple(self._floats(key))
            elif f.type in (int, "int"):
                default = None if key.default is None else int(key.default)
                most, least = int(key.high), int(key.low)
                values[f.name] = self._count(key.name, most, default=default, least=least)
            else:
                values[f.name] = self._number(key.name, key.low, key.high, default=key.default)
        return kind(**values)

    def _floats(self, of: Key) -> list[float]:
        """One number per layer, from a key without the architecture's name; or one for all."""
        n_layer, key = self._n_layer(), of.name
        value = self._file.metadata.get(key)
        found = np.full(n_layer, value) if isinstance(value, float | int) else value
        own = found[:n_layer] if isinstance(found, np.ndarray) else np.zeros(0)
        if len(own) < n_layer or own.dtype.kind != "f" or not np.isfinite(own).all():
            raise self._file.error(f"is {value!r}, expected {n_layer} finite numbers", key=key)
        for wrong in own[(own < of.low) | (own > of.high)][:1]:
            what = f"has {wrong}, expected numbers from {of.low} to {of.high}"
            raise self._file.error(what, key=key)
        return [float(x) for x in own]

    def _nope_layers(self) -> tuple[int, ...]:
        n_layer = self._n_layer()
        if FINETUNED in self._keys and not self._get(FINETUNED, bool, True):
            return tuple(range(n_layer))
        if ROPE_PATTERN not in self._keys:
            return ()
        has_rope = self._each(ROPE_PATTERN, 1, [1] * n_layer, least=0)
        return tuple(i for i in range(n_layer) if not has_rope[i])

    def _n_layer_kv(self) -> int:
        n_layer = self._n_layer()
        if SHARED_KV not in self._keys:
            return 0
        n_shared = self._count(SHARED_KV, n_layer - 2, default=0, least=0)
        return n_layer - n_shared if n_shared else 0

    def _each(
        self, key: str, most: int, default: Sequence[int] | None = None, *, least: int = 1
    ) -> list[int]:
        """One number per layer; a file with a single number has the same for all."""
        n_layer, value = self._n_layer(), None
        found = self._file.metadata.get(f"{self._arch}.{key}")
        if isinstance(found, np.ndarray):
            value = [int(n) for n in found[:n_layer]]
            if len(value) < n_layer or not all(least <= n <= most for n in value):
                self._fail(key, f"is {value!r}, expected {n_layer} numbers from {least} to {most}")
            return value
        if found is None and default is not None:
            return list(default)
        return [self._count(key, most, least=least)] * n_layer

    def _recurrent(self) -> tuple[int, ...]:
        """The layers that the file calls recurrent, or that have no KV heads."""
        n_layer = self._n_layer()
        for key, means in (
            ("attention.recurrent_layers", True),
            ("attention.head_count_kv", False),
        ):
            value = self._file.metadata.get(f"{self._arch}.{key}")
            if isinstance(value, np.ndarray):
                return tuple(i for i, each in enumerate(value[:n_layer]) if bool(each) == means)
            if isinstance(value, bool | int) and means and value:
                return tuple(range(n_layer))
        return ()

    def _swa_layers(self) -> tuple[int, ...]:
        """The layers with a window, if the file lists them.

        For a period the architecture's rule holds.
        """
        value = self._file.metadata.get(f"{self._arch}.{PATTERN}") if PATTERN in self._keys else ()
        n_layer = self._n_layer()
        if isinstance(value, int) and not isinstance(value, bool):
            at = 0 if self._full_first else 1
            return tuple(int(value == 0 or (i + at) % value > 0) for i in range(n_layer))
        if value is None or isinstance(value, bool | str | float) or len(value) == 0:
            return ()
        if len(value) < n_layer:
            self._fail(PATTERN, f"has {len(value)} entries, expected {n_layer}: one a layer")
        return tuple(int(bool(each)) for each in value[:n_layer])

    def _rope_sections(self) -> tuple[int, ...]:
        value = (
            self._file.metadata.get(f"{self._arch}.{SECTIONS}") if SECTIONS in self._keys else ()
        )
        if value is None or isinstance(value, bool | int | float | str):
            return ()
        return tuple(int(n) for n in value)

    def _rope_scaling(self) -> RopeScaling:
        kind = self._get("rope.scaling.type", str, "linear")
        if kind not in ("none", "linear", "yarn", "longrope"):
            self._fail(
                "rope.scaling.type", f"{kind!r} is not known; expected linear, yarn or longrope"
            )
        if kind == "longrope" and CTX_ORIG not in self._keys:
            self._fail("rope.scaling.type", "longrope is not supported for this architecture")
        # the name in the first files
        old = self._number("rope.scale_linear", 0.0, 1e6, default=0.0)
        factor = self._number("rope.scaling.factor", 0.0, 1e6, default=old) or 1.0
        attn_factor = self._number("rope.scaling.attn_factor", 0.0, 1e6, default=1.0)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return RopeScaling(attn_factor=attn_factor)
        ext_factor, fast, slow = (
            self._number(key, -1e6, 1e6, default=default) if key in self._keys else default
            for key, default in zip(YARN, (-1.0, 32.0, 1.0), strict=True)
        )
        return RopeScaling(
            kind=kind,
            factor=factor,
            n_ctx_orig=self._n_ctx_orig(),
            attn_factor=attn_factor,
            ext_factor=1.0 if ext_factor < 0 else ext_factor,
            beta_fast=fast,
            beta_slow=slow,
        )

    def _n_ctx_orig(self) -> int:
        n_ctx = self._count("context_length", MAX_CTX)
        return self._count(CTX_ORIG, MAX_CTX, default=n_ctx)

    def _n_token_type(self) -> int:
        table = self._file.tensors.get("token_types.weight")
        return table.shape[1] if table is not None and len(table.shape) == 2 else 0

    def _n_vocab(self) -> int:
        embd = self._file.tensors.get("token_embd.weight")
        if embd is None or len(embd.shape) != 2:
            raise self._file.error("missing, or not a matrix", key="token_embd.weight")
        return embd.shape[1]

    def _get(self, key: str, type_: type, default: Any) -> Any:
        return self._file.get(f"{self._arch}.{key}", type_, default)

    def _count(self, key: str, most: int, *, default: int | None = None, least: int = 1) -> int:
        name = f"{self._arch}.{key}"
        value = self._file.metadata.get(name, default)
        if value is None:
            self._file.get(name, int)  # raises the error for a missing key
        if isinstance(value, np.ndarray | Strings):
            # Some files have one value per layer; a model whose layers differ is not supported. 0:
            # the layer has none.
            found = set(map(int, value)) - {0}
            if len(found) > 1:
                self._fail(key, "differs between layers, which is not supported")
            value = found.pop() if found else 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._fail(key, f"is {value!r}, expected a whole number from {least} to {most}")
        return value

    def _number(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        name = f"{self._arch}.{key}"
        value = self._file.metadata.get(name, default)
        if value is None:
            value = self._file.get(name, float)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(key, f"is {value!r}, expected a number")
        if not low <= value <= high:  # false for NaN
            self._fail(key, f"is {value!r}, expected a number from {low} to {high}")
        return float(value)

    def _fail(self, key: str, what: str) -> NoReturn:
        raise self._file.error(what, key=f"{self._arch}.{key}")
