"""Qwen 2, 2.5 and 3, dense and of experts."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.family import EXPERTS, LAYER, Family, Named, add_pooling
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy

SHARED = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


class Qwen(Family):
    """Dense models; those for embeddings say how they pool."""

    names: ClassVar[Mapping[str, str]] = {
        "Qwen2ForCausalLM": "qwen2", "Qwen2Model": "qwen2",
        "Qwen3ForCausalLM": "qwen3", "Qwen3Model": "qwen3",
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        super().keys(keys, file_type)
        add_pooling(self.source, keys)

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary; early finetunes have a SentencePiece one."""
        if (self.source.folder / vocab.SPM_FILE).is_file():
            vocab.add_spm(self.source, keys)
        else:
            vocab.add_bpe(self.source, keys, self.pre)


class QwenMoe(Family):
    """Models of experts, with or without one that all tokens share."""

    names: ClassVar[Mapping[str, str]] = {
        "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe",
    }  # fmt: skip
    layer: ClassVar[Mapping[str, str]] = LAYER | EXPERTS | SHARED
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        super().keys(keys, file_type)
        add_expert_sizes(self, keys)
        if self.arch == "qwen3moe" and not self.config.get("norm_topk_prob"):
            raise ConvertError(
                "norm_topk_prob is false: models of the architecture qwen3moe are run with the "
                "weights of a token's experts summing to one, which this one was not made for"
            )

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Take experts' gates and inputs apart."""
        yield from experts_apart(name, tensor)


def add_expert_sizes(family: Family, keys: Keys) -> None:
    """Set the widths of experts."""
    n_shared = family.config.get("shared_expert_intermediate_size")
    keys.own("expert_feed_forward_length", "u32", family.config.get("moe_intermediate_size"))
    keys.own("expert_shared_feed_forward_length", "u32", n_shared)


def experts_apart(name: str, tensor: Lazy) -> Iterable[Named]:
    """Experts that are stored as one tensor, gates before inputs, by the names of single ones."""
    name = name.removesuffix(".weight") if ".experts." in name else name
    if name.endswith(".experts.down_proj"):
        yield f"{name}.weight", tensor
    elif name.endswith(".experts.gate_up_proj"):
        stem, n = name.removesuffix("gate_up_proj"), tensor.shape[-2] // 2
        yield f"{stem}gate_proj.weight", tensor.part(-2, 0, n)
        yield f"{stem}up_proj.weight", tensor.part(-2, n, 2 * n)
    else:
        yield name, tensor
