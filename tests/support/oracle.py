"""The truth that engine tests compare with: NumPy forwards of dequantised weights, and single ops.

Written for reading, from the model definitions; shares no code with the engine, not even the GGUF
reader, so that a mistake cannot hide in both. float64 throughout unless a dtype is given.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

# --- reading a file ------------------------------------------------------------------------------

_SCALAR_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


class _Cursor:
    def __init__(self, data: Array) -> None:
        self.data, self.at = data, 0
        self.view = memoryview(data)  # type: ignore[arg-type]

    def scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self.view, self.at)
        self.at += struct.calcsize(fmt)
        return value

    def string(self) -> str:
        n = self.scalar("<Q")
        self.at += n
        return self.data[self.at - n : self.at].tobytes().decode("utf-8", "replace")

    def value(self, type_: int) -> Any:
        if type_ == _STRING:
            return self.string()
        if type_ != _ARRAY:
            return self.scalar(_SCALAR_FORMATS[type_])
        item, n = self.scalar("<I"), self.scalar("<Q")
        if item in (_STRING, _ARRAY):
            return [self.value(item) for _ in range(n)]
        dtype = np.dtype(_SCALAR_FORMATS[item])
        self.at += n * dtype.itemsize
        return np.frombuffer(self.data, dtype, n, self.at - n * dtype.itemsize)


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and the weights as float32, shapes in NumPy order (rows are outputs).

    No validation: only for files that are known to be good. Far faster than gguf.GGUFReader, which
    makes an object of every vocabulary string.
    """
    cursor = _Cursor(np.memmap(path, np.uint8, "r"))
    assert cursor.scalar("<I") == 0x46554747, f"{path} is not a GGUF file"
    assert cursor.scalar("<I") in (2, 3)
    n_tensors, n_metadata = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(n_metadata):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    infos = []
    for _ in range(n_tensors):
        name, n_dims = cursor.string(), cursor.scalar("<I")
        shape = [cursor.scalar("<Q") for _ in range(n_dims)][::-1]
        infos.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
    align = metadata.get("general.alignment", 32)
    start = -(-cursor.at // align) * align
    return metadata, {
        name: _dequantize(cursor.data[start + offset :], shape, gguf.GGMLQuantizationType(type_))
        for name, shape, type_, offset in infos
    }


def _dequantize(data: Array, shape: list[int], type_: gguf.GGMLQuantizationType) -> Array:
    block_size, type_size = gguf.GGML_QUANT_SIZES[type_]
    n_bytes = math.prod(shape) // block_size * type_size
    rows = np.asarray(data[:n_bytes]).reshape(*shape[:-1], -1)
    if type_ == gguf.GGMLQuantizationType.F32:
        return rows.view(np.float32)
    if type_ == gguf.GGMLQuantizationType.Q1_0:  # which the package cannot decode
        signs = 2 * np.unpackbits(rows.reshape(-1, 18)[:, 2:], axis=1, bitorder="little") - 1.0
        scales = rows.reshape(-1, 18)[:, :2].copy().view("<f2")
        return (scales * signs).astype(np.float32).reshape(shape)
    return gguf.quants.dequantize(rows, type_).astype(np.float32, copy=False)


# --- single ops ----------------------------------------------------------------------------------


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def layer_norm(x: Array, weight: Array, bias: Array | float, eps: float) -> Array:
    """``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`` over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(centred, weight, eps) + bias


def silu(x: Array) -> Array:
    """``x * sigmoid(x)``, written so that no exponential overflows."""
    e = np.exp(-np.abs(x))
    return x * np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def gelu_tanh(x: Array) -> Array:
    """GELU's tanh approximation, the one that ggml_gelu computes."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


def gelu_exact(x: Array) -> Array:
    """GELU by the error function."""
    return 0.5 * x * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x.flat]).reshape(x.shape))


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, written so that no exponential overflows."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


ACTIVATIONS = {
    "none": lambda x: x,
    "silu": silu,
    "sigmoid": sigmoid,
    "gelu": gelu_tanh,
    "gelu_erf": gelu_exact,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "tanh": np.tanh,
    "clamp": lambda x: np.clip(x, -1, 1),
    "curve": lambda x: np.expm1(np.minimum(x, 0)) - np.minimum(x, 0),
    "exp": lambda x: np.exp(np.minimum(x, 87)),
}


