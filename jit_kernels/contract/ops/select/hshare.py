"""Ops of `hshare`."""

from tamis.jit_kernels.contract.op import op

# HShare (Wu et al. 2025, ICLR). Rows of all layers are numbered together; owners int32 [n_row], of
# one layer: whose set a row shares. Those who own theirs retrieve: asking f32 [n_head_kv, heads,
# head_dim], their queries, and n_asking int32 [n_head_kv], how many heads, are what SCORE_KEYS
# reads. first: number of the layer's first row. fresh: 1 makes every row its own owner.
HSHARE_GATE = op(
    "select.hshare",
    "hshare_gate",
    "head_dim heads group",
    "step q owners asking n_asking n_head_kv first fresh",
)

# kept (as for KEPT_SETS, of this layer) of the rows that own theirs: the n_keep best scores before
# the last n_local positions. scores and maxima are SCORE_KEYS's and used up; order int32 [n_row,
# capacity] is scratch.
HSHARE_KEEP = op(
    "select.hshare",
    "hshare_keep",
    "",
    "step owners scores maxima order kept begin n_row rows_per_kv group capacity n_keep n_sink"
    " n_local first",
)

# owners int32 [all layers, n_row] from kept of all layers, for the n_layer layers listed in layers
# int32. n_layer_own of these layers retrieve, in each n_row_own of its rows. Pairs share greedily,
# most alike first: the later of two takes the set of the earlier one, if that is an owner and the
# later one owns only its own. Rows are as alike as their sets have positions in common, layers as
# their rows of the same number together. alike f32 [n, n], n the larger of n_layer and n_row, and
# chosen int32 [n] are scratch.
HSHARE_MAP = op(
    "select.hshare",
    "hshare_map",
    "",
    "kept layers owners alike chosen n_layer n_row n_keep n_layer_own n_row_own",
)
