"""Ops of `snapkv`."""

from tamis.jit_kernels.contract.op import op

# SnapKV (Li et al. 2024, arXiv 2404.14469). Positions before the last n_local by their sums f32
# [n_row, capacity], after 1-D pooling over `pool` neighbours (average 1: their sum, which orders as
# the mean; 0: the largest). n_top a row; of these ada_f are handed out to the rows by how many of
# their pooled sums are among the n_top * n_row best (Feng et al. 2024, arXiv 2407.11550, Alg. 1).
# pooled f32 [n_row, capacity] is scratch.
SNAPKV_KEEP = op(
    "select.kept_sets",
    "snapkv_keep",
    "",
    "step sums pooled kept begin n_row capacity n_keep n_sink n_local n_top pool average ada_f",
)