def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``."""
    return silu(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    """``gelu_tanh(gate) * up``."""
    return gelu_tanh(gate) * up


def softmax(x: Array) -> Array:
    """Over the last axis; -inf entries get zero."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def matmul(x: Array, weight: Array) -> Array:
    """``x [n, n_in] @ weight [n_out, n_in].T`` in float64."""
    return x.astype(np.float64) @ weight.astype(np.float64).T


def quantize_rows(x: Array, *, block: int = 32, q_max: int = 127) -> tuple[Array, Array]:
    """Integers of x's shape and float32 scales [..., n // block]: ``x ≈ q * scale`` per block.

    Round to nearest, ties to even; a block of zeros has scale 0. q_max 127 is int8, 32767 int16.
    """
    blocks = x.reshape(*x.shape[:-1], -1, block).astype(np.float32)
    scale = np.abs(blocks).max(axis=-1) / np.float32(q_max)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    q = np.rint(blocks * inverse[..., None])
    return q.astype(np.int8 if q_max <= 127 else np.int32).reshape(x.shape), scale


def dequantize_rows(q: Array, scale: Array) -> Array:
    """The float64 values that ``quantize_rows`` stands for."""
    blocks = q.reshape(*scale.shape, -1).astype(np.float64)
    return (blocks * scale[..., None]).reshape(q.shape)


