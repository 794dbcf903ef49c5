"""Random models with the shapes of well-known ones, for measuring speed: their text is noise.

Run it as `python -m tamis.tools.random_model llama-3.1-8b Q4_K FILE.gguf [--layers 8]`.
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.text.bpe import byte_alphabet
from tamis.tools.random_shapes import PUBLISHED, RandomModel

Array = NDArray[Any]
POOL = 1 << 22  # elements, repeated in the large matrices of a type and width of rows
# Mixes of types, as llama.cpp's quantiser writes them: the type of most matrices, and of those with
# more bits: the head, and values and down projections of half of the layers.
MIXES: dict[str, tuple[str, ...]] = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
MIXES["MXFP4_MOE"] = "MXFP4", "Q8_0", "experts"  # most matrices are experts', the others Q8_0
# The type of a matrix whose rows are not a multiple of another type's block.
SHORTER = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
SHORTER |= {Type.Q2_K: Type.Q4_0, Type.Q3_K: Type.Q4_0}


class Shape(NamedTuple):
    """The shape that determines a model's tensors; the architecture is llama's."""

    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_ctx: int


SHAPES = {
    "llama-3.1-8b": Shape(32, 32, 8, 128, 4096, 14336, 128256, 131072),
    "qwen2.5-0.5b": Shape(24, 14, 2, 64, 896, 4864, 151936, 32768),
    "smollm2-135m": Shape(30, 9, 3, 64, 576, 1536, 49152, 8192),
}


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], type_: Type | GGMLType, *, std: float = 1.0
) -> Array:
    """Encoded rows: uint8 [..., n_bytes of a row], or float32 and float16 as they are.

    Values are normal where the gguf package can quantise the type, and random valid blocks where
    it cannot.
    """
    values = (std * rng.standard_normal(shape)).astype(np.float32)
    if type_ in (Type.F32, Type.F16):
        return values.astype(np.float16 if type_ == Type.F16 else np.float32)
    try:
        return gguf.quants.quantize(values, cast(Type, type_))
    except NotImplementedError:
        return random_blocks(rng, shape, type_, std=std)


# The offset of a block's float16 scale (0 if it has none here), and of its float16 offset with the
# ratio that centres the values.
_SCALE_AT = {
    GGMLType.Q2_K: 80,
    GGMLType.Q3_K: 108,
    GGMLType.Q6_K: 208,
    GGMLType.TQ1_0: 52,
    GGMLType.TQ2_0: 64,
}
_MIN_AT = {
    GGMLType.Q4_1: (2, -7.5),
    GGMLType.Q5_1: (2, -15.5),
    GGMLType.Q2_K: (82, 1.5),
    GGMLType.Q4_K: (2, 7.5),
    GGMLType.Q5_K: (2, 15.5),
}


def random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], type_: Type | GGMLType, *, std: float = 1.0
) -> Array:
    """Blocks of random bits (every code and sub-scale occurs) whose scales give values of ~std."""
    kind = GGMLType(int(type_))
    n_blocks = math.prod(shape) // kind.block_size
    blocks = rng.integers(0, 256, (n_blocks, kind.type_size), dtype=np.uint8)
    if kind is GGMLType.MXFP4:
        blocks[:, 0] = 127  # an exponent; a code is about 4
        blocks[:, 0] += np.uint8(rng.integers(-1, 2) + round(math.log2(std / 4)) & 0xFF)
        return blocks.reshape(*shape[:-1], -1)
    if kind is GGMLType.NVFP4:
        # 8 times a scale's exponent, and its mantissa; it is halved, and a code is about 6.
        middle = 8 * (7 + math.log2(std / 3))
        scales = middle + rng.integers(-6, 7, (n_blocks, 4))
        blocks[:, :4] = np.clip(np.rint(scales), 1, 0x7E)
        return blocks.reshape(*shape[:-1], -1)
    _set_scale(blocks, kind, np.ones(n_blocks))
    values = dequantize(blocks.reshape(-1), kind, (n_blocks * kind.block_size,))
    scale = std / values.std() * rng.uniform(0.5, 1.5, n_blocks)
    if kind not in _MIN_AT:
        scale *= rng.choice([-1.0, 1.0], n_blocks)  # quantisers write negative scales, too
    _set_scale(blocks, kind, scale)
    return blocks.reshape(*shape[:-1], -1)


def _set_scale(blocks: Array, kind: GGMLType, scale: Array) -> None:
    def put(at: int, values: Array) -> None:
        blocks[:, at : at + 2] = values.astype("<f2")[:, None].view(np.uint8)

    if kind is GGMLType.IQ1_M:  # its four nibbles are at the ends of the last four words
        bits = scale.astype("<f2").view(np.uint16)[:, None] >> np.array([0, 4, 8, 12]) & 15
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | bits << 4
        return
    put(_SCALE_AT.get(kind, 0), scale)
    if kind in _MIN_AT:
        at, ratio = _MIN_AT[kind]
        put(at, ratio * scale)


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and NumPy shape (rows are outputs)."""
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    a_layer = {
        "attn_norm.weight": (shape.n_embd,),
        "attn_q.weight": (n_q, shape.n_embd),
        "attn_k.weight": (n_kv, shape.n_embd),
        "attn_v.weight": (n_kv, shape.n_embd),
        "attn_output.weight": (shape.n_embd, n_q),
        "ffn_norm.weight": (shape.n_embd,),
        "ffn_gate.weight": (shape.n_ff, shape.n_embd),
        "ffn_up.weight": (shape.n_ff, shape.n_embd),
        "ffn_down.weight": (shape.n_embd, shape.n_ff),
    }
    layers = range(shape.n_layer)
    return {
        "token_embd.weight": (shape.n_vocab, shape.n_embd),
        "output_norm.weight": (shape.n_embd,),
        "output.weight": (shape.n_vocab, shape.n_embd),
        **{f"blk.{i}.{name}": dims for i in layers for name, dims in a_layer.items()},
    }


