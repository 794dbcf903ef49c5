"""Mixture of experts."""

from tamis.jit_kernels.contract.op import Address, InOut, Out, op

MAX_EXPERT_GROUP = 32  # most groups of experts that MOE_ROUTE selects from
LEAST_SUM = 6.103515625e-5  # the least divisor of weights


class MoeRoute:
    """The n_used best experts of each token, the lower of equal ones first, and their weights.

    score: "softmax", exp(logit) over the sum of all; "sigmoid", 1 / (1 + exp(-logit)); "softplus",
    sqrt(log(1 + exp(logit))); "chosen", the softmax of the chosen logits alone. The best have the
    largest logits; if there are keys, the largest score + bias (for "chosen", logit + bias) in the
    n_group_used groups whose two best experts have the largest sum. If there are tokens, a token's
    experts are those of the table.
    """

    step: Address
    logits: Address  # f32 [n_tok, n_expert]
    bias: Address  # f32 [n_expert], or 0
    # f32 [n_tok, n_expert]: scratch for the values that experts are selected by, or 0
    keys: Out[Address]
    tokens: Address  # int32 [n_tok], or 0
    table: Address  # int32 [n_vocab, n_used], or 0
    ids: Out[Address]  # int32 [n_tok, n_used]
    weights: Out[Address]  # f32 [n_tok, n_used]
    n_expert: int
    n_used: int
    n_group: int  # groups of n_expert / n_group neighbours, at most MAX_EXPERT_GROUP; 1: no groups
    n_group_used: int
    norm: int  # 1: scores are divided by their sum, or by LEAST_SUM if that is more
    scale: float  # the factor of weights


MOE_ROUTE = op("linear.moe", MoeRoute, "score")


class MoeGroups:
    """The groups of n_each neighbours that contain the first n_used chosen experts, and weights.

    A group's weight is the softmax of all logits at the group's own number, divided by the sum of
    the chosen ones, or by LEAST_SUM if that is more.
    """

    step: Address
    logits: Address  # f32 [n_tok, n_expert]
    ids: Address  # int32 [n_tok, n_chosen]
    groups: Out[Address]  # int32 [n_tok, n_used]
    weights: Out[Address]  # f32 [n_tok, n_used]
    n_expert: int
    n_chosen: int
    n_used: int
    n_each: int


MOE_GROUPS = op("linear.moe", MoeGroups)


class MoeBias:
    """y += bias[ids]."""

    step: Address
    bias: Address  # f32 [n_expert, n]
    ids: Address  # int32 [n_tok, n_used]
    y: InOut[Address]  # f32 [n_tok, n_used, n]
    n: int
    n_used: int


MOE_BIAS = op("linear.moe", MoeBias)


class MoeMatmul:
    """y = x @ w[ids].T."""

    step: Address
    x: Address  # f32, rows of n_in: one per token, or one per (token, slot)
    w: Address  # n_expert matrices of n_out rows, in their ggml encoding or in strips
    ids: Address  # int32 [n_tok, n_used], from 0 to n_expert - 1
    y: Out[Address]  # f32 [n_tok, n_used, n_out]
    n_in: int
    n_out: int
    n_used: int
    n_expert: int
    x_per_slot: int  # 0: x has one row per token; 1: one per (token, slot)
    scratch: Out[Address]  # n_thread * expert_scratch(n_in, n_tok * n_used, n_expert) bytes


MOE_MATMUL = op("linear.moe", MoeMatmul, "type")


class MoeSum:
    """y (+)= sum over slots of weights * x."""

    step: Address
    x: Address  # f32 [n_tok, n_used, n]
    weights: Address  # f32 [n_tok, n_used]
    y: InOut[Address]  # f32 [n_tok, n]
    n: int
    n_used: int
    add: int  # 1: adds to y


MOE_SUM = op("linear.moe", MoeSum)
