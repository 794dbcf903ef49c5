"""Recurrent layers: a state of fixed size a sequence instead of keys and values.

Every op reads n_tok rows and a state, and leaves the state after the last row: the outputs of a
chunk are those of its rows one by one. States are float32. A row of x with a stride is one of n_tok
that begin `stride` elements apart; rows of one token with a step begin `step` elements apart.
"""

from tamis.jit_kernels.contract.op import op

# Causal convolution of each channel: y f32 [n_tok, n], rows y_stride apart,
# y[t] = activation(bias + sum over j of w[j] * x[t - (n_tap - 1) + j]), "none" or "silu".
# x f32 [n_tok, n], rows x_stride apart; w f32 [n_tap, n]; bias f32 [n] or 0. state f32
# [n_tap - 1, n]: the rows before the first one, oldest first; then those before the next chunk.
SHORT_CONV = op(
    "recurrent.conv",
    "short_conv",
    "activation",
    "step x w bias state y n n_tap x_stride y_stride",
)

# y f32 [n_tok, rows_per_tok, n] = x * activation(z), activation "none", "silu" or "sigmoid". x and
# z: f32 rows of n elements with strides and steps; x may be 0: y = activation(z).
GATE_ROWS = op(
    "recurrent.gates",
    "gate_rows",
    "activation",
    "step x z y n rows_per_tok x_stride x_step z_stride z_step",
)

# dt f32 [n_tok, rows_per_tok * n] = softplus(x + bias) and decay f32 like dt = exp(dt * a); one of
# both may be 0. x f32: rows of n with a stride and a step; bias f32 [rows_per_tok * n]; a f32:
# element i is for elements [i * run, (i + 1) * run) of dt, all at most 0.
DECAY = op(
    "recurrent.gates",
    "decay",
    "",
    "step x bias a dt decay n rows_per_tok x_stride x_step run",
)

# x f32, rows_per_tok rows of n one after another a token, tokens `stride` apart, in place:
# x / sqrt(sum(x^2) + eps).
L2_NORM = op("recurrent.norms", "l2_norm", "", "step x n rows_per_tok stride eps_f")

# A norm and a gate of x f32 [n_tok, rows_per_tok, n]; y like x, may be x. order "norm":
# y = rms_norm(x) * w * activation(z); "gate": y = rms_norm(x * activation(z)) * w; rms_norm as in
# RMS_NORM; activation "silu" or "sigmoid". z f32: rows_per_tok rows of n one after another, tokens
# z_stride apart. w f32: a row's n weights, w_step elements after those of the row before.
GATED_NORM = op(
    "recurrent.norms",
    "gated_norm",
    "order activation",
    "step x z w y n rows_per_tok z_stride w_step eps_f",
)

# Selective state space (Gu and Dao 2023, arXiv 2312.00752, Alg. 2), a state of n_state numbers a
# channel: state = exp(dt * a) * state + dt * b * x; y = sum over the state of c * state, + d * x.
# x, dt, y f32 [n_tok, n]; b, c f32: rows of n_state, tokens bc_stride apart; a f32 [n_state, n];
# d f32 [n]; state f32 [n_state, n].
SELECTIVE_SCAN = op(
    "recurrent.selective_scan",
    "selective_scan",
    "n_state",
    "step x dt b c a d state y n bc_stride",
)

# Linear attention with a state S f32 [n_head, head_k, head_v]; k, q vectors of head_k, v of head_v:
#   rule "add":   S = decay * S + k (beta * v)^T
#   rule "delta": S = decay * S; S = S + k (beta * (v - S^T k))^T
#   y = scale * S^T q + skip * v
# decay "head": one number a head (lightning attention, Qin et al. 2024, arXiv 2405.17381; Mamba-2,
# Dao and Gu 2024, arXiv 2405.21060, where k = B, q = C, v = x and beta = dt; Gated DeltaNet, Yang
# et al. 2024, arXiv 2412.06464, Eq. 10); "channel": one a row of S (Kimi Delta Attention, arXiv
# 2510.26692, Eq. 1). q, k, v f32: heads qk_step and v_step elements apart, tokens `stride`; head h
# reads q and k of head h // (n_head / n_head_k), or, where tiled is 1, of head h % n_head_k. decay
# f32: [n_head] or [n_head, head_k], tokens decay_stride apart (0: the same for all). beta f32
# [n_tok, n_head] or 0 (all 1); skip f32 [n_head] or 0. y f32 [n_tok, n_head, head_v]. head_k is a
# multiple of 4.
LINEAR_SCAN = op(
    "recurrent.linear_scan",
    "linear_scan",
    "rule decay head_k head_v",
    "step q k v decay beta skip state y n_head n_head_k tiled stride qk_step v_step decay_stride"
    " scale_f",
)
