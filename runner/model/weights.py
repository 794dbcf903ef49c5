"""The weights of a model: matrices stay in their ggml encoding, vectors become float32.

Every tensor's shape is checked against the hyperparameters before a kernel can see it.
"""

from dataclasses import dataclass

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.gguf import GGUFFile, TensorInfo
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.hparams import HParams


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's tensors, named as the file names them; None where the file has none."""

    attn_norm: np.ndarray  # f32 [n_embd]
    attn_q: QTensor  # [n_head * head_dim, n_embd]
    attn_k: QTensor  # [n_head_kv * head_dim, n_embd]
    attn_v: QTensor  # [n_head_kv * head_dim, n_embd]
    attn_output: QTensor  # [n_embd, n_head * head_dim]
    ffn_norm: np.ndarray  # f32 [n_embd]
    attn_q_bias: np.ndarray | None
    attn_k_bias: np.ndarray | None
    attn_v_bias: np.ndarray | None
    attn_output_bias: np.ndarray | None
    attn_q_norm: np.ndarray | None  # f32 [head_dim]
    attn_k_norm: np.ndarray | None  # f32 [head_dim]
    post_attention_norm: np.ndarray | None  # f32 [n_embd]
    post_ffw_norm: np.ndarray | None  # f32 [n_embd]
    ffn: "Dense | Experts"


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward part."""

    gate: QTensor  # [n_ff, n_embd]
    up: QTensor  # [n_ff, n_embd]
    down: QTensor  # [n_embd, n_ff]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated feed-forward parts: the experts' rows one after another."""

    router: QTensor  # [n_expert, n_embd]
    gate: QTensor  # [n_expert * n_ff_expert, n_embd]
    up: QTensor  # [n_expert * n_ff_expert, n_embd]
    down: QTensor  # [n_expert * n_embd, n_ff_expert]


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model. `output` is the token embedding where the file ties them."""

    token_embd: QTensor  # [n_vocab, n_embd]
    output_norm: np.ndarray  # f32 [n_embd]
    output: QTensor  # [n_vocab, n_embd]
    rope_freqs: np.ndarray | None  # f32 [n_rot / 2]
    blk: tuple[Layer, ...]
    n_bytes: int  # of all tensors in the file


def load_weights(file: GGUFFile, hp: HParams) -> Weights:
    """Views of the file's tensors. Raises GGUFError for a missing or misshapen tensor."""
    return _Loader(file, hp).weights()


class _Loader:
    def __init__(self, file: GGUFFile, hp: HParams) -> None:
        self._file, self._hp = file, hp

    def weights(self) -> Weights:
        hp = self._hp
        token_embd = self._matrix("token_embd.weight", hp.n_vocab, hp.n_embd)
        tied = "output.weight" not in self._file.tensors
        return Weights(
            token_embd=token_embd,
            output_norm=self._vector("output_norm.weight", hp.n_embd),
            output=token_embd if tied else self._matrix("output.weight", hp.n_vocab, hp.n_embd),
            rope_freqs=self._optional("rope_freqs.weight", hp.n_rot // 2),
            blk=tuple(self._layer(i) for i in range(hp.n_layer)),
            n_bytes=sum(t.n_bytes for t in self._file.tensors.values()),
        )

    def _layer(self, i: int) -> Layer:
        hp, blk = self._hp, f"blk.{i}"
        return Layer(
            attn_norm=self._vector(f"{blk}.attn_norm.weight", hp.n_embd),
            attn_q=self._matrix(f"{blk}.attn_q.weight", hp.n_embd_q, hp.n_embd),
            attn_k=self._matrix(f"{blk}.attn_k.weight", hp.n_embd_kv, hp.n_embd),
            attn_v=self._matrix(f"{blk}.attn_v.weight", hp.n_embd_kv, hp.n_embd),
            attn_output=self._matrix(f"{blk}.attn_output.weight", hp.n_embd, hp.n_embd_q),
            ffn_norm=self._vector(f"{blk}.ffn_norm.weight", hp.n_embd),
            attn_q_bias=self._optional(f"{blk}.attn_q.bias", hp.n_embd_q),
            attn_k_bias=self._optional(f"{blk}.attn_k.bias", hp.n_embd_kv),
            attn_v_bias=self._optional(f"{blk}.attn_v.bias", hp.n_embd_kv),
            attn_output_bias=self._optional(f"{blk}.attn_output.bias", hp.n_embd),
            attn_q_norm=self._optional(f"{blk}.attn_q_norm.weight", hp.head_dim),
            attn_k_norm=self._optional(f"{blk}.attn_k_norm.weight", hp.head_dim),
            post_attention_norm=self._optional(f"{blk}.post_attention_norm.weight", hp.n_embd),
            post_ffw_norm=self._optional(f"{blk}.post_ffw_norm.weight", hp.n_embd),
            ffn=self._experts(blk) if hp.n_expert else self._dense(blk),
        )

    def _dense(self, blk: str) -> Dense:
        hp = self._hp
        return Dense(
            gate=self._matrix(f"{blk}.ffn_gate.weight", hp.n_ff, hp.n_embd),
            up=self._matrix(f"{blk}.ffn_up.weight", hp.n_ff, hp.n_embd),
            down=self._matrix(f"{blk}.ffn_down.weight", hp.n_embd, hp.n_ff),
        )

    def _experts(self, blk: str) -> Experts:
        hp = self._hp
        return Experts(
            router=self._matrix(f"{blk}.ffn_gate_inp.weight", hp.n_expert, hp.n_embd),
            gate=self._stack(f"{blk}.ffn_gate_exps.weight", hp.n_ff_expert, hp.n_embd),
            up=self._stack(f"{blk}.ffn_up_exps.weight", hp.n_ff_expert, hp.n_embd),
            down=self._stack(f"{blk}.ffn_down_exps.weight", hp.n_embd, hp.n_ff_expert),
        )

    def _matrix(self, name: str, n_out: int, n_in: int) -> QTensor:
        return self._tensor(name, (n_in, n_out))

    def _stack(self, name: str, n_out: int, n_in: int) -> QTensor:
        return self._tensor(name, (n_in, n_out, self._hp.n_expert))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> QTensor:
        info = self._checked(name, shape)
        n_out = int(np.prod(shape[1:], dtype=object))
        return QTensor(self._file.data(name), info.type.name, n_out, shape[0])

    def _vector(self, name: str, n: int) -> np.ndarray:
        info = self._checked(name, (n,))
        return np.ascontiguousarray(dequantize(self._file.data(name), info.type, (n,)))

    def _optional(self, name: str, n: int) -> np.ndarray | None:
        return self._vector(name, n) if name in self._file.tensors else None

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise self._file.error("the tensor is missing", key=name)
        if info.shape != shape:
            raise self._file.error(f"has shape {info.shape}, expected {shape}", key=name)
        return info
