"""CUDA kernels: the ops of contract/ops, in files of the same names as cpu's."""

# The ops with kernels here: checked before anything is compiled for a GPU.
OPS = frozenset(
    [
        "add_positions", "attend", "attend_merge", "attend_pack", "attend_score_mod", "attend_sink",
        "audit_heads", "bank_begin", "bank_fetch", "bank_lookup", "bounded_decay", "cis_gate",
        "cis_sets", "cluster_estimate", "cluster_values", "cluster_zones", "copy_candidates",
        "copy_kv",
        "copy_rows", "decay", "delta_add", "delta_rows", "embed",
        "entry_choose", "gate", "gate_clamped", "gate_rows", "gated_norm", "hash_ngrams",
        "head_choose", "head_score", "hip_estimate", "hip_means", "hip_search", "hip_select",
        "index_choose", "index_score", "kv_allocate", "kv_evict", "kv_fetch", "kv_mark",
        "kv_write_back", "l2_norm", "layer_norm", "lfps_bypass", "lfps_keep", "lfps_propose",
        "lfps_sets", "lfps_start", "linear_scan", "logit_best", "logit_parts", "map_rows", "matmul",
        "meter_sample", "meter_take", "meter_weigh", "meter_widen", "moe_bias", "moe_groups",
        "moe_matmul", "moe_route", "moe_sum", "pack_rows", "place_heads", "pool_keys",
        "product_gate", "product_norm", "product_rope_append", "products", "quest_bounds",
        "quest_score", "residual_mix", "rms_norm", "rope_append", "rope_heads", "rope_table",
        "scale_by_position", "score_copy",
        "score_keys", "select_best", "select_join", "select_pack",
        "select_psaw", "select_top_k", "select_union", "select_window", "selective_scan",
        "short_conv", "slash_lines", "slash_select", "staged_gate", "staged_products",
        "stream_gate", "stream_mix", "stream_weights", "tactic_assign", "tactic_budget",
        "tactic_joint", "tactic_joint_rank", "tactic_mark", "tactic_mean", "tactic_rank",
        "tactic_score", "tactic_seed", "tactic_select", "tail_draw", "tail_merge", "tail_plan",
        "tail_size", "twilight_prune", "twilight_weigh", "wkv",
    ]
)  # fmt: skip
