"""Stand-ins that llama.cpp's tests need and no registry has, of random weights.

Each is written once, into the user's cache. What they score or say is noise: the tests ask how a
server answers, not what.
"""

import string
from pathlib import Path

import gguf
import numpy as np

from tamis.formats.gguf import GGUFFile

FOLDER = Path.home() / ".cache/tamis/peers"
N_EMBD, N_HEAD, N_FF, N_CTX = 64, 2, 128, 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
RANK = 8  # of the adapter


def ranker() -> Path:
    """A BERT of one layer with a head that scores a query and a document.

    Its WordPiece vocabulary has single characters of ASCII, at a word's start and within.
    """
    path = FOLDER / "ranker.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(path, "bert")
        _keys_of_ranker(writer)
        rng = np.random.default_rng(0)
        for name, shape in _tensors_of_ranker().items():
            values = rng.standard_normal(shape, np.float32) / np.sqrt(np.float32(shape[-1]))
            writer.add_tensor(name, np.ones(shape, np.float32) if _is_scale(name) else values)
        _finish(writer)
    return path


def _is_scale(name: str) -> bool:
    return name.endswith("norm.weight")


def _characters() -> list[str]:
    every = [c for c in string.printable if not c.isspace() and not c.isupper()]
    return [*SPECIAL, *(f"\u2581{c}" for c in every), *every]


def _keys_of_ranker(writer: gguf.GGUFWriter) -> None:
    tokens = _characters()
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(1)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens])
    writer.add_token_type_count(2)
    pad, unknown, begin, separator, mask = range(len(SPECIAL))
    writer.add_pad_token_id(pad)
    writer.add_unk_token_id(unknown)
    writer.add_bos_token_id(begin)
    writer.add_sep_token_id(separator)
    writer.add_mask_token_id(mask)


def _tensors_of_ranker() -> dict[str, tuple[int, ...]]:
    """Every tensor's name and NumPy shape."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(_characters()), N_EMBD),
        "position_embd.weight": (N_CTX, N_EMBD),
        "token_types.weight": (2, N_EMBD),
    }
    matrices = {
        "attn_q": (N_EMBD, N_EMBD),
        "attn_k": (N_EMBD, N_EMBD),
        "attn_v": (N_EMBD, N_EMBD),
        "attn_output": (N_EMBD, N_EMBD),
        "ffn_up": (N_FF, N_EMBD),
        "ffn_down": (N_EMBD, N_FF),
    }
    named = {f"blk.0.{name}": shape for name, shape in matrices.items()}
    named |= {"cls": (N_EMBD, N_EMBD), "cls.output": (1, N_EMBD)}
    for name, shape in named.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        found |= {f"{name}.weight": (N_EMBD,), f"{name}.bias": (N_EMBD,)}
    return found


def adapter(base: Path) -> Path:
    """A LoRA adapter of the query projections of a model."""
    path = FOLDER / f"adapter-{base.stem}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with GGUFFile(base) as file:
            arch = file.get("general.architecture", str)
            infos = {name: info.shape for name, info in file.tensors.items() if "attn_q.w" in name}
        writer, rng = gguf.GGUFWriter(path, arch), np.random.default_rng(0)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(RANK))
        for name, (n_in, n_out) in infos.items():
            a = rng.standard_normal((RANK, n_in), np.float32) / np.sqrt(np.float32(n_in))
            b = rng.standard_normal((n_out, RANK), np.float32) / np.float32(RANK)
            writer.add_tensor(f"{name}.lora_a", a)
            writer.add_tensor(f"{name}.lora_b", b)
        _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