def type_of(name: str, type_: str, n_layer: int, dims: tuple[int, ...] = ()) -> Type:
    """The type of a matrix in a file of a type, or of one of MIXES; dims: of its rows.

    Routers and convolutions are F32; rows that a type's blocks do not fit have the nearest fitting
    one, as in llama.cpp's quantiser.
    """
    if name.endswith(("ffn_gate_inp.weight", "conv1d.weight")):
        return Type.F32
    kind = _of_rows(name, type_, n_layer)
    while dims and dims[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = SHORTER.get(kind, Type.F16)
    return kind


def _of_rows(name: str, type_: str, n_layer: int) -> Type:
    most, better, *rest = MIXES.get(type_, (type_, type_))
    if rest and not name.endswith("_exps.weight"):
        return Type[better]
    if name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
        i, eighth = int(name.split(".")[1]), n_layer // 8
        more = i < eighth or i >= 7 * n_layer // 8 or (i - eighth) % 3 == 2
        return Type[better if more else most]
    return Type[better if name == "output.weight" else most]


class Pool:
    """Encoded matrices; one of more than POOL elements repeats a block of so many."""

    def __init__(self, type_: Type) -> None:
        self._type, self._rng = type_, np.random.default_rng(0)
        self._made: dict[float, Array] = {}

    def matrix(self, n_out: int, n_in: int) -> Array:
        """Rows of n_in weights, scaled so that a product is as large as its input's elements."""
        std = 1 / math.sqrt(n_in)
        if n_out * n_in <= POOL:
            return random_tensor(self._rng, (n_out, n_in), self._type, std=std)
        if std not in self._made:
            rows = (POOL // (1 << 14), 1 << 14)
            self._made[std] = random_tensor(self._rng, rows, self._type, std=std).reshape(-1)
        block, size = gguf.GGML_QUANT_SIZES[self._type]
        pool = self._made[std]
        n = n_out * n_in // block * size // pool.itemsize
        return np.resize(pool, n).reshape(n_out, -1)


def write_random_model(path: str | Path, shape: Shape | RandomModel, type_: str) -> None:
    """Write a model of random weights, all of one ggml type or a mix of MIXES; norms are ones.

    Raises OSError; KeyError for an unknown type.
    """
    model = shape if isinstance(shape, RandomModel) else _llama(shape)
    kinds = {
        name: type_of(name, type_, model.n_layer, dims) for name, dims in model.tensors.items()
    }
    pools = {kind: Pool(kind) for kind in kinds.values()}
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_name(f"random {type_}")
    writer.add_quantization_version(2)
    for key, value in model.keys.items():
        _add_key(writer, f"{model.arch}.{key}", value)
    _add_vocabulary(writer, model.n_vocab)
    rng = np.random.default_rng(1)
    for name, dims in model.tensors.items():
        kind = kinds[name]
        if len(dims) == 1 or name.endswith(".bias"):
            writer.add_tensor(name, _vector(rng, name, dims))
            continue
        raw = None if kind in (Type.F32, Type.F16) else kind
        rows = pools[kind].matrix(math.prod(dims[:-1]), dims[-1])
        writer.add_tensor(name, rows.reshape(*dims[:-1], -1), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama(shape: Shape) -> RandomModel:
    keys: dict[str, Any] = {
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 500000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": shape.n_vocab,
    }
    if shape.n_head * shape.head_dim != shape.n_embd:
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), shape.head_dim)
    return RandomModel("llama", shape.n_layer, shape.n_vocab, keys, tensors_of(shape))


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    tokens = [*byte_alphabet(), "th"]
    tokens += [f"t{i}" for i in range(n_vocab - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h"])
    writer.add_token_types([1] * len(tokens))
    writer.add_bos_token_id(n_vocab - 2)
    writer.add_eos_token_id(n_vocab - 1)


def _vector(rng: np.random.Generator, name: str, dims: tuple[int, ...]) -> Array:
    """Norms, scales and factors are ones; decays are below zero; others are small."""
    if name.endswith(("norm.weight", "norm_1.weight", "scale.weight")) or "rope_freqs" in name:
        return np.ones(dims, np.float32)
    values = rng.standard_normal(dims).astype(np.float32)
    return -np.exp(values) if name.endswith("ssm_a") else np.float32(0.1) * values


def main() -> None:
    """Write the model that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape", choices=[*SHAPES, *PUBLISHED])
    parser.add_argument("type", metavar="TYPE", choices=[*(t.name for t in GGMLType), *MIXES])
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer or more than the model has")
    args = parser.parse_args()
    if args.shape in PUBLISHED:
        model, n_layer = PUBLISHED[args.shape]
        write_random_model(args.file, model(args.layers or n_layer), args.type)
        return
    shape = SHAPES[args.shape]
    if args.layers is not None:
        shape = shape._replace(n_layer=args.layers)
    types = MIXES.get(args.type, (args.type,))[:2]
    block = max(gguf.GGML_QUANT_SIZES[Type[type_]][0] for type_ in types)
    if shape.n_embd % block:
        parser.error(f"{args.type} has blocks of {block}: rows of {shape.n_embd} are no multiple")
    write_random_model(args.file, shape, args.type)


if __name__ == "__main__":
    main()
