"""Several residual streams (Zhu et al. 2024, arXiv 2409.19606), and a mix of earlier residuals."""

from tamis.jit_kernels.contract.op import Address, Out, op

MAX_STREAM = 16


class StreamWeights:
    """The weights for reading and writing streams, from up to n * (2 + n) mixes of a token.

    With c = scale * mix + base, scale[0], [1] and [2] for the n first, the n next and the others:
    pre = sigmoid(c) + eps, post = magnitude * sigmoid(c) + post_eps, comb[source, target] = the
    softmax of c over targets, + eps, whose columns (the sums over sources, + eps), then rows and
    columns n_turn - 1 times, are divided by their sums + eps (Sinkhorn and Knopp 1967).
    """

    step: Address
    mixes: Address  # f32 [n_tok, n_mix]
    scale: Address  # f32 [1], [2] or [3]
    base: Address  # f32 [n_mix]
    pre: Out[Address]  # f32 [n_tok, n]
    post: Out[Address]  # f32 [n_tok, n], or 0
    comb: Out[Address]  # f32 [n_tok, n, n], or 0
    n_mix: int
    n: int  # streams, at most MAX_STREAM
    n_turn: int
    eps: float
    magnitude: float
    post_eps: float


STREAM_WEIGHTS = op("linear.streams", StreamWeights)


class StreamMix:
    """y[target] = post[target] * b + the sum over sources of comb[source, target] * x[source]."""

    step: Address
    x: Address  # f32 [n_tok, n_stream, n]
    b: Address  # f32 [n_tok, n]
    post: Address  # f32 [n_tok, n_stream]
    comb: Address  # f32 [n_tok, n_stream, n_stream], or 0: the identity
    y: Out[Address]  # f32 like x; may be x where comb is 0
    n: int
    n_stream: int


STREAM_MIX = op("linear.streams", StreamMix)


class ResidualMix:
    """y = the mean of n_row rows, weighted by the softmax of w . rms_norm(row)."""

    step: Address
    x: Address  # f32, n_row contiguous rows of n per token, tokens `stride` elements apart
    w: Address  # f32 [n]
    y: Out[Address]  # f32 [n_tok, n]
    n: int
    n_row: int
    stride: int
    eps: float


RESIDUAL_MIX = op("linear.streams", ResidualMix)


class StreamGate:
    """y[s] = 1 / (1 + exp(-r)), r the signed square root of scale * key[s] . query[s].

    Products whose size is below `least` count as of that size.
    """

    step: Address
    key: Address  # f32 [n_tok, n_stream, n]
    query: Address  # f32 like key
    y: Out[Address]  # f32 [n_tok, n_stream]
    n: int
    n_stream: int
    scale: float
    least: float


STREAM_GATE = op("linear.streams", StreamGate)
