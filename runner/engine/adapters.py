"""LoRA adapters and control vectors in GGUF files, and models with some of them.

Weights are not changed: products add the adapters' terms, so that sessions of one engine may have
different ones. Several adapters are concatenated along the rank.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.gguf import GGUFFile
from tamis.graph.device_graph import measure
from tamis.jit_kernels.contract.types import QTensor, zeros
from tamis.model.model import Model
from tamis.model.weights import Delta, Tensor, Tensors

TYPES = ("F32", "F16", "BF16", "Q8_0")
RANK_UNIT = 32  # ranks are padded with zeros to multiples of this
MOST_RANK = 4096
MOST_SCALE = 1e6  # of a request
_NUMBER = re.compile("[0-9]{1,9}")  # the number of a layer, in a tensor's name
# Tensors that the file may have fused, in the order of their rows.
_PARTS = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}


class AdapterError(ValueError):
    """An adapter that cannot be read, or is of another model; the message names the file."""


class Pair(NamedTuple):
    """A low-rank term of a matrix: b @ a is added to it."""

    a: np.ndarray  # f32 [rank, n_in]
    b: np.ndarray  # f32 [n_out, rank]


@dataclass(frozen=True, eq=False)
class Lora:
    """A LoRA adapter of a file."""

    path: str
    arch: str
    alpha: float  # 0: pairs are not scaled by their rank
    pairs: Mapping[str, Pair]  # by the name of the tensor, without ".weight"
    metadata: Mapping[str, Any]

    @staticmethod
    def load(path: str | Path) -> "Lora":
        """Read the file. Raises OSError, GGUFError, AdapterError."""
        file = GGUFFile(path)
        for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
            if (value := file.metadata.get(key)) != expected:
                raise AdapterError(f"{path}: {key} is {value!r}, expected {expected!r}")
        halves: dict[str, dict[str, np.ndarray]] = {}
        for name in file.tensors:
            tensor, _, half = name.rpartition(".lora_")
            if half not in ("a", "b") or not tensor.endswith(".weight"):
                raise AdapterError(f"{path}: tensor {name} is none of NAME.weight.lora_a and _b")
            halves.setdefault(tensor.removesuffix(".weight"), {})[half] = _matrix(file, name)
        pairs = {name: _pair(str(path), name, value) for name, value in halves.items()}
        if not pairs:
            raise AdapterError(f"{path}: the adapter has no tensors")
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, float | int) or not math.isfinite(alpha):
            raise AdapterError(f"{path}: adapter.lora.alpha is {alpha!r}, expected a finite number")
        arch = str(file.metadata.get("general.architecture", ""))
        return Lora(str(path), arch, float(alpha), pairs, file.metadata)

    def scale(self, rank: int, scale: float) -> float:
        """The factor of a pair's product b @ a: `scale`, times alpha / rank if the file has one."""
        return scale * self.alpha / rank if self.alpha else scale


@dataclass(frozen=True, eq=False)
class ControlVector:
    """Vectors of a file, each for a layer."""

    path: str
    rows: Mapping[int, np.ndarray]  # f32 [n_embd], by layer

    @staticmethod
    def load(path: str | Path) -> "ControlVector":
        """Read the file. Raises OSError, GGUFError, AdapterError."""
        file, rows = GGUFFile(path), {}
        for name in file.tensors:
            kind, _, layer = name.partition(".")
            if kind != "direction" or not _NUMBER.fullmatch(layer) or not int(layer):
                raise AdapterError(f"{path}: tensor {name} is none of direction.1, direction.2, ..")
            matrix = _matrix(file, name)
            rows[int(layer)] = matrix.reshape(-1)
        if not rows or len({len(row) for row in rows.values()}) > 1:
            raise AdapterError(f"{path}: a control vector has directions of one length")
        return ControlVector(str(path), rows)


