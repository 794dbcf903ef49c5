"""Mixture of experts."""

from tamis.jit_kernels.contract.op import op

# Mixture of experts. logits f32 [n_tok, n_expert] -> ids int32 and weights f32 [n_tok, n_used]:
# the n_used largest softmax probabilities, divided by their sum where norm is 1.
MOE_ROUTE = op("linear.moe", "moe_route", "", "step logits ids weights n_expert n_used norm")

# y f32 [n_tok, n_used, n_out] = x @ w[ids].T; x f32 rows of n_in, one a token where
# x_per_slot is 0, one a (token, slot) where it is 1. w: n_expert matrices of n_out rows.
# scratch as for MATMUL. ids are from 0 to n_expert - 1.
MOE_MATMUL = op(
    "linear.moe",
    "moe_matmul",
    "type",
    "step x w ids y n_in n_out n_used n_expert x_per_slot scratch",
)

# y f32 [n_tok, n] += sum over slots of weights * x f32 [n_tok, n_used, n].
MOE_SUM = op("linear.moe", "moe_sum", "", "step x weights y n n_used")
