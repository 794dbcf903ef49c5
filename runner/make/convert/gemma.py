"""Gemma 2 and 3: norms' weights are stored without the one that is added to them."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.family import LAYER, Family, Named, plus_one
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import Lazy

NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


class Gemma2(Family):
    """Gemma 2."""

    names: ClassVar[Mapping[str, str]] = {"Gemma2ForCausalLM": "gemma2"}
    layer: ClassVar[Mapping[str, str]] = LAYER | NORMS
    defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-6, "head_dim": 256, "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }  # fmt: skip

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        config = self.config
        keys.own("context_length", "u32", config["max_position_embeddings"])
        keys.own("embedding_length", "u32", config["hidden_size"])
        keys.own("block_count", "u32", self.n_layer)
        keys.own("feed_forward_length", "u32", config["intermediate_size"])
        keys.own("attention.head_count", "u32", config["num_attention_heads"])
        n_head_kv = config.find("num_key_value_heads", "num_attention_heads")
        keys.own("attention.head_count_kv", "u32", n_head_kv)
        keys.own("attention.layer_norm_rms_epsilon", "f32", config["rms_norm_eps"])
        keys.own("attention.key_length", "u32", config["head_dim"])
        keys.own("attention.value_length", "u32", config["head_dim"])
        keys.set("general.file_type", "u32", file_type)
        keys.own("attn_logit_softcapping", "f32", config["attn_logit_softcapping"])
        keys.own("final_logit_softcapping", "f32", config["final_logit_softcapping"])
        keys.own("attention.sliding_window", "u32", config["sliding_window"])

    def vocab(self, keys: Keys) -> None:
        """Set the SentencePiece vocabulary."""
        vocab.add_spm(self.source, keys)
        keys.set("tokenizer.ggml.add_space_prefix", "bool", False)

    def name(self, name: str) -> str | None:
        """A tensor's name; the output is the embeddings."""
        return None if name == "lm_head.weight" else super().name(name)

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Add one to norms."""
        yield name, plus_one(tensor) if name.endswith("norm.weight") else tensor


class Gemma3(Family):
    """Gemma 3's text part, and EmbeddingGemma."""

    names: ClassVar[Mapping[str, str]] = {
        "Gemma3ForCausalLM": "gemma3", "Gemma3ForConditionalGeneration": "gemma3",
    }  # fmt: skip
    layer: ClassVar[Mapping[str, str]] = LAYER | NORMS
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "head_dim": 256, "vocab_size": 262208,
    }  # fmt: skip

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        super().keys(keys, file_type)
        config = self.config
        keys.own("rope.freq_base", "f32", config.rope_full.get("rope_theta", 1e6))
        keys.own("final_logit_softcapping", "f32", config.get("final_logit_softcapping") or None)
        if config.get("sliding_window_pattern") != 1:
            keys.own("attention.sliding_window", "u32", config["sliding_window"])

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary of tokenizer.model, or a byte-level one."""
        if (self.source.folder / vocab.SPM_FILE).is_file():
            vocab.add_spm(self.source, keys)
            keys.set("tokenizer.ggml.add_space_prefix", "bool", False)
        else:
            vocab.add_bpe(self.source, keys, self.pre)

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Add one to norms, and take rows that no token has from the embeddings."""
        if "embed_tokens.weight" in name:
            tensor = tensor.part(0, 0, min(_n_real(self), tensor.shape[0]))
        yield name, plus_one(tensor) if name.endswith("norm.weight") else tensor


def _n_real(family: Family) -> int:
    """The number of tokens of the vocabulary's files."""
    source = family.source
    if (source.folder / vocab.SPM_FILE).is_file():
        return len(vocab.spm_tokens(source).texts)
    tokenizer = source.json(vocab.JSON_FILE)
    return len(tokenizer["model"]["vocab"]) + len(tokenizer.get("added_tokens", []))
