"""The hash tables of MagicPIG, built in NumPy."""

import numpy as np

N_HEAD_KV, N_SINK = 2, 4


def tables_of(codes, n_bit, end):
    """Where each code's positions start, and these."""
    n_head_kv, n_table, _ = codes.shape
    starts = np.zeros((n_head_kv, n_table, (1 << n_bit) + 1), np.int32)
    order = np.full(codes.shape, -7, np.int32)
    for h, t in np.ndindex(n_head_kv, n_table):
        own = codes[h, t, N_SINK:end]
        order[h, t, : len(own)] = N_SINK + np.argsort(own, kind="stable")
        starts[h, t] = np.searchsorted(np.sort(own), np.arange((1 << n_bit) + 1))
    return starts, order
