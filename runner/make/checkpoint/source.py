"""A folder of a Hugging Face model: its config, its tensors by name, scaled ones made whole."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tamis.formats import safetensors
from tamis.formats.safetensors import Stored

INDEX = "model.safetensors.index.json"
UNUSED = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
# Parts of names of what sees and hears in models that also read text: other files are for these.
_OTHER_START = (
    "mlp", "vit.", "vpm.", "siglip2.", "conformer.", "merger.", "resampler.", "sound_encoder.",
    "sound_projection.", "speech_embeddings.",
)  # fmt: skip
_OTHER = re.compile(
    r"visual\.|vision\.|audio\.|talker\.|vision_|audio_|token2wav\.|code2wav\.|projector\."
    r"|pre_mm_projector_norm|image_newline|view_seperator|patch_embed|patch_merger\."
    r"|patch_merge_mlp\.|model\.connector\."
)


class ConvertError(ValueError):
    """A model that cannot be converted; the message says why and what would do."""


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor to come. shape: from the outer dimension; load: its values, float16 or float32.

    type: what it is stored as.
    """

    shape: tuple[int, ...]
    type: str
    load: Callable[[], np.ndarray]

    def changed(
        self, change: Callable[[np.ndarray], np.ndarray], shape: Sequence[int] | None = None
    ) -> "Lazy":
        """What `change` makes of the values; shape: theirs after it, if it differs."""
        load = self.load
        return Lazy(
            tuple(self.shape if shape is None else shape), self.type, lambda: change(load())
        )

    def part(self, axis: int, first: int, last: int) -> "Lazy":
        """The elements from `first` to before `last` along an axis."""
        axis %= len(self.shape)
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        at = (slice(None),) * axis + (slice(first, last),)
        return self.changed(lambda x: x[at], shape)

    def transposed(self) -> "Lazy":
        """With its last two dimensions exchanged."""
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self.changed(lambda x: np.swapaxes(x, -1, -2), shape)


def stacked(parts: Sequence[Lazy]) -> Lazy:
    """Tensors of one shape as one, with a dimension before theirs. Raises ConvertError."""
    if len({part.shape for part in parts}) != 1:
        raise ConvertError(f"experts differ in shape: {sorted({part.shape for part in parts})}")

    def load() -> np.ndarray:
        first = parts[0].load()
        values = np.empty((len(parts), *first.shape), first.dtype)
        values[0] = first
        for i, part in enumerate(parts[1:], 1):
            values[i] = part.load()
        return values

    return Lazy((len(parts), *parts[0].shape), parts[0].type, load)


class Source:
    """A folder of a model: `config`, the names of its files, and `tensors` by name.

    weights: whether it has them; without, there are no tensors. Raises ConvertError for what is
    missing in it, SafetensorsError for damage, OSError.
    """

    def __init__(self, folder: Path, *, weights: bool = True) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise ConvertError(f"{folder} is no folder: name one with config.json and safetensors")
        self.config = self.json("config.json")
        if not self.config:
            raise ConvertError(f"{folder} has no config.json: is it a folder of Hugging Face's?")
        stored = safetensors.read(self._files()) if weights else {}
        self.tensors = {
            name: Lazy(each.shape, each.type, each.values)
            for name, each in stored.items()
            if not name.endswith(UNUSED)
        }
        self.stored: Mapping[str, Stored] = stored
        if weights:
            self._check_index(stored)
            self._unscale()

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; {} if there is none. Raises ConvertError."""
        return self.read_json(self.folder / name)

    @staticmethod
    def read_json(path: Path) -> dict[str, Any]:
        """The object in a JSON file; {} if there is no file. Raises ConvertError."""
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ConvertError(f"{path} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConvertError(f"{path} has a {type(found).__name__}, expected an object")
        return found

    @property
    def architecture(self) -> str:
        """The name of the model's class in transformers. Raises ConvertError."""
        names = self.config.get("architectures")
        if not (isinstance(names, list) and names and isinstance(names[0], str)):
            raise ConvertError(
                f"{self.folder / 'config.json'} has no `architectures`: add one such as "
                '["LlamaForCausalLM"]'
            )
        return names[0]

    def _files(self) -> list[Path]:
        weights = self._weight_map()
        names = sorted(set(weights.values())) if weights else []
        if any(Path(name).name != name for name in names):
            raise ConvertError(f"{self.folder / INDEX} names a file outside of the folder")
        found = [self.folder / name for name in names]
        if not found:
            found = sorted(self.folder.glob("model*.safetensors"))
        if not found:
            old = sorted(self.folder.glob("*.bin"))
            hint = f" {old[0].name} is a pickle: save it as safetensors first" if old else ""
            raise ConvertError(f"{self.folder} has no model*.safetensors.{hint}")
        missing = [path.name for path in found if not path.is_file()]
        if missing:
            raise ConvertError(
                f"{self.folder} lacks {', '.join(missing)}, {len(missing)} of {len(found)} parts "
                f"that {INDEX} names: fetch them"
            )
        return found

    def _weight_map(self) -> dict[str, str]:
        found = self.json(INDEX).get("weight_map", {})
        if not isinstance(found, dict):
            raise ConvertError(f"{self.folder / INDEX} has no `weight_map` of names and files")
        return found

    def _check_index(self, stored: Mapping[str, Stored]) -> None:
        weights = self._weight_map()
        missing = [name for name in weights if name not in stored]
        if missing:
            raise ConvertError(
                f"{weights[missing[0]]} has no {missing[0]}, one of {len(missing)} tensors that "
                f"{INDEX} names: fetch it anew"
            )

    def _unscale(self) -> None:
        """Multiply weights by the scales that are stored beside them."""
        quantization = self.config.get("quantization_config") or {}
        method = quantization.get("quant_method")
        if method in (None, "mxfp4"):
            return
        if method == "fp8":
            block, end, unused = (
                quantization.get("weight_block_size"),
                "_scale_inv",
                "activation_scale",
            )
        elif method == "compressed-tensors" and quantization.get("format") in (
            "float-quantized", "int-quantized", "naive-quantized"
        ):  # fmt: skip
            groups = list(quantization["config_groups"].values())
            block, end, unused = (
                groups[0]["weights"].get("block_structure"),
                "_scale",
                "input_scale",
            )
        else:
            raise ConvertError(
                f"the weights are quantized by {method!r}: fp8, mxfp4 and compressed-tensors of "
                "8 bits are read; take the model as it was before"
            )
        for name in [n for n in self.tensors if n.endswith(end)]:
            weight = name.removesuffix(end)
            scale = self.tensors.pop(name)
            if weight not in self.tensors:
                raise ConvertError(f"{name} is there without {weight}: fetch the file anew")
            self.tensors[weight] = _scaled(self.tensors[weight], scale, block)
        for name in [n for n in self.tensors if n.endswith(unused)]:
            del self.tensors[name]


def is_other(name: str) -> bool:
    """Whether a tensor belongs to what sees or hears, which a file of its own holds."""
    return name.startswith(_OTHER_START) or _OTHER.search(name) is not None


def _scaled(weight: Lazy, scale: Lazy, block: Sequence[int] | None) -> Lazy:
    def load() -> np.ndarray:
        x, factors = weight.load().astype(np.float32), scale.load().astype(np.float32)
        if block is not None:
            first = factors.ndim - len(block)
            for axis, size in enumerate(block):
                factors = np.repeat(factors, size, axis=first + axis)
            factors = factors[tuple(slice(0, n) for n in x.shape)]
        return x * factors.reshape(*factors.shape, *(1,) * (x.ndim - factors.ndim))

    return Lazy(weight.shape, weight.type, load)
