"""Tiny models with recurrent layers, weights drawn from a seed: no test knows what they answer."""

from pathlib import Path

import gguf
import numpy as np

N_VOCAB, N_EMBD, N_FF, N_LAYER = 96, 64, 96, 3
N_INNER, N_STATE, N_HEAD, N_GROUP, N_TAP = 128, 16, 4, 2, 4
N_CONV = N_INNER + 2 * N_GROUP * N_STATE
HEAD_DIM = 32

_MAMBA2 = {
    "ssm_in.weight": (N_INNER + N_CONV + N_HEAD, N_EMBD), "ssm_conv1d.weight": (N_CONV, N_TAP),
    "ssm_conv1d.bias": (N_CONV,), "ssm_dt.bias": (N_HEAD,), "ssm_a": (N_HEAD, 1),
    "ssm_d": (N_HEAD, 1), "ssm_norm.weight": (N_GROUP, N_INNER // N_GROUP),
    "ssm_out.weight": (N_EMBD, N_INNER),
}  # fmt: skip
_DELTA_NET = {
    "attn_qkv.weight": (N_CONV, N_EMBD), "attn_gate.weight": (N_INNER, N_EMBD),
    "ssm_alpha.weight": (N_HEAD, N_EMBD), "ssm_beta.weight": (N_HEAD, N_EMBD),
    "ssm_conv1d.weight": (N_CONV, N_TAP), "ssm_dt.bias": (N_HEAD,), "ssm_a": (N_HEAD,),
    "ssm_norm.weight": (N_INNER // N_HEAD,), "ssm_out.weight": (N_EMBD, N_INNER),
}  # fmt: skip
_SHORT_CONV = {
    "shortconv.in_proj.weight": (3 * N_EMBD, N_EMBD), "shortconv.conv.weight": (N_EMBD, N_TAP),
    "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
}  # fmt: skip
_ATTENTION = {
    "attn_q.weight": (2 * HEAD_DIM, N_EMBD), "attn_k.weight": (HEAD_DIM, N_EMBD),
    "attn_v.weight": (HEAD_DIM, N_EMBD), "attn_output.weight": (N_EMBD, 2 * HEAD_DIM),
}  # fmt: skip
_FFN = {
    "ffn_gate.weight": (N_FF, N_EMBD), "ffn_up.weight": (N_FF, N_EMBD),
    "ffn_down.weight": (N_EMBD, N_FF),
}  # fmt: skip
_GATED = {**_ATTENTION, "attn_q.weight": (4 * HEAD_DIM, N_EMBD)}
_NORM, _FFN_NORM = {"attn_norm.weight": (N_EMBD,)}, {"ffn_norm.weight": (N_EMBD,)}
_POST_NORM = {"post_attention_norm.weight": (N_EMBD,)}

# Tensors of a recurrent layer and of another, by architecture; layer 1 is the other one.
LAYERS = {
    "mamba2": (_NORM | _MAMBA2, _NORM | _MAMBA2),
    "qwen35": (_NORM | _DELTA_NET | _POST_NORM | _FFN, _NORM | _GATED | _POST_NORM | _FFN),
    "lfm2": (_NORM | _SHORT_CONV | _FFN_NORM | _FFN, _NORM | _ATTENTION | _FFN_NORM | _FFN),
}


def write_recurrent_model(path: Path, arch: str) -> Path:
    """A model of three layers, written as a GGUF file."""
    writer, rng = gguf.GGUFWriter(path, arch), np.random.default_rng(len(arch))
    writer.add_block_count(N_LAYER)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    heads = 0 if arch == "mamba2" else 2
    writer.add_head_count(heads)
    writer.add_head_count_kv([0, 1, 0] if heads else 0)
    if heads:
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch == "qwen35":
        writer.add_array("qwen35.attention.recurrent_layers", [True, False, True])
    if arch == "lfm2":
        writer.add_shortconv_l_cache(N_TAP)
    else:
        writer.add_ssm_conv_kernel(N_TAP)
        writer.add_ssm_inner_size(N_INNER)
        writer.add_ssm_state_size(N_STATE)
        writer.add_ssm_time_step_rank(N_HEAD)
        writer.add_ssm_group_count(N_GROUP)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", *(f"tok{i}" for i in range(2, N_VOCAB))])
    writer.add_token_types([3, 3] + [1] * (N_VOCAB - 2))
    writer.add_token_merges(["t o"])
    norm = "token_embd_norm" if arch == "lfm2" else "output_norm"
    shapes = {"token_embd.weight": (N_VOCAB, N_EMBD), f"{norm}.weight": (N_EMBD,)}
    for il in range(N_LAYER):
        shapes |= {f"blk.{il}.{name}": shape for name, shape in LAYERS[arch][il % 2].items()}
    for name, shape in shapes.items():
        writer.add_tensor(name, _drawn(rng, name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    z = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(z)
    if "norm" in name:
        return 1 + np.float32(0.2) * z
    return z if name.startswith("token_embd") else z * np.float32(1.5 / shape[-1] ** 0.5)
