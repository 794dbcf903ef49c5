"""Qwen 3.5, dense and of experts: three of four layers are linear attention."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from tamis.make.checkpoint.family import EXPERTS, LAYER, Family, Named, plus_one
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy
from tamis.make.convert.qwen import SHARED, add_expert_sizes, experts_apart

LINEAR = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    # of layers that predict further tokens
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}  # fmt: skip
MTP = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}  # fmt: skip
SECTIONS = [11, 11, 10, 0]  # of RoPE, where a config has none


class Qwen35(Family):
    """Values' heads are stored by their key's head, and ordered here as ggml repeats keys."""

    names: ClassVar[Mapping[str, str]] = {
        "Qwen3_5ForCausalLM": "qwen35", "Qwen3_5ForConditionalGeneration": "qwen35",
        "Qwen3_5MoeForCausalLM": "qwen35moe", "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    }  # fmt: skip
    layer: ClassVar[Mapping[str, str]] = LAYER | EXPERTS | SHARED | LINEAR
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}

    def __init__(self, source: Any, pre: str | None) -> None:
        super().__init__(source, pre)
        self._n_main = self.n_layer
        stored = [name.split(".") for name in source.tensors if "mtp.layers." in name]
        n_stored = 1 + max((int(words[words.index("layers") + 1]) for words in stored), default=-1)
        self.n_layer += self.config.get("mtp_num_hidden_layers") or n_stored

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes, and which layers are linear."""
        super().keys(keys, file_type)
        add_expert_sizes(self, keys)
        keys.own("nextn_predict_layers", "u32", (self.n_layer - self._n_main) or None)
        config = self.config
        n_value = config["linear_num_value_heads"]
        keys.own("ssm.conv_kernel", "u32", config["linear_conv_kernel_dim"])
        keys.own("ssm.state_size", "u32", config["linear_key_head_dim"])
        keys.own("ssm.group_count", "u32", config["linear_num_key_heads"])
        keys.own("ssm.time_step_rank", "u32", n_value)
        keys.own("ssm.inner_size", "u32", config["linear_value_head_dim"] * n_value)
        kinds = config.get("layer_types")
        if kinds is not None:
            if len(kinds) != self._n_main:
                raise ConvertError(f"layer_types has {len(kinds)} of {self._n_main} layers")
            linear = [kind == "linear_attention" for kind in kinds]
            linear += [False] * (self.n_layer - self._n_main)
            keys.own("attention.recurrent_layers", "bool", linear)
        keys.own("full_attention_interval", "u32", config.get("full_attention_interval", 4))
        n_rot = int(config.head_dim * config.rope.get("partial_rotary_factor", 0.25))
        keys.own("rope.dimension_count", "u32", n_rot)
        if "mrope_section" not in config.rope:
            keys.own("rope.dimension_sections", "i32", SECTIONS)

    def name(self, name: str) -> str | None:
        """A tensor's name; layers that predict further tokens are counted after the others."""
        found = super().name(name)
        if found is None:
            return None
        found = found.replace("model.mtp.", "mtp.", 1)
        if not found.startswith("mtp."):
            return found
        words = found.split(".", 3)
        if words[1] == "layers":
            return f"model.layers.{self._n_main + int(words[2])}.{words[3]}"
        return f"model.layers.{self._n_main}.{MTP.get(words[1], words[1])}.{words[2]}"

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Order values' heads, exponentiate decays, add one to norms, take experts apart."""
        if "linear_attn." in name:
            tensor = self._ordered(name, tensor)
        if name.endswith(".A_log"):
            tensor = tensor.changed(lambda x: -np.exp(x.astype(np.float64)).astype(np.float32))
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = plus_one(tensor)
        yield from experts_apart(name, tensor)

    def _ordered(self, name: str, tensor: Lazy) -> Lazy:
        config = self.config
        n_key, n_value = config["linear_num_key_heads"], config["linear_num_value_heads"]
        n_qk = 2 * config["linear_key_head_dim"] * n_key
        width, axis, first = config["linear_value_head_dim"], 0, 0
        if ".conv1d." in name:
            first, tensor = n_qk, tensor.changed(np.squeeze, [n for n in tensor.shape if n != 1])
        elif ".in_proj_qkv." in name:
            first = n_qk
        elif ".out_proj." in name:
            axis = 1
        elif (
            name.endswith((".A_log", ".dt_bias")) or ".in_proj_a." in name or ".in_proj_b." in name
        ):
            width = 1
        elif ".in_proj_z." not in name:
            return tensor
        order = np.arange(n_value * width).reshape(n_key, n_value // n_key, width)
        rows = first + order.swapaxes(0, 1).reshape(-1)
        rows = np.concatenate([np.arange(first), rows])
        return tensor.changed(lambda x: np.take(x, rows, axis))
