"""Ops of `h2o`."""

from tamis.jit_kernels.contract.op import op

# H2O (Zhang et al. 2023, arXiv 2306.14048), Alg. 1. The n_keep largest sums f32 [n_row, capacity]
# before the last n_local positions: chosen anew where `fresh` is 1, else by evicting the smallest
# when the position that has just left the last n_local joins them.
H2O_KEEP = op(
    "select.kept_sets",
    "h2o_keep",
    "",
    "step sums kept begin n_row capacity n_keep n_sink n_local fresh",
)
