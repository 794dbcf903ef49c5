"""Ops of `delta`."""

from tamis.jit_kernels.contract.op import op

# Delta attention (Willette et al. 2025, arXiv 2505.11254), see select/delta.py. Of a chunk:
# which rows are also attended densely, as step records int64 [STEP_SIZE] of their own: those gamma
# apart, counted from the prompt's first row, and the prompt's last gamma, which the former leave
# out.
DELTA_ROWS = op("select.delta", "delta_rows", "", "step apart last gamma")

# out f32 [n_tok, n_head, head_dim], row i of the prompt, becomes out_i + (dense_g - out_g), with
# g = floor(i / gamma) * gamma (Eq. 7), and dense_g itself where i is g; the rows of `last` become
# last_out. apart and last as above, apart_out and last_out f32 [rows, n_head, head_dim]: their
# dense rows. delta f32 [n_head, head_dim] and delta_pos int64 [n_head]: the last difference and the
# position of its row, for the next chunk. recompute: 1 leaves the rows between as they are (Eq. 5).
DELTA_ADD = op(
    "select.delta",
    "delta_add",
    "head_dim",
    "step apart last apart_out last_out delta delta_pos out n_head gamma recompute",
)
