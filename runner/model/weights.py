"""The weights of a model: matrices stay in their ggml encoding, vectors become float32.

Every tensor's shape is checked against the hyperparameters before a kernel can see it.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.hparams import HParams

# Names without ".weight", and shapes in HParams' names, from the outer dimension to the inner.
TENSORS = {
    "token_embd": "n_vocab n_embd",
    "output_norm": "n_embd",
    "token_embd_norm": "n_embd",  # LFM2's name of output_norm
    "enc.output_norm": "n_embd",  # and NeoBERT
    "output": "n_vocab n_embd",
    "rope_freqs": "n_rot/2|n_rot_swa/2|head_dim/2",
    "rope_factors_long": "n_rot/2|head_dim/2",
    "rope_factors_short": "n_rot/2|head_dim/2",
    "position_embd": "n_ctx_train n_embd",
    "token_types": "n_token_type n_embd",
    "per_layer_token_embd": "n_vocab|n_hashed n_layer*n_embd_layer|n_embd_layer",
    "per_layer_model_proj": "n_layer*n_embd_layer n_embd",
    "per_layer_proj_norm": "n_embd_layer",
    "altup_proj": "3 n_embd n_embd",
    "altup_unembd_proj": "3 n_embd n_embd",
    "hrm.z_l_init": "n_embd",
    "output_res_score": "n_embd",
    "output_hc_fn": "n_stream n_stream*n_embd",
    "output_hc_base": "n_stream",
    "output_hc_scale": "1",
    "output_hc_norm": "n_stream|1 n_embd|n_stream*n_embd",
    "output_hc_down": "n_low n_stream*n_embd",
    "output_hc_up": "n_stream*n_embd n_low",
}
LAYER_TENSORS = {
    "attn_norm": "n_embd",
    "attn_q": "n_embd_q n_embd",
    "attn_k": "n_embd_kv n_embd",
    "attn_v": "n_embd_kv n_embd",
    "attn_qkv": "n_embd_qkv n_embd",
    "attn_q_norm": "head_dim|n_embd_q",
    "attn_k_norm": "head_dim|n_embd_kv",
    "attn_output": "n_embd n_embd_q",
    "post_attention_norm": "n_embd",
    "ffn_norm": "n_embd",
    "ffn_gate": "n_ff n_embd",
    "ffn_up": "n_ff|2*n_ff n_embd",
    "ffn_down": "n_embd n_ff",
    "ffn_gate_inp": "n_expert n_embd",
    "ffn_gate_exps": "n_expert n_ff_expert n_embd",
    "ffn_up_exps": "n_expert n_ff_expert n_embd",
    "ffn_down_exps": "n_expert n_embd n_ff_expert",
    "ffn_gate_up_exps": "n_expert 2*n_ff_expert n_embd",
    "exp_probs_b": "n_expert",  # added to the scores by which experts are selected
    "ffn_gate_tid2eid": "n_vocab n_expert_used",  # the experts of each token
    "ffn_gate_inp_shexp": "n_embd",
    "ffn_gate_shexp": "n_ff_shared n_embd",
    "ffn_up_shexp": "n_ff_shared n_embd",
    "ffn_down_shexp": "n_embd n_ff_shared",
    "attn_sinks": "n_head",
    "post_ffw_norm": "n_embd",
    "attn_output_norm": "n_embd",  # these two: the norms after each part of an encoder
    "layer_output_norm": "n_embd",
}
THIRDS = "3*n_embd"  # rows of attn_qkv in which Q, K and V are a third each
# Matrices that kernels read as float32, in the shapes of the file.
FLOATS = {
    *("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
    *("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv"),
    *("indexer_compressor_ape", "attn_compressor_ape"),
    *("hc_attn_norm", "hc_ffn_norm", "output_hc_norm"),
    *("time_mix_lerp_fused", "channel_mix_lerp_k", "channel_mix_lerp_r"),
    *("time_mix_lerp_x", "time_mix_first", *(f"time_mix_lerp_{name}" for name in "wkvrg")),
    *("ple_norm_key", "ple_norm_query", "ple_norm_conv", "ple_conv1d"),
    *("position_embd", "token_types", "attn_q_norm", "attn_k_norm", "ffn.act.scales"),
    *("altup_predict_coef", "altup_correct_coef"),
}
# Tensors of other heads than that of logits: see heads.py.
APART = {
    *("cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias"),
    *("dense_2.weight", "dense_2.bias", "dense_3.weight"),
}
OPTIONAL = {"rope_freqs", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"}


def is_after(name: str, n_layer: int) -> bool:
    """Whether a tensor belongs to a layer after those that lead to the logits."""
    found = re.match(r"blk\.(\d+)\.", name)
    return found is not None and int(found[1]) >= n_layer


def is_one_of(name: str, labels: Collection[str]) -> bool:
    """Whether a name of the file is one of these labels, which are names without the layer."""
    return name in labels or re.sub(r"^blk\.\d+\.", "", name) in labels


class MissingTensor(ValueError):
    """The graph reads a tensor that the file lacks; the message is its name."""


class Delta(NamedTuple):
    """The adapters' term of a matrix: w + b @ a (LoRA, Hu et al. 2021, arXiv 2106.09685, Eq. 3)."""

    a: QTensor  # F32, [rank, n_in]
    b: QTensor  # F32, [n_out, rank], times all scales


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor and its bias; false if the file has none."""

    name: str  # the file's name, without ".weight"
    data: QTensor | np.ndarray | None = None
    added: np.ndarray | None = None  # f32 [n_out]: its bias
    # Names of the file's tensors that a graph has read: `matrix`, `vector`, `bias`, `delta`,
    # `scale` and `leave` add this tensor's.
    read: set[str] = field(default_factory=set, repr=False, compare=False)
    whole: str = ""  # the file's name of it, or of the tensor whose rows it is part of
    adapted: Delta | None = None
    factor: np.ndarray | None = None  # f32 [1], or for each expert: its scale
    # Called with what a product is about to read: the file's name of the matrix, rows f32 [n, n_in]
    # or [n, n_used, n_in], and of experts' matrices the numbers of these, int32 [n, n_used].
    watch: "Watch | None" = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.data is not None

    @property
    def label(self) -> str:
        """The name without its layer."""
        return self.name.split(".", 2)[-1]

    @property
    def optional(self) -> bool:
        """Whether a graph that reads it works without it."""
        return self.label in OPTIONAL

    def matrix(self) -> QTensor:
        """The rows of a matrix, or of all experts' matrices. Raises MissingTensor."""
        if not isinstance(self.data, QTensor):
            raise MissingTensor(f"{self.name}.weight")
        self.read.add(self.whole)
        return self.data

    def vector(self) -> np.ndarray:
        """The elements of a vector, f32. Raises MissingTensor."""
        if not isinstance(self.data, np.ndarray):
            raise MissingTensor(f"{self.name}.weight")
        self.read.add(self.whole)
        return self.data

    def bias(self) -> np.ndarray | None:
        """The bias of each row's products, f32 [n_out]; None if the file has none."""
        if self.added is not None:
            self.read.update({f"{self.whole.removesuffix('.weight')}.bias", f"{self.name}.bias"})
        return self.added

    def delta(self) -> Delta | None:
        """The adapters' term of the matrix; None without adapters."""
        if self.adapted is not None:
            self.read.add(f"{self.name}.lora")
        return self.adapted

    def scale(self) -> np.ndarray | None:
        """The factor of products before a bias is added, f32 [1] or for each expert.

        It is NVFP4's second scale; None if the file has none.
        """
        if self.factor is not None:
            self.read.add(f"{self.whole.removesuffix('.weight')}.scale")
        return self.factor

    def leave(self) -> None:
        """Mark the tensor and its bias as read, for a graph that does not need them."""
        if self.data is not None:
            self.read.add(self.whole)
        self.leave_bias()

    def leave_bias(self) -> None:
        """Mark the bias as read, for a graph that does not add it."""
        self.bias()

    def rows(self, name: str, first: int, last: int) -> "Tensor":
        """Rows first .. last - 1 of a matrix, as a tensor of another name."""
        w = self.data
        assert isinstance(w, QTensor)
        row = w.data.nbytes // w.n_out
        part = w._replace(data=w.data[first * row : last * row], n_out=last - first)
        added = None if self.added is None else np.ascontiguousarray(self.added[first:last])
        return Tensor(name, part, added, self.read, self.whole, factor=self.factor)


