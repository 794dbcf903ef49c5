"""The basis in which a CPU stores quantised keys, so that four bits suffice.

Scores are products of queries and keys, and softmax ignores what all keys of a head share. So a key
k may be stored as ((k - centre) / scale) @ h, if queries are multiplied by scale and by h as well.

- centre: the mean over positions of the key bias with RoPE, of which slow pairs keep most. Qwen2
  has biases fifty times as large as what differs between keys.
- scale: of a rotary pair, the fourth root of the energy of keys over that of queries: of all scales
  it gives the least error of scores where rounding is spread evenly, as h does.
- h: a Hadamard matrix, which spreads an element that is large in every key over its block (QuaRot,
  Ashkboos et al. 2024, arXiv 2404.00456).

Energies are estimated from weights alone, as those of products with normed rows.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.model import Model
from tamis.model.weights import Tensor, Tensors

SAMPLED = 1024  # columns of a matrix from which the energy of its products is estimated
LEAST = 0.01  # the least energy of an element, as a share of its head's mean


@dataclass(frozen=True)
class KeyBasis:
    """A layer's basis. Arrays are f32 [n_head_kv, head_dim], but for h, [head_dim, head_dim]."""

    centre: np.ndarray
    scale: np.ndarray
    h: np.ndarray  # symmetric and orthogonal

    def stored(self, k: np.ndarray) -> np.ndarray:
        """Keys, f32 [.., n_head_kv, head_dim], as they are stored."""
        found: np.ndarray = ((k - self.centre) / self.scale) @ self.h
        return found

    def original(self, k: np.ndarray) -> np.ndarray:
        """Stored keys, f32 [.., n_head_kv, head_dim], as RoPE left them."""
        found: np.ndarray = (k @ self.h) * self.scale + self.centre
        return found

    @cached_property
    def queries(self) -> QTensor:
        """The matrices, one for each KV head, that queries are multiplied by."""
        return _matrices(self.h[None] * self.scale[:, None, :])

    @cached_property
    def keys(self) -> QTensor:
        """The matrices, one for each KV head, that keys are multiplied by."""
        return _matrices(self.h[None] / self.scale[:, None, :])

    @cached_property
    def shift(self) -> np.ndarray | None:
        """What is added to the products of keys, f32 [1, elements of all heads]; None: nothing."""
        if not self.centre.any():
            return None
        return np.ascontiguousarray(self.stored(0 * self.centre).reshape(1, -1), np.float32)


def _matrices(rows: np.ndarray) -> QTensor:
    """Matrices f32 [n, n_out, n_in] as one tensor."""
    data = np.ascontiguousarray(rows, np.float32).reshape(-1).view(np.uint8)
    return QTensor(data, "F32", rows.shape[0] * rows.shape[1], rows.shape[2], rows.shape[0])


def has_basis(model: Model, layer: int) -> bool:
    """Whether a layer's quantised keys have a basis, or are stored as they are.

    Stored as they are: latents, keys behind which an indexer's lie, heads that a KV cache pads.
    """
    hp, w = model.hp.of(layer), model.weights.blk[layer]
    if model.hp.latent.n_latent or model.hp.indexer.top_k or model.hp.padded or not w.attn_k:
        return False
    return w.attn_k.matrix().n_out == hp.n_head_kv * hp.head_dim


def key_basis(file: GGUFFile, model: Model, layer: int) -> KeyBasis:
    """The basis of a layer that `has_basis`."""
    hp, w = model.hp.of(layer), model.weights.blk[layer]
    pairs = _Pairs(model, layer, hp.head_dim)
    n_q = w.attn_q.matrix().n_out if w.attn_q else 0
    keys = _energy(file, w, w.attn_k, n_q, w.attn_k_norm, hp.head_dim)
    bias = _bias(w.attn_k, (hp.n_head_kv, hp.head_dim))
    if w.attn_k_norm:
        bias = 0 * bias  # it is normed with the rest
    # Sinks and capped scores are not shifted with the keys.
    shifts = not w.attn_sinks and not hp.attention_softcap
    centre = pairs.mean(bias) if shifts else 0 * bias
    keys = pairs.shared(keys + bias**2) - pairs.shared(centre**2)
    queries = np.ones_like(keys)
    if n_q == hp.n_head * hp.head_dim:
        each = _energy(file, w, w.attn_q, 0, w.attn_q_norm, hp.head_dim)
        if not w.attn_q_norm:
            each = each + _bias(w.attn_q, each.shape) ** 2
        of_kv = each.reshape(hp.n_head_kv, hp.group, hp.head_dim).mean(1)
        queries = pairs.shared(of_kv)
    scale = (_floored(keys) / _floored(queries)) ** 0.25
    scale /= np.exp(np.log(scale).mean(-1, keepdims=True))
    h = _hadamard(hp.head_dim)
    return KeyBasis(centre.astype(np.float32), scale.astype(np.float32), h)


