"""Linear attention over a state of head_k rows: threads share its independent columns.

For several tokens, a vector of columns is copied to the stack: in the state its rows are a power of
two apart and conflict in the first-level cache.
"""

from typing import Any

import numpy as np
from numba import njit

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i64, stack_bytes, store_f32
from tamis.jit_kernels.cpu.lang.simd import (
    LANES,
    broadcast_f,
    fma,
    load_f,
    splat_f,
    store_f,
    zero_f,
)

WIDTH = 4 * LANES  # bytes of a vector
COPIED = 4  # tokens from which copying pays
ROWS = 4  # rows of the state that a pass adds to separate sums: a single sum would wait


@njit
def _zero_one():
    return np.float32(0)


@njit
def _splat_one(x):
    return np.float32(x)


@njit
def _fma_one(x, y, z):
    return x * y + z


# One column at a time, for the remainder of whole vectors; and a vector of columns.
ONE = (load_f32, store_f32, load_f32, _splat_one, _zero_one, _fma_one)
VECTOR = (load_f, store_f, broadcast_f, splat_f, zero_f, fma)


def _columns(words: tuple[Any, ...], rule: str, decay: str, head_k: int, row_bytes: int) -> Any:
    """The function that advances columns of a head's state S by a token and returns S^T q."""
    load, store, broadcast, splat, zero, add = words
    delta, by_channel = rule == "delta", decay == "channel"
    n_passed = head_k - head_k % ROWS

    @njit(error_model="numpy")
    def decay_of(gates, i):
        return broadcast(gates + 4 * i) if by_channel else broadcast(gates)

    @njit(error_model="numpy")
    def recalled(state, k, gates):
        """(decay * S)^T k."""
        sum0, sum1, sum2, sum3 = zero(), zero(), zero(), zero()
        for i in range(0, n_passed, ROWS):
            row, key = state + row_bytes * i, k + 4 * i
            keys = (broadcast(key), broadcast(key + 4), broadcast(key + 8), broadcast(key + 12))
            if by_channel:
                keys = (
                    keys[0] * decay_of(gates, i),
                    keys[1] * decay_of(gates, i + 1),
                    keys[2] * decay_of(gates, i + 2),
                    keys[3] * decay_of(gates, i + 3),
                )
            sum0 = add(keys[0], load(row), sum0)
            sum1 = add(keys[1], load(row + row_bytes), sum1)
            sum2 = add(keys[2], load(row + 2 * row_bytes), sum2)
            sum3 = add(keys[3], load(row + 3 * row_bytes), sum3)
        for i in range(n_passed, head_k):
            own = broadcast(k + 4 * i)
            own = own * decay_of(gates, i) if by_channel else own
            sum0 = add(own, load(state + row_bytes * i), sum0)
        total = (sum0 + sum1) + (sum2 + sum3)
        return total if by_channel else total * decay_of(gates, 0)

    @njit(error_model="numpy")
    def advanced(state, i, k, gates, new):
        """Row i of decay * S + k new^T, written over that of S."""
        at = state + row_bytes * i
        row = add(broadcast(k + 4 * i), new, load(at) * decay_of(gates, i))
        store(at, row)
        return row

    @njit(error_model="numpy")
    def token(state, q, k, v, gates, rate):
        new = load(v)
        if delta:
            new = new - recalled(state, k, gates)
        new = new * splat(rate)
        sum0, sum1, sum2, sum3 = zero(), zero(), zero(), zero()
        for i in range(0, n_passed, ROWS):
            query = q + 4 * i
            sum0 = add(broadcast(query), advanced(state, i, k, gates, new), sum0)
            sum1 = add(broadcast(query + 4), advanced(state, i + 1, k, gates, new), sum1)
            sum2 = add(broadcast(query + 8), advanced(state, i + 2, k, gates, new), sum2)
            sum3 = add(broadcast(query + 12), advanced(state, i + 3, k, gates, new), sum3)
        for i in range(n_passed, head_k):
            sum0 = add(broadcast(q + 4 * i), advanced(state, i, k, gates, new), sum0)
        return (sum0 + sum1) + (sum2 + sum3)

    return token


def linear_scan(rule: str, decay: str, head_k: int, head_v: int) -> Any:
    """Kernel of LINEAR_SCAN: threads stride over columns of the heads' states."""
    if rule not in ("add", "delta") or decay not in ("head", "channel"):
        raise ValueError(f"no rule {rule!r} with a decay a {decay!r}")
    vectors = _columns(VECTOR, rule, decay, head_k, 4 * head_v)
    near_vectors = _columns(VECTOR, rule, decay, head_k, WIDTH)
    ones = _columns(ONE, rule, decay, head_k, 4 * head_v)
    size = head_k * WIDTH
    n_vector = head_v // LANES
    n_part = n_vector + head_v % LANES  # vectors of columns, then single ones

    @njit(error_model="numpy")
    def copy_rows(source, source_apart, to, to_apart):
        for i in range(head_k):
            store_f(to + to_apart * i, load_f(source + source_apart * i))

    def kernel(tid, n_thread, a):
        near = stack_bytes(size)
        n_tok, per_head = load_i64(a.step + STEP.n_tok), head_k if by_channel else 1
        is_few = n_tok < COPIED
        for item in range(tid, a.n_head * n_part, n_thread):
            h, part = item // n_part, item % n_part
            single = part >= n_vector
            column = 4 * (LANES * n_vector + part - n_vector if single else LANES * part)
            kv = h % a.n_head_k if a.tiled != 0 else h // (a.n_head // a.n_head_k)
            columns = a.state + 4 * head_k * head_v * h + column
            is_near = not single and not is_few
            if is_near:
                copy_rows(columns, 4 * head_v, near, WIDTH)
            for t in range(n_tok):
                at = a.stride * t + a.qk_step * kv
                value = a.v + 4 * (a.stride * t + a.v_step * h) + column
                gates = a.decay + 4 * (a.decay_stride * t + per_head * h)
                rate = load_f32(a.beta + 4 * (a.n_head * t + h)) if a.beta != 0 else np.float32(1)
                through = load_f32(a.skip + 4 * h) if a.skip != 0 else np.float32(0)
                out = a.y + 4 * head_v * (a.n_head * t + h) + column
                if single:
                    one = ones(columns, a.q + 4 * at, a.k + 4 * at, value, gates, rate)
                    store_f32(out, one * a.scale + through * load_f32(value))
                else:
                    q, k = a.q + 4 * at, a.k + 4 * at
                    if is_near:
                        found = near_vectors(near, q, k, value, gates, rate)
                    else:
                        found = vectors(columns, q, k, value, gates, rate)
                    added = splat_f(through) * load_f(value)
                    store_f(out, fma(found, splat_f(a.scale), added))
            if is_near:
                copy_rows(near, WIDTH, columns, 4 * head_v)

    by_channel = decay == "channel"
    return kernel
