"""gpt-oss: experts' weights in MXFP4 as they are stored, or as they are."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from tamis.formats.ggml_types import GGMLType
from tamis.make.checkpoint.family import LAYER, Family, Named
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy

EXPERTS = {
    "post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp", "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
}  # fmt: skip
BLOCKS, SCALES = "_blocks", "_scales"


class GptOss(Family):
    """gpt-oss; gates and inputs of experts alternate."""

    names: ClassVar[Mapping[str, str]] = {"GptOssForCausalLM": "gpt-oss"}
    layer: ClassVar[Mapping[str, str]] = LAYER | EXPERTS
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "rope_theta": 150000.0}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        super().keys(keys, file_type)
        keys.own("attention.sliding_window", "u32", self.config["sliding_window"])
        keys.own("expert_feed_forward_length", "u32", self.config["intermediate_size"])

    def tensors(self) -> Iterable[Named]:
        """All tensors, those in MXFP4 first."""
        for name in self.source.stored:
            if name.endswith(SCALES):
                yield from self._packed(name.removesuffix(SCALES))
        yield from super().tensors()

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Take gates and inputs apart; matrices are stored the other way round."""
        if name.endswith((BLOCKS, SCALES)):
            return
        stem, end = name, ".weight"
        if name.endswith("_proj_bias"):
            stem, end = name.removesuffix("_bias"), ".bias"
        elif name.endswith((".down_proj", ".gate_up_proj")):
            tensor = tensor.transposed()
        else:
            yield name, tensor
            return
        if stem.endswith(".down_proj"):
            yield stem + end, tensor
            return
        axis = len(tensor.shape) - 1 if end == ".bias" else -2
        for first, kind in enumerate(("gate", "up")):
            yield stem.replace("gate_up", kind) + end, _every_second(tensor, axis, first)

    def _packed(self, stem: str) -> Iterable[Named]:
        stored = self.source.stored
        blocks, scales = stored.get(stem + BLOCKS), stored[stem + SCALES]
        if blocks is None or blocks.type != "U8" or scales.type != "U8":
            raise ConvertError(f"{stem} needs {BLOCKS} and {SCALES} of the type U8")
        shape = (*scales.shape[:-1], 32 * scales.shape[-1])
        if blocks.shape != (*scales.shape, 16):
            raise ConvertError(f"{stem}: blocks {blocks.shape} do not fit scales {scales.shape}")
        parts = ("gate", "up") if stem.endswith("gate_up_proj") else ("",)
        for first, kind in enumerate(parts):
            step = len(parts)

            def load(first: int = first, step: int = step) -> np.ndarray:
                packed = blocks.raw().reshape(blocks.shape)[:, first::step]
                heads = scales.raw().reshape(scales.shape)[:, first::step]
                return mxfp4_rows(packed, heads)

            name = self.last_name(f"{stem.replace('gate_up', kind)}.weight")
            yield name, Lazy((shape[0], shape[1] // step, shape[2]), GGMLType.MXFP4.name, load)


def mxfp4_rows(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of 32 weights as ggml orders them: uint8 [..., n_block, 16], scales [..., n_block].

    There byte i holds the weights 2 i and 2 i + 1, here i and i + 16. Returns uint8 [n].
    """
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(-1)


def _every_second(tensor: Lazy, axis: int, first: int) -> Lazy:
    axis %= len(tensor.shape)
    shape = [n // 2 if i == axis else n for i, n in enumerate(tensor.shape)]
    at = (slice(None),) * axis + (slice(first, None, 2),)
    return tensor.changed(lambda x: x[at], shape)
