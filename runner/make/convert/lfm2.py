"""LFM2, dense and of experts: short convolutions between layers of attention."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from tamis.make.checkpoint.family import LAYER, TOP, Family, Named
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import Lazy

NAMES = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
    "feed_forward.experts.w1": "ffn_gate_exps", "feed_forward.experts.w2": "ffn_down_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
}  # fmt: skip
SIGMOID = 2


class Lfm2(Family):
    """LFM2."""

    names: ClassVar[Mapping[str, str]] = {
        "Lfm2ForCausalLM": "lfm2", "LFM2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2moe",
    }  # fmt: skip
    top: ClassVar[Mapping[str, str]] = TOP | {"model.embedding_norm": "token_embd_norm"}
    layer: ClassVar[Mapping[str, str]] = LAYER | NAMES
    defaults: ClassVar[Mapping[str, Any]] = {
        "norm_eps": 1e-5, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "rope_theta": 1e6,
    }  # fmt: skip

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes; layers of convolution have no heads of keys."""
        config, is_moe = self.config, self.arch == "lfm2moe"
        n_head_kv = config["num_key_value_heads"]
        counts = [n_head_kv if kind == "full_attention" else 0 for kind in config["layer_types"]]
        config.replace(num_key_value_heads=counts)
        super().keys(keys, file_type)
        if is_moe:
            keys.own("expert_feed_forward_length", "u32", config["moe_intermediate_size"])
            keys.own("leading_dense_block_count", "u32", config["num_dense_layers"])
            keys.own("expert_gating_func", "u32", SIGMOID)
        keys.own("vocab_size", "u32", config["vocab_size"])
        keys.own("shortconv.l_cache", "u32", config["conv_L_cache"])
        if not is_moe:
            keys.own("attention.layer_norm_rms_epsilon", "f32", config["norm_eps"])
            keys.own("feed_forward_length", "u32", self._n_ff())

    def _n_ff(self) -> int:
        config = self.config
        n_ff: int = config.find("block_ff_dim", "intermediate_size")
        if not config["block_auto_adjust_ff_dim"]:
            return n_ff
        n_ff, factor, step = (
            2 * n_ff // 3,
            config["block_ffn_dim_multiplier"],
            config["block_multiple_of"],
        )
        n_ff = n_ff if factor is None else int(factor * n_ff)
        return int(-(-n_ff // step) * step)

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Convolutions lose the dimension of one."""
        if "conv.conv" in name:
            shape = (tensor.shape[0], *tensor.shape[2:])
            tensor = tensor.changed(lambda x: np.squeeze(x, 1), shape)
        yield name, tensor
