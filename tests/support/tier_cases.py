"""Sessions whose KV cache has a file, and the methods that tests run on them."""

import numpy as np

from tamis.jit_kernels.contract.types import PAGE

N_CTX = 64 * PAGE


METHODS = [
    "dense", "topk:k=64", "quest:budget=256,page=16", "hip:k=128,b_k=16", "window:recent=64",
    "lfps", "cpe", "tactic:c=16,local=64,period=4,segment=512",
]  # fmt: skip


OTHERS = [
    "auto:least=0", "metered(window:recent=64)", "tail(window:recent=64)",
    "twilight(window:recent=64)", "retroinfer:c=8", "double_p:c=8",
    "beyond(window:recent=64):least=200",
    "bigbird:recent=64", "delta(window:recent=64):gamma=16", "double_sparsity:budget=99",
    "h2o:budget=99", "hshare:budget=99", "hyperattention:block=16,sample=9,size=8,bits=3",
    "magicpig:K=3,L=6,recent=8,period=9", "snapkv:budget=99,window=8",
    "vertical_slash:n_vertical=20,n_slash=12,sink=4,local=8,last_q=16",
]  # fmt: skip


def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(3, 60, n)


def session_of(engine, folder, n_page, **options):
    """A session whose memory has room for n_page pages of a layer beside what it must have."""
    row = engine.memory_plan(PAGE).kv // engine.hp.n_layer
    kv_ram = row * (n_page + 3 * engine.hp.n_layer)
    options = {"n_ctx": N_CTX, "n_ubatch": 128, "kv_ram": kv_ram, "kv_dir": folder} | options
    return engine.session(**options)


def check_same(a, b, n=2000, steps=8):
    """Both sessions give the same logits, to the bit, reading and decoding."""
    ids = ids_of(n + steps)
    np.testing.assert_array_equal(a.prefill(ids[:n]), b.prefill(ids[:n]))
    for token in ids[n:]:
        np.testing.assert_array_equal(a.decode(int(token)), b.decode(int(token)))
