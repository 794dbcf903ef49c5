"""Recurrent layers: a state of fixed size per sequence instead of a KV cache.

Every op reads n_tok rows and a state, and leaves the state after the last row: the outputs of a
chunk equal those of its rows one by one. States are float32. Rows of x with a stride begin `stride`
elements apart for consecutive tokens; rows of one token with a step begin `step` elements apart.
"""

from tamis.jit_kernels.contract.op import Address, InOut, Out, op


class ShortConv:
    """Causal convolution of each channel; activation: "none" or "silu".

    y[t] = activation(bias + sum over j of w[j] * x[t - (n_tap - 1) + j]).
    """

    step: Address
    x: Address  # f32 [n_tok, n], rows x_stride apart
    w: Address  # f32 [n_tap, n]
    bias: Address  # f32 [n], or 0
    # f32 [n_tap - 1, n]: the rows before the first one, oldest first; updated for the next call
    state: InOut[Address]
    y: Out[Address]  # f32 [n_tok, n], rows y_stride apart
    n: int
    n_tap: int
    x_stride: int
    y_stride: int


SHORT_CONV = op("recurrent.conv", ShortConv, "activation")


class PoolKeys:
    """y[t] = the mean of keys of rows t - n_row + 1 .. t, weighted by the softmax of their gates.

    This holds at each `every`-th position of the sequence; elsewhere y is 0; rows before the first
    position have no weight. A row of x has n_half keys, then a gate for each of their elements. The
    n_row rows are n_half runs of neighbours: those of run i are pooled by its i-th key, with row
    j's gate + w[j].
    """

    step: Address
    x: Address  # f32 [n_tok, 2, n_half, n]
    w: Address  # f32 [n_row, n]
    # f32 [n_row - 1, 2, n_half, n]: earlier rows, that of position p in p % (n_row - 1)
    state: InOut[Address]
    y: Out[Address]  # f32 [n_tok, n]
    n: int
    n_row: int
    n_half: int  # divides n_row
    every: int


POOL_KEYS = op("recurrent.pool", PoolKeys)


class GateRows:
    """y = x * activation(z); activation: one of linear.ACTIVATIONS."""

    step: Address
    x: Address  # f32, rows of n elements; 0: y = activation(z)
    z: Address  # f32, rows of n elements, or of one if z_each is 0
    y: Out[Address]  # f32, rows of n elements
    n: int
    rows_per_tok: int
    x_stride: int
    x_step: int
    z_stride: int
    z_step: int
    z_each: int
    y_stride: int
    y_step: int


GATE_ROWS = op("recurrent.gates", GateRows, "activation")


class Decay:
    """dt = softplus(x + bias) and decay = exp(dt * a); either may be 0."""

    step: Address
    x: Address  # f32, rows of n
    bias: Address  # f32 [rows_per_tok * n]
    a: Address  # f32, at most 0: element i covers elements [i * run, (i + 1) * run) of dt
    dt: Out[Address]  # f32 [n_tok, rows_per_tok * n], or 0
    decay: Out[Address]  # f32 like dt, or 0
    n: int
    rows_per_tok: int
    x_stride: int
    x_step: int
    run: int


DECAY = op("recurrent.gates", Decay)


class BoundedDecay:
    """decay = exp(least / (1 + exp(-a * (x + bias))))."""

    step: Address
    x: Address  # f32 [n_tok, n]
    bias: Address  # f32 [n]
    a: Address  # f32: element i covers elements [i * run, (i + 1) * run)
    decay: Out[Address]  # f32 [n_tok, n]
    n: int
    run: int
    least: float  # below 0


BOUNDED_DECAY = op("recurrent.gates", BoundedDecay)


class L2Norm:
    """x / sqrt(sum(x^2) + eps), in place."""

    step: Address
    x: InOut[Address]  # f32, rows_per_tok contiguous rows of n per token
    n: int
    rows_per_tok: int
    stride: int  # from one token to the next
    eps: float


L2_NORM = op("recurrent.norms", L2Norm)


class GatedNorm:
    """A norm and a gate, rms_norm as in RMS_NORM; activation: "silu" or "sigmoid".

    order "norm": y = rms_norm(x) * w * activation(z); "gate": y = rms_norm(x * activation(z)) * w.
    """

    step: Address
    x: InOut[Address]  # f32 [n_tok, rows_per_tok, n]
    z: Address  # f32, rows_per_tok contiguous rows of n per token
    w: Address  # f32: n weights for each row
    y: Out[Address]  # f32 like x, may be x
    n: int
    rows_per_tok: int
    z_stride: int  # from one token to the next
    w_step: int  # from one row's weights to the next's
    eps: float


