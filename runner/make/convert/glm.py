"""GLM 4, dense: norms before and after attention and feed-forward."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.family import LAYER, Family
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError
from tamis.make.checkpoint.special import Special

SPECIAL = {
    "eos": "<|endoftext|>",
    "eot": "<|user|>",
    "unk": "<|endoftext|>",
    "bos": "<|endoftext|>",
}


class Glm4(Family):
    """GLM 4 of April 2024 on."""

    names: ClassVar[Mapping[str, str]] = {"Glm4ForCausalLM": "glm4"}
    layer: ClassVar[Mapping[str, str]] = LAYER | {
        "mlp.gate_up_proj": "ffn_up", "post_mlp_layernorm": "post_ffw_norm",
        "post_self_attn_layernorm": "post_attention_norm",
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1.5625e-7, "rope_theta": 10000.0}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes; half of a head rotates."""
        super().keys(keys, file_type)
        share = self.config.rope.get("partial_rotary_factor", 0.5)
        keys.own("rope.dimension_count", "u32", int(self.config.head_dim * share))

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary, with special tokens of their own."""
        added = self.source.json(vocab.JSON_FILE).get("added_tokens", [])
        ids = {token["content"]: token["id"] for token in added}
        missing = set(SPECIAL.values()) - ids.keys()
        if missing:
            raise ConvertError(f"{vocab.JSON_FILE} has no added token {sorted(missing)[0]}")
        special = Special(self.source, merges=True)
        for kind, text in SPECIAL.items():
            special.propose(kind, ids[text])
        vocab.add_bpe(self.source, keys, self.pre, special)
