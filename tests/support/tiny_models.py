"""Tiny random GGUF models of every architecture and tensor type, with vocabularies that tokenize.

``write_tiny_model(path, TinySpec("qwen3", type_="Q4_K"))`` takes milliseconds. The values are
random but of the size that trained ones have, so that attention and logits are neither flat nor
saturated. Written with the gguf package: the metadata keys are llama.cpp's.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tamis.tools.random_model import random_tensor

Array = NDArray[Any]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")
BLOCK_32_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
IQ_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")
OTHER_TYPES = ("NVFP4", "Q1_0", "TQ1_0", "TQ2_0")  # and Q2_0, which the gguf package cannot write
ALL_TYPES = ("F32", "F16", "BF16", *BLOCK_32_TYPES, *K_TYPES, *IQ_TYPES, *OTHER_TYPES)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinySpec:
    """What to write. None and 0 mean: what is usual for the architecture and type."""

    arch: str = "llama"
    type_: str = "F32"  # of every matrix; norms, biases and the router stay F32
    seed: int = 0
    layers: int = 0
    embd: int = 0
    kv_heads: int = 0
    n_ctx: int = 512
    tied: bool | None = None
    qk_norm: bool | None = None
    window: int = 8  # gemma3's sliding window; small, so that short prompts leave it
    rope_scaling: str = "none"  # none, linear, yarn; llama3 (arch llama only, as in llama.cpp)
    rope_factor: float = 4.0
    rope_n_ctx_orig: int = 64
    vocab: str = ""  # bpe or spm

    @property
    def n_layer(self) -> int:
        # Gemma 3's pattern is five local layers, then a global one: seven have both and a turn.
        return self.layers or (7 if self.arch == "gemma3" else 2)

    @property
    def n_embd(self) -> int:
        return self.embd or (256 if gguf.GGML_QUANT_SIZES[Type[self.type_]][0] > 64 else 64)

    @property
    def n_head(self) -> int:
        return 4

    @property
    def n_head_kv(self) -> int:
        return self.kv_heads or (1 if self.arch == "gemma3" else 2)

    @property
    def head_dim(self) -> int:
        # Not n_embd / n_head where the file states key_length: the two must not be confused.
        usual = self.n_embd // self.n_head
        return usual if self.arch in ("llama", "qwen2") else 2 * usual

    @property
    def n_ff(self) -> int:
        return 2 * self.n_embd

    @property
    def n_expert(self) -> int:
        return 8 if self.arch == "qwen3moe" else 0

    @property
    def n_expert_used(self) -> int:
        return 2 if self.n_expert else 0

    @property
    def is_tied(self) -> bool:
        return self.arch == "gemma3" if self.tied is None else self.tied

    @property
    def has_qk_norm(self) -> bool:
        usual = self.arch in ("qwen3", "qwen3moe", "gemma3")
        return usual if self.qk_norm is None else self.qk_norm

    @property
    def vocab_kind(self) -> str:
        return self.vocab or ("spm" if self.arch == "gemma3" else "bpe")


def like_qwen2(arch: str, **options: Any) -> TinySpec:
    """An architecture with the heads of a tiny qwen2: their methods' kernels are the same ones."""
    if arch == "gemma3":
        options |= {"embd": 32, "kv_heads": 2}
    return TinySpec(arch, **options)


def write_tiny_model(path: str | Path, spec: TinySpec | None = None) -> Path:
    """Writes the model that spec describes; the same spec gives the same bytes."""
    spec = spec or TinySpec()
    writer = gguf.GGUFWriter(path, spec.arch)
    _write_hparams(writer, spec)
    n_vocab = _write_spm(writer) if spec.vocab_kind == "spm" else _write_bpe(writer, spec)
    writer.add_vocab_size(n_vocab)
    rng = np.random.default_rng(spec.seed)
    for name, shape in tensor_shapes(spec, n_vocab).items():
        _write_tensor(writer, rng, name, shape, spec)
    if spec.rope_scaling == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_rope_factors(spec))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _write_hparams(writer: gguf.GGUFWriter, spec: TinySpec) -> None:
    writer.add_name(f"tiny random {spec.arch} {spec.type_}")
    writer.add_quantization_version(2)
    writer.add_context_length(spec.n_ctx)
    writer.add_embedding_length(spec.n_embd)
    writer.add_block_count(spec.n_layer)
    writer.add_feed_forward_length(spec.n_ff)
    writer.add_head_count(spec.n_head)
    writer.add_head_count_kv(spec.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6 if spec.arch == "gemma3" else 10000.0)
    if spec.arch == "llama":
        writer.add_rope_dimension_count(spec.head_dim)
    if spec.arch not in ("llama", "qwen2"):
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if spec.arch == "gemma3":
        writer.add_sliding_window(spec.window)
    if spec.n_expert:
        writer.add_expert_count(spec.n_expert)
        writer.add_expert_used_count(spec.n_expert_used)
        writer.add_expert_feed_forward_length(spec.n_embd)
    if spec.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(spec.rope_scaling))
        writer.add_rope_scaling_factor(spec.rope_factor)
        writer.add_rope_scaling_orig_ctx_len(spec.rope_n_ctx_orig)


