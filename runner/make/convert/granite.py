"""Granite 3: Llama's layers with factors; its experts' gates and inputs lie in one tensor."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tamis.make.checkpoint.family import LAYER, Family, Named
from tamis.make.checkpoint.keys import Keys, add_sizes
from tamis.make.checkpoint.source import Lazy
from tamis.make.convert.llama import add_llama_vocab, llama_heads

FACTORS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
MOE = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_exps", "block_sparse_moe.up": "ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.gate": "ffn_gate_shexp", "shared_mlp.up": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}  # fmt: skip


class Granite(Family):
    """The dense models and those of experts."""

    names: ClassVar[Mapping[str, str]] = {
        "GraniteForCausalLM": "granite",
        "GraniteMoeForCausalLM": "granitemoe",
        "GraniteMoeSharedForCausalLM": "granitemoe",
    }
    layer: ClassVar[Mapping[str, str]] = LAYER | MOE
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes and factors; a head's width follows from the others."""
        self.config.replace(head_dim=None)
        add_sizes(keys, self.config, self.n_layer, file_type)
        keys.own("vocab_size", "u32", self.config["vocab_size"])
        keys.own("rope.dimension_count", "u32", self.config.head_dim)
        for key, name in FACTORS.items():
            keys.own(key, "f32", self.config.get(name) or None)
        n_shared = self.config.get("shared_intermediate_size") or None
        keys.own("expert_shared_feed_forward_length", "u32", n_shared)

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary, as Llama's."""
        add_llama_vocab(self, keys)

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Permute heads, and take gates and inputs apart."""
        if name.endswith(".input_linear.weight"):
            stem, n = name.removesuffix("input_linear.weight"), tensor.shape[-2] // 2
            yield f"{stem}gate.weight", tensor.part(-2, 0, n)
            yield f"{stem}up.weight", tensor.part(-2, n, 2 * n)
        else:
            yield name, llama_heads(self, name, tensor)