def _floored(energy: np.ndarray) -> np.ndarray:
    mean = np.maximum(energy.mean(-1, keepdims=True), 1e-30)
    return np.maximum(energy, LEAST * mean)


def _bias(tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    added = tensor.bias()
    return np.zeros(shape) if added is None else added.reshape(shape).astype(np.float64)


def _energy(
    file: GGUFFile, w: Tensors, tensor: Tensor, first: int, norm: Tensor, head_dim: int
) -> np.ndarray:
    """The mean square of each product without its bias, float64 [n_head, head_dim].

    first: the row of the file's tensor with which this one begins, if that has others, too.
    """
    n_out, n_in = tensor.matrix().n_out, tensor.matrix().n_in
    info = file.tensors[tensor.whole]
    rows = file.data(tensor.whole).reshape(info.shape[1], -1)
    start = first if info.shape[1] > n_out else 0
    n_block = n_in // info.type.block_size
    chosen = np.unique(
        np.linspace(0, n_block - 1, max(1, SAMPLED // info.type.block_size)).astype(int)
    )
    blocks = rows[start : start + n_out].reshape(n_out, n_block, -1)[:, chosen]
    columns = chosen[:, None] * info.type.block_size + np.arange(info.type.block_size)
    shape = columns.size, n_out
    values = dequantize(np.ascontiguousarray(blocks).reshape(-1), info.type, shape)
    values = values.reshape(n_out, columns.size).astype(np.float64)
    if w.attn_norm:
        values *= w.attn_norm.vector()[columns.reshape(-1)]
    found = (values**2).mean(-1).reshape(-1, head_dim) * n_in
    if norm:
        found /= np.maximum(found.mean(-1, keepdims=True), 1e-30)
        found *= norm.vector().reshape(-1, head_dim).astype(np.float64) ** 2
    return found


class _Pairs:
    """The rotary pairs of a layer's heads."""

    def __init__(self, model: Model, layer: int, head_dim: int) -> None:
        rope = model.frequencies(layer)
        self._inv_freq = np.zeros(0) if model.is_nope(layer) else rope.inv_freq
        half, self._scale = len(self._inv_freq), rope.scale if len(self._inv_freq) else 1.0
        at = np.arange(2 * half)
        pairs = at.reshape(2, half) if model.arch.neox else at.reshape(half, 2).T
        self._a, self._b = pairs
        # e^(i w p), summed over the positions p of the trained context, is a geometric series.
        n, step = max(1, model.hp.n_ctx_train), np.exp(1j * self._inv_freq)
        still = np.abs(step - 1) < 1e-12
        series = (1 - step**n) / np.where(still, 1, 1 - step) / n
        self._mean = self._scale * np.where(still, 1, series)

    def shared(self, energy: np.ndarray) -> np.ndarray:
        """Both elements of a pair have their mean, as RoPE mixes them."""
        found = energy.copy()
        found[..., self._a] = found[..., self._b] = (
            energy[..., self._a] + energy[..., self._b]
        ) / 2
        return found

    def mean(self, x: np.ndarray) -> np.ndarray:
        """The mean over positions of x with RoPE."""
        found = x.copy()
        z = (x[..., self._a] + 1j * x[..., self._b]) * self._mean
        found[..., self._a], found[..., self._b] = z.real, z.imag
        return found


def _hadamard(n: int) -> np.ndarray:
    """Sylvester's Hadamard matrix over the largest power of two that divides n, block by block."""
    size, h = n & -n, np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    blocks: np.ndarray = np.kron(np.eye(n // size), h / np.sqrt(size)).astype(np.float32)
    return blocks