GATED_NORM = op("recurrent.norms", GatedNorm, "order activation")


class SelectiveScan:
    """Selective state space (Gu and Dao 2023, arXiv 2312.00752, Alg. 2).

    A channel has a state of n_state numbers: state = exp(dt * a) * state + dt * b * x; y = sum over
    the state of c * state, + d * x.
    """

    step: Address
    x: Address  # f32 [n_tok, n]
    dt: Address  # f32 [n_tok, n]
    b: Address  # f32, rows of n_state, tokens bc_stride apart
    c: Address  # f32, likewise
    a: Address  # f32 [n_state, n]
    d: Address  # f32 [n]
    state: InOut[Address]  # f32 [n_state, n]
    y: Out[Address]  # f32 [n_tok, n]
    n: int
    bc_stride: int


SELECTIVE_SCAN = op("recurrent.selective_scan", SelectiveScan, "n_state")


class LinearScan:
    """Linear attention with a state S; k, q vectors of head_k, v of head_v.

    rule "add":   S = decay * S + k (beta * v)^T
    rule "delta": S = decay * S; S = S + k (beta * (v - S^T k))^T
    y = scale * S^T q + skip * v
    decay "head": one number a head (lightning attention, Qin et al. 2024, arXiv 2405.17381;
    Mamba-2, Dao and Gu 2024, arXiv 2405.21060, where k = B, q = C, v = x and beta = dt; Gated
    DeltaNet, Yang et al. 2024, arXiv 2412.06464, Eq. 10); "channel": one a row of S (Kimi Delta
    Attention, arXiv 2510.26692, Eq. 1). head_k is a multiple of 4.
    """

    step: Address
    q: Address  # f32, heads qk_step elements apart, tokens `stride` apart
    k: Address  # f32, likewise
    v: Address  # f32, heads v_step elements apart, tokens `stride` apart
    decay: Address  # f32 [n_head] or [n_head, head_k], tokens decay_stride apart
    beta: Address  # f32 [n_tok, n_head], or 0: all 1
    skip: Address  # f32 [n_head], or 0
    state: InOut[Address]  # f32 [n_head, head_k, head_v]
    y: Out[Address]  # f32 [n_tok, n_head, head_v]
    n_head: int
    n_head_k: int
    tiled: int  # 0: head h reads q and k of head h // (n_head / n_head_k); 1: of head h % n_head_k
    stride: int
    qk_step: int
    v_step: int
    decay_stride: int  # 0: the same for all tokens
    scale: float


LINEAR_SCAN = op("recurrent.linear_scan", LinearScan, "rule decay head_k head_v")


class HashNgrams:
    """Rows of a table for the last 2 to n_gram tokens, hashed: n_each rows for each length.

    Row h for n tokens is mix % sizes[h] + first[h], where mix is the exclusive or of (token j back)
    * factors[j], j below n, in unsigned 64 bits. Tokens at or before the last earlier `eos`, or
    before the sequence, count as eos.
    """

    step: Address
    ids: Address  # int32 [n_tok]
    state: InOut[Address]  # int32 [n_gram - 1]: earlier tokens + 1, the last one first; 0: none
    rows: Out[Address]  # int32 [n_tok, (n_gram - 1) * n_each]
    factors: Address  # uint64 [n_gram]
    sizes: Address  # int64 [(n_gram - 1) * n_each]
    first: Address  # int64 like sizes
    n_gram: int
    n_each: int
    eos: int


HASH_NGRAMS = op("recurrent.ngrams", HashNgrams)


class Wkv:
    """RWKV-7's state S (Peng et al. 2025, arXiv 2503.14456, Eq. 17); vectors are those of a head.

    S = diag(w) S - b (a^T S) + k v^T; y = S^T r; bonus = ((r * u) . k) v.
    """

    step: Address
    r: Address  # f32 [n_tok, n_head, head]
    w: Address  # f32, likewise
    k: Address  # f32, likewise
    v: Address  # f32, likewise
    a: Address  # f32, likewise
    b: Address  # f32, likewise
    u: Address  # f32 [n_head, head]
    state: InOut[Address]  # f32 [n_head, head, head]
    y: Out[Address]  # f32 [n_tok, n_head, head]
    bonus: Out[Address]  # f32, likewise
    n_head: int


WKV = op("recurrent.wkv", Wkv, "head")
