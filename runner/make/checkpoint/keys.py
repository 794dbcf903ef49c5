"""The metadata that a converted file gets, and the sizes of models that all families share."""

from collections.abc import Iterator, Mapping
from typing import Any

from tamis.formats.gguf_writer import array, number, string

ROPE_SCALING = {"linear": "linear", "yarn": "yarn", "su": "longrope", "longrope": "longrope"}
GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}


class Keys:
    """Metadata in the order in which it is set; a key that is set again keeps its place."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.records: dict[str, bytes] = {"general.architecture": string(arch)}

    def own(self, key: str, kind: str, value: Any) -> None:
        """Set a key of the architecture, unless the value is None."""
        self.set(f"{self.arch}.{key}", kind, value)

    def set(self, key: str, kind: str, value: Any) -> None:
        """Set a key, unless the value is None. kind: of `gguf_writer.KINDS`; lists are arrays."""
        if value is None:
            return
        if isinstance(value, list | tuple):
            self.records[key] = array(kind, value)
        else:
            self.records[key] = string(value) if kind == "str" else number(kind, value)


class Config(Mapping[str, Any]):
    """A model's config, the part for text on top, with its RoPE parameters in one form."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        text = raw.get("text_config")
        found = {**defaults, **raw, **(text if isinstance(text, dict) else {})}
        self._all = found
        self.rope: dict[str, Any] = dict(
            found.get("rope_parameters") or found.get("rope_scaling") or {}
        )
        if not {"full_attention", "sliding_attention"} & self.rope.keys():
            self._fill_rope()

    def _fill_rope(self) -> None:
        local = self.find("local_rope_theta", "rope_local_theta", "swa_rope_theta",
                          "rope_local_base_freq")  # fmt: skip
        if local is not None:
            self.rope["sliding_attention"] = {"rope_theta": local}
        wanted = {
            "rope_theta": self.find("global_rope_theta", "rope_theta", "rotary_emb_base"),
            "rope_type": self.rope.get("type"),
            "partial_rotary_factor": self.find("partial_rotary_factor", "rope_pct"),
            "original_max_position_embeddings": self.find("original_max_position_embeddings"),
        }
        for key, value in wanted.items():
            if value is not None:
                self.rope.setdefault(key, value)

    def __getitem__(self, key: str) -> Any:
        return self._all[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def find(self, *names: str) -> Any:
        """The value of the first of these that is there, which may be None; None if none is."""
        return next((self._all[name] for name in names if name in self._all), None)

    def replace(self, **values: Any) -> None:
        """Set values."""
        self._all.update(values)

    @property
    def rope_full(self) -> Mapping[str, Any]:
        """The RoPE parameters of layers that attend to all tokens."""
        found = self.rope.get("full_attention", self.rope)
        return found if isinstance(found, dict) else {}

    @property
    def n_layer(self) -> int:
        """The number of layers."""
        return int(self.find("n_layers", "num_hidden_layers", "n_layer", "num_layers"))

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        found = self.get("head_dim")
        return int(
            found if found is not None else self["hidden_size"] // self["num_attention_heads"]
        )


def add_sizes(keys: Keys, config: Config, n_layer: int, file_type: int) -> None:
    """Set what files of all architectures have: sizes, RoPE, norms, experts."""
    keys.own("block_count", "u32", n_layer)
    keys.own("context_length", "u32", config.find(
        "max_position_embeddings", "n_ctx", "n_positions", "max_length", "max_sequence_length"
    ))  # fmt: skip
    keys.own("embedding_length", "u32", config.find("hidden_size", "n_embd", "dim"))
    keys.own(
        "feed_forward_length", "u32", config.find("intermediate_size", "n_inner", "hidden_dim")
    )
    keys.own("attention.head_count", "u32", config.find("num_attention_heads", "n_head", "n_heads"))
    n_head_kv = config.find("num_key_value_heads", "n_kv_heads")
    kind = "i32" if isinstance(n_head_kv, list) else "u32"
    keys.own("attention.head_count_kv", kind, n_head_kv)
    if config.get("is_causal") is False:
        keys.own("attention.causal", "bool", False)
    _add_rope(keys, config)
    keys.own("attention.layer_norm_rms_epsilon", "f32", config.find("rms_norm_eps", "norm_eps"))
    keys.own("attention.layer_norm_epsilon", "f32", config.find(
        "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"
    ))  # fmt: skip
    keys.own("expert_count", "u32", config.find(
        "num_local_experts", "num_experts", "n_routed_experts"
    ))  # fmt: skip
    keys.own("expert_used_count", "u32", config.find(
        "num_experts_per_tok", "num_experts_per_token", "top_k_experts"
    ))  # fmt: skip
    keys.own("expert_group_count", "u32", config.get("n_group"))
    keys.own("expert_group_used_count", "u32", config.get("topk_group"))
    gating = config.find("score_function", "scoring_func", "score_func", "moe_router_activation")
    keys.own("expert_gating_func", "u32", GATING.get(gating))
    keys.own("attention.key_length", "u32", config.get("head_dim"))
    keys.own("attention.value_length", "u32", config.get("head_dim"))
    keys.set("general.file_type", "u32", file_type)


def _add_rope(keys: Keys, config: Config) -> None:
    rope = config.rope_full
    kind = ROPE_SCALING.get(str(rope.get("rope_type")))
    if kind == "longrope" or (kind and rope.get("factor") is not None):
        keys.own("rope.scaling.type", "str", kind)
    if kind in ("linear", "yarn"):
        keys.own("rope.scaling.factor", "f32", rope.get("factor"))
    if kind == "yarn" and rope.get("factor") is not None:
        before = rope["original_max_position_embeddings"]
        keys.own("rope.scaling.original_context_length", "u32", before)
        factor = rope.get("attention_factor", rope.get("attn_factor"))
        for name, value in {
            "ext_factor": rope.get("extrapolation_factor"),
            "attn_factor": factor,
            "beta_fast": rope.get("beta_fast"),
            "beta_slow": rope.get("beta_slow"),
        }.items():
            keys.own(f"rope.scaling.yarn_{name}", "f32", value)
    sections = config.rope.get("mrope_section")
    if sections is not None:
        keys.own("rope.dimension_sections", "i32", [*sections, 0, 0, 0, 0][:4])
    keys.own("rope.freq_base", "f32", rope.get("rope_theta"))
    swa = config.rope.get("sliding_attention") or {}
    keys.own("rope.freq_base_swa", "f32", swa.get("rope_theta"))
