"""Phi 3, 3.5 and 4: Q, K and V in one tensor; two sets of RoPE factors."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.family import LAYER, Family
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError


class Phi3(Family):
    """Phi 3."""

    names: ClassVar[Mapping[str, str]] = {"Phi3ForCausalLM": "phi3"}
    layer: ClassVar[Mapping[str, str]] = LAYER | {
        "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        config, n_ctx, before = self.config, *self._contexts()
        keys.own("context_length", "u32", n_ctx)
        keys.own("rope.scaling.original_context_length", "u32", before)
        keys.own("embedding_length", "u32", config["hidden_size"])
        keys.own("feed_forward_length", "u32", config["intermediate_size"])
        keys.own("block_count", "u32", self.n_layer)
        keys.own("attention.head_count", "u32", config["num_attention_heads"])
        keys.own("attention.head_count_kv", "u32", config["num_key_value_heads"])
        keys.own("attention.layer_norm_rms_epsilon", "f32", config["rms_norm_eps"])
        keys.own("rope.dimension_count", "u32", self._n_rot())
        keys.own("rope.freq_base", "f32", config.rope_full["rope_theta"])
        keys.set("general.file_type", "u32", file_type)
        # 0 tells Phi 4 from the others.
        keys.own("attention.sliding_window", "u32", config.get("sliding_window") or 0)

    def first_keys(self, keys: Keys) -> None:
        """Set what attention is multiplied by in long contexts."""
        if self.config.rope.get("long_factor"):
            keys.own("rope.scaling.attn_factor", "f32", self._attention_factor())

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary: Phi 4's is byte-level."""
        config = self.source.json("tokenizer_config.json")
        if config.get("tokenizer_class") == "GPT2Tokenizer":
            vocab.add_bpe(self.source, keys, self.pre)
        else:
            vocab.add_spm(self.source, keys, also_json=True)

    def extra(self) -> Iterable[tuple[str, np.ndarray]]:
        """The factors of long and short contexts."""
        rope = self.config.rope
        if not rope.get("long_factor"):
            return
        for kind in ("long", "short"):
            values = rope.get(f"{kind}_factor") or []
            if len(values) != self._n_rot() // 2:
                raise ConvertError(
                    f"{kind}_factor has {len(values)} values, expected {self._n_rot() // 2}"
                )
            yield f"rope_factors_{kind}.weight", np.array(values, np.float32)

    def _contexts(self) -> tuple[int, int]:
        n_ctx = self.config.find("n_positions", "max_position_embeddings")
        return n_ctx, self.config.rope.get("original_max_position_embeddings", n_ctx)

    def _n_rot(self) -> int:
        share = self.config.rope.get("partial_rotary_factor", 1.0)
        return int(share * self.config["hidden_size"]) // int(self.config["num_attention_heads"])

    def _attention_factor(self) -> float:
        n_ctx, before = self._contexts()
        scale, kind = n_ctx / before, str(self.config.rope.get("rope_type")).lower()
        if kind not in ("su", "longrope", "yarn"):
            raise ConvertError(f"rope_type is {kind}: expected su, longrope or yarn with factors")
        if scale <= 1:
            return 1.0
        if kind == "yarn":
            return 0.1 * math.log(scale) + 1.0
        return math.sqrt(1 + math.log(scale) / math.log(before))
