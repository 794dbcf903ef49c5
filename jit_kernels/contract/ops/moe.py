"""Mixture of experts."""

from tamis.jit_kernels.contract.op import Address, op


class MoeRoute:
    """The n_used largest softmax probabilities of each token."""

    step: Address
    logits: Address  # f32 [n_tok, n_expert]
    ids: Address  # int32 [n_tok, n_used]
    weights: Address  # f32 [n_tok, n_used]
    n_expert: int
    n_used: int
    norm: int  # 1: weights are divided by their sum


MOE_ROUTE = op("linear.moe", MoeRoute)


class MoeMatmul:
    """y = x @ w[ids].T."""

    step: Address
    x: Address  # f32, rows of n_in: one a token, or one a (token, slot)
    w: Address  # n_expert matrices of n_out rows in their ggml encoding
    ids: Address  # int32 [n_tok, n_used], from 0 to n_expert - 1
    y: Address  # f32 [n_tok, n_used, n_out]
    n_in: int
    n_out: int
    n_used: int
    n_expert: int
    x_per_slot: int  # 0: x has one row a token; 1: one a (token, slot)
    scratch: Address  # as for MATMUL


MOE_MATMUL = op("linear.moe", MoeMatmul, "type")


class MoeSum:
    """y += sum over slots of weights * x."""

    step: Address
    x: Address  # f32 [n_tok, n_used, n]
    weights: Address  # f32 [n_tok, n_used]
    y: Address  # f32 [n_tok, n]
    n: int
    n_used: int


MOE_SUM = op("linear.moe", MoeSum)