def _matrix(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    if info.type.name not in TYPES:
        kinds = ", ".join(TYPES)
        raise AdapterError(f"{file.path}: {name} is of type {info.type.name}, expected {kinds}")
    values = np.asarray(dequantize(file.data(name), info.type, info.shape), np.float32)
    if not np.isfinite(values).all():
        raise AdapterError(f"{file.path}: {name} has values that are no finite numbers")
    return values.reshape(info.shape[::-1])


def _pair(path: str, name: str, halves: Mapping[str, np.ndarray]) -> Pair:
    if halves.keys() != {"a", "b"}:
        raise AdapterError(f"{path}: {name} has one half of a pair, expected lora_a and lora_b")
    a, b = halves["a"], halves["b"]
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not 1 <= len(a) <= MOST_RANK:
        raise AdapterError(f"{path}: {name} has lora_a {a.shape} and lora_b {b.shape}")
    return Pair(a, b)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a session's model: files and their scales, in order."""

    loras: tuple[tuple[Lora, float], ...] = ()
    control: tuple[tuple[ControlVector, float], ...] = ()
    layers: tuple[int, int] | None = None  # the first and last layer that control vectors change

    def scaled(self, scales: Sequence[float]) -> "Adapters":
        """The same adapters with other scales of the LoRA ones."""
        loras = [(lora, float(scale)) for (lora, _), scale in zip(self.loras, scales, strict=True)]
        return replace(self, loras=tuple(loras))

    @property
    def key(self) -> str:
        """A text that identifies the adapters; "" if none has an effect."""
        effective = [
            *((one.path, id(one), scale) for one, scale in self.loras if scale),
            *((one.path, id(one), scale, self.layers) for one, scale in self.control if scale),
        ]
        return repr(effective) if effective else ""


class AdapterFiles(NamedTuple):
    """The files of adapters that a process reads, and their scales; see Adapters."""

    loras: tuple[tuple[str, float], ...] = ()
    control: tuple[tuple[str, float], ...] = ()
    layers: tuple[int, int] | None = None

    def load(self) -> Adapters:
        """Read the files. Raises OSError, GGUFError, AdapterError."""
        loras = tuple((Lora.load(path), scale) for path, scale in self.loras)
        control = tuple((ControlVector.load(path), scale) for path, scale in self.control)
        return Adapters(loras, control, self.layers)


def adapted(model: Model, adapters: Adapters) -> Model:
    """The model with adapters. Raises AdapterError if one is of another model."""
    for lora, _ in adapters.loras:
        if lora.arch != model.hp.arch:
            raise AdapterError(
                f"{lora.path}: the adapter is for {lora.arch!r}, the model is {model.hp.arch!r}"
            )
    deltas = _Deltas(model)
    for lora, scale in adapters.loras:
        for name, pair in lora.pairs.items():
            if scale:
                deltas.add(lora, name, pair, lora.scale(len(pair.a), scale))
    weights = deltas.weights()
    control = _control(model, adapters)
    changed = replace(model, weights=weights, control=control, adapters=_digest(adapters))
    changed = replace(changed, needs=measure(changed))
    for name, lora in deltas.names.items():
        if f"{name}.lora" not in weights.read:
            raise AdapterError(
                f"{lora.path}: adapters of {name} are not supported for {model.hp.arch}"
            )
    return changed


def _digest(adapters: Adapters) -> str:
    """The digest that identifies adapters in session files, of values rather than file names."""
    digest = hashlib.sha256()
    for lora, scale in adapters.loras:
        digest.update(np.float64(scale).tobytes())
        for name, pair in sorted(lora.pairs.items()):
            digest.update(name.encode() + pair.a.tobytes() + pair.b.tobytes())
    for vector, scale in adapters.control:
        digest.update(repr((scale, adapters.layers)).encode())
        for layer, row in sorted(vector.rows.items()):
            digest.update(repr(layer).encode() + row.tobytes())
    return digest.hexdigest()[:16]


def _control(model: Model, adapters: Adapters) -> dict[int, np.ndarray]:
    n_embd, n_layer = model.hp.n_embd, model.hp.n_layer
    rows: dict[int, np.ndarray] = {}
    first, last = adapters.layers or (1, n_layer)
    for vector, scale in adapters.control:
        for layer, row in vector.rows.items():
            if len(row) != n_embd:
                raise AdapterError(
                    f"{vector.path}: directions have {len(row)} elements, the model {n_embd}"
                )
            if scale and first <= layer <= last and layer < n_layer:
                rows.setdefault(layer, zeros((1, n_embd), np.float32))
                with np.errstate(over="ignore", invalid="ignore"):
                    rows[layer] += np.float32(scale) * row
                if not np.isfinite(rows[layer]).all():
                    raise AdapterError(
                        f"{vector.path}: direction.{layer} times {scale:g} has values that are no "
                        "finite numbers"
                    )
    return rows


class _Deltas:
    """The pairs of adapters, by the tensors that they are added to."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pairs: dict[tuple[int | None, str], list[Pair]] = {}
        self.names: dict[str, Lora] = {}  # tensors that only products may read

    def add(self, lora: Lora, name: str, pair: Pair, scale: float) -> None:
        """Add a pair.

        Raises AdapterError if the model has no such matrix, or one of another shape.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            pair = Pair(pair.a, pair.b * np.float32(scale))
        if not np.isfinite(pair.b).all():
            raise AdapterError(
                f"{lora.path}: {name} times {scale:g} has values that are no finite numbers"
            )
        layer, tensors = self._of(lora, name)
        w = tensors[0].data
        assert isinstance(w, QTensor)
        n_out = sum(t.data.n_out for t in tensors if isinstance(t.data, QTensor))
        if pair.a.shape[1] != w.n_in or len(pair.b) != n_out:
            raise AdapterError(
                f"{lora.path}: {name} is adapted as [{len(pair.b)}, {pair.a.shape[1]}], the model "
                f"has [{n_out}, {w.n_in}]"
            )
        first = 0
        for tensor in tensors:
            assert isinstance(tensor.data, QTensor)
            part = Pair(pair.a, pair.b[first : first + tensor.data.n_out])
            first += tensor.data.n_out
            self._pairs.setdefault((layer, tensor.label), []).append(part)
            self.names[tensor.name] = lora

    def _of(self, lora: Lora, name: str) -> tuple[int | None, list[Tensor]]:
        """The layer and the matrix of a name, or the matrices that its rows were split from."""
        weights, (kind, _, rest) = self._model.weights, name.partition(".")
        if name == "output" and weights.output.whole == "output.weight":
            return None, [weights.output]
        layer, _, label = rest.partition(".")
        if kind == "blk" and _NUMBER.fullmatch(layer) and int(layer) < len(weights.blk):
            of_layer = weights.blk[int(layer)]
            for names in ((label,), _PARTS.get(label, ())):
                tensors = [of_layer[n] for n in names if n in of_layer]
                if tensors and all(
                    isinstance(t.data, QTensor) and t.whole == f"{name}.weight" for t in tensors
                ):
                    whole = len(names) > 1 or not self._is_part(of_layer, label)
                    if whole:
                        return int(layer), tensors
        raise AdapterError(f"{lora.path}: adapts {name}, which is no matrix of this model's layers")

    @staticmethod
    def _is_part(of_layer: Tensors, label: str) -> bool:
        """Whether the labelled tensor is some rows of the file's tensor of that name."""
        return any(
            other in of_layer and other != label and of_layer[other].whole == of_layer[label].whole
            for other in _PARTS.get(label, ())
        )

    def weights(self) -> Any:
        """The weights with the adapters' terms."""
        weights, blk = self._model.weights, list(self._model.weights.blk)
        output = weights.output
        for (layer, label), pairs in self._pairs.items():
            if layer is None:
                output = replace(output, adapted=_joined(pairs))
            else:
                changed = replace(blk[layer][label], adapted=_joined(pairs))
                blk[layer] = Tensors({**blk[layer], label: changed})
        return replace(weights, output=output, blk=tuple(blk))


def _joined(pairs: Iterable[Pair]) -> Delta:
    pairs = list(pairs)
    n, n_in, n_out = sum(len(p.a) for p in pairs), pairs[0].a.shape[1], len(pairs[0].b)
    rank = -(-n // RANK_UNIT) * RANK_UNIT
    a, b = zeros((rank, n_in), np.float32), zeros((n_out, rank), np.float32)
    a[:n] = np.concatenate([p.a for p in pairs])
    b[:, :n] = np.concatenate([p.b for p in pairs], axis=1)
    return Delta(
        QTensor(a.view(np.uint8).reshape(-1), "F32", rank, n_in),
        QTensor(b.view(np.uint8).reshape(-1), "F32", n_out, rank),
    )


def scales(given: Sequence[Mapping[str, Any]], n: int) -> list[float]:
    """The scale of each of n adapters in a list of {id, scale}; 0 for those not in it.

    Raises ValueError.
    """
    listed = [0.0] * n
    for one in given:
        i, scale = (one.get("id"), one.get("scale")) if isinstance(one, Mapping) else (None, None)
        if type(i) is not int or not 0 <= i < n:
            raise ValueError(f"lora has id {i!r:.60}, there are {n} adapters, from 0 on")
        if isinstance(scale, bool) or not isinstance(scale, float | int):
            scale = math.nan
        if not abs(scale) <= MOST_SCALE:
            raise ValueError(f"lora has scale {scale!r}, expected a number")
        listed[i] = float(scale)
    return listed
