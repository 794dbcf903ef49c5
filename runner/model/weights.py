"""The weights of a model: matrices stay in their ggml encoding, vectors become float32.

Every tensor's shape is checked against the hyperparameters before a kernel can see it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.hparams import HParams

# Names without ".weight", and the shape in HParams' names, from the outer dimension to the inner.
TENSORS = {
    "token_embd": "n_vocab n_embd",
    "output_norm": "n_embd",
    "token_embd_norm": "n_embd",  # what LFM2 calls output_norm
    "output": "n_vocab n_embd",
    "rope_freqs": "n_rot/2",
}
LAYER_TENSORS = {
    "attn_norm": "n_embd",
    "attn_q": "n_embd_q n_embd",
    "attn_k": "n_embd_kv n_embd",
    "attn_v": "n_embd_kv n_embd",
    "attn_q_norm": "head_dim",
    "attn_k_norm": "head_dim",
    "attn_output": "n_embd n_embd_q",
    "post_attention_norm": "n_embd",
    "ffn_norm": "n_embd",
    "ffn_gate": "n_ff n_embd",
    "ffn_up": "n_ff n_embd",
    "ffn_down": "n_embd n_ff",
    "ffn_gate_inp": "n_expert n_embd",
    "ffn_gate_exps": "n_expert n_ff_expert n_embd",
    "ffn_up_exps": "n_expert n_ff_expert n_embd",
    "ffn_down_exps": "n_expert n_embd n_ff_expert",
    "post_ffw_norm": "n_embd",
}
OPTIONAL = {"rope_freqs", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"}


# Matrices that kernels read as float32, in the shapes that the file has.
FLOATS = {"ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv"}


class MissingTensor(ValueError):
    """The graph reads a tensor that the file has not; the message is its name."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor and its bias; false where the file has none."""

    name: str  # as the file names it, without ".weight"
    data: QTensor | np.ndarray | None = None
    bias: np.ndarray | None = None  # f32 [n_out]

    def __bool__(self) -> bool:
        return self.data is not None

    @property
    def label(self) -> str:
        """The name without its layer."""
        return self.name.split(".", 2)[-1]

    @property
    def optional(self) -> bool:
        """Whether a graph that names it goes on without it."""
        return self.label in OPTIONAL

    @property
    def matrix(self) -> QTensor:
        """The rows of a matrix, or of all experts' matrices. Raises MissingTensor."""
        if not isinstance(self.data, QTensor):
            raise MissingTensor(f"{self.name}.weight")
        return self.data

    @property
    def vector(self) -> np.ndarray:
        """The elements of a vector, f32. Raises MissingTensor."""
        if not isinstance(self.data, np.ndarray):
            raise MissingTensor(f"{self.name}.weight")
        return self.data


class Tensors(Mapping[str, Tensor]):
    """Tensors by the names of TENSORS or LAYER_TENSORS, which are attributes: w.attn_q."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_tensors"][name]
        except KeyError:
            raise AttributeError(f"{name} is none of the tensors of model/weights.py") from None

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def matrices(self) -> Iterator[QTensor]:
        """The matrices that the file has."""
        for tensor in self._tensors.values():
            if isinstance(tensor.data, QTensor):
                yield tensor.data

    def with_matrices(self, of: Callable[[QTensor], QTensor]) -> "Tensors":
        """The same tensors, their matrices replaced."""
        return Tensors(
            {
                name: replace(t, data=of(t.data)) if isinstance(t.data, QTensor) else t
                for name, t in self._tensors.items()
            }
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model. `output` is the token embedding where the file ties them."""

    token_embd: Tensor  # [n_vocab, n_embd]
    output_norm: Tensor  # [n_embd]
    output: Tensor  # [n_vocab, n_embd]
    rope_freqs: np.ndarray | None  # f32 [n_rot / 2]
    blk: tuple[Tensors, ...]
    n_bytes: int  # of all tensors in the file


def load_weights(
    file: GGUFFile, hp: HParams, more: Mapping[str, tuple[int, ...]] | None = None
) -> Weights:
    """Views of the file's tensors. Raises GGUFError for a misshapen tensor.

    more: shapes of a layer's tensors, beside or instead of those of LAYER_TENSORS.
    """
    loader = _Loader(file, hp)
    shapes = LAYER_TENSORS | dict(more or {})
    top = loader.tensors("", TENSORS)
    tied = replace(top.token_embd, name="output")
    return Weights(
        token_embd=top.token_embd,
        output_norm=top.output_norm or top.token_embd_norm,
        output=top.output or tied,
        rope_freqs=top.rope_freqs.vector if top.rope_freqs else None,
        blk=tuple(loader.tensors(f"blk.{i}.", shapes) for i in range(hp.n_layer)),
        n_bytes=sum(t.n_bytes for t in file.tensors.values()),
    )


class _Loader:
    def __init__(self, file: GGUFFile, hp: HParams) -> None:
        self._file, self._hp = file, hp

    def tensors(self, prefix: str, shapes: Mapping[str, Any]) -> Tensors:
        return Tensors({name: self._tensor(prefix + name, s) for name, s in shapes.items()})

    def _tensor(self, name: str, shape: str | tuple[int, ...]) -> Tensor:
        sizes = self._sizes(shape.split()) if isinstance(shape, str) else shape
        whole = f"{name}.weight" if f"{name}.weight" in self._file.tensors else name
        data, bias = self._data(whole, sizes), f"{name}.bias"
        if bias not in self._file.tensors:
            return Tensor(name, data)
        return Tensor(name, data, self._vector(bias, sizes[:-1] or sizes))

    def _data(self, name: str, sizes: tuple[int, ...]) -> QTensor | np.ndarray | None:
        if name not in self._file.tensors:
            return None
        label = name.removesuffix(".weight").split(".", 2)[-1]
        if len(sizes) == 1 or label in FLOATS:
            return self._vector(name, sizes)
        type_ = self._checked(name, sizes)
        scale = f"{name.removesuffix('.weight')}.scale"
        if scale in self._file.tensors:
            message = "the scale of a whole matrix (NVFP4's second one) cannot be applied yet:"
            raise self._file.error(f"{message} use a file of another type", key=scale)
        return QTensor(self._file.data(name), type_.name, int(np.prod(sizes[:-1])), sizes[-1])

    def _sizes(self, dims: list[str]) -> tuple[int, ...]:
        hp = self._hp
        return tuple(hp.n_rot // 2 if dim == "n_rot/2" else getattr(hp, dim) for dim in dims)

    def _vector(self, name: str, sizes: tuple[int, ...]) -> np.ndarray:
        type_ = self._checked(name, sizes)
        values = dequantize(self._file.data(name), type_, sizes[::-1])
        return np.ascontiguousarray(values).reshape(sizes)

    def _checked(self, name: str, sizes: tuple[int, ...]) -> Any:
        info, expected = self._file.tensors[name], sizes[::-1]
        if info.shape != expected:
            raise self._file.error(f"has shape {info.shape}, expected {expected}", key=name)
        return info.type
