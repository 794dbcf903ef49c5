"""What the converter asks of a family of models: a class with hooks, and its usual answers."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from tamis.make.checkpoint import vocab
from tamis.make.checkpoint.keys import Config, Keys, add_sizes
from tamis.make.checkpoint.source import ConvertError, Lazy, Source, is_other, stacked

Named = tuple[str, Lazy]
TOP = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
EXPERTS = {
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_EXPERT_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


class Family:
    """A family: subclasses in `make.convert` say in what they differ; found by their file."""

    names: ClassVar[Mapping[str, str]] = {}  # a class of transformers: GGUF's architecture
    top: ClassVar[Mapping[str, str]] = TOP  # tensors' names without their end
    layer: ClassVar[Mapping[str, str]] = LAYER
    layers: ClassVar[re.Pattern[str]] = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
    defaults: ClassVar[Mapping[str, Any]] = {}  # of what a config may lack, as transformers has it

    def __init__(self, source: Source, pre: str | None) -> None:
        self.source = source
        self.pre = pre
        self.config = Config(source.config, self.defaults)
        self.arch = self.names[source.architecture]
        self.n_layer = self.config.n_layer

    def first_keys(self, keys: Keys) -> None:
        """Set what stands before all other keys, as llama.cpp's converter has it."""

    def keys(self, keys: Keys, file_type: int) -> None:
        """Set the architecture's keys."""
        add_sizes(keys, self.config, self.n_layer, file_type)

    def vocab(self, keys: Keys) -> None:
        """Set the vocabulary."""
        vocab.add_bpe(self.source, keys, self.pre)

    def name(self, name: str) -> str | None:
        """A tensor's name before it is looked up; None if it is left out."""
        return None if is_other(name) else name.replace("language_model.", "")

    def change(self, name: str, tensor: Lazy) -> Iterable[Named]:
        """What a tensor becomes: others, with names that are looked up still."""
        yield name, tensor

    def extra(self) -> Iterable[tuple[str, np.ndarray]]:
        """Tensors that no file has, by their last names: float32."""
        return ()

    def tensors(self) -> Iterable[Named]:
        """All tensors by GGUF's names. Raises ConvertError."""
        for last, values in self.extra():
            yield last, Lazy(values.shape, "F32", values.copy)
        experts: dict[str, dict[str, dict[int, Lazy]]] = {}
        n_expert = self.config.find("num_local_experts", "num_experts") or 0
        for stored, tensor in self.source.tensors.items():
            name = self.name(stored)
            if name is None:
                continue
            match = _EXPERT_NAME.fullmatch(name)
            if match is None:
                for changed, each in self.change(name, tensor):
                    yield self.last_name(changed), each
                continue
            layer = experts.setdefault(match[1], {})
            layer.setdefault(match[3], {})[int(match[2])] = tensor
            if sum(map(len, layer.values())) == 3 * n_expert:
                yield from self._merged(match[1], experts.pop(match[1]), n_expert)
        if experts:
            prefix, layer = next(iter(experts.items()))
            n = sum(map(len, layer.values()))
            raise ConvertError(f"{prefix} has {n} tensors, expected three of {n_expert} experts")

    def _merged(
        self, prefix: str, layer: Mapping[str, Mapping[int, Lazy]], n_expert: int
    ) -> Iterable[Named]:
        for part in sorted(layer):
            if sorted(layer[part]) != list(range(n_expert)):
                raise ConvertError(f"{prefix} has {sorted(layer[part])} of {part}, not {n_expert}")
            parts = [layer[part][i] for i in range(n_expert)]
            yield self.last_name(f"{prefix}.{part}.weight"), stacked(parts)

    def last_name(self, name: str) -> str:
        """GGUF's name of a tensor. Raises ConvertError for one that is not known."""
        match = self.layers.fullmatch(name)
        start, inner = "", name
        names: Mapping[str, str] = {
            **self.top,
            **{k.removeprefix("model."): v for k, v in self.top.items()},
        }
        if match is not None and int(match[1]) < self.n_layer:
            start, inner, names = f"blk.{match[1]}.", match[2], self.layer
        stem, dot, end = inner.rpartition(".")
        if inner in names:
            return start + names[inner]
        if stem not in names or not dot:
            raise ConvertError(
                f"{name} is no tensor of {self.source.architecture} that is known here: is the "
                "folder a plain checkpoint, without adapters or quantization?"
            )
        return f"{start}{names[stem]}.{end}"


def add_pooling(source: Source, keys: Keys) -> None:
    """Set how a text's states become one, by the folder's sentence-transformers modules."""
    path = source.folder / "modules.json"
    modules = json.loads(path.read_text("utf-8")) if path.is_file() else []
    for module in modules:
        if module["type"].endswith("Pooling"):
            found = source.json(f"{module['path']}/config.json")
            kinds = {"mean_tokens": 1, "cls_token": 2, "lasttoken": 3}
            by_flag = [n for kind, n in kinds.items() if found.get(f"pooling_mode_{kind}")]
            by_name = {"mean": 1, "cls": 2, "lasttoken": 3}.get(str(found.get("pooling_mode")))
            if not by_flag and by_name is None:
                raise ConvertError(
                    f"{module['path']}/config.json pools in none of the ways mean, cls, lasttoken"
                )
            keys.own("pooling_type", "u32", by_flag[0] if by_flag else by_name)
            return


def permuted(tensor: Lazy, n_head: int) -> Lazy:
    """Rows of heads in the order of rotation of neighbours; Hugging Face's rotates halves."""

    def change(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(n_head, 2, len(x) // n_head // 2, *x.shape[1:])
        return pairs.swapaxes(1, 2).reshape(x.shape)

    return tensor.changed(change)


def plus_one(tensor: Lazy) -> Lazy:
    """A norm's weights plus one, which their model adds when it runs."""
    return tensor.changed(lambda x: x + x.dtype.type(1))
