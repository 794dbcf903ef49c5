"""Ops of `double_sparsity`."""

from tamis.jit_kernels.contract.op import READS_ALL, op

# Double Sparsity (Yang et al. 2024, arXiv 2408.07092). channels int32 [n_head_kv, n_label],
# ascending: those with the largest sum of |q_c k_c| over the queries that past holds before this
# one (as for COLUMN_SUMS), the KV head's query heads, and the keys up to pos. work f32 [n_head_kv,
# head_dim] is scratch.
LABEL_CHANNELS = op(
    "select.double_sparsity",
    "label_channels",
    "head_dim heads",
    "step q past past_pos k_pages k_table channels work n_head_kv n_label n_past",
    reads=READS_ALL,
)

# labels f16 [n_head_kv, n_label, capacity]: the keys' elements in these channels, written for pos,
# or where `fresh` is 1 for all positions up to pos. parts f32 [n_head, n_label]: q's elements.
LABEL_KEYS = op(
    "select.double_sparsity",
    "label_keys",
    "head_dim",
    "step q k_pages k_table channels labels parts n_head n_head_kv n_label capacity fresh",
    reads=READS_ALL,
)

# scores and maxima as SCORE_KEYS leaves them, of parts and labels. capacity: a multiple of 256.
LABEL_SCORE = op(
    "select.double_sparsity",
    "label_score",
    "n_label heads group",
    "step parts labels scores maxima n_head_kv capacity n_sink n_local",
)
