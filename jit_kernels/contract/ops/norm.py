"""Normalisation."""

from tamis.jit_kernels.contract.op import op

# x f32 [n_tok, rows_per_tok, n], rows from step.row on -> y f32 [n_tok, rows_per_tok, n]
# = x / sqrt(mean(x^2) + eps) * w. add: y += that (a norm that closes a residual branch).
RMS_NORM = op("linear.norm", "rms_norm", "add", "step x w y n rows_per_tok eps_f")
