"""The tensors of an mmproj file by their names, with shapes checked before kernels see them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.weights import Tensor, Tensors
from tamis.vision.params import VisionParams

LANES = 64  # elements that rows of patches are padded to
# Tensors of a layer, without "v.blk.N.": dimensions from the outer to the inner.
LAYER = {
    "attn_q": ("n_att", "n_embd"),
    "attn_k": ("n_att", "n_embd"),
    "attn_v": ("n_att", "n_embd"),
    "attn_out": ("n_embd", "n_att"),
    "ln1": ("n_embd",),
    "ln2": ("n_embd",),
    "ls1": ("n_embd",),
    "ls2": ("n_embd",),
    "attn_post_norm": ("n_embd",),
    "ffn_post_norm": ("n_embd",),
    "ffn_up": ("n_ff", "n_embd"),
    "ffn_gate": ("n_ff", "n_embd"),
    "ffn_down": ("n_embd", "n_ff"),
}
TOP = ("pre_ln", "post_ln")
# Tensors of other parts of a file: encoders of sound, and clamps that only one family reads.
APART = ("a.", "mm.a.", "v.std_", "resampler.pos_embed_k")
Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """All tensors of an encoder and its projector."""

    patch: Tensor  # [n_embd, padded elements of a patch]: the sum over equal frames
    patch_bias: np.ndarray | None  # f32 [n_embd]
    positions: np.ndarray | None  # f32 [n, n_embd]: learned ones
    class_embd: np.ndarray | None  # f32 [n_embd]
    top: Tensors  # norms before and after all layers
    blk: tuple[Tensors, ...]
    mm: Mapping[str, Tensor]  # the projector's, by the file's names without ".weight"


class VisionLoader:
    """Reads tensors of one file."""

    def __init__(self, file: GGUFFile, params: VisionParams) -> None:
        self._file, self._params = file, params
        self.read: set[str] = set()

    def load(self, projector: Mapping[str, Shape]) -> VisionWeights:
        """The tensors; projector: the shapes of the projector's. Raises GGUFError."""
        p = self._params
        blk = tuple(self._layer(il) for il in range(p.n_layer))
        mm = {name: self.tensor(name, shape, name) for name, shape in projector.items()}
        found = VisionWeights(
            patch=self._patch(),
            patch_bias=self._vector("v.patch_embd.bias", (p.n_embd,)),
            positions=self._positions(),
            class_embd=self._vector("v.class_embd", (p.n_embd,)),
            top=Tensors({n: self.tensor(f"v.{n}", (p.n_embd,), n) for n in TOP}),
            blk=blk,
            mm=mm,
        )
        self._check_all_read()
        return found

    def tensor(self, name: str, shape: Shape, label: str) -> Tensor:
        """A tensor and its bias; false if the file has none. Raises GGUFError for its shape."""
        whole = f"{name}.weight" if f"{name}.weight" in self._file.tensors else name
        bias = self._vector(f"{name}.bias", (shape[0],))
        if whole not in self._file.tensors:
            return Tensor(label, None, bias, self.read, whole)
        self._check(whole, shape)
        if len(shape) == 1:
            return Tensor(label, self._floats(whole), bias, self.read, whole)
        self.read.add(whole)
        info = self._file.tensors[whole]
        data = QTensor(self._file.data(whole), info.type.name, shape[0], shape[1])
        return Tensor(label, data, bias, self.read, whole)

    def _layer(self, il: int) -> Tensors:
        p, prefix = self._params, f"v.blk.{il}."
        sizes = {"n_embd": p.n_embd, "n_att": p.n_head * p.head_dim}
        up, down = ("ffn_up", "ffn_down")
        shape = self._shape(f"{prefix}{down}.weight")
        if shape is not None and shape[-1] == p.n_embd:  # older files have the names exchanged
            up, down = down, up
            shape = self._shape(f"{prefix}{down}.weight")
        sizes["n_ff"] = p.n_ff if shape is None else shape[-1]
        names = {"ffn_up": up, "ffn_down": down}
        found = {
            name: self.tensor(
                prefix + names.get(name, name), [sizes[d] for d in dims], f"blk.{il}.{name}"
            )
            for name, dims in LAYER.items()
        }
        for name in ("attn_q_norm", "attn_k_norm"):
            wide = (self._shape(f"{prefix}{name}.weight") or (0,))[-1] == sizes["n_att"]
            width = sizes["n_att"] if wide else p.head_dim
            found[name] = self.tensor(prefix + name, (width,), f"blk.{il}.{name}")
        both = self.tensor(
            f"{prefix}attn_qkv", (3 * sizes["n_att"], p.n_embd), f"blk.{il}.attn_qkv"
        )
        if both and not found["attn_q"]:
            n = sizes["n_att"]
            for i, name in enumerate("qkv"):
                found[f"attn_{name}"] = both.rows(f"blk.{il}.attn_{name}", i * n, i * n + n)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down"):
            if not found[name]:
                raise self._file.error("the tensor is missing", key=f"{prefix}{name}.weight")
        return Tensors(found)

    def _patch(self) -> Tensor:
        """The weights of patches as a matrix; those of a second frame, a copy of the first."""
        p, total = self._params, None
        for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
            if name in self._file.tensors:
                info = self._file.tensors[name]
                n = 3 * p.patch_size**2
                if int(np.prod(info.shape)) != n * p.n_embd:
                    want = f"expected {p.n_embd} filters of {n} elements"
                    raise self._file.error(f"its shape is {info.shape}, {want}", key=name)
                own = self._floats(name).reshape(p.n_embd, n)
                total = own if total is None else total + own
        if total is None:
            raise self._file.error("the tensor is missing", key="v.patch_embd.weight")
        return float_tensor("patch_embd", padded(total))

    def _positions(self) -> np.ndarray | None:
        name = "v.position_embd.weight"
        shape = self._shape(name)
        if shape is None:
            return None
        if shape[-1] != self._params.n_embd:
            raise self._file.error(f"its rows have {shape[-1]} elements", key=name)
        return self._floats(name).reshape(*shape[:-1], shape[-1])

    def _vector(self, name: str, shape: Shape) -> np.ndarray | None:
        if name not in self._file.tensors:
            return None
        self._check(name, shape)
        return self._floats(name)

    def _floats(self, name: str) -> np.ndarray:
        info, shape = self._file.tensors[name], self._shape(name)
        assert shape is not None
        self.read.add(name)
        values = dequantize(self._file.data(name), info.type, shape)
        return np.ascontiguousarray(values, np.float32)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        info = self._file.tensors.get(name)
        return None if info is None else tuple(reversed(info.shape))

    def _check(self, name: str, shape: Shape) -> None:
        found = self._shape(name)
        assert found is not None
        plain = [n for n in found if n != 1] or [1]
        if plain != ([n for n in shape if n != 1] or [1]):
            raise self._file.error(
                f"its shape is {list(found)}, expected {list(shape)} (outer dimension first)",
                key=name,
            )

    def _check_all_read(self) -> None:
        """Raise GGUFError for a tensor that no part of the encoder reads."""
        left = sorted(
            name for name in self._file.tensors.keys() - self.read if not name.startswith(APART)
        )
        if left:
            more = f", nor {len(left) - 1} others" if len(left) > 1 else ""
            raise self._file.error(
                f"the encoder of {self._params.projector!r} does not read the tensor{more}",
                key=left[0],
            )


def float_tensor(label: str, values: np.ndarray) -> Tensor:
    """A matrix of float32 f32 [n_out, n_in] that no file has as it is."""
    values = np.ascontiguousarray(values, np.float32)
    data = QTensor(values.view(np.uint8).reshape(-1), "F32", *values.shape)
    return Tensor(label, data)


def transposed(w: Tensor) -> Tensor:
    """The transposed matrix, as float32."""
    from tamis.formats.ggml_types import GGMLType

    q = w.matrix()
    values = dequantize(q.data, GGMLType[q.type], (q.n_in, q.n_out))
    return replace(float_tensor(w.name, values.T), added=w.added)


def padded(rows: np.ndarray) -> np.ndarray:
    """Rows with zeros up to a multiple of LANES elements."""
    n = -rows.shape[-1] % LANES
    return np.pad(rows, ((0, 0), (0, n))) if n else rows
