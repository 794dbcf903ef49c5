"""Recurrent layers in NumPy float64, a token at a time, from the papers' equations.

Each takes the state before its rows and returns outputs and the state after them.
"""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {"none": lambda x: x, "silu": silu, "sigmoid": sigmoid}


def softplus(x):
    return np.logaddexp(0.0, x)


def short_conv(x, w, bias, state, activation):
    """x [n_tok, n], w [n_tap, n], state [n_tap - 1, n]: a causal convolution of each channel."""
    rows = np.concatenate([state, x])
    total = sum(w[j] * rows[j : j + len(x)] for j in range(len(w)))
    return ACTIVATIONS[activation](total + bias), rows[len(x) :]


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * w


def gated_norm(x, z, w, eps, order, activation):
    gate = ACTIVATIONS[activation](z)
    return rms_norm(x, w, eps) * gate if order == "norm" else rms_norm(x * gate, w, eps)


def selective_scan(x, dt, b, c, a, d, state):
    """x, dt [n_tok, n], b, c [n_tok, n_state], a, state [n_state, n], d [n]: Mamba."""
    out = []
    for t in range(len(x)):
        state = np.exp(dt[t] * a) * state + b[t][:, None] * (dt[t] * x[t])
        out.append(c[t] @ state + d * x[t])
    return np.array(out), state


def wkv(r, w, k, v, a, b, u, state):
    """RWKV-7's state [n_head, head, head]; the others but u [n_head, head]: [n_tok, n_head, head].

    The answers, what u adds to them, and the state after.
    """
    out, bonus = [], []
    for t in range(len(r)):
        erased = np.einsum("hkv,hk->hv", state, a[t])
        state = w[t][:, :, None] * state - b[t][:, :, None] * erased[:, None, :]
        state = state + k[t][:, :, None] * v[t][:, None, :]
        out.append(np.einsum("hkv,hk->hv", state, r[t]))
        bonus.append((r[t] * u * k[t]).sum(axis=1, keepdims=True) * v[t])
    return np.array(out), np.array(bonus), state


def linear_scan(q, k, v, decay, beta, skip, state, rule, scale):
    """Linear attention with decay; state [n_head, head_k, head_v].

    q, k [n_tok, n_head, head_k], v [n_tok, n_head, head_v], decay [n_tok, n_head, head_k or 1],
    beta [n_tok, n_head], skip [n_head].
    """
    out = []
    for t in range(len(q)):
        state = decay[t][:, :, None] * state
        new = v[t] - (np.einsum("hkv,hk->hv", state, k[t]) if rule == "delta" else 0)
        state = state + k[t][:, :, None] * (beta[t][:, None] * new)[:, None, :]
        out.append(scale * np.einsum("hkv,hk->hv", state, q[t]) + skip[:, None] * v[t])
    return np.array(out), state
