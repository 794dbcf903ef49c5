"""Encoders: BERT, XLM-RoBERTa, Nomic's, Jina's v2 and v3."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.family import Family, Named, add_pooling
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy, Source

TOP = {
    "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd", "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm", "classifier.dense": "cls", "classifier": "cls",
    "classifier.out_proj": "cls.output",
}  # fmt: skip
LAYER = {
    "attention.self.query": "attn_q", "attention.self.key": "attn_k",
    "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
    # Jina's v2
    "attention.self.layer_norm_q": "attn_q_norm", "attention.self.layer_norm_k": "attn_k_norm",
    "layer_norm_1": "attn_norm_2", "layer_norm_2": "layer_output_norm",
    "mlp.gated_layers": "ffn_up", "mlp.up_gated_layer": "ffn_up", "mlp.wo": "ffn_down",
    "mlp.down_layer": "ffn_down", "mlp.layernorm": "layer_output_norm",
    # Nomic's and Jina's v3
    "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "mixer.Wqkv": "attn_qkv",
    "mixer.out_proj": "attn_output", "norm1": "attn_output_norm", "norm2": "layer_output_norm",
    "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "mlp.router.layer": "ffn_gate_inp", "mlp.experts.mlp.w1": "ffn_up_exps",
    "mlp.experts.mlp.w2": "ffn_down_exps",
}  # fmt: skip
LAYERS = re.compile(r"encoder\.layers?\.(\d+)\.(.+)")
UNUSED = re.compile(
    r"embeddings\.position_ids|pooler\.dense\.(weight|bias)|cls\.(predictions|seq_relationship).*"
)
EPS = 1e-12


class Bert(Family):
    """BERT, and the vocabularies and ends that the others share with it."""

    names: ClassVar[Mapping[str, str]] = {
        "BertModel": "bert", "BertForMaskedLM": "bert", "BertForSequenceClassification": "bert",
        "JinaBertModel": "jina-bert-v2", "JinaBertForMaskedLM": "jina-bert-v2",
    }  # fmt: skip
    top: ClassVar[Mapping[str, str]] = TOP
    layer: ClassVar[Mapping[str, str]] = LAYER
    layers: ClassVar[re.Pattern[str]] = LAYERS
    defaults: ClassVar[Mapping[str, Any]] = {"layer_norm_eps": EPS}

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        super().keys(keys, file_type)
        add_encoder(self, keys)

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary: WordPiece, or Jina's byte-level ones."""
        config = self.source.json("tokenizer_config.json")
        if config.get("tokenizer_class") == "RobertaTokenizer":
            vocab.add_bpe(self.source, keys, self.pre)
            keys.set("tokenizer.ggml.token_type_count", "u32", 2)
        else:
            vocab.add_wordpiece(self.source, keys, self.config.get("type_vocab_size", 1))

    def name(self, name: str) -> str | None:
        """A tensor's name without prefixes; what makes no embeddings is left out."""
        return encoder_name(super().name(name))

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Name a head that tells classes apart, if the config has names of these."""
        if name.startswith("classifier.") and _labels(self):
            name = name.replace("classifier.", "classifier.out_proj.")
        yield name, tensor


class XlmRoberta(Family):
    """XLM-RoBERTa, with positions from 2 on, and Jina's v3, whose adapters are left out."""

    names: ClassVar[Mapping[str, str]] = {
        "XLMRobertaModel": "bert", "XLMRobertaForSequenceClassification": "bert",
    }  # fmt: skip
    top: ClassVar[Mapping[str, str]] = TOP
    layer: ClassVar[Mapping[str, str]] = LAYER
    layers: ClassVar[re.Pattern[str]] = LAYERS
    defaults: ClassVar[Mapping[str, Any]] = {"layer_norm_eps": 1e-5}

    def __init__(self, source: Source, pre: str | None) -> None:
        super().__init__(source, pre)
        if self.config.get("lora_adaptations"):
            self.arch = "jina-bert-v3"
        pad = self.config.get("pad_token_id")
        self._offset = 0 if pad is None else 1 + pad
        if "max_position_embeddings" in self.config:
            n_ctx = self.config["max_position_embeddings"] - self._offset
            self.config.replace(max_position_embeddings=n_ctx)

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        super().keys(keys, file_type)
        add_encoder(self, keys)

    def vocab(self, keys: Keys) -> None:
        """Set the Unigram vocabulary."""
        vocab.add_unigram(self.source, keys, self.config.get("type_vocab_size", 1))

    def name(self, name: str) -> str | None:
        """A tensor's name without prefixes and parametrizations."""
        name = (
            name.removeprefix("roberta.")
            .replace(".parametrizations.", ".")
            .removesuffix(".original")
        )
        if name.endswith((".lora_A", ".lora_B")):
            return None
        return encoder_name(super().name(name))

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Take the positions away that no token has."""
        if name == "embeddings.position_embeddings.weight":
            tensor = tensor.part(0, self._offset, tensor.shape[0])
        if name.startswith("classifier.") and ".dense" not in name and ".out_proj" not in name:
            name = name.replace("classifier.", "classifier.out_proj.") if _labels(self) else name
        yield name, tensor


class NomicBert(Family):
    """Nomic's encoders, dense and of experts."""

    names: ClassVar[Mapping[str, str]] = {"NomicBertModel": "nomic-bert"}
    top: ClassVar[Mapping[str, str]] = TOP
    layer: ClassVar[Mapping[str, str]] = LAYER
    layers: ClassVar[re.Pattern[str]] = LAYERS
    defaults: ClassVar[Mapping[str, Any]] = {"max_trained_positions": 2048}

    def __init__(self, source: Source, pre: str | None) -> None:
        super().__init__(source, pre)
        config = self.config
        self._is_moe = bool(config.get("moe_every_n_layers"))
        self.arch = "nomic-bert-moe" if self._is_moe else "nomic-bert"
        n_ctx, trained = config["n_positions"], config["max_trained_positions"]
        # What the models were trained with; their configs name what they were scaled to.
        known = {(8192, 2048): 2048, (2048, 2048): 512}
        if (n_ctx, trained) not in known:
            raise ConvertError(
                f"n_positions {n_ctx} with {trained} trained is no Nomic model known"
            )
        config.replace(n_positions=known[n_ctx, trained])
        self._expect({
            "activation_function": "gelu" if self._is_moe else "swiglu", "causal": False,
            "qkv_proj_bias": self._is_moe, "mlp_fc1_bias": self._is_moe,
            "mlp_fc2_bias": self._is_moe, "prenorm": False, "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        })  # fmt: skip

    def _expect(self, wanted: Mapping[str, Any]) -> None:
        for key, value in wanted.items():
            if self.config.get(key) != value:
                raise ConvertError(f"{key} is {self.config.get(key)!r}, {value!r} is run here")

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the sizes."""
        super().keys(keys, file_type)
        add_encoder(self, keys)
        if self._is_moe:
            keys.own("moe_every_n_layers", "u32", self.config["moe_every_n_layers"])
            keys.own("expert_used_count", "u32", self.config["moe_top_k"])

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary: WordPiece, or XLM-RoBERTa's."""
        n_types = self.config.get("type_vocab_size", 1)
        kind = self.source.json(vocab.JSON_FILE).get("model", {}).get("type")
        if kind == "Unigram":
            vocab.add_unigram(self.source, keys, n_types)
        else:
            vocab.add_wordpiece(self.source, keys, n_types)

    def name(self, name: str) -> str | None:
        """A tensor's name without prefixes."""
        return None if "mlp.experts.bias" in name else encoder_name(super().name(name))

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """Give experts, stored below each other, a dimension."""
        if "mlp.experts.mlp.w" in name:
            n_expert = self.config.find("num_local_experts", "num_experts")
            shape = (n_expert, self.config["n_inner"], self.config["n_embd"])
            tensor = tensor.changed(lambda x: x.reshape(shape), shape)
            if ".w2" in name:
                tensor = tensor.transposed()
            name += ".weight"
        yield name, tensor


def encoder_name(name: str | None) -> str | None:
    """A tensor's name as BERT's first release has it; None for what makes no embeddings."""
    if name is None:
        return None
    name = name.removeprefix("bert.")
    if name.endswith(".gamma"):
        name = name.removesuffix("gamma") + "weight"
    if name.endswith(".beta"):
        name = name.removesuffix("beta") + "bias"
    return None if UNUSED.fullmatch(name) else name


def add_encoder(family: Family, keys: Keys) -> None:
    """Set that tokens see each other, how they are pooled, and the names of classes."""
    keys.own("attention.causal", "bool", False)
    add_pooling(family.source, keys)
    labels = _labels(family)
    if labels:
        keys.own("classifier.output_labels", "str", labels)


def _labels(family: Family) -> list[str]:
    """The names of classes, in their order; none if they say nothing."""
    found = {int(k): v for k, v in (family.config.get("id2label") or {}).items()}
    if len(found) == 2 and found.get(0) == "LABEL_0":
        return []
    return [label for _, label in sorted(found.items())]
