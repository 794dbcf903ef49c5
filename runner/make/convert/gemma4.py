"""Gemma 4's text part: heads of two widths, shared KV caches, embeddings of each layer, experts."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from tamis.formats.vocab import TokenType
from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.family import LAYER, TOP, Family, Named
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy
from tamis.make.checkpoint.special import Special
from tamis.make.convert.gemma import NORMS

# Control tokens that stay text: what reads answers must see them.
VISIBLE = frozenset(
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
     "<tool_response|>", '<|"|>']
)  # fmt: skip
INNER = {
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
FREE = 1e30  # a frequency's divisor that stops its rotation


class Gemma4(Family):
    """Gemma 4."""

    names: ClassVar[Mapping[str, str]] = {
        "Gemma4ForCausalLM": "gemma4", "Gemma4ForConditionalGeneration": "gemma4",
    }  # fmt: skip
    top: ClassVar[Mapping[str, str]] = TOP | {
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    }
    layer: ClassVar[Mapping[str, str]] = LAYER | NORMS | INNER
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes, by kinds of layers where these differ."""
        super().keys(keys, file_type)
        config = self.config
        local = [kind == "sliding_attention" for kind in config["layer_types"]]
        wide, narrow = self._of_full("global_head_dim", "head_dim"), config["head_dim"]
        if wide is None:
            raise ConvertError("config.json has no global_head_dim: is it of Gemma 4?")
        keys.own("rope.freq_base", "f32", config.rope_full.get("rope_theta", 1e6))
        keys.own("final_logit_softcapping", "f32", config.get("final_logit_softcapping") or None)
        keys.own("attention.sliding_window", "u32", config["sliding_window"])
        n_shared = config["num_kv_shared_layers"]
        keys.own("attention.shared_kv_layers", "u32", n_shared)
        n_input = config.get("hidden_size_per_layer_input") or 0
        keys.own("embedding_length_per_layer_input", "u32", n_input)
        keys.own("attention.sliding_window_pattern", "bool", local)
        for kind, width in (("", wide), ("_swa", narrow)):
            keys.own(f"attention.key_length{kind}", "u32", width)
            keys.own(f"attention.value_length{kind}", "u32", width)
        n_ff_expert = config.find("expert_intermediate_size", "moe_intermediate_size")
        keys.own("expert_feed_forward_length", "u32", n_ff_expert)
        if config.get("use_double_wide_mlp"):
            n_ff, first = config["intermediate_size"], self.n_layer - n_shared
            widths = [n_ff if il < first else 2 * n_ff for il in range(self.n_layer)]
            keys.own("feed_forward_length", "i32", widths)
        n_full = self._of_full("num_global_key_value_heads", "num_key_value_heads")
        n_local = config.get("num_key_value_heads")
        if n_full is not None and n_local is not None:
            counts = [n_local if is_local else n_full for is_local in local]
            keys.own("attention.head_count_kv", "i32", counts)
        share = config.rope.get("partial_rotary_factor", 1.0)
        keys.own("rope.dimension_count", "u32", wide)
        keys.own("rope.dimension_count_swa", "u32", int(narrow * share))

    def _of_full(self, name: str, of_layer: str) -> Any:
        """A size of layers that attend to all tokens, which may stand with single layers."""
        config = self.config
        if config.get(name) is not None:
            return config[name]
        for il, layer in (config.get("per_layer_config") or {}).items():
            if config["layer_types"][int(il)] == "full_attention" and of_layer in layer:
                return layer[of_layer]
        return None

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary: BPE of characters."""
        tokens = vocab.unscored_tokens(self.source)
        for id, text in enumerate(tokens.texts):
            if text in VISIBLE:
                tokens.types[id] = TokenType.USER_DEFINED
        keys.set("tokenizer.ggml.model", "str", "gemma4")
        tokens.add_to(keys, scores=True)
        Special(self.source, merges=True).add_to(keys)
        keys.set("tokenizer.ggml.add_space_prefix", "bool", False)
        keys.set("tokenizer.ggml.add_bos_token", "bool", True)

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Take rows that no token has from the embeddings."""
        if "embed_tokens.weight" in name:
            tokenizer = self.source.json(vocab.JSON_FILE)
            n = len(tokenizer["model"]["vocab"]) + len(tokenizer.get("added_tokens", []))
            tensor = tensor.part(0, 0, min(n, tensor.shape[0]))
        yield name, tensor

    def extra(self) -> Iterable[tuple[str, np.ndarray]]:
        """The divisors of frequencies in wide heads: only their first ones rotate."""
        rope = self.config.rope_full
        if rope.get("rope_type") != "proportional":
            raise ConvertError(f"rope_type is {rope.get('rope_type')}, expected proportional")
        width = self._of_full("global_head_dim", "head_dim")
        n = int(width * rope["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", np.array([1.0] * n + [FREE] * (width // 2 - n), np.float32)