Watch = Callable[[str, np.ndarray, np.ndarray | None], None]


class Tensors(Mapping[str, Tensor]):
    """Tensors by the names of TENSORS or LAYER_TENSORS, as attributes: w.attn_q."""

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
        """The same tensors with replaced matrices."""
        return Tensors(
            {
                name: replace(t, data=of(t.data)) if isinstance(t.data, QTensor) else t
                for name, t in self._tensors.items()
            }
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model. `output` is the token embedding if the file ties them."""

    token_embd: Tensor  # [n_vocab, n_embd]
    output_norm: Tensor  # [n_embd]
    output: Tensor  # [n_vocab, n_embd]
    top: Tensors  # tensors that belong to no layer
    blk: tuple[Tensors, ...]
    n_bytes: int  # of all tensors in the file
    read: set[str] = field(default_factory=set)  # names of the file's tensors that were read


def load_weights(
    file: GGUFFile,
    hp: HParams,
    more: Callable[[HParams], Mapping[str, tuple[int | str, ...]]] | None = None,
    unread: tuple[str, ...] = (),
    block: Callable[[HParams, int], int] | None = None,
) -> Weights:
    """Views of the file's tensors. Raises GGUFError for a misshapen tensor.

    more: shapes of a layer's tensors by name, in addition to or instead of those of LAYER_TENSORS.
    unread: labels of biases that are left out. block: the block whose tensors a layer uses.
    """
    loader = _Loader(file, hp, unread)
    top = loader.tensors("", TENSORS)
    tied = replace(top.token_embd, name="output")
    return Weights(
        token_embd=top.token_embd,
        output_norm=top.output_norm or top["enc.output_norm"] or top.token_embd_norm,
        output=top.output or tied,
        top=top,
        blk=tuple(_layer(loader, block(hp, i) if block else i, more) for i in range(hp.n_layer)),
        n_bytes=sum(t.n_bytes for t in file.tensors.values()),
        read=loader.read,
    )


def load_layer(
    file: GGUFFile,
    hp: HParams,
    layer: int,
    more: Mapping[str, tuple[int | str, ...] | str],
    unread: tuple[str, ...] = (),
) -> Tensors:
    """The tensors of one layer, which may come after those that lead to the logits.

    more: shapes in addition to or instead of those of LAYER_TENSORS. Raises what load_weights
    raises.
    """
    return _Loader(file, hp, unread).layer(f"blk.{layer}.", LAYER_TENSORS | dict(more))


def _absorbed(both: Tensor, prefix: str, hp: HParams) -> dict[str, Tensor]:
    """The tensors attn_k_b and attn_v_b of latent attention, from older files' single tensor.

    For each head it has the rows of the keys, which become columns, then those of the values.
    """
    w, n, n_head = both.data, hp.latent, hp.n_head
    assert isinstance(w, QTensor)
    n_plain, row = n.n_key - hp.n_rot, w.data.nbytes // w.n_out
    rows = w.data.reshape(n_head, n_plain + n.n_value, row)
    values = np.ascontiguousarray(rows[:, n_plain:]).reshape(-1)
    v = QTensor(values, w.type, n_head * n.n_value, n.n_latent, n_head)
    found = {"attn_v_b": Tensor(f"{prefix}attn_v_b", v, None, both.read, both.whole)}
    if n_plain == 0:
        return found  # all elements of a key are rotated
    type, flat = GGMLType[w.type], np.ascontiguousarray(rows[:, :n_plain]).reshape(-1)
    keys = dequantize(flat, type, (n.n_latent, n_head * n_plain))
    transposed = np.asarray(keys).reshape(n_head, n_plain, n.n_latent).swapaxes(1, 2)
    kind = "F32" if w.type == "F32" or n_plain % 32 else "F16"
    transposed = np.ascontiguousarray(transposed, np.float32 if kind == "F32" else np.float16)
    k = QTensor(transposed.view(np.uint8).reshape(-1), kind, n_head * n.n_latent, n_plain, n_head)
    found["attn_k_b"] = Tensor(f"{prefix}attn_k_b", k, None, both.read, both.whole)
    return found


def _layer(
    loader: "_Loader", i: int, more: Callable[[HParams], Mapping[str, tuple[int | str, ...]]] | None
) -> Tensors:
    own = loader.of(i)
    return own.layer(f"blk.{i}.", LAYER_TENSORS | dict(more(own.hp) if more else {}))


class _Loader:
    def __init__(
        self, file: GGUFFile, hp: HParams, unread: tuple[str, ...], read: set[str] | None = None
    ) -> None:
        self._file, self.hp, self._unread = file, hp, unread
        self.read: set[str] = set() if read is None else read
        self._shapes: Mapping[str, Any] = {}  # of the layer's tensors

    def of(self, layer: int) -> "_Loader":
        """A loader with the shape of a layer."""
        return _Loader(self._file, self.hp.of(layer), self._unread, self.read)

    def tensors(self, prefix: str, shapes: Mapping[str, Any]) -> Tensors:
        return Tensors({name: self._tensor(prefix + name, s) for name, s in shapes.items()})

    def layer(self, prefix: str, shapes: Mapping[str, Any]) -> Tensors:
        """The tensors of a layer; matrices that the file has fused are split."""
        self._shapes = shapes
        hp, found = self.hp, dict(self.tensors(prefix, shapes))
        qkv, up = found["attn_qkv"], found["ffn_up"]
        starts = self._starts_of_qkv()
        if qkv and not found["attn_q"] and starts:
            del found["attn_qkv"]
            sizes = hp.n_embd_q, hp.n_embd_kv, hp.n_embd_kv
            self._check_biases_beside(prefix, qkv)
            for name, first, n in zip("qkv", starts, sizes, strict=True):
                last = first + n
                own = f"{prefix}attn_{name}.bias"
                part = qkv.rows(f"{prefix}attn_{name}", first, last)
                if qkv.added is None and own in self._file.tensors:
                    part = replace(part, added=self._vector(own, [last - first]))
                found[f"attn_{name}"] = part
        if (
            up
            and not found["ffn_gate"]
            and isinstance(up.data, QTensor)
            and up.data.n_out == 2 * hp.n_ff
        ):
            found["ffn_gate"] = up.rows(f"{prefix}ffn_gate", 0, hp.n_ff)
            found["ffn_up"] = up.rows(f"{prefix}ffn_up", hp.n_ff, 2 * hp.n_ff)
        if hp.latent.n_latent and found["attn_kv_b"]:
            found |= _absorbed(found["attn_kv_b"], prefix, hp)
        return Tensors(found)

    def _check_biases_beside(self, prefix: str, qkv: Tensor) -> None:
        """Raise GGUFError for biases of some of Q, K and V beside a fused matrix.

        llama.cpp loads them, and then adds none.
        """
        names = [f"attn_{name}.bias" for name in "qkv"]
        there = [name for name in names if prefix + name in self._file.tensors]
        if qkv.added is None and 0 < len(there) < 3 and not set(there) <= set(self._unread):
            what = f"beside one matrix of Q, K and V, expected {', '.join(names)}, or none"
            raise self._file.error(what, key=prefix + there[0])

    def _starts_of_qkv(self) -> tuple[int, ...]:
        """The first rows of Q, K and V in a fused matrix; () if it is another kind of matrix.

        After them, or after each of three thirds, there may be rows that are not read.
        """
        hp, shape = self.hp, self._shapes["attn_qkv"]
        rows = (shape.split() if isinstance(shape, str) else shape)[0]
        if rows == THIRDS:
            return 0, hp.n_embd, 2 * hp.n_embd
        is_packed = str(rows).startswith("n_embd_qkv")
        return (0, hp.n_embd_q, hp.n_embd_q + hp.n_embd_kv) if is_packed else ()

    def _tensor(self, name: str, shape: str | tuple[int, ...]) -> Tensor:
        whole, bias = f"{name}.weight", f"{name}.bias"
        if whole not in self._file.tensors:
            whole = name
        data = self._data(whole, shape.split() if isinstance(shape, str) else shape)
        added = None
        if bias in self._file.tensors and not is_one_of(bias, self._unread):
            if data is None:
                sizes = self._file.tensors[bias].shape
            else:
                sizes = (data.n_out if isinstance(data, QTensor) else len(data),)
            added = self._vector(bias, sizes)
        return Tensor(name, data, added, self.read, whole, factor=self._factor(name))

    def _factor(self, name: str) -> np.ndarray | None:
        """A matrix's scale, if the file has one and the architecture does not use it otherwise."""
        scale, label = f"{name}.scale", name.split(".", 2)[-1]
        if scale not in self._file.tensors or f"{label}.scale" in self._shapes:
            return None
        if label in ("ffn_gate", "ffn_up", "ffn_down") and f"{name}.bias" in self._file.tensors:
            message = "a scale and a bias of one matrix: which is first is not the same everywhere"
            raise self._file.error(message, key=scale)
        return self._vector(scale, [self.hp.n_expert if label.endswith("_exps") else 1])

    def _data(self, name: str, dims: Sequence[str | int]) -> QTensor | np.ndarray | None:
        if name not in self._file.tensors:
            return None
        info = self._file.tensors[name]
        shape = (1,) * (len(dims) - len(info.shape)) + info.shape[::-1]  # ggml leaves out 1s
        while len(shape) > len(dims) and shape[-1] == 1:  # and some files have extra ones
            shape = shape[:-1]
        while len(shape) > len(dims) and shape[0] == 1:  # llama.cpp's converter: [1, n_embd]
            shape = shape[1:]
        self._check(name, shape, dims)
        label = name.removesuffix(".weight").split(".", 2)[-1]
        if label == "ffn_gate_tid2eid":
            return self._numbers(name, shape)
        if len(shape) == 1 or label in FLOATS:
            return self._vector(name, shape)
        n_out = int(np.prod(shape[:-1]))
        n_matrix = int(np.prod(shape[:-2]))
        return QTensor(self._file.data(name), info.type.name, n_out, shape[-1], n_matrix)

    def _vector(self, name: str, shape: Sequence[int]) -> np.ndarray:
        info = self._file.tensors[name]
        if int(np.prod(info.shape)) != int(np.prod(shape)):
            raise self._file.error(f"has shape {info.shape}, expected {tuple(shape)}", key=name)
        values = dequantize(self._file.data(name), info.type, info.shape)
        return np.ascontiguousarray(values).reshape(tuple(shape))

    def _numbers(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """Numbers of experts, int32."""
        info = self._file.tensors[name]
        if info.type is not GGMLType.I32:
            raise self._file.error(f"is {info.type.name}, expected I32", key=name)
        found = np.frombuffer(self._file.data(name), np.int32).reshape(tuple(shape))
        if found.min() < 0 or found.max() >= self.hp.n_expert:
            what = f"has expert {found.min()} or {found.max()}, there are {self.hp.n_expert}"
            raise self._file.error(what, key=name)
        return found

    def _check(self, name: str, shape: tuple[int, ...], dims: Sequence[str | int]) -> None:
        allowed = [[self._size(each) for each in str(dim).split("|")] for dim in dims]
        if len(shape) != len(dims) or any(
            n not in sizes for n, sizes in zip(shape, allowed, strict=False)
        ):
            expected = tuple(sizes[0] for sizes in allowed[::-1])
            found = self._file.tensors[name].shape
            raise self._file.error(f"has shape {found}, expected {expected}", key=name)

    def _size(self, dim: str) -> int:
        if dim.endswith("/2"):
            return int(getattr(self.hp, dim[:-2])) // 2
        return prod(int(n) if n.isdigit() else getattr(self.hp, n) for n in dim.split("*"))
