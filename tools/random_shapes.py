"""Shapes of published models with experts, recurrent layers, latents or shared keys.

Each function gives a model of n_layer layers: its metadata, and its tensors' NumPy shapes by name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

Dims = dict[str, tuple[int, ...]]


class RandomModel(NamedTuple):
    """The metadata and shapes of a file of random weights."""

    arch: str
    n_layer: int
    n_vocab: int
    keys: dict[str, Any]  # keys without the architecture's name
    tensors: Dims  # rows are outputs


def _model(arch: str, n_vocab: int, keys: dict[str, Any], top: Dims, layers: list[Dims]) -> Any:
    n_embd = keys["embedding_length"]
    ends = {"token_embd": (n_vocab, n_embd), "output_norm": (n_embd,)}
    named = {
        f"{name}.weight" if "." not in name else name: dims for name, dims in (ends | top).items()
    }
    for i, tensors in enumerate(layers):
        for name, dims in tensors.items():
            whole = name if name.endswith((".bias", "ssm_a")) else f"{name}.weight"
            named[f"blk.{i}.{whole}"] = dims
    common = {"block_count": len(layers), "vocab_size": n_vocab}
    return RandomModel(arch, len(layers), n_vocab, common | keys, named)


def _attention(n_embd: int, n_head: int, n_head_kv: int, head_dim: int) -> Dims:
    n_q, n_kv = n_head * head_dim, n_head_kv * head_dim
    return {
        "attn_norm": (n_embd,),
        "attn_q": (n_q, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_q),
    }


def _norms_of_heads(head_dim: int) -> Dims:
    return {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}


def _gated(n_embd: int, n_ff: int, end: str = "") -> Dims:
    return {
        f"ffn_gate{end}": (n_ff, n_embd),
        f"ffn_up{end}": (n_ff, n_embd),
        f"ffn_down{end}": (n_embd, n_ff),
    }


def _experts(n_embd: int, n_expert: int, n_ff: int) -> Dims:
    routed = {name: (n_expert, *dims) for name, dims in _gated(n_embd, n_ff, "_exps").items()}
    return {"ffn_gate_inp": (n_expert, n_embd), **routed}


def _heads(n_embd: int, n_head: int, n_head_kv: int, head_dim: int, base: float) -> dict[str, Any]:
    return {
        "embedding_length": n_embd,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": base,
    }


def qwen3_30b_a3b(n_layer: int) -> RandomModel:
    """Qwen3-30B-A3B: 8 of 128 experts in every layer."""
    n_embd = 2048
    layer = {
        **_attention(n_embd, 32, 4, 128),
        **_norms_of_heads(128),
        "ffn_norm": (n_embd,),
        **_experts(n_embd, 128, 768),
    }
    keys = _heads(n_embd, 32, 4, 128, 1e6) | {
        "context_length": 40960,
        "feed_forward_length": 6144,
        "expert_feed_forward_length": 768,
        "expert_count": 128,
        "expert_used_count": 8,
    }
    return _model("qwen3moe", 151936, keys, {"output": (151936, n_embd)}, [layer] * n_layer)


def gpt_oss_20b(n_layer: int) -> RandomModel:
    """gpt-oss-20b: 4 of 32 experts, a window of 128 in every second layer, biases, sinks."""
    n_embd = n_ff = 2880
    layer = {
        **_attention(n_embd, 64, 8, 64),
        "attn_q.bias": (4096,),
        "attn_k.bias": (512,),
        "attn_v.bias": (512,),
        "attn_output.bias": (n_embd,),
        "attn_sinks": (64,),
        "post_attention_norm": (n_embd,),
        **_experts(n_embd, 32, n_ff),
        "ffn_gate_inp.bias": (32,),
        "ffn_gate_exps.bias": (32, n_ff),
        "ffn_up_exps.bias": (32, n_ff),
        "ffn_down_exps.bias": (32, n_embd),
    }
    keys = _heads(n_embd, 64, 8, 64, 150000.0) | {
        "context_length": 131072,
        "feed_forward_length": n_ff,
        "expert_feed_forward_length": n_ff,
        "expert_count": 32,
        "expert_used_count": 4,
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }
    return _model("gpt-oss", 201088, keys, {"output": (201088, n_embd)}, [layer] * n_layer)


def _delta_net(n_embd: int, n_key_head: int, n_head: int) -> Dims:
    n, n_conv = 128 * n_head, 128 * (2 * n_key_head + n_head)
    return {
        "attn_norm": (n_embd,),
        "attn_qkv": (n_conv, n_embd),
        "attn_gate": (n, n_embd),
        "ssm_conv1d": (n_conv, 4),
        "ssm_dt.bias": (n_head,),
        "ssm_a": (n_head,),
        "ssm_alpha": (n_head, n_embd),
        "ssm_beta": (n_head, n_embd),
        "ssm_norm": (128,),
        "ssm_out": (n_embd, n),
        "post_attention_norm": (n_embd,),
    }


def _hybrid(
    n_embd: int, n_head_kv: int, n_layer: int, mlp: Dims
) -> tuple[dict[str, Any], list[Dims]]:
    """Gated DeltaNet, and attention in every fourth layer, with queries beside their gates."""
    full = _attention(n_embd, 16, n_head_kv, 256) | _norms_of_heads(256)
    full |= {"attn_q": (2 * 16 * 256, n_embd), "post_attention_norm": (n_embd,)}
    kinds = [full | mlp if i % 4 == 3 else _delta_net(n_embd, 16, 32) | mlp for i in range(n_layer)]
    keys = _heads(n_embd, 16, n_head_kv, 256, 1e7) | {
        "context_length": 262144,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 4096,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 32,
        "ssm.group_count": 16,
    }
    return keys, kinds


def qwen36_35b_a3b(n_layer: int) -> RandomModel:
    """Qwen3.6-35B-A3B: 8 of 256 experts and a shared one behind Gated DeltaNet or attention."""
    n_embd = 2048
    mlp = _experts(n_embd, 256, 512) | _gated(n_embd, 512, "_shexp")
    keys, layers = _hybrid(n_embd, 2, n_layer, mlp | {"ffn_gate_inp_shexp": (n_embd,)})
    keys |= {
        "feed_forward_length": 512,
        "expert_feed_forward_length": 512,
        "expert_shared_feed_forward_length": 512,
        "expert_count": 256,
        "expert_used_count": 8,
    }
    return _model("qwen35moe", 248320, keys, {"output": (248320, n_embd)}, layers)


def qwen35_4b(n_layer: int) -> RandomModel:
    """Qwen3.5-4B: Gated DeltaNet, and attention in every fourth layer."""
    keys, layers = _hybrid(2560, 4, n_layer, _gated(2560, 9216))
    return _model("qwen35", 248320, keys | {"feed_forward_length": 9216}, {}, layers)


def _latent(n_embd: int, n_head: int, n_query: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layer's matrices of DeepSeek's latent attention, and its keys; n_query: 0, or a rank."""
    n_latent, n_rot = 512, 64
    by_rank = {
        "attn_q_a": (n_query, n_embd),
        "attn_q_a_norm": (n_query,),
        "attn_q_b": (n_head * 192, n_query),
    }
    latent = {
        "attn_kv_a_mqa": (n_latent + n_rot, n_embd),
        "attn_kv_a_norm": (n_latent,),
        "attn_k_b": (n_head, n_latent, 128),
        "attn_v_b": (n_head, 128, n_latent),
        "attn_output": (n_embd, n_head * 128),
    }
    queries = by_rank if n_query else {"attn_q": (n_head * 192, n_embd)}
    matrices = {"attn_norm": (n_embd,)} | queries | latent | {"ffn_norm": (n_embd,)}
    keys = _heads(n_embd, n_head, 1, n_latent + n_rot, 10000.0) | {
        "attention.value_length": n_latent,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "attention.kv_lora_rank": n_latent,
        # llama.cpp requires it, even as 0, unless a file has 27 layers.
        "attention.q_lora_rank": n_query,
        "context_length": 163840,
        "rope.dimension_count": n_rot,
    }
    return matrices, keys


