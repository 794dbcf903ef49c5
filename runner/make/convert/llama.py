"""Llama, Mistral, Mixtral, Ministral 3 and SmolLM3: heads are rotated by neighbours."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.family import LAYER, Family, Named, permuted
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy

CODE_LLAMA, GRANITE_SMALL = 32016, 49152  # sizes of vocabularies
MOE = {
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps", "block_sparse_moe.experts.w3": "ffn_up_exps",
}  # fmt: skip


class Llama(Family):
    """The family whose layers others share; a rotation's scaling by parts becomes a tensor."""

    names: ClassVar[Mapping[str, str]] = {
        "LlamaForCausalLM": "llama", "LLaMAForCausalLM": "llama", "LlamaModel": "llama",
        "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
        "Ministral3ForCausalLM": "mistral3", "Mistral3ForConditionalGeneration": "mistral3",
        "SmolLM3ForCausalLM": "smollm3",
    }  # fmt: skip
    layer: ClassVar[Mapping[str, str]] = LAYER | MOE
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes, and what Ministral 3 scales."""
        super().keys(keys, file_type)
        keys.own("vocab_size", "u32", self.config["vocab_size"])
        keys.own("rope.dimension_count", "u32", self.config.head_dim)
        if self.config.get("model_type") == "ministral3":
            rope = self.config.rope
            if rope.get("rope_type") != "yarn":
                raise ConvertError(f"rope_type is {rope.get('rope_type')}, ministral3 has yarn")
            keys.own("rope.scaling.yarn_log_multiplier", "f32", rope["mscale_all_dim"])
            keys.own("attention.temperature_scale", "f32", rope["llama_4_scaling_beta"])

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary, of whichever kind the folder has."""
        add_llama_vocab(self, keys)

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Bring heads into the order of GGUF's rotation."""
        yield name, llama_heads(self, name, tensor)

    def extra(self) -> Iterable[tuple[str, np.ndarray]]:
        """The factors of Llama 3's RoPE scaling."""
        rope = self.config.rope_full
        if str(rope.get("rope_type")).lower() == "llama3":
            yield "rope_freqs.weight", llama3_factors(rope, self.config.head_dim)


def add_llama_vocab(family: Family, keys: Keys) -> None:
    """Set a vocabulary of tokenizer.model, or of tokenizer.json, SentencePiece's or byte-level."""
    source = family.source
    config = source.json("tokenizer_config.json")
    keys.set("tokenizer.ggml.add_space_prefix", "bool", config.get("add_prefix_space"))
    if (source.folder / vocab.SPM_FILE).is_file():
        vocab.add_spm(source, keys)
    elif not vocab.add_spm_of_json(source, keys):
        vocab.add_bpe(source, keys, family.pre)
    n_vocab = family.config.get("vocab_size")
    if n_vocab == CODE_LLAMA:
        names = ("prefix", "suffix", "middle", "eot")
        for id, name in enumerate(names, 32007):
            keys.set(f"tokenizer.ggml.{name}_token_id", "u32", id)
    if n_vocab == GRANITE_SMALL:
        keys.set("tokenizer.ggml.add_bos_token", "bool", False)


def llama_heads(family: Family, name: str, tensor: Lazy) -> Lazy:
    """Queries' and keys' weights permuted, others as they are."""
    config = family.config
    n_head = config.find("n_heads", "num_attention_heads")
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        return permuted(tensor, n_head)
    if name.endswith(("k_proj.weight", "k_proj.bias")):
        return permuted(tensor, config.find("n_kv_heads", "num_key_value_heads") or n_head)
    return tensor


def llama3_factors(rope: Mapping[str, Any], n_rot: int) -> np.ndarray:
    """What the frequencies of Llama 3's RoPE are divided by: float32 [n_rot / 2].

    Long waves by `factor`, short ones by 1, those between by a mean of both.
    """
    one = np.float32(1)
    base, factor = rope.get("rope_theta", 10000.0), rope.get("factor", 8.0)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    n_ctx = rope.get("original_max_position_embeddings", 8192)
    exponents = np.arange(0, n_rot, 2, dtype=np.float32) / np.float32(n_rot)
    frequencies = (one / (float(base) ** exponents.astype(np.float64)).astype(np.float32)).tolist()
    found = []
    for frequency in frequencies:
        wave = np.float32(np.float32(2 * math.pi) / np.float32(frequency))
        if wave < n_ctx / high:
            found.append(one)
        elif wave > n_ctx / low:
            found.append(np.float32(factor))
        else:
            smooth = (np.float32(n_ctx) / wave - np.float32(low)) / np.float32(high - low)
            found.append(one / ((one - smooth) / np.float32(factor) + smooth))
    return np.array(found, np.float32)