def llama3_rope_factors(spec: TinySpec) -> Array:
    """Llama 3's frequency factors as llama.cpp's converter writes them (low 1, high 4)."""
    n_rot, low, high = spec.head_dim, 1.0, 4.0
    wavelen = 2 * math.pi * 10000.0 ** (np.arange(0, n_rot, 2) / n_rot)
    turns = spec.rope_n_ctx_orig / wavelen
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / spec.rope_factor + smooth)).astype(np.float32)


# --- tensors -------------------------------------------------------------------------------------


def tensor_shapes(spec: TinySpec, n_vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and NumPy shape (rows are outputs)."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, spec.n_embd),
        "output_norm.weight": (spec.n_embd,),
    }
    if not spec.is_tied:
        shapes["output.weight"] = (n_vocab, spec.n_embd)
    for layer in range(spec.n_layer):
        tensors = _attention_shapes(spec) | _ffn_shapes(spec)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in tensors.items()}
    return shapes


def _attention_shapes(spec: TinySpec) -> dict[str, tuple[int, ...]]:
    n_q, n_kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (spec.n_embd,),
        "attn_q.weight": (n_q, spec.n_embd),
        "attn_k.weight": (n_kv, spec.n_embd),
        "attn_v.weight": (n_kv, spec.n_embd),
        "attn_output.weight": (spec.n_embd, n_q),
    }
    if spec.arch == "qwen2":
        shapes |= {"attn_q.bias": (n_q,), "attn_k.bias": (n_kv,), "attn_v.bias": (n_kv,)}
    if spec.has_qk_norm:
        shapes |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    if spec.arch == "gemma3":
        shapes |= {"post_attention_norm.weight": (spec.n_embd,)}
    return shapes


def _ffn_shapes(spec: TinySpec) -> dict[str, tuple[int, ...]]:
    n_embd, n_expert = spec.n_embd, spec.n_expert
    if n_expert:
        return {
            "ffn_norm.weight": (n_embd,),
            "ffn_gate_inp.weight": (n_expert, n_embd),
            "ffn_gate_exps.weight": (n_expert, n_embd, n_embd),
            "ffn_up_exps.weight": (n_expert, n_embd, n_embd),
            "ffn_down_exps.weight": (n_expert, n_embd, n_embd),
        }
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_norm.weight": (n_embd,),
        "ffn_gate.weight": (spec.n_ff, n_embd),
        "ffn_up.weight": (spec.n_ff, n_embd),
        "ffn_down.weight": (n_embd, spec.n_ff),
    }
    return shapes | ({"post_ffw_norm.weight": (n_embd,)} if spec.arch == "gemma3" else {})


def _write_tensor(
    writer: gguf.GGUFWriter,
    rng: np.random.Generator,
    name: str,
    shape: tuple[int, ...],
    spec: TinySpec,
) -> None:
    if len(shape) == 1:
        mean = 0.0 if name.endswith(".bias") else 1.0
        values = mean + 0.2 * rng.standard_normal(shape)
        writer.add_tensor(name, values.astype(np.float32))
        return
    # Three times the unit gain for embedding and head: logits with a clear spread.
    gain = 3.0 if name.startswith(("token_embd", "output")) else 1.0
    type_ = Type.F32 if "ffn_gate_inp" in name else Type[spec.type_]
    data = random_tensor(rng, shape, type_, std=gain / math.sqrt(shape[-1]))
    if type_ in (Type.F32, Type.F16):
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, data, raw_dtype=type_)


# --- vocabularies --------------------------------------------------------------------------------

# In merge order; each part is a byte or an earlier merge. "_" stands for the space.
_MERGES = (
    "_ t|h e|i n|r e|o n|_t he|e r|_ a|_ s|a t|n d|_a nd|o r|_ w|e n|l l|i t|_ o|_o f|a n|in g|"
    "_ i|e s|_ b|_ c|h a|t ha|o u|_ f|_ 1|0 0|_ _|__ __|v er|_i s|_t o"
)
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(other)) for b in range(256)]


def _write_bpe(writer: gguf.GGUFWriter, spec: TinySpec) -> int:
    merges = _MERGES.replace("_", byte_alphabet()[ord(" ")]).split("|")
    normal = [*byte_alphabet(), *(m.replace(" ", "") for m in merges)]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if spec.arch == "llama" else "qwen2")
    writer.add_token_list(normal + control)
    writer.add_token_types([_NORMAL] * len(normal) + [_CONTROL] * len(control))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(normal))
    writer.add_eos_token_id(len(normal) + 2)
    writer.add_pad_token_id(len(normal))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    return len(normal) + len(control)


def _write_spm(writer: gguf.GGUFWriter) -> int:
    control = ["<pad>", "<eos>", "<bos>"]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    merged = [m.replace(" ", "").replace("_", "▁") for m in _MERGES.split("|")]
    pieces = [*merged, "▁", *map(chr, range(33, 127))]
    tokens = [*control, "<unk>", *turns, *bytes_, *pieces]
    types = [_CONTROL] * 3 + [_UNKNOWN] + [_CONTROL] * 2 + [_BYTE] * 256 + [_NORMAL] * len(pieces)
    # As in trained vocabularies: a merge's score falls with its rank, single characters come last.
    scores = [-1000.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    return len(tokens)