def deepseek_v2_lite(n_layer: int) -> RandomModel:
    """DeepSeek-V2-Lite: latent attention; after a dense layer 6 of 64 experts, 2 shared."""
    n_embd = 2048
    attention, keys = _latent(n_embd, 16, 0)
    routed = _experts(n_embd, 64, 1408) | _gated(n_embd, 2816, "_shexp")
    layers = [attention | (routed if i else _gated(n_embd, 10944)) for i in range(n_layer)]
    keys |= {
        "feed_forward_length": 10944,
        "leading_dense_block_count": 1,
        "expert_feed_forward_length": 1408,
        "expert_count": 64,
        "expert_used_count": 6,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
    }
    return _model("deepseek2", 102400, keys, {"output": (102400, n_embd)}, layers)


def deepseek_v3(n_layer: int) -> RandomModel:
    """DeepSeek-V3: latent attention; after three dense layers 8 of 256 experts, 1 shared."""
    n_embd = 7168
    attention, keys = _latent(n_embd, 128, 1536)
    routed = _experts(n_embd, 256, 2048) | _gated(n_embd, 2048, "_shexp")
    routed |= {"exp_probs_b.bias": (256,)}
    layers = [attention | (routed if i > 2 else _gated(n_embd, 18432)) for i in range(n_layer)]
    keys |= {
        "feed_forward_length": 18432,
        "leading_dense_block_count": min(3, n_layer),
        "expert_feed_forward_length": 2048,
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    return _model("deepseek2", 129280, keys, {"output": (129280, n_embd)}, layers)


def deepseek_v32(n_layer: int) -> RandomModel:
    """DeepSeek-V3.2: DeepSeek-V3 with an indexer that selects 2048 positions for a token."""
    dense, n_head, n_key = deepseek_v3(n_layer), 64, 128
    n_embd, n_query = dense.keys["embedding_length"], dense.keys["attention.q_lora_rank"]
    indexer = {
        "attn_q_b.weight": (n_head * n_key, n_query),
        "attn_k.weight": (n_key, n_embd),
        "k_norm.weight": (n_key,),
        "k_norm.bias": (n_key,),
        "proj.weight": (n_head, n_embd),
    }
    own = {f"blk.{i}.indexer.{name}": d for i in range(n_layer) for name, d in indexer.items()}
    keys = dense.keys | {
        "attention.indexer.head_count": n_head,
        "attention.indexer.key_length": n_key,
        "attention.indexer.top_k": 2048,
        "attention.layer_norm_epsilon": 1e-6,
    }
    return dense._replace(arch="deepseek32", keys=keys, tensors=dense.tensors | own)


def gemma4_e2b(n_layer: int) -> RandomModel:
    """Gemma 4 E2B: wider heads in every fifth layer, 4 of 7 layers read keys of earlier ones."""
    n_embd, n_vocab, n_own = 1536, 262144, 256
    n_shared = n_layer - 5 * max(1, round(n_layer * 15 / 35 / 5))  # after a layer without a window
    layers = []
    for i in range(n_layer):
        head_dim, own = 512 if i % 5 == 4 else 256, i < n_layer - n_shared
        n_ff = 6144 if own else 12288
        layer = (
            _attention(n_embd, 8, 1, head_dim) | _norms_of_heads(head_dim) | _gated(n_embd, n_ff)
        )
        for name in () if own else ("attn_k", "attn_v", "attn_k_norm"):
            del layer[name]
        norms = "ffn_norm", "post_attention_norm", "post_ffw_norm", "post_norm"
        layer |= dict.fromkeys(norms, (n_embd,)) | {"layer_output_scale": (1,)}
        layers.append(layer | {"inp_gate": (n_own, n_embd), "proj": (n_embd, n_own)})
    keys = _heads(n_embd, 8, 1, 512, 1e6) | {
        "context_length": 131072,
        "feed_forward_length": [6144] * (n_layer - n_shared) + [12288] * n_shared,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [i % 5 != 4 for i in range(n_layer)],
        "attention.shared_kv_layers": n_shared,
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256,
        "rope.freq_base_swa": 10000.0,
        "embedding_length_per_layer_input": n_own,
        "final_logit_softcapping": 30.0,
    }
    top = {
        "per_layer_token_embd": (n_vocab, n_own * n_layer),
        "per_layer_model_proj": (n_own * n_layer, n_embd),
        "per_layer_proj_norm": (n_own,),
        "rope_freqs": (256,),
    }
    return _model("gemma4", n_vocab, keys, top, layers)


# By name, with the number of the model's layers.
PUBLISHED: dict[str, tuple[Callable[[int], RandomModel], int]] = {
    "qwen3-30b-a3b": (qwen3_30b_a3b, 48),
    "qwen3.6-35b-a3b": (qwen36_35b_a3b, 40),
    "gpt-oss-20b": (gpt_oss_20b, 24),
    "qwen3.5-4b": (qwen35_4b, 32),
    "deepseek-v2-lite": (deepseek_v2_lite, 27),
    "deepseek-v3": (deepseek_v3, 61),
    "deepseek-v3.2": (deepseek_v32, 61),
    "gemma4-e2b": (gemma4_e2b, 35),
}
