"""What a model's metadata says about its shape: read once, checked, never changed."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import numpy as np

from tamis.formats.gguf import GGUFFile
from tamis.formats.strings import Strings

LEAST_HEAD_DIM = 16  # elements that kernels read at once
MAX_LAYER, MAX_EMBD, MAX_CTX = 1024, 1 << 18, 1 << 28
# Kernels are compiled for these, and larger ones take longer: twice what any known model has.
MAX_HEAD_DIM, MAX_GROUP, MAX_EXPERT, MAX_EXPERT_USED = 1024, 128, 4096, 64


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions are stretched beyond the training context.

    kind: "none", "linear" (Chen et al. 2023, arXiv 2306.15595) or "yarn" (Peng et al. 2023,
    arXiv 2309.00071).
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
    """Shapes of recurrent layers; what each counts is their architecture's."""

    n_tap: int = 0  # of the convolution
    n_inner: int = 0  # channels, or all heads' values
    n_state: int = 0  # numbers a channel, or of a key
    n_rank: int = 0  # of the time step (Mamba), or heads
    n_group: int = 0  # heads of keys


@dataclass(frozen=True, slots=True)
class HParams:
    """Shapes and constants of a model. Counts in elements; n_ctx_train in tokens."""

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
    # Not in the text that session files name a model by: it is older than these.
    n_ff_shared: int = field(default=0, repr=False)  # of the expert that all tokens read
    recurrent: tuple[int, ...] = field(default=(), repr=False)  # layers that have a state
    ssm: Ssm = field(default=Ssm(), repr=False)
    # What only some architectures have, read where their record names the key; 0: none of it.
    attention_scale: float = field(default=0.0, repr=False)  # 0: head_dim ** -0.5
    rope_base_swa: float = field(default=0.0, repr=False)  # of sliding-window layers
    swa_layers: tuple[int, ...] = field(default=(), repr=False)  # 1: the layer has a window
    rope_sections: tuple[int, ...] = field(default=(), repr=False)  # rotary pairs of each kind

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.n_head // self.n_head_kv

    @property
    def n_embd_q(self) -> int:
        """Width of all query heads together."""
        return self.n_head * self.head_dim

    @property
    def n_embd_kv(self) -> int:
        """Width of all keys of one token."""
        return self.n_head_kv * self.head_dim

    @property
    def n_embd_qkv(self) -> int:
        """Width of queries, keys and values of one token together."""
        return self.n_embd_q + 2 * self.n_embd_kv

    @property
    def scale(self) -> float:
        """What scores of attention are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def extras(self) -> dict[str, str]:
        """What only some architectures have, where it is set."""
        others = [f for f in fields(self) if not f.repr and getattr(self, f.name) != f.default]
        return {f.name: repr(getattr(self, f.name)) for f in others}

    @staticmethod
    def from_gguf(
        file: GGUFFile, keys: Collection[str] = (), refused: Collection[str] = ()
    ) -> "HParams":
        """Read and check the hyperparameters. Raises GGUFError naming the key.

        keys: those of BASE_SWA, SECTIONS and PATTERN that this architecture reads. refused: those
        that it has in llama.cpp, but not here: an error where they have an effect.
        """
        reader = _Reader(file, keys)
        reader.refuse(refused)
        return reader.hparams()


# Keys that an architecture may name.
BASE_SWA = "rope.freq_base_swa"
SECTIONS = "rope.dimension_sections"
PATTERN = "attention.sliding_window_pattern"


class _Reader:
    """Typed access to the keys of the file's architecture, with ranges."""

    def __init__(self, file: GGUFFile, keys: Collection[str]) -> None:
        self._file, self._keys = file, keys
        self._arch: str = file.get("general.architecture", str)

    def refuse(self, keys: Collection[str]) -> None:
        """Raise GGUFError where one of these keys has a value that is not 0."""
        for key in keys:
            value = self._file.metadata.get(f"{self._arch}.{key}")
            if value is not None and np.any(np.asarray(value) != 0):
                self._fail(key, f"is {value!r}, which is not supported; only 0 is")

    def hparams(self) -> HParams:
        n_embd = self._count("embedding_length", MAX_EMBD)
        n_head, n_head_kv, head_dim = self._heads(n_embd)
        n_rot = self._count("rope.dimension_count", head_dim, default=head_dim)
        n_ff = self._count("feed_forward_length", 1 << 22, default=0, least=0)
        n_ff_expert = self._count("expert_feed_forward_length", 1 << 22, default=0, least=0)
        n_expert = self._count("expert_count", MAX_EXPERT, default=0, least=0)
        most_used = min(n_expert, MAX_EXPERT_USED)
        return HParams(
            arch=self._arch,
            n_ctx_train=self._count("context_length", MAX_CTX),
            n_embd=n_embd,
            n_layer=self._count("block_count", MAX_LAYER),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_ff=n_ff,
            n_vocab=self._n_vocab(),
            n_rot=n_rot - n_rot % 2,
            rms_eps=self._number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope_base=self._number("rope.freq_base", 1.0, 1e12, default=10000.0),
            rope_scaling=self._rope_scaling(),
            n_expert=n_expert,
            n_expert_used=self._count("expert_used_count", most_used, default=0, least=0),
            n_ff_expert=n_ff_expert or (n_ff if n_expert else 0),
            sliding_window=self._count("attention.sliding_window", MAX_CTX, default=0, least=0),
            n_ff_shared=self._count(
                "expert_shared_feed_forward_length", 1 << 22, default=0, least=0
            ),
            recurrent=self._recurrent(),
            ssm=Ssm(
                n_tap=self._count("ssm.conv_kernel", 64, default=0, least=0)
                or self._count("shortconv.l_cache", 64, default=0, least=0),
                n_inner=self._count("ssm.inner_size", MAX_EMBD, default=0, least=0),
                n_state=self._count("ssm.state_size", 1 << 12, default=0, least=0),
                n_rank=self._count("ssm.time_step_rank", MAX_EMBD, default=0, least=0),
                n_group=self._count("ssm.group_count", MAX_EMBD, default=0, least=0),
            ),
            swa_layers=self._swa_layers(),
            rope_sections=self._rope_sections(),
            rope_base_swa=self._number(BASE_SWA, 0.0, 1e12, default=0.0)
            if BASE_SWA in self._keys
            else 0.0,
        )

    def _heads(self, n_embd: int) -> tuple[int, int, int]:
        """Heads, KV heads and elements of a head."""
        has_state = self._count("ssm.state_size", 1 << 12, default=0, least=0) > 0
        n_head = self._count("attention.head_count", MAX_EMBD, least=0 if has_state else 1)
        if n_head == 0:
            return 1, 1, LEAST_HEAD_DIM  # all layers are recurrent: none has keys and values
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

    def _recurrent(self) -> tuple[int, ...]:
        """The layers that the file calls recurrent, or that have no heads of keys."""
        n_layer = self._count("block_count", MAX_LAYER)
        for key, means in (
            ("attention.recurrent_layers", True),
            ("attention.head_count_kv", False),
        ):
            value = self._file.metadata.get(f"{self._arch}.{key}")
            if isinstance(value, np.ndarray):
                return tuple(i for i, each in enumerate(value[:n_layer]) if bool(each) == means)
            if isinstance(value, bool | int) and means:
                return tuple(range(n_layer)) if value else ()
        return ()

    def _swa_layers(self) -> tuple[int, ...]:
        """Of a file that lists them; one that gives a period has the architecture's."""
        value = self._file.metadata.get(f"{self._arch}.{PATTERN}") if PATTERN in self._keys else ()
        n_layer = self._count("block_count", MAX_LAYER)
        if isinstance(value, int) and not isinstance(value, bool):
            return tuple(int(value == 0 or i % value < value - 1) for i in range(n_layer))
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
        kind = self._get("rope.scaling.type", str, "none")
        if kind not in ("none", "linear", "yarn", "longrope"):
            self._fail("rope.scaling.type", f"{kind!r} is not known; expected linear or yarn")
        if kind == "longrope":
            self._fail("rope.scaling.type", "longrope is not supported")
        factor = self._number("rope.scaling.factor", 0.0, 1e6, default=1.0)
        if kind == "none" or factor == 0.0:
            return RopeScaling()
        return RopeScaling(
            kind=kind,
            factor=factor,
            n_ctx_orig=self._count(
                "rope.scaling.original_context_length",
                MAX_CTX,
                default=self._count("context_length", MAX_CTX),
            ),
            attn_factor=self._number("rope.scaling.attn_factor", 0.0, 1e6, default=1.0),
            ext_factor=self._number("rope.scaling.yarn_ext_factor", 0.0, 1e6, default=1.0),
            beta_fast=self._number("rope.scaling.yarn_beta_fast", 0.0, 1e6, default=32.0),
            beta_slow=self._number("rope.scaling.yarn_beta_slow", 0.0, 1e6, default=1.0),
        )

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
            # Some files give one value a layer; a model whose layers differ is not supported.
            # 0: a layer that has none of what is counted.
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