def attention(
    q: Array, k: Array, v: Array, *, scale: float, window: int = 0, pos: Array | None = None
) -> Array:
    """Causal softmax attention; returns [n, n_head, head_dim].

    q [n, n_head, head_dim]; k, v [n_kv, n_head_kv, head_dim], whose row is its position; query head
    h reads KV head ``h // (n_head // n_head_kv)``. pos [n] are the queries' positions: the last n
    unless given. A window of w lets position p read p-w+1 .. p; 0 is no window.
    """
    n, n_kv = len(q), len(k)
    pos = np.arange(n_kv - n, n_kv) if pos is None else pos
    distance = pos[:, None] - np.arange(n_kv)[None, :]
    hidden = (distance < 0) | ((distance >= window) if window else False)
    group = q.shape[1] // k.shape[1]
    out = np.empty((n, q.shape[1], v.shape[2]), q.dtype)
    for h in range(q.shape[1]):
        logits = (q[:, h] * q.dtype.type(scale)) @ k[:, h // group].T
        logits[hidden] = -np.inf
        out[:, h] = softmax(logits) @ v[:, h // group]
    return out


@dataclass(frozen=True)
class RopeParams:
    """One kind of layer's rotary embedding, in llama.cpp's terms."""

    n_rot: int
    base: float = 10000.0
    neox: bool = True  # pairs (i, i + n_rot/2); else (2i, 2i + 1)
    freq_scale: float = 1.0  # 1 / rope.scaling.factor
    ext_factor: float = 0.0  # 1 for YaRN: how much of the ramp applies
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    factors: Array | None = None  # rope_freqs.weight: divides the frequencies


def rope_angles(pos: Array, p: RopeParams) -> tuple[Array, float]:
    """Angles [n, n_rot/2] in float64 and the factor on cosine and sine (ggml's rope_yarn)."""
    pair = np.arange(p.n_rot // 2)
    extrap = np.asarray(pos, np.float64)[:, None] * p.base ** (-2.0 * pair / p.n_rot)
    if p.factors is not None:
        extrap = extrap / p.factors.astype(np.float64)
    interp = p.freq_scale * extrap
    if p.ext_factor == 0:
        return interp, p.attn_factor
    low, high = yarn_corr_dims(p)
    ramp = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    mix = ramp * p.ext_factor
    mscale = p.attn_factor * (1 + 0.1 * math.log(1 / p.freq_scale))
    return interp * (1 - mix) + extrap * mix, mscale


def yarn_corr_dims(p: RopeParams) -> tuple[float, float]:
    """The pairs between which YaRN goes from extrapolation to interpolation."""

    def corr_dim(n_turns: float) -> float:
        turns = p.n_ctx_orig / (n_turns * 2 * math.pi)
        return p.n_rot * math.log(turns) / (2 * math.log(p.base))

    low, high = math.floor(corr_dim(p.beta_fast)), math.ceil(corr_dim(p.beta_slow))
    return max(0, low), min(p.n_rot - 1, high)


def rope(x: Array, pos: Array, p: RopeParams) -> Array:
    """x [n, n_head, head_dim] rotated at pos [n]; dimensions from n_rot on pass through."""
    angles, mscale = rope_angles(pos, p)
    cos = (np.cos(angles) * mscale)[:, None, :].astype(x.dtype)
    sin = (np.sin(angles) * mscale)[:, None, :].astype(x.dtype)
    half = p.n_rot // 2
    first = slice(0, half) if p.neox else slice(0, p.n_rot, 2)
    second = slice(half, p.n_rot) if p.neox else slice(1, p.n_rot, 2)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


# --- the forward pass ----------------------------------------------------------------------------


@dataclass(frozen=True)
class OracleParams:
    """What the forward pass needs of a file's metadata; filled by ``from_metadata``."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    rms_eps: float
    rope: RopeParams
    rope_local: RopeParams  # layers with a sliding window
    n_swa: int = 0
    swa_pattern: int = 1  # every swa_pattern-th layer is global
    n_expert_used: int = 0

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], rope_factors: Array | None = None
    ) -> "OracleParams":
        arch = metadata["general.architecture"]

        def get(key: str, default: Any = None) -> Any:
            return metadata.get(f"{arch}.{key}", default)

        n_embd, n_head = get("embedding_length"), get("attention.head_count")
        head_dim = get("attention.key_length", n_embd // n_head)
        n_swa = get("attention.sliding_window", 0) if arch == "gemma3" else 0
        rope_global = _rope_params(get, arch, head_dim, rope_factors)
        local = RopeParams(head_dim, get("rope.freq_base_swa", 10000.0))
        return cls(
            arch=arch,
            n_layer=get("block_count"),
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=get("attention.head_count_kv", n_head),
            head_dim=head_dim,
            rms_eps=get("attention.layer_norm_rms_epsilon"),
            rope=rope_global,
            rope_local=local if n_swa else rope_global,
            n_swa=n_swa,
            swa_pattern=get("attention.sliding_window_pattern", 6) if n_swa else 1,
            n_expert_used=get("expert_used_count", 0),
        )

    def is_local(self, layer: int) -> bool:
        return self.n_swa > 0 and layer % self.swa_pattern < self.swa_pattern - 1

    @property
    def attn_scale(self) -> float:
        # llama.cpp's rule for Gemma 3 27B, which it knows by its 62 layers.
        if self.arch == "gemma3" and self.n_layer == 62:
            return 1 / math.sqrt(self.n_embd / self.n_head)
        return 1 / math.sqrt(self.head_dim)


def _rope_params(get: Any, arch: str, head_dim: int, factors: Array | None) -> RopeParams:
    # llama.cpp takes a file that has a factor and no type for linear scaling.
    kind = get("rope.scaling.type", "linear")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 0.0)) or 1.0
    yarn = kind == "yarn"
    return RopeParams(
        n_rot=get("rope.dimension_count", head_dim),
        base=get("rope.freq_base", 10000.0),
        neox=arch != "llama",
        freq_scale=1.0 if kind == "none" else 1.0 / factor,
        ext_factor=get("rope.scaling.yarn_ext_factor", 1.0) if yarn else 0.0,
        attn_factor=get("rope.scaling.attn_factor", 1.0),
        beta_fast=get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=get("rope.scaling.yarn_beta_slow", 1.0),
        n_ctx_orig=get("rope.scaling.original_context_length", get("context_length")),
        factors=factors,
    )


class Oracle:
    """The forward pass of one model over one whole sequence, without a cache.

    ``linear`` is every matrix product of the model: a subclass that changes its input simulates a
    policy for activations.
    """

    def __init__(
        self,
        params: OracleParams,
        weights: Mapping[str, Array],
        *,
        kv_f16: bool = False,
        dtype: DTypeLike = np.float64,
    ) -> None:
        self.p, self.weights, self.kv_f16 = params, weights, kv_f16
        self.dtype = np.dtype(dtype)

    @classmethod
    def from_gguf(cls, path: str | Path, **options: Any) -> "Oracle":
        metadata, weights = read_gguf(path)
        # llama.cpp reads these factors for llama alone; other architectures' files have none.
        params = OracleParams.from_metadata(metadata, weights.get("rope_freqs.weight"))
        return cls(params, weights, **options)

    def with_dtype(self, dtype: DTypeLike) -> "Oracle":
        return type(self)(self.p, self.weights, kv_f16=self.kv_f16, dtype=dtype)

    def logits(self, ids: Sequence[int] | Array, rows: Any = slice(None)) -> Array:
        """[n_rows, n_vocab] of the positions that rows selects (all unless given)."""
        return self.head(self.hidden(ids)[rows])

    def head(self, hidden: Array) -> Array:
        name = "output" if "output.weight" in self.weights else "token_embd"
        return self.linear(name, hidden)

    def hidden(self, ids: Sequence[int] | Array) -> Array:
        """[n, n_embd]: what enters the output head."""
        x = self.weights["token_embd.weight"][np.asarray(ids)].astype(self.dtype)
        if self.p.arch == "gemma3":
            x = x * np.asarray(math.sqrt(self.p.n_embd), self.dtype)
        for layer in range(self.p.n_layer):
            x = self.block(x, layer)
        return self.norm("output_norm", x)

    def block(self, x: Array, layer: int) -> Array:
        name = f"blk.{layer}."
        y = self.attention(self.norm(name + "attn_norm", x), layer)
        x = x + self.optional_norm(name + "post_attention_norm", y)
        y = self.norm(name + "ffn_norm", x)
        y = (
            self.moe(y, layer)
            if name + "ffn_gate_inp.weight" in self.weights
            else self.ffn(y, layer)
        )
        return x + self.optional_norm(name + "post_ffw_norm", y)

    def attention(self, x: Array, layer: int) -> Array:
        p, name = self.p, f"blk.{layer}."
        q = self.linear(name + "attn_q", x).reshape(len(x), p.n_head, p.head_dim)
        k = self.linear(name + "attn_k", x).reshape(len(x), p.n_head_kv, p.head_dim)
        v = self.linear(name + "attn_v", x).reshape(len(x), p.n_head_kv, p.head_dim)
        kind = p.rope_local if p.is_local(layer) else p.rope
        pos = np.arange(len(x))
        q = rope(self.optional_norm(name + "attn_q_norm", q), pos, kind)
        k = rope(self.optional_norm(name + "attn_k_norm", k), pos, kind)
        if self.kv_f16:
            k, v = (a.astype(np.float16).astype(self.dtype) for a in (k, v))
        window = p.n_swa if p.is_local(layer) else 0
        out = attention(q, k, v, scale=p.attn_scale, window=window)
        return self.linear(name + "attn_output", out.reshape(len(x), -1))

    def ffn(self, x: Array, layer: int) -> Array:
        name = f"blk.{layer}."
        glu = geglu if self.p.arch == "gemma3" else swiglu
        h = glu(self.linear(name + "ffn_gate", x), self.linear(name + "ffn_up", x))
        return self.linear(name + "ffn_down", h)

    def moe(self, x: Array, layer: int) -> Array:
        """The top experts' outputs, weighted by their softmax probabilities scaled to sum to 1."""
        name = f"blk.{layer}."
        probs = softmax(self.linear(name + "ffn_gate_inp", x))
        chosen = np.argsort(-probs, axis=-1, kind="stable")[:, : self.p.n_expert_used]
        weight = np.take_along_axis(probs, chosen, axis=-1)
        weight = weight / weight.sum(axis=-1, keepdims=True)
        out = np.zeros_like(x)
        for e in np.unique(chosen):
            rows, slot = np.nonzero(chosen == e)
            gate = self.linear(name + "ffn_gate_exps", x[rows], expert=e)
            up = self.linear(name + "ffn_up_exps", x[rows], expert=e)
            y = self.linear(name + "ffn_down_exps", swiglu(gate, up), expert=e)
            out[rows] += weight[rows, slot, None] * y
        return out

    def linear(self, name: str, x: Array, *, expert: int | None = None) -> Array:
        w = self.weights[name + ".weight"]
        y = x @ (w if expert is None else w[expert]).astype(self.dtype, copy=False).T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias.astype(self.dtype)

    def norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self.weights[name + ".weight"].astype(self.dtype), self.p.rms_eps)

    def optional_norm(self, name: str, x: Array) -> Array:
        return self.norm(name, x) if name + ".weight" in self.weights else x


def nll(logits: Array, ids: Sequence[int] | Array) -> Array:
    """-log softmax(logits)[ids] of every row."""
    top = logits.max(axis=-1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
    return lse - logits[np.arange(len(logits)), np.asarray(ids)]
